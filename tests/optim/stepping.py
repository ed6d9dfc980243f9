"""Steps of optimizers of N members, and of single members, with drawn parameters and gradients."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import Tensor, nn

from widepack.optim import PerMember

N = 3
LR = [0.1, 0.02, 0.5]
DECAY = [0.0, 0.3, 0.01]
SHAPES = ((), (4,), (2, 3))


def numbers(seed: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Returns random tensors `[N, *shape]`, one for each shape. Seeds from 1 are gradients with zeros."""
    g = torch.Generator().manual_seed(seed)
    values = [torch.randn((N, *s), generator=g, dtype=dtype) for s in SHAPES]
    if seed:
        values[2][:, 0, 1] = 0.0
    return values


def parameters(dtype: torch.dtype = torch.float64, i: int | None = None) -> list[Tensor]:
    """Returns the parameters of all members, or of member i, at the start."""
    return [nn.Parameter(v if i is None else v[i].clone()) for v in numbers(0, dtype)]


def steps(
    optimizer: torch.optim.Optimizer, params: list[Tensor], count: int, first: int = 0, i: int | None = None
) -> None:
    """Performs steps with the gradients of all members, or of member i. first: the number of the first."""
    for k in range(first, first + count):
        for p, g in zip(params, numbers(1 + k, params[0].dtype), strict=True):
            p.grad = g if i is None else g[i].clone()
        optimizer.step()


def of_member(option: Any, i: int) -> Any:
    """Returns member i's value of an option."""
    if isinstance(option, tuple):
        return tuple(of_member(part, i) for part in option)
    return option[i] if isinstance(option, list) else option


def options_of(options: dict[str, Any], i: int) -> dict[str, Any]:
    return {k: of_member(v, i) for k, v in options.items()}


def per_member(option: Any) -> Any:
    """Returns an option with a `PerMember` in place of each list."""
    if isinstance(option, tuple):
        return tuple(map(per_member, option))
    return PerMember(option) if isinstance(option, list) else option


def saved(value: Any) -> io.BytesIO:
    """Returns the file that torch writes of a value."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


def label(value: Any) -> str:
    """Returns the name of a test's case: of an optimizer, or of its options."""
    return value if isinstance(value, str) else "-".join(value) or "plain"
