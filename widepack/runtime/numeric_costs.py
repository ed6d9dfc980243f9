"""Computes the costs of pools, losses over pairs, distances, linear algebra, window transforms and gamma
functions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..ir.limits import integers, size, tensors
from .cost_terms import NOTHING, Cost, Rule, broadcast_count, count, first_tensor


def pool(name: str, args: Mapping[str, Any], result: Any) -> Cost:
    """Pools: every number of the result reads one window."""
    x, out = args.get("self"), first_tensor(result)
    if not isinstance(x, torch.Tensor) or out is None:
        return NOTHING
    kernel = integers(args.get("kernel_size")) or [1]
    spatial = [int(n) for n in x.shape[-len(kernel) :]] if len(kernel) <= x.dim() else [1]
    if len(kernel) == 1:
        spatial = [max([int(n) for n in x.shape[2:]] or [1])] * max(1, x.dim() - 2)
        kernel = kernel * len(spatial)
    window = math.prod(max(1, min(k, n)) for k, n in zip(kernel, spatial))
    return Cost(out.numel() * window * 1.0 + x.numel(), float(size(x)))


def pair(name: str, args: Mapping[str, Any], result: Any) -> Cost:
    """Operands that broadcast to each other, are compared number by number, and summed."""
    numbers = count(dict(args)) * 64 if name == "aten.isin" else broadcast_count(args)
    return Cost(20.0 * (numbers + count(dict(args))), 3.0 * 8 * numbers)


def distance(name: str, args: Mapping[str, Any], result: Any) -> Cost:
    """Every row against every row."""
    x, out = first_tensor(dict(args)), first_tensor(result)
    if x is None or out is None:
        return NOTHING
    inner = int(x.shape[-1]) if x.dim() else 1
    work = out.numel() * max(1, inner) * 20.0 + count(dict(args))
    return Cost(work, float(size(list(args.values())) * 3 + size(out)))


def linear_algebra(each: float) -> Rule:
    """Linear algebra that is cubic in the size of a matrix. each: nanoseconds of one of these operations."""

    def rule(name: str, args: Mapping[str, Any], result: Any) -> Cost:
        work, numbers = 0.0, 0
        given = list(tensors([dict(args), result]))
        batch = _batch(given)
        for t in given:
            if t.dim() < 2:
                numbers += t.numel()
                continue
            of_matrix, most = int(t.shape[-2]) * int(t.shape[-1]), max(int(n) for n in t.shape[-2:])
            work += batch * (of_matrix * max(1, most) * each + 5_000.0)  # operands that broadcast are copied
            numbers += max(t.numel(), batch * of_matrix, most)  # pivots of no matrix are written too
        return Cost(work + 20.0 * numbers, 6.0 * 8 * numbers)

    return rule


def _batch(given: Sequence[torch.Tensor]) -> int:
    """The number of matrices after the operands broadcast to each other; the most of an operand if they do
    not.
    """
    shapes = [tuple(int(n) for n in t.shape[:-2]) for t in given if t.dim() >= 2]
    try:
        batch: tuple[int, ...] = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
        return math.prod(batch)
    except RuntimeError:
        return max(map(math.prod, shapes))


def class_pairs(name: str, args: Mapping[str, Any], result: Any) -> Cost:
    """`multilabel_margin_loss`: every class of a row against every other class."""
    x = args.get("self")
    if not isinstance(x, torch.Tensor):
        return NOTHING
    classes = int(x.shape[-1]) if x.dim() else 1
    return Cost(4.0 * x.numel() * classes + count(dict(args)), 4.0 * size(list(args.values())))


def differences(name: str, args: Mapping[str, Any], result: Any) -> Cost:
    """`diff`: a pass for each order."""
    times = 1 + max([1, *integers(args.get("n"))])
    numbers = count(dict(args))
    return Cost(times * (20_000.0 + 2.0 * numbers), 3.0 * size(list(args.values())))


def window(name: str, args: Mapping[str, Any], result: Any) -> Cost:
    """`stft` and `istft`: every window is written out."""
    numbers = count(dict(args)) + count(result)
    return Cost(40.0 * numbers, 24.0 * numbers)


def multivariate_gamma(name: str, args: Mapping[str, Any], result: Any) -> Cost:
    """`mvlgamma`: `p` gamma functions for each number."""
    numbers = count(dict(args)) * max([1, *integers(args.get("p"))])
    return Cost(100.0 * numbers, 8.0 * numbers)
