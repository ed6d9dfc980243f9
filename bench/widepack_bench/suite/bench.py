"""Times an artifact, or a loaded model, against the baselines: `bench(artifact)`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from widepack.errors import UsageError
from widepack.spec.dtypes import find_dtype
from widepack.system.time_limit import TimeLimit

from ..baselines.compiled import compiler_settings
from ..baselines.members import named_factory, own_module, reason
from ..baselines.table import BASELINES, Run
from ..measure.inputs import Inputs
from ..measure.levels import load_levels
from ..measure.loading import load_on
from ..measure.processors import quiet
from ..report.document import Report
from .batches import Progress
from .compare import COMPILE_LIMIT_S, check, compare

if TYPE_CHECKING:
    from widepack import WideModel

Factory = Callable[[Mapping[str, Any]], nn.Module] | str


def bench(
    model: str | os.PathLike[str] | WideModel,
    *,
    device: str = "cpu",
    batches: Sequence[int] = (1, 8, 32),
    backends: Sequence[str] = ("auto",),
    baselines: Sequence[str] = tuple(BASELINES),
    levels: bool = False,
    budget_s: float = 20.0,
    compile_limit_s: float = COMPILE_LIMIT_S,
    threads: int | None = None,
    pattern: str = "shared",
    modules: Sequence[nn.Module] | None = None,
    factory: Callable[[Mapping[str, Any]], nn.Module] | str | None = None,
    factory_args: Mapping[str, Any] | None = None,
    inputs: Inputs | None = None,
    entry: str = "",
    pin: bool = False,
    roofline: bool = False,
    alone: bool = False,
    beside: Mapping[str, Run] = MappingProxyType({}),
    dtype: str | None = None,
    total_s: float | None = None,
    progress: Progress | None = None,
) -> Report:
    """Times an artifact, or a loaded model, against the baselines.

    Args:
        model: The folder of an artifact, or a loaded model.
        device: Where the artifact is loaded and everything runs.
        batches: The batch sizes.
        backends: The verdicts are about the first. Each other one is a contestant `widepack[name]`. A backend
            that `widepack.load` refuses is skipped with its reason.
        baselines: Names of `BASELINES`. Default: all.
        levels: Also time the steps from one op after the other to the plan (`measure/levels.py`).
        budget_s: Seconds of measuring for each batch, without compilation.
        compile_limit_s: Seconds that each baseline may take to compile.
        threads: Threads inside an op. Default: torch's number.
        pattern: `shared` (all members get the same inputs) or `each` (every member has its own).
        modules: Your own modules, in the members' order.
        factory: Makes a module from a member's state dict, or its name `file.py:factory`. Without `modules`
            and `factory` the baselines run `ens.member(i)`.
        factory_args: Arguments of a named factory.
        inputs: As in `compare`.
        entry: The method to call. Default: forward, or else the artifact's first entry.
        pin: Run on fixed processors.
        roofline: Count the program's work, and measure the limits of this machine.
        alone: Also measure peak memory and start-up, each contestant in its own process. Modules must then
            come from a named factory.
        beside: Other calls by name. They are timed in the same run, and are no baselines.
        dtype: As in `widepack.load`, for an artifact. The members are converted to it, too.
        total_s: Seconds that the whole call may take, with loading and compilation, without `alone`. Each
            batch has an equal part: half of it compiles baselines, the rest measures for at most three
            times `budget_s`. A baseline that is not compiled in time is skipped with its reason. Default: no
            limit.
        progress: Called with a stage, the finished steps, and all steps.

    Returns:
        A `Report` with a row for each batch.

    Raises:
        BenchError: The wide model's answers are not the loop's.
        UsageError: An unknown baseline or pattern, or options that do not go together.
        WidepackError: `widepack.load` raised it.

    Example:
        >>> print(bench("ens.wide", batches=(1, 32), threads=1).table())
    """
    import widepack

    limit = TimeLimit.of(total_s)
    check(batches, baselines, pattern)
    if progress:
        progress("load", 0, 1)
    loaded_before = isinstance(model, widepack.WideModel)
    _check_options(loaded_before, tuple(backends) != ("auto",), levels, alone, dtype)
    with quiet(threads, pin), compiler_settings():
        subject = (
            _Loaded(model, "model")
            if isinstance(model, widepack.WideModel)
            else _load(model, device, backends, levels, dtype)
        )
        if modules is None and factory is not None:
            modules = _made_by(factory, factory_args or {}, subject.ens)
        if modules is not None and dtype:
            modules = [m.to(find_dtype(dtype)) for m in modules]
        report = compare(
            subject.ens,
            modules,
            batches,
            baselines=baselines,
            others=subject.others,
            beside=beside,
            budget_s=budget_s,
            compile_limit_s=compile_limit_s,
            pattern=pattern,
            inputs=inputs,
            entry=entry,
            device=device,
            name=subject.name,
            roofline=roofline,
            limit=limit,
            progress=progress,
        )
        report = subject.noted(report)
    if not alone or not report.rows:
        return report
    from ..processes.contestant import measured_alone

    named = factory if isinstance(factory, str) else ""
    return measured_alone(
        report,
        model=subject.name,
        factory=named,
        factory_args=factory_args or {},
        unnamed=modules is not None and not named,
        device=device,
        pin=pin,
        inputs=inputs,
        progress=progress,
    )


def _check_options(loaded: bool, backends: bool, levels: bool, alone: bool, dtype: str | None) -> None:
    """Checks options that do not go together. Raises: UsageError."""
    if loaded and (backends or levels or alone or dtype):
        raise UsageError(
            "backends, levels, memory, start-up and dtype need an artifact: give its path, not a loaded model"
        )
    if dtype and (levels or alone):
        raise UsageError(
            "levels, memory and start-up are measured in the artifact's own dtype: leave dtype out"
        )


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A model to time. others: the artifact loaded in other ways. skipped: those that cannot be loaded."""

    ens: Any
    name: str
    backend: str = "auto"
    others: Mapping[str, Any] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)

    def noted(self, report: Report) -> Report:
        """Adds the backend and the skipped ways to a report."""
        rows = tuple(replace(row, skipped={**self.skipped, **row.skipped}) for row in report.rows)
        return replace(report, backend=self.backend, rows=rows)


def _load(
    path: str | os.PathLike[str], device: str, backends: Sequence[str], levels: bool, dtype: str | None
) -> _Loaded:
    """Loads the artifact under each backend, and at each level."""
    # Compiled code of other models would be searched at every call.
    torch._dynamo.reset()
    loaded, refused = load_backends(path, device, backends, dtype)
    backend, ens = next(iter(loaded.items()))
    others: dict[str, Any] = {f"widepack[{b}]": m for b, m in loaded.items() if b != backend}
    skipped = {f"widepack[{b}]": why for b, why in refused.items()}
    if levels:
        steps, missing = load_levels(path, device)
        others.update(steps)
        skipped.update(missing)
    return _Loaded(ens, os.fspath(path), backend, others, skipped)


def _made_by(factory: Factory, arguments: Mapping[str, Any], ens: Any) -> list[nn.Module]:
    """Makes the user's modules with a factory or its name."""
    make_one = named_factory(factory, arguments, ens) if isinstance(factory, str) else factory
    return [own_module(make_one, ens.state_dict(i), str(m)) for i, m in enumerate(ens.members)]


def load_backends(
    path: str | os.PathLike[str], device: str, backends: Sequence[str], dtype: str | None = None
) -> tuple[dict[str, WideModel], dict[str, str]]:
    """Loads the artifact under each backend, and returns the reasons why others were refused.

    Raises: the first error of `widepack.load` where no backend can be loaded.
    """
    import widepack

    loaded: dict[str, WideModel] = {}
    refused: dict[str, str] = {}
    first: Exception | None = None
    for backend in dict.fromkeys(backends or ("auto",)):
        try:
            loaded[backend] = load_on(path, device, backend, dtype)
        except Exception as error:
            if not isinstance(error, widepack.WidepackError) and len(tuple(backends)) < 2:
                raise
            first = first or error
            refused[backend] = reason(error)
    if not loaded:
        assert first is not None
        raise first
    return loaded, refused
