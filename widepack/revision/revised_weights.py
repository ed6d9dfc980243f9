"""Makes the weights table of a revised artifact and writes its weights files.

| what changes | how the files are made |
|---|---|
| only values of members | each file is copied, and the members' slices are written into the copy |
| the number of members, a kind, or a shape | streamed, one tensor of one member at a time |

A copy shares blocks with the old file where the file system can do that. A file without a changed weight
stays. Streamed files have the size that the artifact was built with.

A Shared weight stays Shared while all members have the same bits; otherwise it becomes Stacked. A Stacked
weight stays Stacked for all values, so the values of one update do not change the programs of a running
service. A Ragged weight becomes Stacked if all its shapes are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from widepack_artifacts import weights as weight_files
from widepack_artifacts.errors import some
from widepack_artifacts.factored import FactoredWeight
from widepack_artifacts.manifest import Manifest
from widepack_artifacts.manifest_weights import FACTOR, Weight, member_tensor
from widepack_artifacts.reader import Reader
from widepack_artifacts.writer import Change, Writer

from ..building.build_weights import StoredFactors, WeightRow, WeightTable
from ..building.write import SHARD_BYTES, SHARD_SIZE, write_weights
from ..checkpoints.differences import bit_equal
from ..checkpoints.new_member import RAGGED, SHARED
from ..errors import MemberMismatch
from ..fleet.open_member import new_factors
from ..system.readahead import Extent, extents
from .request import MemberSlot

STACKED = "stacked"
_MOST_NAMED = 5


@dataclass(frozen=True)
class RevisedTable(WeightTable):
    """The weights table of the revised artifact. changed: a row for each weight whose kind changed, as
    `ReviseReport.kinds` has it.
    """

    rows: list[WeightRow]
    count: int
    stored_factors: list[StoredFactors]
    changed: list[dict[str, Any]]


def new_table(manifest: Manifest, files: weight_files.Weights, slots: Sequence[MemberSlot]) -> RevisedTable:
    """Returns the weights table of the revised members. files: the weights of the old artifact."""
    factored = _factored(manifest, files, slots)
    of_factors = {row.weight.name: row for f in factored for row in f.rows}
    rows = [of_factors[w.name] if w.role == FACTOR else _row(w, files, slots) for w in manifest.weights]
    was = len(manifest.members)
    changed = [
        {
            "weight": old.name,
            "was": old.kind,
            "kind": r.weight.kind,
            "before": old.bytes(was),
            "after": r.weight.bytes(len(slots)),
        }
        for old, r in zip(manifest.weights, rows)
        if old.kind != r.weight.kind
    ]
    return RevisedTable(rows, len(slots), factored, changed)


def _row(w: Weight, files: weight_files.Weights, slots: Sequence[MemberSlot]) -> WeightRow:
    """Returns the row of one weight, with its new kind."""

    def value(i: int) -> torch.Tensor:
        new = slots[i].new
        return files.of_member(w.name, w.kind, slots[i].place) if new is None else new.value(w.name)

    if w.kind == SHARED and w.role == "constant":
        # A shared constant belongs to the program, so new members have the same value.
        return WeightRow(w, lambda i: files.get(w.name))
    if w.kind == SHARED:
        new = [i for i, slot in enumerate(slots) if slot.new is not None]
        first = next((i for i, slot in enumerate(slots) if slot.new is None), 0)
        same = all(bit_equal(value(first), value(i)) for i in new)
        return WeightRow(w if same else replace(w, kind=STACKED), (lambda i: value(first)) if same else value)
    if w.kind == RAGGED:
        shapes = [list(w.shape[slot.like]) for slot in slots]
        equal = all(shape == shapes[0] for shape in shapes)
        return WeightRow(
            replace(w, kind=STACKED, shape=shapes[0]) if equal else replace(w, shape=shapes), value
        )
    return WeightRow(w, value)


def _factored(
    manifest: Manifest, files: weight_files.Weights, slots: Sequence[MemberSlot]
) -> list[StoredFactors]:
    """Returns the factored weights of the revised members. The base stays.

    Raises: MemberMismatch, which lists the weights of new members that are no low-rank fine-tunes of it.
    """
    table = {w.name: w for w in manifest.weights}
    found, bad = [], []
    for weight in manifest.factored.weights:
        try:
            found.append(_revised_factors(weight, table, files, slots))
        except MemberMismatch as error:
            bad.append(str(error))
    if bad:
        raise MemberMismatch(some(bad, _MOST_NAMED, "\n"))
    return found


def _revised_factors(
    weight: FactoredWeight,
    table: Mapping[str, Weight],
    files: weight_files.Weights,
    slots: Sequence[MemberSlot],
) -> StoredFactors:
    new = {
        i: new_factors(weight, files, slot.new, slot.new.checkpoint.path)
        for i, slot in enumerate(slots)
        if slot.new is not None
    }
    left, right = table[weight.left], table[weight.right]
    rank = max([int(left.shape[1]), *(f.left.shape[1] for f in new.values())])
    stored = [
        (new[i].rank, new[i].correction) if i in new else files.factors_of(weight.name, slot.place)
        for i, slot in enumerate(slots)
    ]

    def part(name: str, i: int, axis: int | None = None) -> torch.Tensor:
        value = new[i].parts(weight)[name] if i in new else files.slice(name, slots[i].place)
        if axis is None or value.shape[axis] == rank:
            return value
        shape = list(value.shape)
        shape[axis] = rank - shape[axis]
        return torch.cat([value, value.new_zeros(shape)], axis)

    scales = [WeightRow(table[weight.scale], lambda i: part(weight.scale, i))] if weight.scale else []
    return StoredFactors(
        replace(weight, ranks=[own for own, _ in stored]),
        [
            WeightRow(table[weight.base], lambda i: files.get(weight.base)),
            WeightRow(replace(left, shape=[left.shape[0], rank]), lambda i: part(weight.left, i, 1)),
            WeightRow(replace(right, shape=[rank, right.shape[1]]), lambda i: part(weight.right, i, 0)),
            *scales,
        ],
        lambda: {member_tensor(weight.name, i): data for i, (_, data) in enumerate(stored) if data},
    )


def shard_size(reader: Reader) -> int:
    """Returns the largest size of a weights file that the artifact was built with, in bytes.

    An artifact that does not store it, and has several files, gives the size of its largest one.
    """
    stored = reader.manifest.provenance.get(SHARD_SIZE)
    if isinstance(stored, int) and not isinstance(stored, bool) and stored > 0:
        return stored
    sizes = [path.stat().st_size for path in reader.weights_files()]
    return max(sizes) if len(sizes) > 1 else SHARD_BYTES


def rewrite(
    writer: Writer,
    reader: Reader,
    table: RevisedTable,
    slots: Sequence[MemberSlot],
    shard_bytes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[list[str], str]:
    """Writes the weights files. shard_bytes: the largest size of a file; None: as in the artifact.

    Returns: their names, and how they were made: `reflink`, `kernel`, `copy`, `streamed` or `kept`.
    Raises: ArtifactError.
    """
    manifest = reader.manifest
    same_layout = table.count == len(manifest.members) and table.weights == manifest.weights
    if shard_bytes is not None or not same_layout:
        writer.reserve(sum(table.bytes_by_kind.values()))
        size = shard_size(reader) if shard_bytes is None else shard_bytes
        return write_weights(writer, table, size, progress), "streamed"
    names, ways = [], {"kept": 0}
    new = [i for i, slot in enumerate(slots) if slot.new is not None]
    for path in reader.weights_files():
        places = extents([path])
        changes = [c for row in table.rows for c in _changes(row, new, len(slots), places)]
        if changes:
            stem, _, suffix = path.name.rpartition(".")
            name, way = writer.revised(stem.rpartition("-")[0], suffix, path, changes, progress)
            ways[way] = 1
        else:
            writer.take(reader, [path.name])
            name = path.name
        names.append(name)
    return names, next(reversed(ways))


def _changes(
    row: WeightRow, new: Sequence[int], count: int, places: Mapping[str, Extent]
) -> Iterator[Change]:
    """Yields what changes of a weight in a file: the slices of new members.

    A Shared weight changes only if all members are new. new: their numbers. count: the number of all members.
    """
    w = row.weight
    if w.kind == SHARED:
        if w.name in places and w.role != "constant" and len(new) == count:
            yield places[w.name][1], weight_files.views(row.value(0))
        return
    for i in new:
        name = member_tensor(w.name, i) if w.kind == RAGGED else w.name
        if name in places:
            _, begin, size = places[name]
            offset = 0 if w.kind == RAGGED else i * (size // count)
            yield begin + offset, weight_files.views(row.value(i))
