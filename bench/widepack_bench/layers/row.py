"""Measures one row of `widepack bench-layers`: N members of a layer, every strategy beside the baselines.

1. All answers are compared with the members' answers in float64 (`reference.py`). A strategy with wrong
   answers is an error of the row. A baseline with wrong answers is skipped.
2. Strategies and baselines that are much slower than the fastest one are timed for a few calls only
   (`contestants.py`). The compiled member that is called N times is always raced: published tables compare
   with it.
3. The others run interleaved (`measure/race.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from widepack.errors import VerificationError
from widepack_bench.layers.sweeps import Sweep

from ..baselines.compiled import TooLong, at_most, compiler_settings
from ..baselines.members import reason
from ..baselines.table import BASELINES, Run
from ..errors import BenchError
from ..measure import race as noise
from ..measure.answers import leaves
from ..measure.processors import quiet
from ..report.row import Row
from .block_sweeps import FAMILY as BLOCK
from .contestants import COMPILED_MEMBER, Contestants
from .in_memory import AUTO, LOOP, InMemory, WideContestant, inputs, members
from .reference import LayerReference
from .tuned import TuneRequest, open_tuned, place_of, tuned

RULES = "rules"  # The predicted plan, when `auto` is a tuned plan.
LEAST_ROUNDS = 12  # Six even rounds: fewer give no 95% interval.
CHECKED = "checked"
PREPARING = "preparing "  # Prefix of a baseline's stage. It shows which baseline ended a process.
OnStage = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Effort:
    """How much time a preset gives to a row.

    baselines: names. budget_s: seconds of racing. rounds: the least number of rounds; 0 for a short race
    without a verdict. compile_limit_s: seconds that each baseline may take to compile. row_s: an estimate of
    the whole row's seconds.
    """

    baselines: tuple[str, ...]
    budget_s: float
    rounds: int
    compile_limit_s: float
    row_s: float

    @classmethod
    def of(cls, preset: str) -> Effort:
        every = tuple(name for name in BASELINES if name != "cuda-graph-loop" or torch.cuda.is_available())
        return {
            "ci": cls(("loop", "vmap"), 0.05, 0, 10.0, 2.0),
            "quick": cls(every, 1.0, LEAST_ROUNDS, 60.0, 15.0),
            "full": cls(every, 4.0, LEAST_ROUNDS, 60.0, 20.0),
        }[preset]


@dataclass(frozen=True, slots=True)
class RowOptions:
    """Options of a row. All are JSON values, because a row may run in its own process.

    baselines: names; empty for the preset's baselines. budget_s: seconds of racing; None for the preset's.
    compiled: also time the wide program under `torch.compile`. artifacts: a folder for tuned artifacts, where
    earlier ones are used again. With a folder `auto` is the tuned and loaded artifact of these members, and
    the predicted plan is the strategy `rules`. Without a folder `auto` is the predicted plan.
    """

    baselines: Sequence[str] = ()
    pattern: str = "each"
    device: str = "cpu"
    threads: int | None = None
    pin: bool = False
    budget_s: float | None = None
    compiled: bool = False
    artifacts: str = ""

    @property
    def each(self) -> bool:
        """Whether every member has its own inputs."""
        return self.pattern == "each"


def run_row(
    sweep: Sweep,
    count: int,
    preset: str,
    options: RowOptions | None = None,
    on_stage: OnStage = lambda stage: None,
) -> dict[str, Any]:
    """Measures one row and returns it as JSON values.

    count: the number of members. on_stage: called with the name of each stage.

    Raises: VerificationError where a strategy's answers are wrong; BenchError where no baseline runs;
    whatever capturing and lowering raise.
    """
    options = options or RowOptions()
    effort = Effort.of(preset)
    begin = time.perf_counter()
    with quiet(options.threads, options.pin), compiler_settings(), torch.inference_mode():
        torch._dynamo.reset()
        layer = _Layer.of(sweep, count, preset, options, on_stage)
        auto = _check_strategies(layer)
        runs, skipped = _baselines(layer, options.baselines or effort.baselines, effort, on_stage)
        if not runs:
            raise BenchError(f"no baseline runs: {'; '.join(f'{k}: {v}' for k, v in skipped.items())}")
        on_stage("measuring")
        contestants = Contestants.of(
            {p.name: p.run for p in layer.programs if p.name not in layer.refused},
            runs,
            layer.args,
            torch.cuda.synchronize if options.device.startswith("cuda") else None,
        )
        race = contestants.race(options.budget_s or effort.budget_s, effort.rounds)
    row = Row.of(sweep.at(preset).batch, {}, race, skipped, count)
    if not effort.rounds:
        row = replace(
            row,
            verdict=CHECKED,
            why="the answers are right; the shapes are too small and the calls too few for a verdict",
        )
    return {
        **_layer_json(sweep, count, preset, options, layer, auto),
        **_times_json(row, race, contestants, layer),
        "seconds": time.perf_counter() - begin,
    }


@dataclass(frozen=True, slots=True)
class _Layer:
    """A row's members, their reference answers, and their wide programs.

    args: the inputs of a call. programs: `auto` first. refused: strategies that cannot be lowered or run,
    with the reasons. plan: the measured plan, empty without a folder for tuned artifacts.
    """

    modules: Sequence[nn.Module]
    reference: LayerReference
    args: Sequence[Tensor]
    each: bool
    programs: Sequence[WideContestant]
    refused: dict[str, str]
    plan: Mapping[str, Any]

    @classmethod
    def of(cls, sweep: Sweep, count: int, preset: str, options: RowOptions, on_stage: OnStage) -> _Layer:
        shape, each, device = sweep.at(preset), options.each, options.device
        with torch.inference_mode(False):
            stacked = inputs(shape.inputs, shape.batch, count)
            modules = members(lambda: sweep.make(preset), count)
            on_stage("members alone in float64")
            reference = LayerReference.of(modules, stacked, each)
            on_stage("lowering")
            wide = InMemory(lambda: sweep.make(preset), modules, shape.inputs, stacked, each, device)
            # A network has many ops: the strategies of each op would be hundreds of programs.
            programs, refused = wide.contestants(() if sweep.family == BLOCK else None)
            programs += [wide.compiled()] if options.compiled else []
            plan: dict[str, Any] = {}
            if options.artifacts:
                folder = place_of(options.artifacts, sweep.name, count)
                request = TuneRequest(shape.inputs, shape.batch, options.pattern, device)
                plan = tuned(lambda: sweep.make(preset), modules, request, folder, on_stage)
                auto = open_tuned(folder, plan, pattern=options.pattern, device=device)
                programs = [auto, replace(programs[0], name=RULES), *programs[1:]]
        args = [v.to(device) if each else v[0].to(device) for v in stacked]
        return cls([m.to(device) for m in modules], reference, args, each, programs, refused, plan)


def _check_strategies(layer: _Layer) -> WideContestant:
    """Runs every strategy once, and adds those that cannot run to `layer.refused`. Returns the program of
    `auto`.

    Raises: VerificationError for wrong answers.
    """
    for program in layer.programs:
        try:
            answer = program.run(*layer.args)
        except Exception as error:  # A strategy may need a kernel that this machine does not have.
            if program.name == AUTO:
                raise
            layer.refused[program.name] = reason(error)
            continue
        if wrong := layer.reference.wrong(answer):
            raise VerificationError(
                f"strategy {program.name} ({', '.join(program.used)}) does not give the members' "
                f"answers: {wrong}"
            )
    return layer.programs[0]


def _baselines(
    layer: _Layer, names: Sequence[str], effort: Effort, on_stage: OnStage
) -> tuple[Mapping[str, Run], dict[str, str]]:
    """Returns the baselines that run with right answers, and the reasons why the others do not."""
    runs: dict[str, Run] = {}
    skipped: dict[str, str] = {}
    for name in names:
        on_stage(f"{PREPARING}{name}")
        try:
            with at_most(effort.compile_limit_s):
                run = BASELINES[name](layer.modules, layer.each)
                wrong = layer.reference.wrong(answer := run(*layer.args))
                if wrong:
                    wrong = f"its answers are not the members': {wrong}"
                else:
                    wrong = _shares_memory(answer, layer.args)
                run(*layer.args)
        except (Exception, TooLong) as error:  # noqa: BLE001  # compilers raise errors of any class
            skipped[name] = reason(error)
            continue
        if wrong:
            skipped[name] = wrong
        else:
            runs[name] = run
    return runs, skipped


def _shares_memory(answer: Any, args: Sequence[Any]) -> str:
    """Returns why an answer is not comparable: it shares memory with an input. Empty where it does not.

    The answers of the loop and of widepack have their own memory.
    """
    inputs = {v.untyped_storage().data_ptr() for v in leaves(args) if v.numel()}
    if not any(v.untyped_storage().data_ptr() in inputs for v in leaves(answer)):
        return ""
    return "another output form: its answer shares memory with its input, and the others' answers do not"


def _layer_json(
    sweep: Sweep, count: int, preset: str, options: RowOptions, layer: _Layer, auto: WideContestant
) -> dict[str, Any]:
    """Returns the fields of a row that describe the layer and the plan of `auto`."""
    shape = sweep.at(preset)
    used = ", ".join(auto.used)
    if not options.artifacts and LOOP in auto.used:
        used = next((s for s in auto.same if s.startswith(LOOP)), LOOP)
    return {
        "primitive": sweep.name,
        "members": count,
        "layer": str(layer.modules[0]),
        "inputs": list(shape.inputs),
        "batch": shape.batch,
        "pattern": options.pattern,
        "auto": used,
        **({"tuned": layer.plan} if options.artifacts else {}),
    }


def _times_json(row: Row, race: noise.Race, contestants: Contestants, layer: _Layer) -> dict[str, Any]:
    """Returns the fields of a row that hold times, ratios and verdicts."""
    strategies = contestants.strategies_json(race, row.fastest, layer.programs, layer.refused)
    slow = contestants.slow_baselines()
    times = {k: v for k, v in row.to_json().items() if k not in ("sizes", "others", "memory", "roofline")}
    times["skipped"] = {**times["skipped"], **slow}
    times["baselines"] |= {n: {"median_ms": contestants.baseline_s[n] * 1e3} for n in slow}
    return {COMPILED_MEMBER: strategies[AUTO].get(COMPILED_MEMBER), "strategies": strategies, **times}
