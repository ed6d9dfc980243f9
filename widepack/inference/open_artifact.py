"""Defines an open artifact: its files, its weights, the options and the limits of its load. All entries of a
model share it.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from widepack_artifacts.entry import Entry
from widepack_artifacts.file_identity import bytes_on_disk
from widepack_artifacts.file_list import graph_file
from widepack_artifacts.manifest import Manifest, Member
from widepack_artifacts.manifest_weights import Weight
from widepack_artifacts.program import Kind, Program
from widepack_artifacts.reader import Reader
from widepack_artifacts.weights import Weights
from widepack_artifacts.wide_program import WideProgram

from ..errors import ArtifactError, UsageError
from ..runtime.admission import check_counts, check_member_slots
from ..runtime.budget import Budget
from ..runtime.executable import Executable, storage
from ..spec.names import number_of
from ..system.deadline import Deadline
from ..system.gate import Gate
from ..system.progress import Report
from ..verification.record import OutputBounds
from .cast import Cast
from .graph_pool import GraphPool
from .loaded_weights import LoadedWeights

if TYPE_CHECKING:
    from ..simplify.factored_weights import FactorNames


class LoadLimits:
    """The budget and the deadline of one load, and of each pattern that is bound later.

    Args:
        limit: How many times the usual amount a load may take; None for no limit.
        weights: The weights files.
        probe: The file of the probe, if the artifact has one.

    Attributes:
        budget: The memory and work of what is bound now; None for no limit.
        lowering: The deadline of what is lowered now.
        weights_bytes: The bytes of the weights files on the disk.
        derived_bytes: The bytes that prologues of bound programs have computed and that are in memory.
        justified: The bytes of each weight that a program reads.
    """

    def __init__(self, limit: float | None, weights: Iterable[Path], probe: Path | None) -> None:
        self.limit = limit
        # The sizes are read now: the files may be replaced later.
        self.weights_bytes = sum(map(bytes_on_disk, weights))
        self._probe_bytes = bytes_on_disk(probe) if probe is not None else 0
        self.justified: dict[str, int] = {}
        self._merged_bytes = 0
        self.derived_bytes = 0
        self.budget = self._new_budget()
        self.lowering = Deadline(limit)
        self._loading = False

    def _new_budget(self, before: Budget | None = None) -> Budget | None:
        """Returns a budget for what is bound now. before: the budget that it replaces in the same load."""
        if self.limit is None:
            return None
        weights = min(self.weights_bytes, sum(self.justified.values())) + self._merged_bytes
        budget = Budget.of(weights, self._probe_bytes, self.limit)
        budget.resident = self.derived_bytes
        if before is not None:
            budget.spent, budget.walked, budget.nodes = before.spent, before.walked, before.nodes
        return budget

    @contextlib.contextmanager
    def one_load(self, active: bool = True) -> Iterator[None]:
        """Patterns that are bound in the block share a budget and a deadline. active: False: each its own."""
        self._loading = active
        try:
            yield
        finally:
            self._loading = False
        self.lowering.made.clear()

    def begin(self) -> None:
        """Begins a budget and a deadline for a pattern that is bound now, unless a load has begun one."""
        if not self._loading:
            self.budget, self.lowering = self._new_budget(), Deadline(self.limit)

    def justify(self, sizes: Mapping[str, int]) -> None:
        """Raises the budget by weights that a program reads. Weights that no program reads do not raise it.

        sizes: the bytes of each weight.
        """
        self.justified.update(sizes)
        self._raise()

    def justify_merged(self, size: int) -> None:
        """Raises the budget by weights that are merged, after their memory was found to be available.

        size: their bytes.
        """
        self._merged_bytes += size
        self._raise()

    def _raise(self) -> None:
        if self.budget is not None:
            self.budget = self._new_budget(self.budget)

    def add_derived(self, run: Executable, weights: Iterable[Any]) -> None:
        """Counts a program's derived weights as long as it exists. weights: those that it is bound to."""
        known = {storage(t) for w in weights for t in (w if isinstance(w, list) else [w])}
        sizes = {}
        for t in (t for w in run.given for t in (w if isinstance(w, (list, tuple)) else [w])):
            if isinstance(t, torch.Tensor) and not ((at := storage(t)) and at in known):
                sizes[at or id(t)] = t.untyped_storage().nbytes() if at else t.numel() * t.element_size()
        size = sum(sizes.values())
        self.derived_bytes += size
        weakref.finalize(run, self._remove, size).atexit = False

    def _remove(self, size: int) -> None:
        self.derived_bytes -= size


@dataclass(frozen=True)
class LoadOptions:
    """How an artifact is loaded.

    Attributes:
        device: Where programs run.
        prologue: Whether nodes that depend on weights only run once, at load.
        strategies: As `load` takes them; None for the artifact's plans.
        simplify: Whether programs that are lowered again are simplified.
        verified: Whether the probe runs.
        backend: The name of the backend that runs programs, or `auto`.
        compile: Whether the backend may compile.
        cache: The folder of compiled programs; None for the usual one.
        progress: Is called while something compiles.
        most_nodes: How many nodes a program may have to be compiled; 0 for any number.
        cast: The cast to another dtype; None for the artifact's.
        limit: How many times the usual memory and work a load may take; None for no limit.
        memory: `auto` merges factored weights when a call has many rows, `least` never, `most` at load.
        int8: Whether programs of few rows read int8 weights.
        max_error: The largest error that int8 weights may make; None for any.
        trusted: Whether the user named the artifact's digest.
    """

    device: torch.device
    prologue: bool = True
    strategies: str | Sequence[str] | None = None
    simplify: bool = True
    verified: bool = True
    backend: str = "eager"
    compile: bool = False
    cache: Path | None = None
    progress: Report | None = None
    most_nodes: int = 0
    cast: Cast | None = None
    limit: float | None = 1.0
    memory: str = "auto"
    int8: bool = False
    max_error: float | None = None
    trusted: bool = False


@dataclass(frozen=True)
class Replacement:
    """The checkpoint that replaced a member in this process.

    Attributes:
        checkpoint: The checkpoint, as a manifest names it.
        unread: Its values of weights that all members share and that no program reads.
        extra: Its extra state, by name.
        answers: Its answers to the probe's inputs, named as in the probe. They replace those that the
            artifact recorded.
        bounds: For each call of the probe the bounds of each output; empty if the member answers as before.
    """

    checkpoint: Member
    unread: Mapping[str, Tensor]
    extra: Mapping[str, Any]
    answers: Mapping[str, Tensor] = field(default_factory=dict)
    bounds: Mapping[str, Sequence[OutputBounds]] = field(default_factory=dict)


class OpenArtifact:
    """An open artifact: its files, the loaded members, their weights, and what calls and swaps synchronize
    with.

    Attributes: reader: The artifact's files. options: How it is loaded. chosen: The numbers of the loaded
        members in the artifact. members: The names of the loaded members. whole: Whether all members are
        loaded, in the artifact's order. weights: The weights of the loaded members. probe: The tensors of the
        probe, mapped; None if the artifact has no probe. extra: The extra states of the members, mapped, or
        None. limits: What may be bound. lock: Is held while programs are bound and weights are copied. gate:
        Calls pass it, and a swap closes it. swapping: Is held by the one swap at a time. replaced: The
        checkpoints of members that were swapped, by the member's number. changes: How often the weights of
        each loaded member were exchanged, by its place. graphs: What the graphs of calls share; None if calls
        run without graphs.
    """

    def __init__(
        self,
        reader: Reader,
        files: Weights,
        chosen: Sequence[int],
        options: LoadOptions,
        gate: Gate | None = None,
        graphs: GraphPool | None = None,
    ) -> None:
        self.graphs = graphs
        self.reader, self.options, self.chosen = reader, options, tuple(chosen)
        self.manifest: Manifest = reader.manifest
        probe = reader.path(self.manifest.probe) if self.manifest.probe else None
        self.probe = Weights([probe]) if probe is not None else None
        extra = self.manifest.state_dicts.extra
        self.extra = Weights([reader.path(extra)]) if extra else None
        self.members: tuple[str, ...] = tuple(self.manifest.members[i].name for i in self.chosen)
        self.whole = self.chosen == tuple(range(len(self.manifest.members)))
        self.lock = threading.RLock()
        self.weights = LoadedWeights(reader, files, self.chosen, options.device, options.cast, self.lock)
        self.limits = LoadLimits(options.limit, reader.weights_files(), probe)
        self.closed = False
        self.gate = gate or Gate()
        self.swapping = threading.Lock()
        self.replaced: dict[int, Replacement] = {}
        self.changes: Counter[int] = Counter()
        self._cast_programs: dict[str, Program] = {}
        self._checked: set[tuple[str, str]] = set()

    @property
    def replacements(self) -> int:
        """How often members were replaced. It grows before weights are written, while no call is inside."""
        return sum(list(self.changes.values()))  # a list, since a swap may add a place meanwhile

    @property
    def swapped(self) -> dict[int, Replacement]:
        """The checkpoints of members that answer otherwise than the artifact recorded, by number."""
        return {number: new for number, new in self.replaced.items() if new.bounds}

    @cached_property
    def stored_rows(self) -> tuple[Weight, ...]:
        """The rows of the weights that wide programs read."""
        manifest = self.manifest
        if self.factors or not manifest.factored.weights:
            return manifest.weights
        return manifest.member_weights

    @property
    def kinds(self) -> dict[str, Kind]:
        """The kinds of the weights that wide programs read, by name."""
        return {w.name: w.kind for w in self.stored_rows}  # type: ignore[misc]  # checked by the reader

    @property
    def files_key(self) -> str:
        """Identifies the files of the weights and of the probe, for the user's cache."""
        mapped = [self.weights.files, *([self.probe] if self.probe is not None else [])]
        return "; ".join(i.key for files in mapped for i in files.identities)

    def check_unchanged(self) -> None:
        """Checks that no mapped file was changed in place since the load. Raises: ArtifactError."""
        self.weights.files.check_unchanged()
        if self.probe is not None:
            self.probe.check_unchanged()

    @property
    def device(self) -> torch.device:
        """Where programs run."""
        return self.options.device

    @property
    def cast(self) -> Cast | None:
        """The cast to another dtype; None for the artifact's."""
        return self.options.cast

    @property
    def uses_stored_plans(self) -> bool:
        """Whether the artifact's own programs can run: its dtype, and no requested strategies."""
        return self.cast is None and self.options.strategies is None

    def serves(self, wide: WideProgram) -> bool:
        """Returns whether a program of the artifact is for the loaded members."""
        return self.whole if wide.part is None else self.chosen == tuple(wide.part)

    @property
    def checkpoints(self) -> tuple[Member, ...]:
        """The checkpoint that each loaded member is now."""
        rows = self.manifest.members
        return tuple(self.replaced[i].checkpoint if i in self.replaced else rows[i] for i in self.chosen)

    def part(self, name: str, number: int) -> Tensor:
        """Returns a weight of one member as its checkpoint has it. number: of the member in the artifact."""
        replacement = self.replaced.get(number)
        unread = replacement.unread if replacement is not None else {}
        return unread[name] if name in unread else self.weights.part(name, number)

    def extra_state(self, number: int) -> dict[str, Any]:
        """Returns the extra state of one member. number: of the member in the artifact.

        Raises: ArtifactError.
        """
        if (replacement := self.replaced.get(number)) is not None:
            return copy.deepcopy(dict(replacement.extra))
        if self.extra is None:
            return {}
        from ..checkpoints.extra_state import extra_of_member  # most members have no extra state

        return extra_of_member(self.reader, self.extra, number)

    def reads(self, name: str) -> bool:
        """Returns whether a program of the artifact reads a weight, or a state begins as it."""
        entries = self.manifest.entries.values()
        if any(s.initial == name for e in entries for s in e.state):
            return True
        files = {f for e in entries for f in (*e.member, *(w.file for w in e.wide))}
        return any(s.source == name for f in files for s in self.reader.program(f).weights)

    @cached_property
    def factors(self) -> dict[str, FactorNames]:
        """The weights whose factors programs read, by name, in the requested dtype.

        They are none for a wider dtype: there the rounding of a merged weight is not rounding any more, so
        that programs read the whole weights.
        """
        if not self.manifest.factored.weights or (self.cast is not None and self.cast.widens):
            return {}
        from ..simplify.factored_weights import stored_factors  # only lowering needs it

        table = {w.name: w for w in self.manifest.weights}
        return stored_factors(self.manifest.factored.weights, table, self.cast.table if self.cast else None)

    def check_open(self) -> None:
        """Raises: UsageError after `close`."""
        if self.closed:
            raise UsageError("this model was closed; widepack.load opens its artifact again")

    def index(self, member: int | str) -> int:
        """Returns a loaded member's place. member: number or name. Raises: UsageError."""
        return number_of(self.members, member)

    def entry(self, name: str) -> Entry:
        """Returns an entry in the requested dtype."""
        entry = self.manifest.entries[name]
        return self.cast.entry(entry) if self.cast else entry

    def program(self, file: str, entry: str) -> Program:
        """Returns a member program of an entry in the requested dtype.

        Raises: ArtifactError, also for a program that is not of this entry; LoweringError for a program that
            cannot be cast.
        """
        program, row = self.reader.program(file), self.manifest.entries[entry]
        if (file, entry) not in self._checked:
            title = f"{self.reader.root}: the member program {file} of entry {entry}"
            table = {w.name: w for w in self.manifest.member_weights}
            check_counts(title, program, row, table)
            for signature, of in enumerate(row.member):
                if of == file and signature in row.signatures:
                    check_member_slots(title, program, row, table, row.signatures.index(signature))
            self._checked.add((file, entry))
        if self.cast is None:
            return program
        if file not in self._cast_programs:
            sizes = {d: max(2, v.example) for d, v in self.manifest.entries[entry].dims.items()}
            self._cast_programs[file] = self.cast.program(program, sizes)
        return self._cast_programs[file]

    def executable(
        self, program: Program, weights: Mapping[str, Any], workers: int = 0, lazy: bool = False
    ) -> Executable:
        """Binds a program to weights, and counts its derived weights as long as it exists.

        weights: by source name. workers: how many members a loop runs at a time. lazy: as in `Executable`.
        """
        return Executable(
            program,
            weights,
            self.device,
            prologue=self.options.prologue,
            workers=workers,
            lazy=lazy,
            bound=lambda run: self.limits.add_derived(run, weights.values()),
        )

    def trusted_graph(self, content: str) -> bytes | None:
        """Returns the ONNX graph that the artifact has of a program, if the load names the artifact's digest.

        content: the digest of the program. ONNX Runtime parses the file, and was not made for files of
        strangers; so of no other artifact a graph is read.
        """
        if not self.options.trusted:
            return None
        name = graph_file(self.manifest.files, content)
        try:
            return self.reader.bytes(name) if name else None
        except (ArtifactError, OSError):  # another artifact was published at the path since
            return None

    @property
    def weights_key(self) -> str:
        """Identifies the values of the loaded members' weights; "" if a member was swapped."""
        if self.replaced:
            return ""
        dtype = str(self.cast.dtype) if self.cast else ""
        return f"{self.manifest.digest} {list(self.chosen)} {self.files_key} {dtype} {self.options.prologue}"

    def justify(self, names: Iterable[str]) -> None:
        """Raises the budget by weights that a program reads.

        Raises: ArtifactError for a weight that is not in the table.
        """
        members = len(self.manifest.members)
        self.limits.justify(
            {n: self.weights.row(n).bytes(members) for n in names if n not in self.limits.justified}
        )

    def close(self) -> None:
        """Closes the artifact for calls. Tensors that are in use stay valid."""
        with self.lock:
            self.closed = True
            self.weights.close()
