"""Measures one row of the suite `training`: compares the losses of all contestants, then times steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..baselines.compiled import at_most, compiler_settings
from ..baselines.members import reason
from ..errors import BenchError
from ..measure.answers import difference
from ..measure.processors import quiet
from ..measure.race import OURS, race
from ..report.environment import environment
from ..report.row import Row
from .contestants import COMPILED, CONTESTANTS, Step, fused, fused_compiled
from .networks import chosen_networks
from .task import TrainingTask, task_of

STEPS = 3  # Losses of so many steps are compared: the last ones depend on the optimizer.
LEAST_ROUNDS = 14  # half of them measure the ratio; an interval needs six
CPU_STEPS = 5
START_LIMIT_S = 600.0  # seconds that a baseline without compilation may take to start
FUSED_COMPILED = "widepack[compile]"


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """Options of a row. All are JSON values, because a row runs in its own process.

    baselines: empty for all. budget_s: seconds of measuring. compile_limit_s: seconds that one baseline may
    take to compile.
    """

    baselines: Sequence[str] = ()
    budget_s: float = 15.0
    compile_limit_s: float = 120.0
    threads: int = 1
    pin: bool = False


def run_rows(rows: Sequence[Mapping[str, Any]], **options: Any) -> Iterator[dict[str, Any]]:
    """Yields the result of each row as JSON values.

    rows: with the name of the network, the number of members and the pattern: `shared`, one batch for all
    members, or `each`, a batch for each. options: fields of `TrainingOptions`.
    """
    for row in rows:
        yield run_row(row["network"], row["members"], row["pattern"], TrainingOptions(**options))


def run_row(name: str, members: int, pattern: str, given: TrainingOptions) -> dict[str, Any]:
    """Returns the result of one row."""
    (network,) = chosen_networks([name])
    with quiet(given.threads, given.pin), compiler_settings():
        task = task_of(network, members, pattern == "each")
        result, cpu = measured(task, network.batch, given)
    return {
        "parameters": sum(p.numel() for p in task.modules[0].parameters()),
        "environment": environment("cpu", given.threads),
        "result": result.to_json(),
        "cpu_ms": cpu,
    }


def measured(task: TrainingTask, batch: int, options: TrainingOptions) -> tuple[Row, dict[str, float]]:
    """Returns the row, and the processor time of a step of the fused module and of the fastest baseline.

    Raises: BenchError if the fused module's losses differ from those of the members, or if no baseline runs.
    """
    expected = _losses(CONTESTANTS["loop"](task))
    ours = fused(task)
    if wrong := difference(_losses(ours), expected):
        raise BenchError(
            f"the fused module does not train as the members do, so its time means nothing: {wrong}"
        )
    steps: dict[str, Step] = {}
    skipped: dict[str, str] = {}
    for name in options.baselines or CONTESTANTS:
        limit = options.compile_limit_s if name in COMPILED else START_LIMIT_S
        made = _right(CONTESTANTS[name], task, expected, limit)
        if isinstance(made, str):
            skipped[name] = made
        else:
            steps[name] = made
    if not steps:
        raise BenchError(f"no baseline runs: {'; '.join(f'{k}: {v}' for k, v in skipped.items())}")
    others: dict[str, Step] = {}
    compiled = _right(fused_compiled, task, expected, options.compile_limit_s)
    if isinstance(compiled, str):
        skipped[FUSED_COMPILED] = compiled
    else:
        others[FUSED_COMPILED] = compiled
    raced = race(ours, steps, others=others, budget_s=options.budget_s, min_rounds=LEAST_ROUNDS)
    row = Row.of(batch, {"B": batch}, raced, skipped, len(task.modules))
    cpu = {OURS: _cpu_ms(ours)}
    if row.fastest != "processes":  # their time is not this process's
        cpu[row.fastest] = _cpu_ms(steps[row.fastest])
    return row, cpu


def _right(
    make: Callable[[TrainingTask], Step], task: TrainingTask, expected: Tensor, limit_s: float
) -> Step | str:
    """Returns a step whose losses are the loop's, or the reason why it is not timed."""
    try:
        with at_most(limit_s):
            step = make(task)
            wrong = difference(_losses(step), expected)
    except Exception as error:  # noqa: BLE001  # compilers raise errors of any class
        return reason(error)
    return f"its losses are not the loop's: {wrong}" if wrong else step


def _losses(step: Callable[[], Any]) -> Tensor:
    """Returns the losses of the first steps, `[STEPS, N]`."""
    return torch.stack([torch.as_tensor(step()).float() for _ in range(STEPS)])


def _cpu_ms(step: Step) -> float:
    """Returns the processor time of this process for a step, in milliseconds."""
    begin = time.process_time()
    for _ in range(CPU_STEPS):
        step()
    return 1e3 * (time.process_time() - begin) / CPU_STEPS
