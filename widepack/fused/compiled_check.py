"""Compares a compiled program with the same program without compilation: answers and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree

from .gradients import PART, error_and_size, gradients_of, relative_bound, weighted_sum


def difference(compiled: Callable[..., Any], plain: Callable[..., Any], given: Sequence[Any]) -> str:
    """Returns how the answers or gradients of a compiled program differ; an empty text if they do not.

    Args:
        compiled: The compiled function of weights and inputs.
        plain: The same function without compilation.
        given: The weights and inputs of a call.
    """
    found, expected = (_answers_and_gradients(run, given) for run in (compiled, plain))
    largest = max((error_and_size(t, t)[1] for t in expected if t is not None), default=0.0)
    for a, b in zip(found, expected):
        if (a is None) != (b is None):
            return "a gradient is missing"
        if a is None or b is None:
            continue
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"a result is {list(a.shape)} {a.dtype} in place of {list(b.shape)} {b.dtype}"
        if b.is_complex():
            a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
        if not b.is_floating_point():
            if not torch.equal(a, b):
                return "whole numbers differ"
            continue
        if not torch.equal(torch.isfinite(a), torch.isfinite(b)):
            return "NaN or infinity in other places"
        error, size = error_and_size(a, b)
        size = max(size, PART * largest)
        if error > relative_bound([b]) * size + torch.finfo(b.dtype).tiny:
            return f"a result is off by {error:.2e} at a size of {size:.2e}"
    return ""


def _answers_and_gradients(run: Callable[..., Any], given: Sequence[Any]) -> list[torch.Tensor | None]:
    """Returns the answers, then the gradients of a weighted sum of them by each value that needs one."""
    copies = pytree.tree_map(_copied, list(given))
    tensors = [v for v in pytree.tree_leaves(copies) if isinstance(v, torch.Tensor) and v.requires_grad]
    needed = {str(k): v for k, v in enumerate(tensors)}
    with torch.enable_grad():
        answers = [y for y in pytree.tree_leaves(run(*copies)) if isinstance(y, torch.Tensor)]
        gradients = gradients_of(weighted_sum(answers, 0), needed, list(needed))
    return [*(y.detach() for y in answers), *gradients.values()]


def _copied(value: Any) -> Any:
    """Returns a copy of a tensor that is a parameter if it is one: torch compiles others once more."""
    if not isinstance(value, torch.Tensor):
        return value
    copied = value.detach().clone()
    if isinstance(value, torch.nn.Parameter):
        return torch.nn.Parameter(copied, requires_grad=value.requires_grad)
    return copied.requires_grad_(value.requires_grad)
