"""Compares a compiled program with the same program without compilation: answers and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree

BOUND = 1e-3  # the relative difference of float32 that is accepted; a wrong program is off by more


def difference(compiled: Callable[..., Any], plain: Callable[..., Any], given: Sequence[Any]) -> str:
    """Returns how the answers or gradients of a compiled program differ; an empty text if they do not.

    Args:
        compiled: The compiled function of weights and inputs.
        plain: The same function without compilation.
        given: The weights and inputs of a call.
    """
    found, expected = (_answers_and_gradients(run, given) for run in (compiled, plain))
    largest = max((_size(t) for t in expected if t is not None), default=0.0)
    for a, b in zip(found, expected):
        if (a is None) != (b is None):
            return "a gradient is missing"
        if a is None or b is None:
            continue
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"a result is {list(a.shape)} {a.dtype} in place of {list(b.shape)} {b.dtype}"
        if not b.is_floating_point():
            if not torch.equal(a, b):
                return "whole numbers differ"
            continue
        bound = BOUND * math.sqrt(torch.finfo(b.dtype).eps / torch.finfo(torch.float32).eps)
        finite = torch.isfinite(b)
        if not torch.equal(finite, torch.isfinite(a)):
            return "NaN or infinity in other places"
        error, size = _size((a - b).where(finite, 0)), max(_size(b), 0.01 * largest)
        if error > bound * size + torch.finfo(b.dtype).tiny:
            return f"a result is off by {error:.2e} at a size of {size:.2e}"
    return ""


def _answers_and_gradients(run: Callable[..., Any], given: Sequence[Any]) -> list[torch.Tensor | None]:
    """Returns the answers, then the gradients of a weighted sum of them by each value that needs one."""
    copies = pytree.tree_map(_copied, list(given))
    needed = [v for v in pytree.tree_leaves(copies) if isinstance(v, torch.Tensor) and v.requires_grad]
    generator = torch.Generator().manual_seed(17)
    with torch.enable_grad():
        answers = [y for y in pytree.tree_leaves(run(*copies)) if isinstance(y, torch.Tensor)]
        terms = []
        for y in answers:
            if y.requires_grad:
                weight = torch.randn(y.shape, generator=generator, dtype=torch.float64)
                terms.append((y * weight.to(y.device, y.dtype)).sum().double())
        gradients: Sequence[torch.Tensor | None] = [None] * len(needed)
        if terms and needed:
            gradients = torch.autograd.grad(torch.stack(terms).sum(), needed, allow_unused=True)
    return [*(y.detach() for y in answers), *gradients]


def _copied(value: Any) -> Any:
    """Returns a copy of a tensor that is a parameter if it is one: torch compiles others once more."""
    if not isinstance(value, torch.Tensor):
        return value
    copied = value.detach().clone()
    if isinstance(value, torch.nn.Parameter):
        return torch.nn.Parameter(copied, requires_grad=value.requires_grad)
    return copied.requires_grad_(value.requires_grad)


def _size(value: torch.Tensor) -> float:
    """Returns the largest absolute number of a tensor that is finite."""
    if not value.is_floating_point() or not value.numel():
        return 0.0
    return float(value.where(torch.isfinite(value), 0).abs().max())
