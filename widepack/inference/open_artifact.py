"""`Held`: an open artifact with its weights, and how it was asked to be loaded."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from widepack_artifacts.manifest import Entry, Manifest, Weight
from widepack_artifacts.program import Program
from widepack_artifacts.writer import Reader
from widepack_artifacts.weights import Weights

from ..system.readahead import Extent, extents, parts_of, will_read
from ..backends.task import Mapped
from .cast import Cast
from ..errors import ArtifactError, UsageError
from ..system.gate import Gate
from ..spec.names import number_of
from ..system.deadline import Lowering
from ..system.pinned_copy import Pinned
from ..system.progress import Report
from ..runtime.graph_module import Executable, storage
from ..runtime.walk import Budget


@dataclass(frozen=True)
class Running:
    """What programs are to run on. backend: its name or `auto`. compile: whether it may compile, and most_nodes how long a program: 0 for any. cache: of compiled
    programs; None is the usual one."""

    backend: str = "eager"
    compile: bool = False
    cache: Path | None = None
    progress: Report | None = None
    most_nodes: int = 0


@dataclass(frozen=True)
class Answers:
    """What a member that was swapped answers to the probe's inputs. tensors: as the probe names them. records: by name of the call, one an output: `own_max`,
    `own_rms`, `scale`. checkpoint: where its weights came from."""

    checkpoint: str
    tensors: Mapping[str, Tensor]
    records: Mapping[str, Sequence[Mapping[str, float]]]


class Made:
    """Bytes that the prologues of bound programs have made and that are there, beside the weights themselves."""

    def __init__(self) -> None:
        self.bytes = 0

    def add(self, run: Executable, weights: Iterable[Any]) -> None:
        known = {storage(t) for w in weights for t in (w if isinstance(w, list) else [w])}
        sizes = {}
        for t in (t for w in run.given for t in (w if isinstance(w, (list, tuple)) else [w])):
            if isinstance(t, torch.Tensor) and not ((at := storage(t)) and at in known):
                sizes[at or id(t)] = t.untyped_storage().nbytes() if at else t.numel() * t.element_size()
        size = sum(sizes.values())
        self.bytes += size
        weakref.finalize(run, self._gone, size).atexit = False

    def _gone(self, size: int) -> None:
        self.bytes -= size


def present(path: Path) -> int:
    """Bytes of a file that are on the disk: holes of a sparse one justify nothing."""
    found = path.stat()
    blocks = 512 * getattr(found, "st_blocks", 0)
    if not blocks or blocks >= found.st_size or not hasattr(os, "SEEK_DATA"):  # a file system without a count of blocks says 0
        return found.st_size
    with open(path, "rb", buffering=0) as file:
        return _written(file.fileno(), found.st_size)


def _written(handle: int, size: int) -> int:
    """Bytes of an open file that are no holes; blocks alone are fewer where a file system compresses."""
    total = at = 0
    with contextlib.suppress(OSError):  # ENXIO: what is left is a hole
        while at < size:
            begin = os.lseek(handle, at, os.SEEK_DATA)
            at = os.lseek(handle, begin, os.SEEK_HOLE)
            total += min(at, size) - begin
    return total


class Held:
    """An open artifact with its weights, and how it was asked to be loaded: what all entries of a model share.

    chosen: numbers of the members that are loaded. members: their names. whole: whether they are all of the artifact's in its order, for which its programs are. probe: the tensors of the probe, mapped, where there is one. gate: what calls pass, and a
    swap closes. swapping: held by the one swap at a time. cast: to another dtype than the artifact's. swapped: of the members that were swapped, by number, what
    stands in the place of their answers in the probe. limit: of what programs may take, over what the files justify; None for none.
    """

    def __init__(
        self,
        reader: Reader,
        weights: Weights,
        chosen: Sequence[int],
        device: torch.device,
        *,
        prologue: bool,
        strategies: str | Sequence[str] | None,
        verified: bool,
        running: Running = Running(),
        simplify: bool = True,
        cast: Cast | None = None,
        limit: float | None = 1.0,
    ) -> None:
        self.reader, self.weights, self.chosen, self.device = reader, weights, tuple(chosen), device
        self.prologue, self.strategies, self.verified, self.running = prologue, strategies, verified, running
        self.simplify, self.cast = simplify, cast
        self.manifest: Manifest = reader.manifest
        self.probe = Weights([reader.path(reader.manifest.probe)]) if reader.manifest.probe else None
        self.limit = limit
        probed = [reader.path(self.manifest.probe)] if self.manifest.probe else []
        self._sizes = sum(map(present, reader.weights_files())), sum(map(present, probed))  # now: the files may be replaced later
        self._rows = {w.name: w for w in self.manifest.weights}
        self._read_by_programs: dict[str, int] = {}
        self._made = Made()
        self.budget = self.fresh_budget()
        self.lowering = Lowering(limit)
        self.loading = False
        self.members: tuple[str, ...] = tuple(self.manifest.members[i].name for i in self.chosen)
        self.whole = self.chosen == tuple(range(len(self.manifest.members)))
        self.lock = threading.RLock()
        self.closed = False
        self.gate = Gate()
        self.swapping = threading.Lock()
        self.swapped: dict[int, Answers] = {}
        self._pinned = Pinned(device)
        self._programs: dict[str, Program] = {}
        first, last = self.chosen[0], self.chosen[-1]
        self._run = slice(first, last + 1) if self.chosen == tuple(range(first, last + 1)) else None  # members side by side need no copy
        self._values: dict[str, list[TensorWeakRef]] = {}  # copies, as long as a program holds them
        self._alone: dict[tuple[str, int], TensorWeakRef] = {}  # and those of one member, as long as somebody does

    def fresh_budget(self) -> Budget | None:
        """What programs may take that are bound together: all of one load, or those of one later pattern. None: no limit."""
        if self.limit is None:
            return None
        weights, probe = self._sizes
        return replace(Budget.of(min(weights, sum(self._read_by_programs.values())), probe, self.limit), held=self._made.bytes)

    def justify(self, names: Iterable[str]) -> None:
        """Weights that a program reads justify memory and work; those that none reads do not. Raises: ArtifactError for a weight that is not in the table."""
        new = {n: self.row(n).bytes(len(self.manifest.members)) for n in names if n not in self._read_by_programs}
        self._read_by_programs.update(new)
        if self.budget is not None and (fresh := self.fresh_budget()) is not None:
            self.budget.bytes, self.budget.work, self.budget.held = fresh.bytes, fresh.work, fresh.held

    def keeping(self, run: Executable, weights: Mapping[str, Any]) -> Executable:
        """A program that is bound: what its prologue has made counts as long as it is there."""
        self._made.add(run, weights.values())
        return run

    def must_be_open(self) -> None:
        """Raises: UsageError after `close`."""
        if self.closed:
            raise UsageError("this model was closed; widepack.load opens its artifact again")

    def index(self, member: int | str) -> int:
        """A loaded member's place. Raises: UsageError."""
        return number_of(self.members, member)

    def row(self, name: str) -> Weight:
        """A weight's row in the table. Raises: ArtifactError."""
        if name not in self._rows:
            raise ArtifactError(f"a program reads the weight {name[:80]!r}, which the manifest's table does not have")
        return self._rows[name]

    def entry(self, name: str) -> Entry:
        """An entry as it is called: in the dtype that was asked for."""
        entry = self.manifest.entries[name]
        return self.cast.entry(entry) if self.cast else entry

    def program(self, file: str, entry: str) -> Program:
        """A member program of an entry, in the dtype that was asked for. Raises: ArtifactError; LoweringError for one that cannot be cast."""
        program = self.reader.program(file)
        if self.cast is None:
            return program
        if file not in self._programs:
            self._programs[file] = self.cast.program(program, {d: max(2, v.example) for d, v in self.manifest.entries[entry].dims.items()})
        return self._programs[file]

    def placed(self, value: Tensor, said: str) -> Tensor:
        """A tensor of the artifact's on the device, in the dtype that was asked for. said: what it is, for messages. Raises: UsageError."""
        value = self._pinned.place(value) if self.device.type == "cuda" and value.device.type == "cpu" else value.to(self.device)
        return self.cast.value(value, said) if self.cast else value

    def part(self, name: str, i: int) -> Tensor:
        """Weight `name` of the artifact's member i, mapped."""
        row = self.row(name)
        kind = row.kind
        self._ask(row, [i])
        return self.weights.get(name) if kind == "shared" else self.weights.get(f"{name}@{i}") if kind == "ragged" else self.weights.slice(name, i)

    def weight(self, name: str) -> Any:
        """A weight of the loaded members, on the device: shared `[...]`, stacked `[N, ...]`, ragged a list of N.

        On the CPU it is mapped, and a copy only where members are chosen that do not lie side by side. A copy is made once for all programs that hold it.
        """
        row = self.row(name)
        with self.lock:
            if (kept := self.copies(name)) is not None:
                return kept if row.kind == "ragged" else kept[0]
            value, mapped = self._read(row)
            if not mapped:
                self._values[name] = [TensorWeakRef(v) for v in (value if row.kind == "ragged" else [value])]
            return value

    def copies(self, name: str) -> list[Tensor] | None:
        """The tensors of a weight that are no part of the mapped files, while a program holds them: one, or of a ragged one N. None where there are none."""
        found = [held() for held in self._values.get(name, ())]
        return [f for f in found if f is not None] if found and all(f is not None for f in found) else None

    def _read(self, row: Weight) -> tuple[Any, bool]:
        """The value, and whether it lies in the mapped files."""
        here, said = self._here(row), f"weight {row.name}"
        self._ask(row, self.chosen)
        if row.kind == "ragged":
            return [self.placed(self.weights.get(f"{row.name}@{i}"), f"{said} of member {self.manifest.members[i].name}") for i in self.chosen], here
        if row.kind == "shared":
            return self.placed(self.weights.get(row.name), said), here
        if self._run is not None:
            return self.placed(self.weights.get(row.name)[self._run], said), here
        return torch.stack([self.placed(self.weights.slice(row.name, i), said) for i in self.chosen]), False

    def _ask(self, row: Weight, numbers: Sequence[int]) -> None:
        """Where some members are loaded, have no more read than what is needed of a weight. numbers: of the artifact's members."""
        if not self.whole:
            with contextlib.suppress(ArtifactError, OSError):  # a hint; the files may have been replaced since they were mapped
                will_read(parts_of(row, self._offsets, len(self.manifest.members), numbers))

    def _here(self, row: Weight) -> bool:
        """Whether programs read this weight as the files have it."""
        return self.device.type == "cpu" and (self.cast is None or row.dtype not in self.cast.table)

    def own(self, name: str, place: int) -> Tensor:
        """Weight `name` of a loaded member, on the device, by the member's place among the loaded ones."""
        row = self.row(name)
        if self._here(row):
            return self.part(name, self.chosen[place])
        with self.lock:
            if (kept := self.copies(name)) is not None:
                return kept[place] if row.kind == "ragged" else kept[0] if row.kind == "shared" else kept[0][place]
            if (alone := self.alone(name, place)) is None:
                alone = self.placed(self.part(name, self.chosen[place]), f"weight {name} of member {self.members[place]}")
                self._alone[name, place] = TensorWeakRef(alone)
            return alone

    def alone(self, name: str, place: int) -> Tensor | None:
        """A copy of one member's part of a weight that somebody holds; None where there is none."""
        found = self._alone.get((name, place))
        return found() if found is not None else None

    @cached_property
    def _offsets(self) -> dict[str, Extent]:
        """Where each tensor of the weights files is."""
        return extents(self.reader.weights_files())

    def located(self) -> list[Mapped]:
        """Every tensor of the weights files, where it is mapped."""
        return [Mapped(self.weights.get(name).data_ptr(), size, path.name, offset) for name, (path, offset, size) in self._offsets.items()]

    def close(self) -> None:
        with self.lock:
            self.closed = True
            self._values.clear()
