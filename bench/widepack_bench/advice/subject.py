"""The artifact that advice is about: as it is loaded now, its inputs, and the answers of its members."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map

from widepack.inference.entry import WideEntry
from widepack.ir.torch_internals import without_fast_path
from widepack.kernel_times.profile import Profile
from widepack.kernel_times.program import loop_seconds, wide_seconds
from widepack.system.progress import Report as Progress
from widepack_artifacts.program import Program

from ..baselines.member_programs import flat_members
from ..baselines.table import Run, loop
from ..errors import BenchError
from ..measure.answers import difference, leaves
from ..measure.inputs import batch_dim, make
from ..measure.loading import entry_of, load_on


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is called. `batch` is the size of the batch's dim."""

    path: Path
    entry: str
    pattern: str
    batch: int
    threads: int

    @property
    def each(self) -> bool:
        """Whether every member has its own inputs."""
        return self.pattern == "each"


@dataclass(frozen=True, kw_only=True)
class AdvisedArtifact:
    """A workload on the artifact as it is loaded now.

    entry: the loaded entry. args, kwargs, sizes: of the call. members: the members one after the other, whose
    answers are expected. times: of kernels on this machine.
    """

    work: Workload
    entry: WideEntry
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    sizes: Mapping[str, int]
    members: Run
    expected: Any
    times: Profile
    folder: Path
    progress: Progress | None = None

    @classmethod
    def of(
        cls, work: Workload, times: Profile, folder: Path, progress: Progress | None = None
    ) -> AdvisedArtifact:
        """Loads the artifact. folder: for what moves write.

        Raises: BenchError if the entry carries state, or no inputs can be made; ArtifactError.
        """
        entry = entry_of(load_on(work.path, "cpu", "auto"), work.entry)
        if entry.entry.state:
            raise BenchError(
                f"{work.path}: entry {entry.name} carries state from call to call, and advice times calls "
                "that do not depend on each other; advise another entry"
            )
        count = len(entry.members) if work.each else 0
        if not batch_dim(entry.entry):
            work = replace(work, batch=1)  # all sizes are fixed
        args, kwargs, sizes = make(entry.entry, work.batch, members=count)
        members = loop(flat_members(entry), work.each)
        with without_fast_path():
            expected = members(*args, **kwargs)
        return cls(
            work=work,
            entry=entry,
            args=args,
            kwargs=kwargs,
            sizes=sizes,
            members=members,
            expected=expected,
            times=times,
            folder=folder,
            progress=progress,
        )

    @property
    def ragged(self) -> bool:
        """Whether members have different shapes."""
        return len(self.entry.entry.member) > 1

    @property
    def count(self) -> int:
        """The number of members."""
        return len(self.entry.members)

    def call(self, entry: WideEntry) -> Callable[[], object]:
        """Returns the call that is timed, on an entry that was loaded in any way."""
        return functools.partial(self.run_of(entry), *self.args, **self.kwargs)

    def run_of(self, entry: WideEntry) -> Run:
        """Returns what is called with the inputs."""
        run: Run = entry.each if self.work.each else entry
        return run

    def wrong(self, answers: Any, *, other_dtype: bool = False) -> str:
        """Returns why answers are not those of the members; empty where they are.

        other_dtype: floating answers may have another dtype; then its rounding is the bound.
        """
        if not other_dtype:
            return difference(answers, self.expected)
        got, expected = leaves(answers), leaves(self.expected)
        if len(got) != len(expected):
            return difference(got, expected)
        both = [g.is_floating_point() and e.is_floating_point() for g, e in zip(got, expected)]
        return difference(got, [e.to(g.dtype) if f else e for g, e, f in zip(got, expected, both)])

    def in_dtype(self, dtype: torch.dtype) -> AdvisedArtifact:
        """Returns the artifact with floating inputs in a dtype."""

        def cast(value: Any) -> Any:
            return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

        args, kwargs = tree_map(cast, (self.args, dict(self.kwargs)))
        return replace(self, args=args, kwargs=kwargs)

    @property
    def program(self) -> Program:
        """The wide program that a call of now runs."""
        return self.program_of(self.entry)

    def program_of(self, entry: WideEntry, sizes: Mapping[str, int] | None = None) -> Program:
        """Returns the wide program that a call of an entry runs. sizes: default those of the call."""
        return entry.programs.for_sizes(self.work.pattern, sizes or self.sizes).program

    def seconds(self, entry: WideEntry, times: Profile | None = None) -> float | None:
        """Predicts the seconds of a call of an entry. Returns None where a size depends on values."""
        with suppress(RuntimeError):
            return wide_seconds(self.program_of(entry), self.sizes, times or self.times)
        return None

    def loop_seconds(self) -> float | None:
        """Predicts the seconds of the members one after the other. Returns None as `seconds` does."""
        source = self.entry.programs.source
        programs = [source.member_program(i) for i in range(self.count)]
        with suppress(RuntimeError):
            return loop_seconds(programs, self.sizes, self.times, modules=1)
        return None
