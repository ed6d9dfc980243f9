"""The weights of an artifact whose members come and go: the new table, and the files that hold it.

| what changes | how the files are made |
|---|---|
| members' values alone | the file again (its blocks shared, where the file system can do that), and the members' slices written into it; a file without any stays |
| the number of members, a kind, a shape | streamed, a member's tensor at a time, into files of the size that the artifact was built with |

A Shared weight stays Shared while all members hold the same bits, and becomes Stacked where they do not. A Stacked one stays Stacked, whatever it holds: what runs in
a service shall not change its form with a value. A Ragged one whose shapes have become one is Stacked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from widepack_artifacts import weights as weight_files
from widepack_artifacts.manifest import Manifest, Weight
from widepack_artifacts.writer import Change, Reader, Writer

from ..system.readahead import Extent, extents
from ..checkpoints.newcomer import RAGGED, SHARED, Newcomer
from ..building.entry import Row
from ..checkpoints.alignment import bit_equal
from ..building.write import SHARD_BYTES, SHARD_SIZE, write_weights

STACKED = "stacked"


@dataclass(frozen=True)
class Seat:
    """A member of the artifact as it shall be.

    old: its number in the artifact that is there, or None for one that comes. new: what comes. place: the number of the old member whose inputs in the probe it takes.
    """

    name: str
    old: int | None
    new: Newcomer | None = None
    place: int = 0

    @property
    def like(self) -> int:
        """The number of an old member whose shapes it has."""
        return self.new.like if self.new is not None else self.place if self.old is None else self.old


@dataclass(frozen=True)
class NewKind:
    """A weight that is of another kind now. before, after: its bytes in the files."""

    weight: str
    was: str
    kind: str
    before: int
    after: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class NewTable:
    """The weights' table as it shall be: a row for each weight, as `write_weights` takes them. changed: those of other kinds."""

    rows: list[Row]
    count: int
    changed: list[NewKind]

    @property
    def weights(self) -> tuple[Weight, ...]:
        return tuple(r.weight for r in self.rows)


def new_table(manifest: Manifest, held: weight_files.Weights, seats: Sequence[Seat]) -> NewTable:
    """The table of these members. held: the weights that are there."""
    rows = [_row(w, held, seats) for w in manifest.weights]
    was = len(manifest.members)
    changed = [
        NewKind(old.name, old.kind, r.weight.kind, old.bytes(was), r.weight.bytes(len(seats)))
        for old, r in zip(manifest.weights, rows)
        if old.kind != r.weight.kind
    ]
    return NewTable(rows, len(seats), changed)


def _row(w: Weight, held: weight_files.Weights, seats: Sequence[Seat]) -> Row:
    def value(i: int) -> torch.Tensor:
        seat = seats[i]
        if seat.new is not None:
            return seat.new.value(w.name)
        assert seat.old is not None  # a seat has one of the two
        return held.get(w.name) if w.kind == SHARED else held.get(f"{w.name}@{seat.old}") if w.kind == RAGGED else held.slice(w.name, seat.old)

    if w.kind == SHARED and w.role == "constant":  # of the program, not of the checkpoints: one for whoever comes
        return Row(w, lambda i: held.get(w.name))
    if w.kind == SHARED:
        coming = [i for i, seat in enumerate(seats) if seat.new is not None]
        first = next((i for i, seat in enumerate(seats) if seat.new is None), 0)
        same = all(bit_equal(value(first), value(i)) for i in coming)
        return Row(w if same else replace(w, kind=STACKED), (lambda i: value(first)) if same else value)
    if w.kind == RAGGED:
        shapes = [list(w.shape[seat.like]) for seat in seats]
        one = all(shape == shapes[0] for shape in shapes)
        return Row(replace(w, kind=STACKED, shape=shapes[0]) if one else replace(w, shape=shapes), value)
    return Row(w, value)


def same_layout(manifest: Manifest, table: NewTable) -> bool:
    """Whether the files that are there hold the table's tensors, with other values."""
    return table.count == len(manifest.members) and table.weights == manifest.weights


def shard_size(reader: Reader) -> int:
    """Bytes of a weights file as the artifact was built; where it does not say so, those of its largest one where there are several."""
    kept = reader.manifest.provenance.get(SHARD_SIZE)
    if isinstance(kept, int) and not isinstance(kept, bool) and kept > 0:
        return kept
    sizes = [path.stat().st_size for path in reader.weights_files()]
    return max(sizes) if len(sizes) > 1 else SHARD_BYTES


def rewrite(
    writer: Writer,
    reader: Reader,
    table: NewTable,
    seats: Sequence[Seat],
    most: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[list[str], str]:
    """Write the weights files. most: bytes of one; None as they are.

    Returns: their names; `reflink`, `kernel`, `copy`, `streamed` or `kept`, the way they were made. Raises: ArtifactError.
    """
    if most is not None or not same_layout(reader.manifest, table):
        writer.reserve(sum(w.bytes(table.count) for w in table.weights))
        return write_weights(writer, table, shard_size(reader) if most is None else most, progress), "streamed"
    names, ways = [], {"kept": 0}
    coming = [i for i, seat in enumerate(seats) if seat.new is not None]
    for path in reader.weights_files():
        name = path.name
        places = extents([path])
        changes = [c for row in table.rows for c in _changes(row, coming, seats, places)]
        if changes:
            rest, _, suffix = name.rpartition(".")
            made, how = writer.revised(rest.rpartition("-")[0], suffix, path, changes, progress)
            ways[how] = 1
        else:
            writer.take(reader, [name])
            made = name
        names.append(made)
    return names, next(reversed(ways))


def _changes(row: Row, coming: Sequence[int], seats: Sequence[Seat], places: Mapping[str, Extent]) -> Iterator[Change]:
    """What of a weight goes into a file: the slices of the members that come, or the one value where all of them do."""
    w = row.weight
    if w.kind == SHARED:
        if w.name in places and w.role != "constant" and len(coming) == len(seats):
            yield places[w.name][1], weight_files.views(row.value(0))
        return
    for i in coming:
        name = f"{w.name}@{i}" if w.kind == RAGGED else w.name
        if name in places:
            _, begin, size = places[name]
            yield begin + (0 if w.kind == RAGGED else i * (size // len(seats))), weight_files.views(row.value(i))
