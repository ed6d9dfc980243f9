"""Writes a program of an artifact as a `torch.export` program: `torch.export.load(f).module()(x)` runs it.

Weights `inside` have the names of the artifact's weights files. With `none` they are left out, as in the
artifact's `.pt2` files, and the reader puts them into `state_dict`. The program is exported from the
artifact's checked programs. A `.pt2` file of the artifact is never copied, because loading one can run code
that is in it.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree

from widepack_artifacts import tree
from widepack_artifacts.entry import Entry

from ..backends.flat import nodes_unrolled
from ..backends.task import first_line, quiet
from ..backends.torch_export import (
    exported_program,
    flat_weights,
    placeholder,
    save_program,
    without_literals,
)
from ..errors import LoweringError, WidepackError
from ..ir.fake_values import Fakes
from ..system import atomic_file, deadline
from .subject import ExportSubject, Run

_QUOTES = re.compile(r"[\"'\\\x00-\x1f]")


@dataclass
class WrittenPt2:
    """inputs, outputs: names and types, as the file has them. weights: how many."""

    inputs: list[str]
    outputs: list[str]
    weights: int


def write(subject: ExportSubject, path: Path, weights: str) -> WrittenPt2:
    """Writes the file. Raises: LoweringError for a program that torch.export cannot express."""
    result, keywords = calling_convention(subject.entry)
    _refuse_names(subject)
    fakes = Fakes(subject.example)
    values = _values(subject)
    try:
        with torch.no_grad(), deadline.within(60 + 0.5 * nodes_unrolled(subject.program)):
            exported = exported_program(
                subject.program,
                fakes,
                subject.dims,
                result,
                keywords,
                values if weights == "inside" else None,
            )
            with atomic_file.Sink(path) as file, quiet():
                save_program(exported, file)
    except (WidepackError, OSError):
        raise
    except Exception as e:
        raise LoweringError(
            f"{subject.title} cannot be written by torch.export of torch {torch.__version__}: "
            f"{type(e).__name__}: {first_line(e)}"
        ) from e
    entry = subject.entry
    axis = f"{subject.members}," if subject.members else ""
    return WrittenPt2(
        [
            f"{placeholder(i.name)}={i.type.replace('[', f'[{axis}' if stacked else '[', 1)}"
            for i, stacked in zip(entry.inputs, subject.stacked_inputs)
        ],
        [f"{o.name or 'output'}={o.type.replace('[', f'[{axis}', 1)}" for o in entry.outputs],
        len(values),
    )


def check(subject: ExportSubject, path: Path, weights: str) -> str:
    """Loads the file, which this process has just written, and compares its answers with the artifact's.

    Returns: what was compared, in words, or `not checked: ` and the reason. Raises: VerificationError,
    LoweringError.
    """
    try:
        loaded = torch.export.load(path)
        if weights == "none":
            loaded.state_dict.update(_values(subject))
        run = _callable(subject, loaded.module())
        compared = subject.compare(run, f"{subject.title}, written as a torch.export program,")
    except (WidepackError, OSError):
        raise
    except Exception as e:
        raise LoweringError(
            f"{subject.title}: torch.export of torch {torch.__version__} does not run the file that "
            f"was written: {type(e).__name__}: {first_line(e)}"
        ) from e
    if not compared:
        return "not checked: the artifact has no probe, and no other sizes to try"
    return f"torch {torch.__version__}: {'; '.join(compared)}"


def calling_convention(entry: Entry) -> tuple[tree.Tree, frozenset[str]]:
    """Returns the result's tree in a torch.export program, and the names of the inputs that are keywords.

    An entry with state returns (result, {state: new value}) and takes states as keywords:
    `y, state = model(x, **state)`.
    """
    keywords = frozenset(
        entry.inputs[i].name for p in entry.signature if p.kind == "keyword" for i in tree.paths(p.tree)
    )
    if not entry.state:
        return entry.result, keywords
    names = {s.output: entry.inputs[s.input].name for s in entry.state}
    states = {"dict": [[placeholder(name), {"leaf": o}] for o, name in names.items()]}
    return {"tuple": [entry.result, states]}, keywords | set(names.values())


def _callable(subject: ExportSubject, module: Any) -> Run:
    """Returns the loaded program as a function of its inputs in the manifest's order."""
    result, keywords = calling_convention(subject.entry)
    inputs, kinds = subject.entry.inputs, subject.kinds
    numbers = [[k] * subject.members if kind == "ragged" else k for k, kind in enumerate(kinds)]
    order = pytree.tree_leaves(tree.build(without_literals(result), numbers, lambda _, rows: dict(rows)))

    def run(values: Sequence[torch.Tensor]) -> list[Any]:
        args = [x for x, i in zip(values, inputs) if i.name not in keywords]
        kwargs = {placeholder(i.name): x for x, i in zip(values, inputs) if i.name in keywords}
        with torch.no_grad():
            leaves = pytree.tree_leaves(module(*args, **kwargs))
        answers: list[Any] = [[] if kind == "ragged" else None for kind in kinds]
        for k, value in zip(order, leaves, strict=True):
            if kinds[k] == "ragged":
                answers[k].append(value)
            else:
                answers[k] = value
        return answers

    return run


def _values(subject: ExportSubject) -> dict[str, torch.Tensor]:
    """Returns the program's weights by their names in the weights file. Each has separate memory, because
    torch writes all of the memory that a tensor is a part of.
    """
    tensors: Mapping[str, Any] = {
        name: part
        for source, value in subject.values.items()
        for name, part in (
            [(f"{source}@{i}", v) for i, v in enumerate(value)]
            if isinstance(value, (list, tuple))
            else [(source, value)]
        )
    }
    return {
        s.source: _with_separate_storage(tensors[s.source]) for s in flat_weights(subject.program).weights
    }


def _with_separate_storage(value: torch.Tensor) -> torch.Tensor:
    """Returns a view of a tensor whose storage ends where the tensor ends. The memory is not copied."""
    value = value.detach().contiguous()
    start, size = value.storage_offset() * value.element_size(), value.numel() * value.element_size()
    return torch.empty(0, dtype=value.dtype).set_(
        value.untyped_storage()[start : start + size], 0, value.shape, value.stride()
    )


def _refuse_names(subject: ExportSubject) -> None:
    """Refuses names that are not Python names. torch writes names into Python code that runs when a program
    is loaded, and an artifact may come from anyone. Raises: LoweringError.
    """
    for spec in subject.entry.inputs:
        name = placeholder(spec.name)
        if not name.isidentifier() or keyword.iskeyword(name):
            raise LoweringError(
                f"{subject.title}: a torch.export program cannot have an input called {spec.name[:60]!r}; "
                "names in Python have letters, digits and _ only"
            )
    for name in subject.values:
        if _QUOTES.search(name):
            raise LoweringError(
                f"{subject.title}: a torch.export program cannot have a weight called {name[:60]!r}"
            )
