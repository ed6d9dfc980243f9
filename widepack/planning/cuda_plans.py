"""Makes the plans of a CUDA device by predicted times: the fastest strategy of each node, by batch class.

The model (`kernel_times/cuda.py`) predicts a call at the batches `BATCHES`. At each of them, several walks
through the program choose strategies, and the walk with the least total time counts:

1. each node takes its first strategy
2. each node takes its fastest strategy, where that saves `MARGIN`
3. for each strategy of convolutions: all convolutions that can take it take it

Walks of the third kind find chains: a strategy may need a copy at one convolution alone, and none at a chain
of them. If both batches choose the same, one plan serves all batches. Else there are two batch classes, and
the batch between them is where both plans take about the same time.

A loop over the members starts N times the kernels, and copies the results. It is the plan of a class only if
it is predicted to take less than `LOOP_PART` of the time. Nodes with values of other shapes in each member
always run in a loop, whose time is not counted. Where a strategy cannot run on meta tensors, each node takes
its first strategy. No plan of this module has been timed on a device yet.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from widepack_artifacts.program import Kind, Node, Program

from ..kernel_times.call_time import CallTime
from ..kernel_times.cuda import CudaModel
from .plan import NodeChoice, Plan
from .regions import Regions
from .strategy_times import Choose, NodeRuns, ProgramTimes, TimedWriter, walk
from .time_reasons import microseconds, node_choice

BATCHES = (2, 256)
"""The batches at which times are predicted."""
MARGIN = 0.9
"""Another strategy than the first is chosen if it takes at most this part of the time of the first."""
LOOP_PART = 0.8
"""A loop is chosen if its predicted time is at most this part of the time of one op for all members."""
FUSED = ("pointwise", "norm")
"""The families whose chains a compiler makes one kernel of."""
LEAST_FUSED = 0.1
"""The least part of the time of these families that a reason names."""
STEPS = 4
"""How many batches are tried to find the one between two classes."""
_WHY = "on cuda N members cost N times the launches; one op for all costs one"


@dataclass(frozen=True)
class BatchTimes:
    """The predicted times of a program at a batch. wide: of one op for all members. loop: of a loop over the
    members.
    """

    batch: int
    wide: ProgramTimes
    loop: CallTime

    @property
    def fused_part(self) -> float:
        """The part of the time of one op for all members that chains of pointwise ops and norms take."""
        times = self.wide.nodes.values()
        total = sum(t.time.seconds for t in times)
        return sum(t.time.seconds for t in times if t.family in FUSED) / total if total else 0.0

    @property
    def loops(self) -> bool:
        """Whether the members should run one after the other."""
        return self.loop.seconds < LOOP_PART * self.wide.total.seconds


class Predictor:
    """Predicts the times of one program.

    Args:
        program: The member program.
        slots: The kinds of its weights and inputs.
        members: N.
        fixed: The strategies of nodes that are decided already.
        training: Whether the program has gradients.
        model: The device.
        left_out: The nodes that run in a loop always.
    """

    def __init__(
        self,
        program: Program,
        slots: Mapping[str, Kind],
        members: int,
        fixed: Mapping[str, NodeChoice],
        training: bool,
        model: CudaModel,
        left_out: Collection[str] = (),
    ) -> None:
        self._program, self._slots, self._training = program, slots, training
        self._fixed = {name: choice.strategy for name, choice in fixed.items()}
        self._wide, self._alone = TimedWriter(members, model, left_out), TimedWriter(1, model, left_out)
        self._convolutions = {n.name for n in program.nodes if ".conv" in n.op}
        self.model = model

    def at(self, sizes: Mapping[str, int], batch: int) -> BatchTimes:
        """Predicts the times at the given sizes. batch: the size of the batch among them.

        Raises: What a strategy raises that cannot run at these sizes.
        """
        best = first = self.times(sizes, _first)
        several = {n: t.times for n, t in first.nodes.items() if len(t.times) > 1}
        if several:
            names = {s for n, times in several.items() if n in self._convolutions for s in times}
            others = [self.times(sizes, _fastest)]
            others += [self.times(sizes, self._preferring(name)) for name in sorted(names)]
            least = min(others, key=lambda times: times.total.seconds)
            if least.total.seconds <= MARGIN * first.total.seconds:
                best = least
        members = self._wide.members
        alone = walk(self._program, self._slots, sizes, self._alone, self._fixed, _first, self._training)
        copies = self.model.copy(alone.results)
        return BatchTimes(batch, best, (alone.total + copies).times(members))

    def times(self, sizes: Mapping[str, int], choose: Choose) -> ProgramTimes:
        """Returns the times of one op for all members. Raises: as `at`."""
        return walk(self._program, self._slots, sizes, self._wide, self._fixed, choose, self._training)

    def _preferring(self, name: str) -> Choose:
        return lambda node, runs: (
            name if name in runs.times and node.name in self._convolutions else _fastest(node, runs)
        )


def cuda_plans(
    regions: Regions,
    slots: Mapping[str, Kind],
    members: int,
    sizes: Mapping[str, int],
    batch: str,
    fixed: Mapping[str, NodeChoice],
    *,
    because: str = "",
    training: bool = False,
    model: CudaModel | None = None,
) -> list[Plan]:
    """Returns the plans of a CUDA device, one for each batch class, smallest batch first.

    Args:
        regions: The regions of the member program.
        slots: The kinds of its weights and inputs.
        members: N.
        sizes: An example size of each dim.
        batch: The dim that batch classes are made of, or "".
        fixed: The strategies of nodes that are decided already.
        because: The reason of a plan that the user requests; it has no loop then. Default: predicted times.
        training: Whether the plans are of a program with gradients.
        model: The device. Default: an H100 with torch's settings of TF32.
    """
    model = model or CudaModel()
    predictor = Predictor(regions.program, slots, members, fixed, training, model, regions.ragged)
    found = predictions(predictor, sizes, batch)
    if not found:
        return [regions.wide(because or _WHY, fixed)]
    small, large = found[0], found[-1]
    loops = tuple(p.loops and not because and not regions.ragged for p in (small, large))
    every: tuple[int, int | None] = (1, None)
    classes = [(large, loops[1], every, found)]
    if loops[0] != loops[1] or not (loops[0] or small.wide.strategies == large.wide.strategies):
        at = _boundary(predictor, sizes, batch, small, large, loops)
        classes = [(small, loops[0], (1, at), [small]), (large, loops[1], (at + 1, None), [large])]
    firsts = _firsts(found)
    plans = []
    for times, loop, batches, told in classes:
        why = because or reason(told, batch, loop, predictor.model)
        if loop:
            plans.append(regions.loop(why, fixed, *batches))
            continue
        choices = {
            name: node_choice(node, predictor.model, node.chosen == firsts[name])
            for name, node in times.wide.nodes.items()
            if regions.found[name] == "stacked"
        }
        plans.append(regions.wide(why, {**choices, **fixed}, *batches))
    return plans


def _firsts(found: list[BatchTimes]) -> dict[str, str | None]:
    """Returns the strategy of each node that lowering takes without a plan; None if it depends on the device
    or the batch.
    """
    every = [{name: times.first for name, times in p.wide.nodes.items()} for p in found]
    return {name: first if all(e[name] == first for e in every) else None for name, first in every[0].items()}


def predictions(predictor: Predictor, sizes: Mapping[str, int], batch: str) -> list[BatchTimes]:
    """Returns the predicted times at `BATCHES`; at the example's sizes alone if the batch cannot change;
    empty if they cannot be predicted.

    Args:
        predictor: Predicts the times of a program.
        sizes: An example size of each dim.
        batch: The dim that batch classes are made of, or "".
    """
    points = [{**sizes, batch: b} for b in BATCHES] if batch else []
    for some in (points, [dict(sizes)]):
        try:
            if some:
                return [predictor.at(at, at.get(batch, 1)) for at in some]
        except Exception:  # noqa: BLE001  # a guard, a size that depends on values, an op without meta tensors
            continue
    return []


def _first(node: Node, runs: NodeRuns) -> str:
    return next(iter(runs.times))


def _fastest(node: Node, runs: NodeRuns) -> str:
    times, first = runs.times, next(iter(runs.times))
    least = min(times, key=lambda name: times[name].seconds)
    return least if times[least].seconds <= MARGIN * times[first].seconds else first


def _boundary(
    predictor: Predictor,
    sizes: Mapping[str, int],
    batch: str,
    small: BatchTimes,
    large: BatchTimes,
    loops: tuple[bool, ...],
) -> int:
    """Returns the last batch of the first class: where both plans take about the same time."""
    low, high = small.batch, large.batch
    for _ in range(STEPS):
        middle = round((low * high) ** 0.5)
        if middle in (low, high):
            break
        at = {**sizes, batch: middle}
        try:
            seconds = [
                predictor.at(at, middle).loop.seconds
                if loop
                else predictor.times(at, _as_in(p.wide.strategies)).total.seconds
                for p, loop in zip((small, large), loops)
            ]
        except Exception:  # noqa: BLE001  # as above
            break
        low, high = (middle, high) if seconds[0] <= seconds[1] else (low, middle)
    return max(1, low)


def _as_in(strategies: Mapping[str, str]) -> Choose:
    return lambda node, runs: (
        strategies[node.name] if strategies[node.name] in runs.times else next(iter(runs.times))
    )


def reason(found: list[BatchTimes], batch: str, loop: bool, model: CudaModel) -> str:
    """Returns the predicted times as a sentence: of all members at once, and of a loop over them.

    Args:
        found: The times at one batch or several.
        batch: The dim of the batch, or "".
        loop: Whether the plan is the loop, which the sentence then names first.
        model: The device.
    """
    rows = []
    for p in found:
        names = ["one op for all members takes", "a loop over them"]
        times = [p.wide.total.seconds, p.loop.seconds]
        if loop:
            names, times = ["a loop over the members takes", "one op for all of them"], times[::-1]
        at = f"at {batch} = {p.batch} " if batch else ""
        rows.append(f"{at}{names[0]} about {microseconds(times[0])}, {names[1]} {microseconds(times[1])}")
    words = f"predicted for {model.place}: " + "; ".join(rows)
    part = 0.0 if loop else found[-1].fused_part
    if part < LEAST_FUSED:
        return words
    return f"{words}; pointwise ops and norms are {part:.0%} of it, which the backend `compile` can fuse"
