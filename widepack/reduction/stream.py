"""Computes figures while members answer one after the other, without the tensor `[N, ...]` of all answers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import torch

from .block import Block, entropies, squared
from .precision import wide
from .request import Requested


class Stream:
    """Takes the answers of members, in any order and from several threads, and computes figures of them.

    Answers are added in the order of the members, so that the figures do not depend on the threads. An answer
    that comes early is kept until then: at most one for each thread.

    Args:
        wanted: The figures. Each must be one that is `streamed`.
        of: What they are computed of: see `Sums`.
        dim: The dim of the classes in one member's answer, not negative.
        weights: The number of each member that counts, and its weight. Others are left out.
        equal: Whether the weights are those of members that count the same.
    """

    def __init__(
        self, wanted: Sequence[Requested], of: str | None, dim: int, weights: Mapping[int, float], equal: bool
    ) -> None:
        self.wanted = wanted
        self.sums = StreamedSums(of, dim, equal, frozenset(r for w in wanted for r in w.figure.reads))
        self._weights = weights
        self._lock = threading.Lock()
        self._early: dict[int, torch.Tensor] = {}
        self._next = 0

    def take(self, member: int, answer: torch.Tensor) -> None:
        """Takes the answer of one member. member: its number, from 0 to N - 1. answer: its own."""
        with self._lock:
            self._early[member] = answer
            while (value := self._early.pop(self._next, None)) is not None:
                if (weight := self._weights.get(self._next)) is not None:
                    self.sums.add(wide(value), weight)
                self._next += 1

    def figures(self) -> dict[str, torch.Tensor]:
        """Returns the figures by their text. All members must have answered."""
        return {w.text: w.figure.compute(self.sums, w.number) for w in self.wanted}


class StreamedSums:
    """What a stream has summed up: see `Sums`.

    Args:
        of, dim: See `Sums`.
        equal: Whether all weights are the same.
        reads: What the figures read: names of properties of `Sums`.
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
        for name in ("mean", "expected_entropy", "counts"):
            if name in theirs:
                self._sum(name, theirs[name])
        for name, choose in (("least", torch.minimum), ("greatest", torch.maximum)):
            if name in theirs:
                self._keep(name, theirs[name], choose)
        if "squares" in theirs:
            apart = (theirs["first"] - self._sums["first"]) + (theirs["shift"] - self._sums["shift"])
            self._sums["shift"] = self._sums["shift"] + apart * (other.weight / weight)
            between = squared(apart) * (self.weight * other.weight / weight)
            self._sums["squares"] = self._sums["squares"] + theirs["squares"] + between
        self.members += other.members
        self.weight = weight

    def add(self, answer: torch.Tensor, weight: float) -> None:
        """Adds the answer of one member. answer: float32 or wider."""
        block = Block(answer.unsqueeze(0), self.of, self.dim)
        self.members += 1
        self.weight += weight
        self.dtype = answer.dtype
        if self.reads & {"mean", "entropy"}:
            self._sum("mean", block.values[0] * weight)
        if "var" in self.reads:
            self._add_squares(block.values[0], weight)
        if "expected_entropy" in self.reads:
            self._sum("expected_entropy", block.expected_entropy * weight)
        if "counts" in self.reads:
            self._sum("counts", block.counts if self.equal else block.counts.to(self.dtype) * weight)
        if "least" in self.reads:
            self._keep("least", block.least, torch.minimum)
        if "greatest" in self.reads:
            self._keep("greatest", block.greatest, torch.maximum)

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

    def _sum(self, name: str, value: torch.Tensor) -> None:
        self._sums[name] = self._sums[name].add_(value) if name in self._sums else value.clone()

    def _keep(self, name: str, value: torch.Tensor, choose: Callable[..., torch.Tensor]) -> None:
        self._sums[name] = choose(self._sums[name], value) if name in self._sums else value.clone()

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
