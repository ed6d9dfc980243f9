"""Makes the plans of a CPU by predicted times: the fastest way to run a program, by batch class.

The table of kernel times (`kernel_times/`) predicts a call at the batches `BATCHES`. A way is one op for all
members, or a loop over them. The memory order of images, and so the time of the ops between convolutions,
depends on the strategies of the convolutions. So ways differ in these, too: all that can be packed are
packed, or none are. Within a way every other node takes its fastest strategy
by itself. `way_choice.py` chooses ways, strategies, and the form of each weight.

Nodes with values of other shapes in each member always run in a loop, whose time is not counted. Where times
cannot be predicted, because sizes depend on values, one op for all members takes its first strategy.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from widepack_artifacts.program import Kind, Node

from ..ir.tensor_type import parse_slot, tensor_type
from ..kernel_times.call_time import CallTime
from ..kernel_times.cpu import CpuModel
from ..kernel_times.profile import Profile
from ..kernel_times.sources import profile_here
from ..spec.dtypes import dtype_of
from .call_memory import bytes_given_back
from .loop_times import PACKED, PLAIN, LoopWalker, activated_layers
from .packed_convs import packable
from .plan import NodeChoice, Plan
from .regions import Regions
from .strategy_times import NodeRuns, NodeTimes, TimedCalls, TimedWriter, walk
from .time_reasons import microseconds, node_choice
from .way_choice import Option, Options, Way, WayClass, chosen_classes

BATCHES = (1, 2, 8, 32, 128)
"""The batches at which times are predicted."""
FEWER = (1, 2, 16, 64)
"""The batches at which programs of more than `MANY` nodes are predicted."""
MANY = 64
FAR = 0.5
"""A convolution that can be packed is not, if another strategy takes at most this part of the time."""
UNTRIED = frozenset({"streams", "unfold_bmm", "trained", "split", "grouped_channels_last"})
"""Strategies for GPUs, for members that train, or that no CPU runs fastest."""
STORED = "stored"
JOINING, MEMORY = "(joining the members' results)", "(new memory)"


def cpu_plans(
    regions: Regions,
    slots: Mapping[str, Kind],
    members: int,
    sizes: Mapping[str, int],
    batch: str,
    fixed: Mapping[str, NodeChoice],
    profile: Profile | None = None,
) -> list[Plan]:
    """Returns the plans of a CPU, one for each batch class, smallest batch first.

    Args:
        regions: The regions of the member program.
        slots: The kinds of its weights and inputs.
        members: N.
        sizes: An example size of each dim.
        batch: The dim that batch classes are made of, or "".
        fixed: The strategies of nodes that are decided already.
        profile: The kernel times. Default: of this machine.
    """
    predictor = _WayPredictor(regions, slots, members, fixed, profile or profile_here())
    found = predictor.everywhere(sizes, batch)
    if not found:
        why = "one op for all members: times cannot be predicted, because sizes depend on values"
        return [regions.wide(why, fixed)]
    batches = [b for b, _ in found]
    names = list(found[0][1])
    ways = [_way(name, [times[name] for _, times in found]) for name in names]
    plans, nothing = [], NodeTimes({}, "", None)
    for part in chosen_classes(ways, batches):
        at = found[part.numbers[0]][1][names[ways.index(part.way)]]
        choices = {
            name: node_choice(replace(at[name], chosen=strategy), predictor.model)
            for name, strategy in part.strategies.items()
            if strategy != PLAIN
            and strategy in at.get(name, nothing).times
            and regions.found[name] == "stacked"
        }
        make = regions.loop if part.way.loop else regions.wide
        because = _reason(part, ways, batches, batch, predictor.model)
        plan = make(because, {**choices, **fixed}, part.least, part.most)
        plans.append(replace(plan, predicted=predictor.model.place))
    return plans


Times = Mapping[str, NodeTimes]
"""The times of the nodes of a way at a batch, and of more: `JOINING`, `MEMORY`."""
WayTimes = dict[tuple[bool, str], Times]
"""The times of all ways, by whether each is a loop, and how it runs convolutions: `PACKED` or `STORED`."""


class _WayPredictor:
    """Predicts the ways to run one program. Arguments: as `cpu_plans` takes them."""

    def __init__(
        self,
        regions: Regions,
        slots: Mapping[str, Kind],
        members: int,
        fixed: Mapping[str, NodeChoice],
        profile: Profile,
    ) -> None:
        self._regions, self._slots, self._members = regions, slots, members
        self._program = regions.program
        self._convolutions = {n.name for n in self._program.nodes if ".conv" in n.op}
        self._chosen: dict[tuple[str, str], str] = {}  # one strategy of a convolution for all batches
        self._fixed = {name: choice.strategy for name, choice in fixed.items()}
        self.model = CpuModel(profile, _weight_bytes(regions, slots, members))
        calls = TimedCalls(self.model)
        self._packs: Collection[str] = (
            () if regions.plain else packable(self._program, regions.found, members)
        )
        untried = UNTRIED | {PACKED} if regions.plain else UNTRIED
        self._writer = TimedWriter(members, self.model, regions.ragged, untried, calls)
        self._loop = LoopWalker(regions, members, self._packs, fixed, self.model, calls)
        self._activated = activated_layers(self._program)
        self._types = {n.name: n.out for n in self._program.nodes}

    def everywhere(self, sizes: Mapping[str, int], batch: str) -> list[tuple[int, WayTimes]]:
        """Returns the times at all batches; at the example's sizes alone if the batch cannot change; nothing
        if they cannot be predicted.
        """
        batches = FEWER if len(self._program.nodes) > MANY else BATCHES
        points = [{**sizes, batch: b} for b in batches] if batch else []
        for some in (points, [dict(sizes)]):
            try:
                if some:
                    order = sorted(range(len(some)), key=lambda i: i != 1)
                    found = {i: self.at(some[i]) for i in order}
                    return [(at.get(batch, 1), found[i]) for i, at in enumerate(some)]
            except Exception:  # noqa: BLE001  # a guard, a size that depends on values, an op without meta tensors
                continue
        return []

    def at(self, sizes: Mapping[str, int]) -> WayTimes:
        """Returns the times of each way: whether it is a loop, and how it runs its convolutions."""
        found: WayTimes = {}
        for name in (STORED, PACKED) if self._packs else (STORED,):
            found[False, name] = self._with_memory(self._wide(sizes, name), sizes, self._members)
        once = {n: t for n, t in found[False, STORED].items() if n not in self._regions.looped}
        for name in (STORED, PACKED) if self._packs else (STORED,):
            nodes, joining = self._loop.at(sizes, packed=name == PACKED)
            found[True, name] = {**once, **self._with_memory(nodes, sizes, 1), JOINING: _one(joining)}
        return found

    def _with_memory(self, times: Times, sizes: Mapping[str, int], together: int) -> Times:
        """Returns times with those that new memory takes, except of activations that run in place.

        together: the members whose results are one value.
        """
        found = dict(times)
        made = {name: node.time.made * together / self._members for name, node in times.items()}
        for layer, activation in self._activated.items():
            node = found.get(layer)
            if node is None or PACKED not in node.times:
                continue
            size = together * _bytes(self._types[activation], sizes)
            saved = self.model.new_memory(size).times(-(self._members // together))
            found[layer] = replace(node, times={**node.times, PACKED: node.times[PACKED] + saved})
            if node.chosen == PACKED:
                made[activation] = 0.0
        pages = self.model.pages(bytes_given_back(self._program, made))
        return {**found, MEMORY: _one(pages.times(self._members // together))}

    def _wide(self, sizes: Mapping[str, int], name: str) -> Times:
        def choose(node: Node, runs: NodeRuns) -> str:
            times = runs.times
            if node.name in self._convolutions:
                able = [s for s in times if s != PACKED and not runs.forms[s]] or [*times]
                best = min(able, key=lambda s: times[s].seconds)
                if name == PACKED and PACKED in times and node.name in self._packs:
                    best = best if times[best].seconds < FAR * times[PACKED].seconds else PACKED
                known = self._chosen.setdefault((name, node.name), best)
                return known if known in times else best
            return min(times, key=lambda s: times[s].seconds)

        found = walk(self._program, self._slots, sizes, self._writer, self._fixed, choose).nodes
        return {n: self._decided(n, times) for n, times in found.items()}

    def _decided(self, name: str, times: NodeTimes) -> NodeTimes:
        """Returns the times of a node; of a convolution those of the chosen strategy alone."""
        if name not in self._convolutions:
            return times
        return replace(times, times={times.chosen: times.time})


def _one(time: CallTime) -> NodeTimes:
    """Returns the times of what has one strategy."""
    return NodeTimes({"": time}, "", None)


def _way(key: tuple[bool, str], every: Sequence[Times]) -> Way:
    """Returns a way, with the options of the nodes that have several, or that read forms of weights."""
    at: list[Mapping[str, Options]] = []
    rest = []
    for times in every:
        options: dict[str, Options] = {}
        total = 0.0
        for name, node in times.items():
            if (
                len(node.times) == 1
                and node.chosen in ("", PLAIN, node.first)
                and not any(node.forms.values())
            ):
                total += node.time.seconds
                continue
            options[name] = tuple(
                Option(s, t.seconds, node.forms.get(s, frozenset())) for s, t in node.times.items()
            )
        at.append(options)
        rest.append(total)
    return Way(key[0], tuple(at), tuple(rest))


def _weight_bytes(regions: Regions, slots: Mapping[str, Kind], members: int) -> float:
    """Returns the bytes of all weights, which a call reads."""
    total = 0
    for slot in regions.program.weights:
        if slots[slot.name] != "ragged":
            type_ = parse_slot(slot.type)
            size = math.prod(type_.numbers or ()) * dtype_of(type_.dtype).itemsize
            total += size * (members if slots[slot.name] == "stacked" else 1)
    return float(total)


def _bytes(type_: str, sizes: Mapping[str, int]) -> int:
    """Returns the bytes of a value; 0 if they are not known."""
    found = tensor_type(type_)
    if found is None or any(isinstance(s, str) for s in found.sizes):
        return 0
    size: int = math.prod(found.shape(sizes)) * dtype_of(found.dtype).itemsize
    return size


def _reason(part: WayClass, ways: Sequence[Way], batches: Sequence[int], batch: str, model: CpuModel) -> str:
    """Returns the predicted times as a sentence: of the plan, and of the other kind of plan."""
    rows = []
    for i in dict.fromkeys((part.numbers[0], part.numbers[-1])):
        names = ["one op for all members takes", "a loop over them"]
        if part.way.loop:
            names = ["a loop over the members takes", "one op for all of them"]
        others = [w.least(i) for w in ways if w.loop != part.way.loop]
        at = f"at {batch} = {batches[i]} " if batch else ""
        rows.append(f"{at}{names[0]} about {microseconds(part.seconds[i])}")
        if others:
            rows[-1] += f", {names[1]} {microseconds(min(others))}"
    return f"predicted for {model.place}: " + "; ".join(rows)
