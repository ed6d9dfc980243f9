"""Computes gradients of a weighted sum of answers, and compares numbers up to rounding."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


@contextlib.contextmanager
def terms_of(module: nn.Module, names: Collection[str]) -> Iterator[dict[str, float]]:
    """Collects the sums of the absolute terms of the gradients of biases, while the module runs.

    The gradient of a bias is the sum of the gradients that come into its layer. In front of a BatchNorm, or
    of a softmax over the same dim, these cancel: the sum is as small as its rounding error, and says nothing
    of its size. The terms do.

    Args:
        module: The member.
        names: The weights whose gradients are computed.

    Yields:
        for each bias `[C]` the sum of the absolute gradients of its layer's answers, for one of the C numbers
        on average. It is complete after the backward pass.
    """
    found: dict[str, float] = {}
    handles = []
    for path, part in module.named_modules():
        bias = dict(part.named_parameters(recurse=False, remove_duplicate=False)).get("bias")
        name = f"{path}.bias" if path else "bias"
        if bias is not None and name in names and bias.dim() == 1 and bias.numel():
            handles.append(part.register_forward_hook(_collecting(found, name, bias.numel())))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _collecting(found: dict[str, float], name: str, count: int) -> Any:
    def hook(part: nn.Module, args: Any, answer: Any) -> None:
        if isinstance(answer, Tensor) and answer.requires_grad:
            answer.register_hook(add)  # type: ignore[no-untyped-call]

    def add(gradient: Tensor) -> None:
        terms = gradient.detach().abs()
        terms = terms.where(torch.isfinite(terms), 0)
        found[name] = found.get(name, 0.0) + float(terms.sum()) / count

    return hook


Gradients = dict[str, torch.Tensor | None]

BOUND = 1e-3  # the relative error of float32 that is accepted; a wrong program is off by more
PART = 0.01  # a gradient of less than this part of the largest one is compared with this part


def weighted_sum(outputs: Sequence[torch.Tensor], i: int) -> torch.Tensor:
    """Returns a weighted sum of outputs. The weights are random, the same for the same `i`."""
    g = torch.Generator().manual_seed(17 + i)
    pairs = [
        (y, torch.randn(y.shape, generator=g, dtype=torch.float64).to(y.device, y.dtype))
        for y in outputs
        if y.is_floating_point()
    ]
    terms = [(y * r).sum().double() for y, r in pairs if y.requires_grad]
    return torch.stack(terms).sum() if terms else torch.zeros(())


def gradients_of(total: torch.Tensor, weights: Mapping[str, torch.Tensor], names: Sequence[str]) -> Gradients:
    """Returns the gradient of a sum by each named weight; None if the sum does not depend on it."""
    if not names or not total.requires_grad:
        return dict.fromkeys(names)
    return dict(zip(names, torch.autograd.grad(total, [weights[n] for n in names], allow_unused=True)))


def relative_bound(values: Sequence[torch.Tensor]) -> float:
    """Returns the relative error that is accepted for values of these dtypes."""
    eps = max((torch.finfo(v.dtype).eps for v in values if v.is_floating_point()), default=0.0)
    return BOUND * max(math.sqrt(eps / torch.finfo(torch.float32).eps), 1e-6)


def error_and_size(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float]:
    """Returns the largest difference of two values where the second is finite, and its largest number there.

    The difference is inf if the first is not finite where the second is.
    """
    if not b.is_floating_point() or not b.numel():
        return 0.0, 0.0
    finite = torch.isfinite(b)
    error = float((a - b).where(finite, 0).abs().max())
    return math.inf if math.isnan(error) else error, float(b.where(finite, 0).abs().max())
