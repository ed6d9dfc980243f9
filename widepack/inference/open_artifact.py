"""Defines an open artifact with its weights and the options of its load: what all entries of a model
share.
"""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from widepack_artifacts.entry import Entry
from widepack_artifacts.manifest import Manifest, Member
from widepack_artifacts.manifest_weights import Weight
from widepack_artifacts.program import Program
from widepack_artifacts.reader import Reader
from widepack_artifacts.weights import Weights
from widepack_artifacts.wide_program import WideProgram

from ..errors import UsageError
from ..runtime.admission import check_counts, check_member_slots
from ..runtime.executable import Executable
from ..spec.names import number_of
from ..system.gate import Gate
from ..system.progress import Report
from ..verification.record import OutputBounds
from .cast import Cast
from .graph_pool import GraphPool
from .load_limits import LoadLimits
from .loaded_weights import LoadedWeights

if TYPE_CHECKING:
    from ..simplify.factored_weights import FactorNames


@dataclass(frozen=True)
class BackendOptions:
    """What programs run on.

    Attributes:
        backend: The backend's name, or `auto`.
        compile: Whether the backend may compile.
        cache: The folder of compiled programs; None for the usual one.
        progress: Is called while something compiles.
        most_nodes: How many nodes a program may have to be compiled; 0 for any number.
    """

    backend: str = "eager"
    compile: bool = False
    cache: Path | None = None
    progress: Report | None = None
    most_nodes: int = 0


@dataclass(frozen=True)
class Int8Weights:
    """A request for int8 weights. most: the largest error that they may make; None for any."""

    most: float | None = None


@dataclass(frozen=True)
class LoadOptions:
    """How an artifact is loaded.

    Attributes:
        device: Where programs run.
        prologue: Whether nodes that depend on weights only run once, at load.
        strategies: As `load` takes them; None for the artifact's plans.
        simplify: Whether programs that are lowered again are simplified.
        verified: Whether the probe runs.
        backend: What programs run on.
        cast: The cast to another dtype; None for the artifact's.
        limit: How many times the usual memory and work a load may take; None for no limit.
        memory: `auto` merges factored weights when a call has many rows, `least` never, `most` at load.
        int8: What a load with int8 weights may change; None for float weights.
    """

    device: torch.device
    prologue: bool = True
    strategies: str | Sequence[str] | None = None
    simplify: bool = True
    verified: bool = True
    backend: BackendOptions = BackendOptions()
    cast: Cast | None = None
    limit: float | None = 1.0
    memory: str = "auto"
    int8: Int8Weights | None = None


@dataclass(frozen=True)
class SwappedAnswers:
    """A swapped member's answers to the probe's inputs. They replace those that the artifact recorded.

    Attributes:
        checkpoint: Where the member's weights came from.
        tensors: The answers, named as in the probe.
        bounds: For each call of the probe the bounds of each output.
    """

    checkpoint: str
    tensors: Mapping[str, Tensor]
    bounds: Mapping[str, Sequence[OutputBounds]]


@dataclass(frozen=True)
class Replacement:
    """The checkpoint that replaced a member in this process.

    Attributes:
        checkpoint: The checkpoint, as a manifest names it.
        unread: Its values of weights that all members share and that no program reads.
        extra: Its extra state, by name.
    """

    checkpoint: Member
    unread: Mapping[str, Tensor]
    extra: Mapping[str, Any]


class OpenArtifact:
    """An open artifact: its files, the loaded members, their weights, and what calls and swaps synchronize
    with.

    Attributes: reader: The artifact's files. options: How it is loaded. chosen: The numbers of the loaded
        members in the artifact. members: The names of the loaded members. whole: Whether all members are
        loaded, in the artifact's order. weights: The weights of the loaded members. probe: The tensors of the
        probe, mapped; None if the artifact has no probe. extra: The extra states of the members, mapped, or
        None. limits: What may be bound. lock: Is held while programs are bound and weights are copied. gate:
        Calls pass it, and a swap closes it. swapping: Is held by the one swap at a time. swapped: The
        answers of swapped members, by the member's number. replaced: The checkpoints of members that were
        swapped, by the member's number. changes: How often the weights of each loaded member were exchanged,
        by its place. graphs: What the graphs of calls share; None if calls run without graphs.
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
        self.swapped: dict[int, SwappedAnswers] = {}
        self.replaced: dict[int, Replacement] = {}
        self.changes: Counter[int] = Counter()
        self._cast_programs: dict[str, Program] = {}
        self._checked: set[tuple[str, str]] = set()

    @property
    def replacements(self) -> int:
        """How often members were replaced. It grows before weights are written, while no call is inside."""
        return sum(list(self.changes.values()))  # a list, since a swap may add a place meanwhile

    @cached_property
    def stored_rows(self) -> tuple[Weight, ...]:
        """The rows of the weights that wide programs read."""
        manifest = self.manifest
        if self.factors or not manifest.factored.weights:
            return manifest.weights
        return manifest.member_weights

    @property
    def files_key(self) -> str:
        """Identifies the files of the weights and of the probe, for what the user's cache remembers of
        them.
        """
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

    def executable(self, program: Program, weights: Mapping[str, Any], workers: int = 0) -> Executable:
        """Binds a program to weights, and counts its derived weights as long as it exists.

        weights: by source name. workers: how many members a loop runs at a time.
        """
        run = Executable(program, weights, self.device, prologue=self.options.prologue, workers=workers)
        self.limits.prologue.add(run, weights.values())
        return run

    def justify(self, names: Iterable[str]) -> None:
        """Raises the budget by weights that a program reads.

        Raises: ArtifactError for a weight that is not in the table.
        """
        members = len(self.manifest.members)
        self.limits.justify(
            {n: self.weights.row(n).bytes(members) for n in names if not self.limits.justified(n)}
        )

    def close(self) -> None:
        """Closes the artifact for calls. Tensors that are in use stay valid."""
        with self.lock:
            self.closed = True
            self.weights.close()
