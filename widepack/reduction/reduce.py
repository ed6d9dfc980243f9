"""Computes the requested figures of answers, block after block."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .block import Block
from .positions import BLOCK, blocks
from .precision import wide
from .request import Requested, requested


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
    places = list(blocks(answers.shape, whole, most * torch.get_num_threads()))
    found: dict[str, torch.Tensor] = {}
    for place in places:
        block = Block(wide(answers[place]), of, dim - 1, weights)
        for one in wanted:
            part = one.figure.compute(block, one.number)
            if len(places) == 1:
                found[one.text] = part
                continue
            lost = not one.figure.classes and of != "sigmoid"
            at = tuple(s for d, s in enumerate(place) if d and not (lost and d == dim))
            if one.text not in found:
                shape = [n for d, n in enumerate(answers.shape) if d and not (lost and d == dim)]
                found[one.text] = part.new_empty(shape)
            found[one.text][at] = part
    return found


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
