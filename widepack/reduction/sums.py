"""Sums up the members' answers: at some positions for all members, or member after member."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from math import ceil, prod

import torch

Place = tuple[slice, ...]

BLOCK = 2**17
"""Numbers of all members in one block: 512 kB of float32."""


def blocks(shape: Sequence[int], whole: int | None, most: int = BLOCK) -> Iterator[Place]:
    """Yields the places of blocks that cover answers, each place once.

    Args:
        shape: Of the answers, members first.
        whole: A dim that stays whole, beside the first.
        most: The numbers in a block; more where the dims that stay whole have more.
    """
    parts = [1] * len(shape)  # how many parts each dim is divided into
    size = prod(shape)
    for dim, length in enumerate(shape):
        if dim in (0, whole) or size <= most:
            continue
        parts[dim] = min(length, ceil(size / most))
        size = ceil(size / parts[dim])
    yield from _places(shape, parts, ())


def _places(shape: Sequence[int], parts: Sequence[int], before: Place) -> Iterator[Place]:
    if len(before) == len(shape):
        yield before
        return
    length, count = shape[len(before)], parts[len(before)]
    step = ceil(length / count) if length else 1
    for start in range(0, max(length, 1), step):
        yield from _places(shape, parts, (*before, slice(start, min(start + step, length))))


def wide(answers: torch.Tensor) -> torch.Tensor:
    """Returns answers in float32 or wider: half precision would lose the differences between members."""
    return answers.float() if answers.dtype in (torch.float16, torch.bfloat16) else answers


def by_blocks(
    answers: torch.Tensor,
    whole: int | None,
    most: int,
    compute: Callable[[torch.Tensor], Mapping[str, torch.Tensor]],
    without: Collection[str],
) -> dict[str, torch.Tensor]:
    """Computes tensors of answers block after block, so that the answers are read once.

    Args:
        answers: `[N, ...]`.
        whole: A dim that stays whole, beside the first.
        most: The numbers in a block for each thread.
        compute: Returns the tensors of a block by name, without the dim of the members.
        without: The names of tensors that do not have the dim `whole`.
    """
    places = list(blocks(answers.shape, whole, most * torch.get_num_threads()))
    if len(places) == 1:
        return dict(compute(wide(answers[places[0]])))
    found: dict[str, torch.Tensor] = {}
    for place in places:
        for name, part in compute(wide(answers[place])).items():
            dims = [d for d in range(1, answers.dim()) if d != whole or name not in without]
            if name not in found:
                found[name] = part.new_empty([answers.shape[d] for d in dims])
            found[name][tuple(place[d] for d in dims)] = part
    return found


FEW = 2**14
"""Numbers up to which one kernel of torch is faster than several that each take the whole block at a time."""


def entropies(probabilities: torch.Tensor, of: str | None, dim: int) -> torch.Tensor:
    """Returns entropies in nats. of, dim: as of `Block`. With `sigmoid` each label has its own entropy."""
    found: torch.Tensor = torch.special.entr(probabilities)
    return found + torch.special.entr(1 - probabilities) if of == "sigmoid" else found.sum(dim)


def squared(x: torch.Tensor) -> torch.Tensor:
    """Returns |x|^2."""
    square: torch.Tensor = (x * x.conj()).real if x.is_complex() else x * x
    return square


class Block:
    """The answers of all members at some positions. What several figures read is computed once.

    Each result has the form of one member's answer.

    Args:
        answers: `[N, ...]`, float32 or wider.
        of: What the figures are computed of: `softmax`, `sigmoid`, `probabilities`; None: the answers.
        dim: The dim of the classes in one member's answer, not negative.
        weights: `[N]`, with the sum 1; None: all members count the same.

    Attributes:
        members: How many members count.
        total: What the counts sum to: the number of members, or 1 with weights.
        dtype: The dtype of the answers.
    """

    def __init__(
        self, answers: torch.Tensor, of: str | None, dim: int, weights: torch.Tensor | None = None
    ) -> None:
        self.answers, self.of, self.dim, self.weights = answers, of, dim, weights
        self.members, self.dtype = answers.shape[0], answers.dtype
        self.total = float(self.members) if weights is None else 1.0

    def over_members(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the weighted mean over members. values: `[N, ...]`."""
        return values.mean(0) if self.weights is None else self.summed(values)

    def summed(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the weighted sum over members. values: `[N, ...]`."""
        if self.weights is None:
            return values.sum(0)
        total: torch.Tensor = torch.tensordot(self.weights.to(values.dtype), values, 1)
        return total

    @cached_property
    def values(self) -> torch.Tensor:
        """What is averaged: the answers, or probabilities, `[N, ...]`."""
        if self.of == "softmax":
            return self.answers.softmax(self.dim + 1)
        return self.answers.sigmoid() if self.of == "sigmoid" else self.answers

    @cached_property
    def mean(self) -> torch.Tensor:
        """The mean over members of what the figures are computed of."""
        return self.over_members(self.values)

    @cached_property
    def var(self) -> torch.Tensor:
        """The mean squared distance from the mean, computed so, since E[x^2] - E[x]^2 cancels."""
        if self.weights is None and not self.values.is_complex() and 0 < self.values.numel() <= FEW:
            return self.values.var(0, correction=0)
        apart = self.values - self.mean
        left = self.over_members(apart)  # the rounding error of the mean
        squares = self.over_members(squared(apart))
        return torch.where(squares > 0, (squares - squared(left)).clamp_min(0), squares)

    @cached_property
    def least(self) -> torch.Tensor:
        """The least over members."""
        return self.values.amin(0)

    @cached_property
    def greatest(self) -> torch.Tensor:
        """The greatest over members."""
        return self.values.amax(0)

    @cached_property
    def entropy(self) -> torch.Tensor:
        """The entropy of the mean probabilities."""
        return entropies(self.mean, self.of, self.dim)

    @cached_property
    def expected_entropy(self) -> torch.Tensor:
        """The mean of the members' entropies."""
        return self.over_members(entropies(self.values, self.of, self.dim + 1))

    @cached_property
    def chosen(self) -> torch.Tensor:
        """The class that each member chooses; with `sigmoid`, whether it chooses each label (1 or 0)."""
        return (self.answers > 0).long() if self.of == "sigmoid" else self.answers.argmax(self.dim + 1)

    @cached_property
    def counts(self) -> torch.Tensor:
        """How many members choose each class, or the sum of their weights; with `sigmoid`: each label."""
        kind = torch.int64 if self.weights is None else self.weights.dtype
        ones = torch.ones(self.members, dtype=kind, device=self.answers.device)
        weights = ones if self.weights is None else self.weights
        if self.of == "sigmoid":
            return (weights.view(-1, *[1] * (self.chosen.dim() - 1)) * self.chosen).sum(0)
        counts = torch.zeros(self.answers.shape[1:], dtype=kind, device=self.answers.device)
        for weight, chosen in zip(weights, self.chosen.unsqueeze(self.dim + 1)):
            counts.scatter_add_(self.dim, chosen, weight.expand(chosen.shape))
        return counts

    @cached_property
    def _sorted(self) -> torch.Tensor:
        return self.values.sort(0).values

    @cached_property
    def _missing(self) -> torch.Tensor:
        return self.values.isnan().any(0)

    def quantile(self, q: float) -> torch.Tensor:
        """Returns a quantile over members. q: 0 to 1."""
        place = q * (self.members - 1)
        low = int(place)
        found = self._sorted[low]
        if place > low:  # between two members; at one of them, two infinite answers would give NaN
            found = torch.lerp(found, self._sorted[low + 1], place - low)
        return found.masked_fill(self._missing, float("nan"))


_JOINED: dict[str, Callable[..., torch.Tensor]] = {
    "mean": torch.Tensor.add_,
    "expected_entropy": torch.Tensor.add_,
    "counts": torch.Tensor.add_,
    "least": torch.minimum,
    "greatest": torch.maximum,
}
"""How sums of some members and of others become those of all."""


class StreamedSums:
    """What figures read, summed up while members answer. Its properties are those of `Block`.

    Args:
        of, dim: See `Block`.
        equal: Whether all weights are the same.
        reads: What the figures read: names of properties.
    """

    def __init__(self, of: str | None, dim: int, equal: bool, reads: frozenset[str]) -> None:
        self.of, self.dim, self.equal, self.reads = of, dim, equal, reads
        self.members = 0
        self.dtype = torch.float32
        self.weight = 0.0
        self._sums: dict[str, torch.Tensor] = {}

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """What is summed up so far: `mean` (a sum), `first`, `shift` and `squares` (of the variance),
        `expected_entropy`, `counts`, `least`, `greatest`. Each has the form of one member's answer.
        """
        return dict(self._sums)

    def put(self, tensors: Mapping[str, torch.Tensor], members: int, weight: float) -> None:
        """Replaces the sums by those of other members. weight: the sum of their weights."""
        self._sums, self.members, self.weight = dict(tensors), members, weight
        self.dtype = next((t.dtype for name, t in tensors.items() if name != "counts"), self.dtype)

    def to(self, device: torch.device) -> StreamedSums:
        """Returns the same sums on a device."""
        found = StreamedSums(self.of, self.dim, self.equal, self.reads)
        found.put({n: t.to(device) for n, t in self._sums.items()}, self.members, self.weight)
        found.dtype = self.dtype
        return found

    def merge(self, other: StreamedSums) -> None:
        """Adds the sums of other members. The result does not depend on the order within each of the two.

        Squared distances are merged as Chan, Golub and LeVeque do (1979): those of both, and that of the two
        means. The distance of the means is that of the first answers and of the shifts from them, so that it
        does not cancel where the answers are large and differ little.
        """
        if not other.members:
            return
        if not self.members:
            self.put({n: t.clone() for n, t in other.tensors.items()}, other.members, other.weight)
            self.dtype = other.dtype
            return
        theirs, weight = other.tensors, self.weight + other.weight
        self._join(theirs)
        if "squares" in theirs:
            apart = (theirs["first"] - self._sums["first"]) + (theirs["shift"] - self._sums["shift"])
            self._sums["shift"] = self._sums["shift"] + apart * (other.weight / weight)
            between = squared(apart) * (self.weight * other.weight / weight)
            self._sums["squares"] = self._sums["squares"] + theirs["squares"] + between
        self.members += other.members
        self.weight = weight

    def add(self, answer: torch.Tensor, weight: float) -> None:
        """Adds the answer of one member. answer: float32 or wider."""
        block = self.block(answer.unsqueeze(0), [weight])
        self.members += 1
        self.weight += weight
        self.dtype = answer.dtype
        self._join(self.of_block(block))
        if "var" in self.reads:
            self._add_squares(block.values[0], weight)

    def block(self, answers: torch.Tensor, weights: Sequence[float]) -> Block:
        """Returns the answers `[n, ...]` of members, with their weights, as a block."""
        if self.equal:
            return Block(answers, self.of, self.dim)
        real = torch.float64 if answers.dtype in (torch.float64, torch.complex128) else torch.float32
        return Block(answers, self.of, self.dim, torch.tensor(weights, dtype=real, device=answers.device))

    def of_block(self, block: Block) -> dict[str, torch.Tensor]:
        """Returns the sums of some members by name, without those of the variance."""
        sums: dict[str, Callable[[], torch.Tensor]] = {
            "mean": lambda: block.summed(block.values),
            "expected_entropy": lambda: block.summed(entropies(block.values, self.of, self.dim + 1)),
            "counts": lambda: block.counts,
            "least": lambda: block.least,
            "greatest": lambda: block.greatest,
        }
        reads = {*self.reads, *(["mean"] if "entropy" in self.reads else [])}
        return {name: compute() for name, compute in sums.items() if name in reads}

    def _join(self, found: Mapping[str, torch.Tensor]) -> None:
        """Adds sums of other members, which may be written into, without those of the variance."""
        for name, join in _JOINED.items():
            if name in found:
                mine = self._sums.get(name)
                self._sums[name] = found[name] if mine is None else join(mine, found[name])

    def _add_squares(self, value: torch.Tensor, weight: float) -> None:
        """Adds to the squared distances from the mean (Welford's method, with weights).

        The numbers that it adds are distances from the first answer: they are small where the answers are
        large and differ little.
        """
        if "first" not in self._sums:
            self._sums["first"] = value.clone()
            self._sums["shift"] = value - value  # 0; NaN where it is not finite
            self._sums["squares"] = squared(self._sums["shift"])
            return
        distance = value - self._sums["first"]
        apart = distance - self._sums["shift"]
        self._sums["shift"] = self._sums["shift"] + apart * (weight / self.weight)
        left = distance - self._sums["shift"]
        product = (apart * left.conj()).real if apart.is_complex() else apart * left
        self._sums["squares"].add_(product, alpha=weight)

    @property
    def total(self) -> float:
        return float(self.members) if self.equal else self.weight

    @cached_property
    def mean(self) -> torch.Tensor:
        return self._sums["mean"] / self.weight

    @cached_property
    def var(self) -> torch.Tensor:
        return self._sums["squares"] / self.weight

    @property
    def least(self) -> torch.Tensor:
        return self._sums["least"]

    @property
    def greatest(self) -> torch.Tensor:
        return self._sums["greatest"]

    @cached_property
    def entropy(self) -> torch.Tensor:
        return entropies(self.mean, self.of, self.dim)

    @cached_property
    def expected_entropy(self) -> torch.Tensor:
        return self._sums["expected_entropy"] / self.weight

    @property
    def counts(self) -> torch.Tensor:
        return self._sums["counts"]

    def quantile(self, q: float) -> torch.Tensor:
        raise ValueError("a quantile needs the answers of all members at one time")


BY_CLASS = frozenset({"counts", "entropy", "expected_entropy"})
"""What is computed over the classes of an answer."""


def add_answers(
    sums: StreamedSums, answers: torch.Tensor, weights: Sequence[float], most: int = BLOCK
) -> None:
    """Sums up the answers of several members at one time: block after block, as `reduced` reads them.

    Args:
        sums: What is summed up; empty before.
        answers: `[n, ...]`, at least one member.
        weights: The weight of each, above 0; all 1 where members count the same.
        most: The numbers in a block.
    """
    by_class = (sums.of == "softmax" or bool(sums.reads & BY_CLASS)) and sums.of != "sigmoid"

    def compute(part: torch.Tensor) -> dict[str, torch.Tensor]:
        block = sums.block(part, weights)
        found = sums.of_block(block)
        if "var" in sums.reads:
            distances = block.values - block.values[0]
            shift = block.summed(distances) / float(sum(weights))
            squares = block.summed(squared(distances - shift))
            found |= {"first": block.values[0].clone(), "shift": shift, "squares": squares}
        return found

    whole = sums.dim + 1 if by_class else None
    found = by_blocks(answers, whole, most, compute, ["expected_entropy"])
    sums.put(found, len(weights), float(sum(weights)))
    sums.dtype = wide(answers[:0]).dtype


Sums = Block | StreamedSums
"""What figures read."""
