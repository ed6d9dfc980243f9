"""Computes the costs of pools, losses over pairs, distances, linear algebra, window transforms and gamma
functions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
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
        for t in tensors([dict(args), result]):
            if t.dim() >= 2:
                most = max(int(t.shape[-1]), int(t.shape[-2]))
                work += t.numel() * max(1, most) * each + math.prod(int(n) for n in t.shape[:-2]) * 5_000.0
            numbers += t.numel()
        return Cost(work + 20.0 * numbers, 6.0 * 8 * numbers)

    return rule


def window(name: str, args: Mapping[str, Any], result: Any) -> Cost:
    """`stft` and `istft`: every window is written out."""
    numbers = count(dict(args)) + count(result)
    return Cost(40.0 * numbers, 24.0 * numbers)


def multivariate_gamma(name: str, args: Mapping[str, Any], result: Any) -> Cost:
    """`mvlgamma`: `p` gamma functions for each number."""
    numbers = count(dict(args)) * max([1, *integers(args.get("p"))])
    return Cost(100.0 * numbers, 8.0 * numbers)
