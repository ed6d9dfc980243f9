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
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from widepack_artifacts import weights as weight_files
from widepack_artifacts.manifest import Manifest
from widepack_artifacts.reader import Reader
from widepack_artifacts.weight_table import FACTOR, Weight, member_tensor
from widepack_artifacts.writer import Change, Writer

from ..building.provenance import SHARD_SIZE
from ..building.weight_row import WeightRow
from ..building.write import SHARD_BYTES, write_weights
from ..checkpoints.differences import bit_equal
from ..checkpoints.new_member import RAGGED, SHARED
from ..system.readahead import Extent, extents
from .factors import RevisedFactors, revised_factors
from .slots import MemberSlot

STACKED = "stacked"


@dataclass(frozen=True)
class KindChange:
    """A weight whose kind changed. before, after: its bytes in the files."""

    weight: str
    was: str
    kind: str
    before: int
    after: int

    def to_json(self) -> dict[str, Any]:
        """Returns the change as a dict that JSON can hold."""
        return asdict(self)


@dataclass(frozen=True)
class RevisedTable:
    """The weights table of the revised artifact, as `write_weights` takes it. changed: the weights whose kind
    changed. factored: the weights that are stored as factors; their bases and factors are rows too.
    """

    rows: list[WeightRow]
    count: int
    changed: list[KindChange]
    factored: list[RevisedFactors] = field(default_factory=list)

    @property
    def weights(self) -> tuple[Weight, ...]:
        """The manifest's rows."""
        return tuple(r.weight for r in self.rows)


def new_table(manifest: Manifest, files: weight_files.Weights, slots: Sequence[MemberSlot]) -> RevisedTable:
    """Returns the weights table of the revised members. files: the weights of the old artifact."""
    factored = revised_factors(manifest, files, slots)
    of_factors = {row.weight.name: row for f in factored for row in f.rows}
    rows = [of_factors[w.name] if w.role == FACTOR else _row(w, files, slots) for w in manifest.weights]
    was = len(manifest.members)
    changed = [
        KindChange(old.name, old.kind, r.weight.kind, old.bytes(was), r.weight.bytes(len(slots)))
        for old, r in zip(manifest.weights, rows)
        if old.kind != r.weight.kind
    ]
    return RevisedTable(rows, len(slots), changed, factored)


def _row(w: Weight, files: weight_files.Weights, slots: Sequence[MemberSlot]) -> WeightRow:
    """Returns the row of one weight, with its new kind."""

    def value(i: int) -> torch.Tensor:
        slot = slots[i]
        if slot.new is not None:
            return slot.new.value(w.name)
        assert slot.old is not None  # a slot has one of the two
        return files.of_member(w.name, w.kind, slot.old)

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


def same_layout(manifest: Manifest, table: RevisedTable) -> bool:
    """Returns whether the old files have the table's tensors, with other values."""
    return table.count == len(manifest.members) and table.weights == manifest.weights


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
    if shard_bytes is not None or not same_layout(reader.manifest, table):
        writer.reserve(sum(w.bytes(table.count) for w in table.weights))
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
