"""Compares the answers of all contestants at one batch, then times them in one race."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from widepack.ir.torch_internals import without_fast_path
from widepack.runtime.admission import guarded
from widepack.system.time_limit import NO_LIMIT, TimeLimit

from ..baselines.compiled import NOT_COMPILED, at_most
from ..baselines.members import reason
from ..baselines.table import Run, difference
from ..errors import BenchError
from ..measure import race as noise
from ..report.row import Row

Progress = Callable[[str, int, int], None]

COMPILING = 0.5  # The part of a batch's time limit in which baselines are compiled.
LEAST_COMPILE_S = 1.0  # A baseline that has less time is not even begun.
EAGER = ("loop", "vmap")  # Baselines that need no compilation.


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds of timing for each batch, and seconds that each baseline may take to compile."""

    budget_s: float
    compile_limit_s: float


@dataclass(frozen=True, slots=True)
class BatchInputs:
    """The inputs of one call. sizes: of the named dims."""

    batch: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    sizes: dict[str, int]


@dataclass(frozen=True, slots=True)
class BatchContest:
    """The contestants of a comparison, the same for all batches.

    wide: the wide model. others: the wide model loaded in other ways. loop: the members one after another,
    whose answers are expected. baselines: those that could be made. skipped: the reasons why the others could
    not. members: N. sync: waits for the device; None on the CPU.
    """

    wide: Run
    others: Mapping[str, Run]
    loop: Run
    baselines: Mapping[str, Run]
    skipped: Mapping[str, str]
    members: int
    limits: Limits
    sync: noise.Call | None
    progress: Progress | None

    def row(self, inputs: BatchInputs, limit: TimeLimit = NO_LIMIT) -> Row:
        """Compares all answers, then times. limit: when both must end.

        Raises: BenchError if a wide model's answers differ from the loop's.
        """
        if self.progress:
            self.progress(f"batch {inputs.batch}: comparing answers", 0, 1)
        with without_fast_path(), guarded(f"batch {inputs.batch}: the members one after another"):
            expected = self.loop(*inputs.args, **inputs.kwargs)
        _check("the wide model", self.wide, inputs, expected)
        skipped = dict(self.skipped)
        others = self._right_others(inputs, expected, skipped)
        calls = self._right_baselines(inputs, expected, skipped, limit.part(COMPILING))
        if not calls:
            raise BenchError(
                f"batch {inputs.batch}: no baseline runs: "
                f"{'; '.join(f'{k}: {v}' for k, v in skipped.items())}"
            )
        progress = self.progress
        race = noise.race(
            _bound(self.wide, inputs),
            calls,
            others=others,
            budget_s=self.limits.budget_s,
            sync=self.sync,
            limit_s=limit.left,
            report=progress and (lambda *done: progress(f"batch {inputs.batch}: measuring", *done)),
        )
        return Row.of(inputs.batch, inputs.sizes, race, skipped, self.members)

    def _right_others(
        self, inputs: BatchInputs, expected: Any, skipped: dict[str, str]
    ) -> dict[str, noise.Call]:
        """Returns the calls of the other loaded models. Raises: BenchError for wrong answers."""
        calls: dict[str, noise.Call] = {}
        for name, run in self.others.items():
            try:
                _check(name, run, inputs, expected)
            except BenchError:
                raise
            except Exception as error:  # noqa: BLE001  # backends raise errors of any class
                skipped[name] = reason(error)
            else:
                calls[name] = _bound(run, inputs)
        return calls

    def _right_baselines(
        self, inputs: BatchInputs, expected: Any, skipped: dict[str, str], limit: TimeLimit
    ) -> dict[str, noise.Call]:
        """Returns the calls of the baselines that run with right answers. limit: for those that compile.

        The time of the limit is divided equally; what one baseline leaves, the next ones have.
        """
        calls: dict[str, noise.Call] = {}
        for number, (name, run) in enumerate(self.baselines.items()):
            if self.progress and name not in EAGER:
                self.progress(f"batch {inputs.batch}: preparing {name}", number, len(self.baselines))
            compile_s = self.limits.compile_limit_s
            if name not in EAGER:
                compile_s = min(compile_s, limit.part(1 / (len(self.baselines) - number)).left)
            if compile_s < LEAST_COMPILE_S:
                skipped[name] = f"{compile_s:.1f} s were left to prepare it; give more time (--budget)"
                continue
            wrong = _wrong(run, inputs, expected, compile_s)
            if wrong:
                skipped[name] = wrong
            else:
                calls[name] = _bound(run, inputs)
        return calls


def _check(name: str, run: Run, inputs: BatchInputs, expected: Any) -> None:
    """Compares a wide model's answers with the loop's. Raises: BenchError where they differ."""
    with without_fast_path():
        wrong = difference(run(*inputs.args, **inputs.kwargs), expected)
    if wrong:
        raise BenchError(
            f"batch {inputs.batch}: {name} does not give the members' answers, so its time means "
            f"nothing: {wrong}. Run `widepack verify` for details."
        )


def _wrong(run: Run, inputs: BatchInputs, expected: Any, limit_s: float) -> str:
    """Returns why a baseline cannot be timed here; empty where it can."""
    try:
        with at_most(limit_s):
            with without_fast_path():
                wrong = difference(run(*inputs.args, **inputs.kwargs), expected)
            run(*inputs.args, **inputs.kwargs)  # Compiles the form that is timed.
    except Exception as error:  # noqa: BLE001  # compilers raise errors of any class
        text = reason(error)  # a compiler may wrap the exception in its own
        return text[text.index(NOT_COMPILED) :] if NOT_COMPILED in text else text
    return wrong and f"its answers are not the loop's: {wrong}"


def _bound(run: Run, inputs: BatchInputs) -> noise.Call:
    """Returns the call that is timed, with as little Python around it as possible."""
    args, kwargs = inputs.args, inputs.kwargs
    if len(args) == 1 and not kwargs:
        (only,) = args
        return lambda: run(only)
    return lambda: run(*args, **kwargs)
