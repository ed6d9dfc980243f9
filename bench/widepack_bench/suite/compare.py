"""Times a loaded model against its members: `compare(ens, modules)`."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from widepack.errors import UsageError
from widepack.spec.entries import FORWARD, PATTERNS
from widepack.system.time_limit import NO_LIMIT, TimeLimit
from widepack_artifacts.entry import Entry
from widepack_artifacts.manifest import Manifest

from ..baselines.compiled import compiler_settings
from ..baselines.derivatives import for_inference
from ..baselines.member_programs import flat_members
from ..baselines.members import call_inputs, called, reason
from ..baselines.table import BASELINES, Run, loop
from ..errors import BenchError
from ..measure.inputs import Inputs
from ..measure.roofline import roof_of
from ..report.document import Report
from ..report.environment import environment
from ..report.row import Row
from .batches import BatchContest, BatchInputs, Limits, Progress

FLAT = "the artifact's member programs (give the model's factory to run your own modules)"
OWN = "your own modules"
COMPILE_LIMIT_S = 600.0


def compare(
    ens: Any,
    modules: Sequence[nn.Module] | None = None,
    batches: Sequence[int] = (1, 8, 32),
    *,
    baselines: Sequence[str] = tuple(BASELINES),
    others: Mapping[str, Any] = MappingProxyType({}),
    beside: Mapping[str, Run] = MappingProxyType({}),
    budget_s: float = 20.0,
    compile_limit_s: float = COMPILE_LIMIT_S,
    pattern: str = "shared",
    inputs: Inputs | None = None,
    entry: str = "",
    device: str = "cpu",
    name: str = "model",
    roofline: bool = False,
    limit: TimeLimit = NO_LIMIT,
    progress: Progress | None = None,
) -> Report:
    """Times a loaded model against its members.

    Args:
        ens: The loaded model.
        modules: The members as your own modules, in the members' order. Default: `ens.member(i)`.
        batches: The batch sizes.
        others: The same members loaded in other ways, by name. They are timed in the same run, and are no
            baselines.
        beside: Other calls by name. They are timed in the same run, and are no baselines.
        inputs: Maps a batch to (positional, keyword) inputs, stacked `[N, ...]` for the pattern `each`.
            Default: made from the manifest.
        baselines: The names of the baselines. Default: all.
        budget_s: Seconds of measuring for each batch size.
        compile_limit_s: Seconds that one baseline may take to compile.
        pattern: `"shared"` or `"each"`: whether all members get the same inputs.
        entry: The entry. Default: the first.
        device: The device of all contestants.
        roofline: Whether to measure the roofline of this machine.
        limit: When the comparison must end (`total_s` of `bench`).
        progress: A function that is called with `(stage, done, total)`.
        name: The model's name in the report.

    Returns:
        A `Report` with a row for each batch.

    Raises:
        BenchError: Answers of `ens` or of another way are not the loop's, or the number of `modules` is not
            the number of members.
        UsageError: As in `bench`.

    Example:
        >>> from widepack_bench import compare
        >>> report = compare(ens, batches=[8], baselines=["loop"], budget_s=0.5)
        >>> print(report)
    """
    check(batches, baselines, pattern)
    subject = _Subject.of(ens, modules, entry, pattern, device, others, beside)
    subject = subject.with_derivatives(inputs, batches)
    limits = Limits(budget_s, compile_limit_s)
    rows: list[Row] = []
    refused: dict[int, str] = {}
    with torch.inference_mode(), compiler_settings():
        # Without state the contestants are the same for all batches.
        shared = None if subject.carries else subject.contest({}, baselines, limits, progress)
        for done, batch in enumerate(batches):
            if progress:
                progress(f"batch {batch}", done, len(batches))
            try:
                call = subject.inputs(inputs, batch)
            except BenchError as refusal:
                refused[batch] = str(refusal)
                continue
            part = limit.part(1 / (len(batches) - done))
            row = (shared or subject.contest(call.sizes, baselines, limits, progress)).row(call, part)
            rows.append(subject.with_roof(row) if roofline else row)
            if progress:
                progress(f"batch {batch}", done + 1, len(batches))
    where = environment(device, torch.get_num_threads())
    whose = OWN if modules is not None else FLAT
    return Report(name, subject.count, pattern, whose, tuple(rows), refused, where, subject.entry)


@dataclass(frozen=True, slots=True)
class _Subject:
    """What a comparison is about.

    model: the loaded model. described: the entry in the manifest; None for a model without a manifest.
    carries: whether the entry has state. wide, others: what is called, for the entry. count: N.
    """

    model: Any
    modules: Sequence[nn.Module] | None
    entry: str
    described: Entry | None
    carries: bool
    pattern: str
    device: str
    wide: Any
    others: Mapping[str, Any]
    beside: Mapping[str, Run]
    count: int

    @classmethod
    def of(
        cls,
        ens: Any,
        modules: Sequence[nn.Module] | None,
        entry: str,
        pattern: str,
        device: str,
        others: Mapping[str, Any],
        beside: Mapping[str, Run],
    ) -> _Subject:
        """Finds the entry. Raises: UsageError for an unknown one, BenchError for a wrong count of modules."""
        entry, described = _entry(ens, entry)
        carries = described is not None and bool(described.state)
        if described is not None and carries and modules is not None:
            raise UsageError(
                f"{entry} carries state ({', '.join(described.states)}), and your own modules "
                "change their state "
                "at every call. Leave the model out: the baselines then run the artifact's member programs, "
                "every call from the same state."
            )

        def of_entry(model: Any) -> Any:
            return model if entry == FORWARD and not carries else model.entry(entry)

        wide = of_entry(ens)
        count = len(wide if modules is None else modules)
        if count != len(wide):
            raise BenchError(
                f"{count} modules were given to compare with, but the wide model has {len(wide)} members"
            )
        ways = {name: of_entry(model) for name, model in others.items()}
        return cls(ens, modules, entry, described, carries, pattern, device, wide, ways, beside, count)

    @property
    def each(self) -> bool:
        """Whether every member has its own inputs."""
        return self.pattern == "each"

    def with_derivatives(self, inputs: Inputs | None, batches: Sequence[int]) -> _Subject:
        """Returns the same, with modules that run in inference mode although forward takes derivatives."""
        if self.modules is None or self.carries:
            return self
        for batch in batches:
            try:
                args, kwargs, _ = call_inputs(self.described, inputs, batch, 0, self.device)
            except BenchError:
                continue
            members = [called(m, self.entry).to(self.device).eval() for m in self.modules]
            usable = for_inference(members, args, kwargs)
            return self if usable == members else replace(self, modules=usable)
        return self

    def contest(
        self, sizes: Mapping[str, int], baselines: Sequence[str], limits: Limits, progress: Progress | None
    ) -> BatchContest:
        """Makes the contestants. sizes: of the named dims, where the entry carries state."""
        state = self.wide.state(**sizes) if self.carries else None
        modules = (
            [called(m, self.entry) for m in self.modules]
            if self.modules is not None
            else flat_members(self.wide, state)
        )
        members = [m.to(self.device).eval() for m in modules]
        runs, skipped = _baselines(members, baselines, self.each)

        def call_of(model: Any) -> Run:
            run: Run = model.each if self.each else model
            return functools.partial(run, state=state) if self.carries else run

        return BatchContest(
            call_of(self.wide),
            {**{name: call_of(model) for name, model in self.others.items()}, **self.beside},
            loop(members, self.each),
            runs,
            skipped,
            self.count,
            limits,
            torch.cuda.synchronize if self.device.startswith("cuda") else None,
            progress,
        )

    def inputs(self, inputs: Inputs | None, batch: int) -> BatchInputs:
        """Makes the inputs of a batch. Raises: BenchError where none can be made."""
        members = self.count if self.each else 0
        args, kwargs, sizes = call_inputs(self.described, inputs, batch, members, self.device)
        return BatchInputs(batch, args, kwargs, sizes)

    def with_roof(self, row: Row) -> Row:
        """Adds the roofline to a row, or the reason why it cannot be computed."""
        if self.described is None:
            return row
        try:
            roof = roof_of(self.model, self.entry, self.pattern, row.sizes, row.median_ms, self.device)
        except Exception as error:  # noqa: BLE001  # data-dependent sizes have no count
            return replace(row, skipped={**row.skipped, "roofline": reason(error)})
        return replace(row, roof=roof)


def _entry(ens: Any, entry: str) -> tuple[str, Entry | None]:
    """Returns the entry's name and description in the manifest. Raises: UsageError for an unknown name."""
    manifest: Manifest | None = getattr(ens, "manifest", None)
    entry = entry or (manifest.entry if manifest else FORWARD)
    if manifest and entry not in manifest.entries:
        raise UsageError(f"there is no entry {entry!r}; the entries are {', '.join(manifest.entries)}")
    return entry, ens.entry(entry).entry if manifest else None


def check(batches: Sequence[int], baselines: Sequence[str], pattern: str) -> None:
    """Checks names and batch sizes. Raises: UsageError with the known ones."""
    unknown = [b for b in baselines if b not in BASELINES]
    if unknown or not baselines:
        raise UsageError(
            f"unknown baseline {', '.join(map(repr, unknown)) or '(none given)'}; known: "
            f"{', '.join(BASELINES)}"
        )
    if pattern not in PATTERNS:
        raise UsageError(f"unknown pattern {pattern!r}; known: {', '.join(PATTERNS)}")
    if not batches or any(b < 1 for b in batches):
        raise UsageError(f"batches are whole numbers from 1, got {', '.join(map(str, batches)) or 'none'}")


def _baselines(
    members: Sequence[nn.Module], names: Sequence[str], each: bool
) -> tuple[dict[str, Run], dict[str, str]]:
    """Makes the baselines. Returns them, and the reasons why others cannot be made."""
    runs: dict[str, Run] = {}
    skipped: dict[str, str] = {}
    for name in names:
        try:
            runs[name] = BASELINES[name](members, each)
        except Exception as error:  # noqa: BLE001  # torch raises errors of any class
            skipped[name] = reason(error)
    return runs, skipped
