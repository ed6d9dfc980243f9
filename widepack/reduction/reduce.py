"""Computes the requested figures of answers, block after block."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import torch

from .figures import Requested, requested
from .sums import BLOCK, Block, StreamedSums, by_blocks, wide


def reduced(
    answers: torch.Tensor,
    wanted: Sequence[Requested],
    of: str | None,
    dim: int,
    weights: torch.Tensor | None,
    most: int = BLOCK,
) -> dict[str, torch.Tensor]:
    """Computes figures of the members' answers.

    The answers are read once: each figure of a block is computed while the block is in the cache. Half
    precision is computed, and answered, in float32.

    Args:
        answers: `[N, ...]`.
        wanted: The figures.
        of: What they are computed of: see `Block`.
        dim: The dim of the classes in `answers`.
        weights: `[N]` with the sum 1, or None.
        most: The numbers in a block.

    Returns:
        A tensor for each figure by its text, in the order of `wanted`.
    """
    classes = of == "softmax" or any(w.figure.needs in ("votes", "probabilities") for w in wanted)
    whole = dim if classes and of != "sigmoid" else None

    def compute(part: torch.Tensor) -> dict[str, torch.Tensor]:
        block = Block(part, of, dim - 1, weights)
        return {w.text: w.figure.compute(block, w.number) for w in wanted}

    return by_blocks(answers, whole, most, compute, [w.text for w in wanted if not w.figure.classes])


def mixture(
    means: torch.Tensor, variances: torch.Tensor, weights: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes mean and variance of the mixture of the members' distributions.

    mean = sum_i w_i m_i, variance = sum_i w_i (s_i + m_i^2) - mean^2, which is the mean of the variances s_i
    and the variance of the means m_i (Lakshminarayanan and others, 2017).

    Args:
        means, variances: `[N, ...]`, of one shape.
        weights: `[N]` with the sum 1, or None.
    """
    of_means = reduced(means, requested(["mean", "var"], None, weights is not None), None, 1, weights)
    of_variances = reduced(variances, requested(["mean"], None, weights is not None), None, 1, weights)
    return of_means["mean"], of_means["var"] + of_variances["mean"]


class Stream:
    """Takes the answers of members, in any order and from several threads, and computes figures of them.

    Answers are added in the order of the members, so that the figures do not depend on the threads. An answer
    that comes early is kept until then: at most one for each thread.

    Args:
        wanted: The figures. Each must be one that is `streamed`.
        of: What they are computed of: see `Block`.
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
