"""Draws inputs for verification and measurement, at any sizes of the named dims.

Integers are drawn within the user's bounds. Without bounds they are rows of the example, so they stay valid
ids, masks or edge lists. Floats have the example's mean and spread, and stay within its smallest and largest
number: what is positive, or a probability, stays so. Equal seeds give equal inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from .dtypes import dtype_of
from .input_spec import parse_type


@dataclass(frozen=True, slots=True)
class InputSource:
    """One input leaf to draw: its type text, the inclusive bounds of integers, and an example or None."""

    name: str
    type: str
    low: int | None
    high: int | None
    example: torch.Tensor | None = None


def draw(source: InputSource, sizes: Mapping[str, int], seed: int) -> torch.Tensor:
    """Draws a tensor of the source's type at these sizes."""
    dtype_name, dims = parse_type(source.type)
    dtype = dtype_of(dtype_name)
    shape = [d if isinstance(d, int) else sizes[d.letter] * d.factor for d in dims]
    g = torch.Generator().manual_seed(seed)
    if source.low is not None and source.high is not None:
        return torch.randint(source.low, source.high + 1, shape, generator=g, dtype=dtype)
    if source.example is None:
        if dtype.is_floating_point or dtype.is_complex:
            return torch.randn(shape, generator=g, dtype=dtype if dtype.itemsize >= 4 else torch.float32).to(
                dtype
            )
        return torch.randint(0, 2, shape, generator=g).to(dtype)
    value = source.example
    for axis, (dim, size) in enumerate(zip(dims, shape)):
        if not isinstance(dim, int):
            value = value.index_select(axis, torch.randint(0, value.shape[axis], (size,), generator=g))
    if value.is_floating_point() and value.numel() and torch.isfinite(value).all():
        example = source.example.float()
        spread = example.std(correction=0)
        moved = value.float() + 0.1 * spread * torch.randn(value.shape, generator=g)
        value = moved.clamp(example.min(), example.max()).to(dtype)
    return value.clone()


def draw_all(sources: Sequence[InputSource], sizes: Mapping[str, int], seed: int) -> list[torch.Tensor]:
    """Draws the inputs of one call."""
    return [draw(s, sizes, seed * 1009 + i) for i, s in enumerate(sources)]


def rows(
    values: Sequence[torch.Tensor], sources: Sequence[InputSource], letter: str, count: int
) -> list[torch.Tensor]:
    """Returns the first `count` rows of a call along the dim `letter`."""
    made = []
    for value, source in zip(values, sources):
        for axis, dim in enumerate(parse_type(source.type)[1]):
            if not isinstance(dim, int) and dim.letter == letter:
                value = value.narrow(axis, 0, count * dim.factor)
        made.append(value.contiguous())
    return made
