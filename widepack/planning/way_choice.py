"""Chooses among the ways to run a program, from the times of its nodes at a few batches.

A way is one op for all members, or a loop over them. In a way a node has one option or several: a strategy
with its time, and the form of the weight that it reads. One way serves all batches, or each of two or three
serves a range of batches.

A weight may be read in the stored form, and in others that are made at load. All classes together read it in
two others if all of these have at most `FEW_BYTES` together, in one other up to `MOST_BYTES`, else in none.
Each class makes its own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from .strategy_times import WeightForm

FEW_BYTES, MOST_BYTES = 64 << 20, 1 << 30
"""The bytes of all forms that are made at load: where a weight has two of them, and where it has one."""
FORM_PART = 0.08
"""One more form is made at load if it saves more than this part of a node's time at a batch, on average."""
MERGE_PART = 0.02
"""Two classes become one if that adds at most this part to the time of a batch."""
MOST_CLASSES = 4
WAY_PART = 0.05
"""One more way is taken if it saves more than this part of the time of a batch."""
MOST_WAYS = 3
"""How many ways the batches have at most."""
Form = frozenset[WeightForm]
Forms = frozenset[Form]
STORED: Form = frozenset()


@dataclass(frozen=True, slots=True)
class Option:
    """A strategy of a node: its seconds, and the forms of weights that it needs beside the stored ones."""

    strategy: str
    seconds: float
    form: Form


Options = tuple[Option, ...]


@dataclass(frozen=True)
class Way:
    """A way to run a program.

    loop: whether it is a loop over the members. at: for each batch the options of each node that has several
    or needs a form. rest: for each batch the seconds of all else.
    """

    loop: bool
    at: tuple[Mapping[str, Options], ...]
    rest: tuple[float, ...]

    def least(self, i: int) -> float:
        """Returns the least seconds at a batch."""
        return self.rest[i] + sum(min(o.seconds for o in options) for options in self.at[i].values())


@dataclass(frozen=True)
class WayClass:
    """The way of a batch class. least, most: its batches. strategies: by node. numbers: its batches' numbers.
    seconds: at all batches.
    """

    way: Way
    least: int
    most: int | None
    strategies: Mapping[str, str]
    numbers: tuple[int, ...]
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class _Group:
    """Nodes that are alike in every way and at every batch. at: for each way and batch their options."""

    names: tuple[str, ...]
    at: Mapping[tuple[int, int], Options]

    def forms(self, uses: Sequence[int], most: int) -> Iterator[Forms]:
        """Yields the sets of up to `most` forms that a way for each batch may read, the stored one apart."""
        known = {o.form: None for i, way in enumerate(uses) for o in self.at.get((way, i), ()) if o.form}
        for count in range(most + 1):
            yield from map(frozenset, itertools.combinations(known, count))


def chosen_classes(ways: Sequence[Way], batches: Sequence[int]) -> list[WayClass]:
    """Returns the batch classes of the best plan, smallest batch first.

    Args:
        ways: The ways, with their times at each batch.
        batches: The batches.
    """
    weights = [1.0 / max(min(w.least(i) for w in ways), 1e-12) for i in range(len(batches))]
    groups = _groups(ways, len(batches))
    uses, forms = (0,) * len(batches), [Forms()] * len(groups)
    parts = _parts(ways, groups, uses, forms, weights)
    for most, limit in ((2, FEW_BYTES), (1, MOST_BYTES), (0, 0)):
        found = _best(ways, groups, weights, most)
        if found is None:
            continue
        parts = _parts(ways, groups, *found, weights)
        if sum(_bytes(groups, part) for part in parts) <= limit:
            break
    return _classes(ways, batches, groups, parts)


def _best(
    ways: Sequence[Way], groups: Sequence[_Group], weights: Sequence[float], most: int
) -> tuple[tuple[int, ...], list[Forms]] | None:
    """Returns the best way of each batch, and the forms of each group; None if no way reads so few forms."""
    best: tuple[float, tuple[int, ...], list[Forms]] | None = None
    for uses in _sequences(len(ways), len(weights)):
        found = _forms(groups, uses, weights, most)
        if found is None:
            continue
        cost = found[0] + sum(weights[i] * ways[w].rest[i] for i, w in enumerate(uses))
        cost += WAY_PART * (len(set(uses)) - 1)
        if best is None or cost < best[0]:
            best = cost, uses, found[1]
    return None if best is None else best[1:]


def _groups(ways: Sequence[Way], count: int) -> list[_Group]:
    names: dict[str, None] = {name: None for way in ways for at in way.at for name in at}
    alike: dict[tuple[tuple[tuple[int, int], Options], ...], list[str]] = {}
    for name in names:
        found = tuple(
            ((w, i), ways[w].at[i][name])
            for w in range(len(ways))
            for i in range(count)
            if name in ways[w].at[i]
        )
        alike.setdefault(found, []).append(name)
    return [_Group(tuple(group), dict(found)) for found, group in alike.items()]


def _sequences(ways: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yields the ways of all batches: the same, or another from some batch on, at most `MOST_WAYS`."""
    for several in range(1, min(MOST_WAYS, ways, count) + 1):
        for order in itertools.permutations(range(ways), several):
            for ends in itertools.combinations(range(1, count), several - 1):
                parts = zip(order, itertools.pairwise((0, *ends, count)))
                yield tuple(way for way, (first, end) in parts for _ in range(first, end))


def _forms(
    groups: Sequence[_Group], uses: Sequence[int], weights: Sequence[float], most: int
) -> tuple[float, list[Forms]] | None:
    """Returns the weighted seconds of all nodes with the best forms of each; None if a node cannot run.

    most: how many forms beside the stored one a weight may have.
    """
    total, chosen = 0.0, []
    for group in groups:
        best = math.inf, Forms()
        for forms in group.forms(uses, most):
            cost = 0.0
            for i, way in enumerate(uses):
                if options := group.at.get((way, i)):
                    able = (o.seconds for o in options if o.form in forms or not o.form)
                    cost += weights[i] * min(able, default=math.inf)
            saved = FORM_PART * cost / len(uses) * (len(forms) - len(best[1]))
            if math.isinf(best[0]) or cost + saved < best[0]:
                best = cost, forms
        if math.isinf(best[0]):
            return None
        total += len(group.names) * best[0]
        chosen.append(best[1])
    return total, chosen


@dataclass
class _Part:
    """Neighbouring batches that run in one way by the same strategies. strategies: one for each group."""

    way: int
    numbers: list[int]
    strategies: list[str]
    cost: float


def _bytes(groups: Sequence[_Group], part: _Part) -> int:
    """Returns the bytes of the forms of weights that neighbouring batches make at load."""
    total = 0
    for group, strategy in zip(groups, part.strategies):
        options = group.at.get((part.way, part.numbers[0]), ())
        forms = next((o.form for o in options if o.strategy == strategy), STORED)
        total += len(group.names) * sum(form.bytes for form in forms)
    return total


def _parts(
    ways: Sequence[Way],
    groups: Sequence[_Group],
    uses: Sequence[int],
    forms: Sequence[Forms],
    weights: Sequence[float],
) -> list[_Part]:
    """Returns the batches that run alike. Neighbours are merged where that costs little."""

    def part(way: int, numbers: list[int]) -> _Part:
        found = _Part(way, numbers, [], sum(weights[i] * ways[way].rest[i] for i in numbers))
        for group, known in zip(groups, forms):
            seconds = _common(group, known, way, numbers, weights)
            name = min(seconds, key=seconds.__getitem__, default="")
            found.strategies.append(name)
            if seconds:
                found.cost += len(group.names) * seconds[name]
            elif any((way, i) in group.at for i in numbers):
                found.cost = math.inf
        return found

    parts = [part(way, [i]) for i, way in enumerate(uses)]
    while True:
        merged = [
            (both.cost - a.cost - b.cost, i, both)
            for i, (a, b) in enumerate(itertools.pairwise(parts))
            if a.way == b.way
            for both in [part(a.way, a.numbers + b.numbers)]
        ]
        least = min(merged, key=lambda m: m[0], default=None)
        if least is None or (least[0] > MERGE_PART and len(parts) <= MOST_CLASSES) or math.isinf(least[0]):
            break
        parts[least[1] : least[1] + 2] = [least[2]]
    return parts


def _classes(
    ways: Sequence[Way], batches: Sequence[int], groups: Sequence[_Group], parts: Sequence[_Part]
) -> list[WayClass]:
    """Returns the classes of batches."""
    seconds = [_seconds(ways[p.way], p, groups, range(len(batches))) for p in parts]
    ends = [_end(batches, a.numbers[-1], of_a, of_b) for a, of_a, of_b in zip(parts, seconds, seconds[1:])]
    return [
        WayClass(
            ways[p.way],
            (ends[i - 1] + 1) if i else 1,
            ends[i] if i < len(ends) else None,
            {name: s for group, s in zip(groups, p.strategies) for name in group.names},
            tuple(p.numbers),
            seconds[i],
        )
        for i, p in enumerate(parts)
    ]


def _common(
    group: _Group, forms: Forms, way: int, numbers: Iterable[int], weights: Sequence[float]
) -> dict[str, float]:
    """Returns the weighted seconds of each strategy that a group has at all of some batches."""
    found: dict[str, float] | None = None
    for i in numbers:
        options = group.at.get((way, i), ())
        own = {o.strategy: weights[i] * o.seconds for o in options if o.form in forms or not o.form}
        found = own if found is None else {s: t + own[s] for s, t in found.items() if s in own}
    return found or {}


def _seconds(way: Way, part: _Part, groups: Sequence[_Group], numbers: Iterable[int]) -> tuple[float, ...]:
    """Returns the seconds of a class's strategies at all batches, also at those of other classes."""
    strategies = {n: s for group, s in zip(groups, part.strategies) for n in group.names}
    found = []
    for i in numbers:
        total = way.rest[i]
        for name, options in way.at[i].items():
            known = [o.seconds for o in options if o.strategy == strategies[name]]
            total += known[0] if known else options[0].seconds
        found.append(total)
    return tuple(found)


def _end(batches: Sequence[int], i: int, small: Sequence[float], large: Sequence[float]) -> int:
    """Returns the last batch of a class: where the next class takes the same time, by interpolation."""
    low, high = batches[i], batches[i + 1]
    before, after = (math.log(small[k] / large[k]) for k in (i, i + 1))
    part = before / (before - after) if before < 0 < after else 0.5
    return min(high - 1, max(low, math.floor(low * math.exp(part * math.log(high / low)))))
