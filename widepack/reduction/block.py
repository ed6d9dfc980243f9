"""Holds what figures read of the members' answers: at some positions for all members, or summed up."""

from __future__ import annotations

from functools import cached_property
from typing import Protocol

import torch


class Sums(Protocol):
    """What figures read. Each tensor has the form of one member's answer."""

    @property
    def of(self) -> str | None:
        """What the figures are computed of: `softmax`, `sigmoid`, `probabilities`; None: the answers."""

    @property
    def dim(self) -> int:
        """The dim of the classes in one member's answer, not negative."""

    @property
    def members(self) -> int:
        """How many members count."""

    @property
    def total(self) -> float:
        """What the counts sum to: the number of members, or 1 with weights."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the answers."""

    @property
    def mean(self) -> torch.Tensor:
        """The mean over members of what the figures are computed of."""

    @property
    def var(self) -> torch.Tensor:
        """The mean squared distance from the mean, computed so, since E[x^2] - E[x]^2 cancels."""

    @property
    def least(self) -> torch.Tensor:
        """The least over members."""

    @property
    def greatest(self) -> torch.Tensor:
        """The greatest over members."""

    @property
    def entropy(self) -> torch.Tensor:
        """The entropy of the mean probabilities."""

    @property
    def expected_entropy(self) -> torch.Tensor:
        """The mean of the members' entropies."""

    @property
    def counts(self) -> torch.Tensor:
        """How many members choose each class, or the sum of their weights; with `sigmoid`: each label."""

    def quantile(self, q: float) -> torch.Tensor:
        """Returns a quantile over members. q: 0 to 1."""


FEW = 2**14
"""Numbers up to which one kernel of torch is faster than several that each take the whole block at a time."""


def entropies(probabilities: torch.Tensor, of: str | None, dim: int) -> torch.Tensor:
    """Returns entropies in nats. of, dim: see `Sums`. With `sigmoid` each label has an entropy of its own."""
    found: torch.Tensor = torch.special.entr(probabilities)
    return found + torch.special.entr(1 - probabilities) if of == "sigmoid" else found.sum(dim)


def squared(x: torch.Tensor) -> torch.Tensor:
    """Returns |x|^2."""
    square: torch.Tensor = (x * x.conj()).real if x.is_complex() else x * x
    return square


class Block:
    """The answers of all members at some positions. What several figures read is computed once.

    Args:
        answers: `[N, ...]`, float32 or wider.
        of, dim: See `Sums`.
        weights: `[N]`, with the sum 1; None: all members count the same.
    """

    def __init__(
        self, answers: torch.Tensor, of: str | None, dim: int, weights: torch.Tensor | None = None
    ) -> None:
        self.answers, self.of, self.dim, self.weights = answers, of, dim, weights
        self.members, self.dtype = answers.shape[0], answers.dtype
        self.total = float(self.members) if weights is None else 1.0

    def over_members(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the weighted mean over members. values: `[N, ...]`."""
        if self.weights is None:
            return values.mean(0)
        mean: torch.Tensor = torch.tensordot(self.weights.to(values.dtype), values, 1)
        return mean

    @cached_property
    def values(self) -> torch.Tensor:
        """What is averaged: the answers, or probabilities, `[N, ...]`."""
        if self.of == "softmax":
            return self.answers.softmax(self.dim + 1)
        return self.answers.sigmoid() if self.of == "sigmoid" else self.answers

    @cached_property
    def mean(self) -> torch.Tensor:
        return self.over_members(self.values)

    @cached_property
    def var(self) -> torch.Tensor:
        if self.weights is None and not self.values.is_complex() and 0 < self.values.numel() <= FEW:
            return self.values.var(0, correction=0)
        apart = self.values - self.mean
        left = self.over_members(apart)  # the rounding error of the mean
        squares = self.over_members(squared(apart))
        return torch.where(squares > 0, (squares - squared(left)).clamp_min(0), squares)

    @cached_property
    def least(self) -> torch.Tensor:
        return self.values.amin(0)

    @cached_property
    def greatest(self) -> torch.Tensor:
        return self.values.amax(0)

    @cached_property
    def entropy(self) -> torch.Tensor:
        return entropies(self.mean, self.of, self.dim)

    @cached_property
    def expected_entropy(self) -> torch.Tensor:
        return self.over_members(entropies(self.values, self.of, self.dim + 1))

    @cached_property
    def chosen(self) -> torch.Tensor:
        """The class that each member chooses; with `sigmoid`, whether it chooses each label (1 or 0)."""
        return (self.answers > 0).long() if self.of == "sigmoid" else self.answers.argmax(self.dim + 1)

    @cached_property
    def counts(self) -> torch.Tensor:
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
        place = q * (self.members - 1)
        low = int(place)
        found = self._sorted[low]
        if place > low:  # between two members; at one of them, two infinite answers would give NaN
            found = torch.lerp(found, self._sorted[low + 1], place - low)
        return found.masked_fill(self._missing, float("nan"))
