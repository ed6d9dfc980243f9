"""Runs one batch on its model, and gives each call its part of the outputs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from widepack.errors import InputError
from widepack.inference.model import weights_version
from widepack.inference.reduced_answer import Reduction

from ..catalog.call import Call
from ..catalog.layout import EntryLayout
from ..catalog.outputs import Wanted, rows_dim
from ..catalog.served import EACH, ONE
from .job import Outputs, Part


def run_batch(parts: Sequence[Part]) -> None:
    """Runs parts that belong to one group, and gives each job its outputs.

    Raises: what the model raises. No job has outputs then.
    """
    first = parts[0].job.call
    if len(parts) == 1 and parts[0].whole:
        parts[0].job.finish(_outputs(first, first.tensors, first.numbers))
        return
    layout, stacked = first.model.layout, first.model.kind == EACH
    tensors = [
        _joined([_rows_of(p, k, i.rows.dim + stacked) for p in parts], i.rows.dim + stacked)
        for k, i in enumerate(layout.inputs)
        if i.rows is not None  # calls that have an input without rows run alone
    ]
    numbers = None if first.numbers is None else [n for p in parts for n in _numbers_of(p)]
    model = first.model.artifact.model
    before = weights_version(model)
    outputs = _outputs(first, tensors, numbers)
    version = before if weights_version(model) == before else None
    front = numbers is None
    dims = [rows_dim(layout, one, front) for one in first.wanted]
    sizes = [p.rows for p in parts]
    for part, *found in zip(parts, *(_split(value, sizes, dim) for value, dim in zip(outputs, dims))):
        if part.whole:
            part.job.finish(found)
        else:
            part.job.add_part(part.start, found, dims, version)


def _rows_of(part: Part, k: int, dim: int) -> torch.Tensor:
    tensor = part.job.call.tensors[k]
    return tensor if part.whole else tensor.narrow(dim, part.start, part.rows)


def _numbers_of(part: Part) -> Sequence[int]:
    numbers = part.job.call.numbers
    assert numbers is not None
    return numbers if part.whole else numbers[part.start : part.stop]


def _joined(tensors: list[torch.Tensor], dim: int) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim)


def _split(value: Any, sizes: list[int], dim: int) -> Sequence[torch.Tensor]:
    """Returns the rows of each call. value: a tensor, or a list with one tensor for each row."""
    if isinstance(value, torch.Tensor):
        return torch.split(value, sizes, dim)
    ends = list(accumulate(sizes))
    return [_of_rows(value[end - rows : end], dim) for end, rows in zip(ends, sizes)]


def _of_rows(rows: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """Returns rows that have tensors of their own as one tensor. Raises: InputError if their shapes
    differ.
    """
    if len({r.shape for r in rows}) > 1:
        raise InputError(
            "the members of these rows answer in different shapes; request the rows of each member apart"
        )
    return torch.stack(list(rows), dim)


def _outputs(call: Call, tensors: Sequence[torch.Tensor], numbers: Sequence[int] | None) -> Outputs:
    """Runs a model. numbers: the member of each row; None if all members answer."""
    model, layout = call.model, call.model.layout
    entry, calls = layout.entry, layout.entry.tensor_calls
    args, kwargs, state = calls.arguments(tensors)
    if state:
        kwargs["state"] = state
    if numbers is not None and layout.batch:
        leaves = calls.leaves(entry.route(*args, member=numbers, **kwargs))
    elif model.kind == ONE:
        leaves = _with_states(layout, entry.member(model.member)(*args, **kwargs), bool(state))
    elif model.kind == EACH:
        leaves = _with_states(layout, entry.each(*args, **kwargs), bool(state))
    elif (figures := _only_figures(layout, call.wanted)) is not None:
        one = call.wanted[0]
        found = entry.reduce(*args, *figures, of=one.of, dim=one.dim, calibrated=one.calibrated, **kwargs)
        return [found[w.figure] for w in call.wanted]
    else:
        leaves = _with_states(layout, entry(*args, **kwargs), bool(state))
    return _chosen(layout, leaves, call.wanted)


def _with_states(layout: EntryLayout, answer: Any, states: bool) -> list[Any]:
    """Returns the leaves of an answer, with the new states in their places."""
    calls, spec = layout.entry.tensor_calls, layout.entry.entry
    if not states:
        return calls.leaves(answer)
    answer, new = answer
    leaves: list[Any] = [None] * len(spec.outputs)
    for k, leaf in calls.numbered_leaves(answer).items():
        leaves[k] = leaf
    for state in spec.state:
        leaves[state.output] = new[spec.inputs[state.input].name]
    return leaves


def _only_figures(layout: EntryLayout, wanted: Wanted) -> list[str] | None:
    """Returns the figures if nothing else is wanted, all of the entry's only output, with the same
    options.
    """
    first = wanted[0]
    options = first.of, first.dim, first.calibrated
    same = all(w.figure and (w.of, w.dim, w.calibrated) == options for w in wanted)
    return [w.figure for w in wanted] if same and len(layout.outputs) == 1 else None


def _chosen(layout: EntryLayout, leaves: Sequence[Any], wanted: Wanted) -> Outputs:
    """Returns the wanted outputs of the leaves of an answer."""
    found: Outputs = []
    for one in wanted:
        if not one.figure:
            found.append(leaves[one.leaf])
            continue
        reduction = Reduction([one.figure], one.of, dim=one.dim)
        described = [layout.entry.entry.outputs[one.leaf]]
        if one.calibrated:  # after the members ran: of none that was swapped meanwhile
            reduction.calibrate(layout.entry.calibration, described)
        found.append(reduction.apply(leaves[one.leaf], described, False)[one.figure])
    return found
