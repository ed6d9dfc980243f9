"""Draws inputs for verification and measurement, at any sizes of the named dims.

Integers are drawn within the user's bounds. Without bounds they are rows of the example, so they stay valid
ids, masks or edge lists. A list in order stays in order: lengths, or the graphs of nodes. Equal seeds
give equal inputs.

Floats are rows of the example. `InputSource.noise` says how they change:

| noise | floats |
|---|---|
| `within` | noise of a tenth of the example's spread, within its least and largest number |
| `none` | no noise, for members that refuse others: positive definite matrices |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from .dtypes import dtype_of
from .input_spec import parse_type

NOISES = ("within", "none")
NOISE = 0.1  # of the example's spread


@dataclass(frozen=True, slots=True)
class InputSource:
    """One input leaf to draw: its type text, the inclusive bounds of integers, an example or None, and the
    noise of floats: one of `NOISES`.
    """

    name: str
    type: str
    low: int | None
    high: int | None
    example: torch.Tensor | None = None
    noise: str = "within"


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
    if (order := _order(source.example)) is not None:
        return value.sort(descending=order).values
    return _with_noise(value, source.example, source.noise, g)


def _order(example: torch.Tensor) -> bool | None:
    """Returns whether the integers of a list in order descend; None for other tensors.

    Lengths of sequences, or the graphs of nodes, may be valid in order only.
    """
    if example.ndim != 1 or example.dtype not in (torch.int64, torch.int32) or example.numel() < 2:
        return None
    steps = example.diff()
    descends = bool((steps <= 0).all())
    return descends if (descends or bool((steps >= 0).all())) and bool((steps != 0).any()) else None


def spread_of(numbers: torch.Tensor) -> float:
    """Returns the standard deviation of finite numbers of any size. Squares of large ones would overflow."""
    largest = float(numbers.abs().max())
    return largest * float((numbers.double() / largest).std(correction=0)) if largest else 0.0


def _with_noise(value: torch.Tensor, example: torch.Tensor, noise: str, g: torch.Generator) -> torch.Tensor:
    """Returns a copy of rows of the example with noise, if they are finite floats."""
    if (
        noise == "none"
        or not value.is_floating_point()
        or not value.numel()
        or not torch.isfinite(value).all()
    ):
        return value.clone()
    dtype = torch.float64 if value.dtype == torch.float64 else torch.float32
    numbers = example.to(dtype)
    # one number has no spread; equal calls would compare it with itself
    spread = float(numbers.abs().max()) if numbers.numel() == 1 else spread_of(numbers)
    noisy = value.to(dtype) + NOISE * spread * torch.randn(value.shape, generator=g).to(dtype)
    if numbers.numel() > 1:
        least, most = numbers.min(), numbers.max()
        noisy = torch.where(noisy < least, 2 * least - noisy, noisy)
        noisy = torch.where(noisy > most, 2 * most - noisy, noisy).clamp(least, most)
    return noisy.to(value.dtype)


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
