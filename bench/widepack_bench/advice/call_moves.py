"""Moves that call the artifact in another way: parts of the batch, or parts of the members, in turn.

A call over fewer rows or members goes through values that fit a cache, and starts more kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only

import widepack
from widepack.inference.entry import WideEntry
from widepack.kernel_times.program import wide_seconds, work_at
from widepack.rows.axes import row_axis_of

from ..measure.answers import leaves
from ..measure.inputs import arranged
from ..measure.loading import entry_of
from .move import Move, NotPossible, Opened
from .subject import AdvisedArtifact

PARTS = (2, 4)
FEWEST_MEMBERS = 8
"""The least number of members of a part."""


def row_moves(subject: AdvisedArtifact) -> Iterator[Move]:
    """Yields calls of a part of the rows each, where rows are independent."""
    rows = subject.entry.entry.rows
    batch = subject.work.batch
    if subject.ragged or rows is None or not rows.independent or not rows.dim:
        return
    for parts in PARTS:
        if batch % parts == 0 and batch // parts >= 1 and batch > parts:
            yield Move(
                name=f"{parts} calls of {batch // parts} rows",
                how=f"call it {parts} times, with {batch // parts} rows each, and join the answers",
                predict=partial(_in_rows, parts=parts),
                open=partial(_open_rows, parts=parts),
            )


def _in_rows(subject: AdvisedArtifact, parts: int) -> float:
    rows = subject.entry.entry.rows
    assert rows is not None
    sizes = {**subject.sizes, rows.dim: subject.sizes[rows.dim] // parts}
    return parts * wide_seconds(subject.program_of(subject.entry, sizes), sizes, subject.times)


def _open_rows(subject: AdvisedArtifact, parts: int) -> Opened:
    entry = subject.entry.entry
    assert entry.rows is not None
    letter, extra = entry.rows.dim, 1 if subject.work.each else 0
    count = subject.work.batch // parts
    axes = [_axis(i.type, letter) for i in entry.inputs]
    order_args, order_kwargs = arranged(entry, list(range(len(entry.inputs))))

    def own(order: Any, values: Any, number: int) -> Any:
        def cut(place: int | None, value: Any) -> Any:
            axis = None if place is None else axes[place]
            return value if axis is None else value.narrow(axis + extra, number * count, count)

        return tree_map(cut, order, values)

    run = subject.run_of(subject.entry)
    calls = [
        partial(run, *own(order_args, subject.args, i), **own(order_kwargs, dict(subject.kwargs), i))
        for i in range(parts)
    ]

    def call() -> list[Any]:
        return [part() for part in calls]

    def answers() -> Any:
        found = zip(*(leaves(part) for part in call()), strict=True)
        joined = [_joined(leaf, _axis(o.type, letter)) for leaf, o in zip(found, entry.outputs, strict=True)]
        return joined[0] if len(joined) == 1 else joined

    return Opened(call=call, answers=answers)


def _axis(type_: str, letter: str) -> int | None:
    """Returns the dim of the rows, without that of the members. Raises: NotPossible if it is not one dim."""
    try:
        axis = row_axis_of(type_, letter)
    except ValueError as e:
        raise NotPossible(str(e)) from None
    if axis is not None and not axis.plain:
        raise NotPossible(f"{type_} has more than one place for each row")
    return None if axis is None else axis.dim


def _joined(parts: Sequence[Tensor], axis: int | None) -> Tensor:
    """Joins answers to parts of the rows. Answers have the members as first dim."""
    return parts[0] if axis is None else torch.cat(list(parts), axis + 1)


def member_moves(subject: AdvisedArtifact) -> Iterator[Move]:
    """Yields calls of a part of the members each, every part loaded by itself."""
    for parts in PARTS if not subject.ragged else ():
        if subject.count % parts == 0 and subject.count // parts >= FEWEST_MEMBERS:
            count = subject.count // parts
            yield Move(
                name=f"{parts} calls of {count} members",
                how=f"load {parts} parts, widepack.load({str(subject.work.path)!r}, members=range(i, "
                f"i + {count})) for i in range(0, {subject.count}, {count}), call each, and join the answers",
                predict=partial(_in_members, parts=parts),
                open=partial(_open_members, parts=parts),
            )


def _in_members(subject: AdvisedArtifact, parts: int) -> float:
    program = subject.program_of(_part(subject, parts, 0))
    others = (parts - 1) * work_at(program, subject.sizes).weight_bytes
    return parts * wide_seconds(program, subject.sizes, subject.times, between=others)


def _part(subject: AdvisedArtifact, parts: int, number: int) -> WideEntry:
    count = subject.count // parts
    chosen = range(number * count, (number + 1) * count)
    ens = widepack.load(subject.work.path, device="cpu", members=chosen, warmup=False)
    return entry_of(ens, subject.work.entry)


def _open_members(subject: AdvisedArtifact, parts: int) -> Opened:
    entries = [_part(subject, parts, i) for i in range(parts)]
    count = subject.count // parts

    def own(value: Any, number: int) -> Any:
        if not subject.work.each:
            return value
        return tree_map_only(Tensor, lambda t: t[number * count : (number + 1) * count], value)

    calls = [
        partial(subject.run_of(e), *own(subject.args, i), **own(dict(subject.kwargs), i))
        for i, e in enumerate(entries)
    ]

    def call() -> list[Any]:
        return [run() for run in calls]

    def answers() -> Any:
        found = [leaves(part) for part in call()]
        return [torch.cat(leaf) for leaf in zip(*found, strict=True)]

    return Opened(call=call, answers=answers)
