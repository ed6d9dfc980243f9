"""Measures how large the terms of a gradient are whose sum is zero but for rounding.

The gradient of a bias is the sum of the gradients that come into its layer. In front of a BatchNorm, or of a
softmax over the same dim, these cancel: the sum is as small as its rounding error, and says nothing of its
size. The terms do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn


@contextlib.contextmanager
def terms_of(module: nn.Module, names: Collection[str]) -> Iterator[dict[str, float]]:
    """Collects the sums of the absolute terms of the gradients of biases, while the module runs.

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
