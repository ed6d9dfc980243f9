"""Samples: example arguments of an op, which stand beside its strategies; tests and `widepack selftest` read them.

    @samples("linear")
    def _linear(draw: Draw) -> list[Sample]:
        return [call(draw.normal(B, 4), draw.normal(3, 4), draw.normal(3))]

Two seeds give the same number of samples with the same shapes, dtypes and literals: only what the tensors hold differs. So N draws are N members.
Every batch is `B` and no other size is, so that a test can hide the batch from a rule, as a program with a dynamic batch does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .registry import full_name

Sample = tuple[tuple[Any, ...], dict[str, Any]]
B = 5  # the batch of every sample
SAMPLES: dict[str, Callable[[Draw], list[Sample]]] = {}


class Draw:
    """Tensors from one seed."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, dtype=dtype)

    def uniform(self, low: float, high: float, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return low + (high - low) * torch.rand(shape, generator=self.generator, dtype=dtype)

    def ints(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """low included, high not."""
        return torch.randint(low, high, shape, generator=self.generator).to(dtype)

    def bools(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=self.generator) < 0.6

    def complex(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.complex64)


Make = Callable[[Draw], list[Sample]]


def call(*args: Any, **kwargs: Any) -> Sample:
    """One sample: the arguments of a call."""
    return args, kwargs


def samples(ops: str) -> Callable[[Make], Make]:
    """Register the decorated function as the samples of these ops (a space-separated string). Raises: ValueError for an op that has samples."""

    def add(make: Make) -> Make:
        for op in map(full_name, ops.split()):
            if op in SAMPLES:
                raise ValueError(f"{op}: samples are registered twice, in {SAMPLES[op].__code__.co_filename} and in {make.__code__.co_filename}")
            SAMPLES[op] = make
        return make

    return add


def unary(draw: Draw) -> list[Sample]:
    """Floats of all ranks, in and out of the domains of logarithms and inverses."""
    return [call(draw.normal(B, 3, 4)), call(draw.uniform(0.1, 0.9, 3)), call(draw.uniform(1, 2)), call(draw.normal(B, 2, dtype=torch.float64))]


def integers(draw: Draw) -> list[Sample]:
    """Whole numbers."""
    return [call(draw.ints(-9, 9, B, 3)), call(draw.ints(-9, 9)), call(draw.ints(-9, 9, 2, B, 3, dtype=torch.int32))]


def bits(draw: Draw) -> list[Sample]:
    """Whole numbers and truth values."""
    return [*integers(draw), call(draw.bools(B, 3))]


def complexes(draw: Draw) -> list[Sample]:
    return [call(draw.complex(B, 3)), call(draw.complex())]


def binary(draw: Draw) -> list[Sample]:
    """Two floats, of one shape, broadcast, with a 0-dim operand."""
    pairs = [((B, 3, 4), (B, 3, 4)), ((B, 3, 4), (4,)), ((3, 1), (B, 3, 4)), ((B, 3), ()), ((), (4,)), ((), ())]
    return [call(draw.normal(*a), draw.normal(*b)) for a, b in pairs]


def binary_mixed(draw: Draw) -> list[Sample]:
    """And operands of other dtypes: a 0-dim one of the same category does not promote, among 0-dim ones it does."""
    double, small, half = torch.float64, torch.int32, torch.float16
    return [
        *binary(draw),
        call(draw.normal(B, 3), draw.normal(dtype=double)),
        call(draw.normal(dtype=double), draw.normal(B, 3, 4)),
        call(draw.normal(), draw.normal(dtype=double)),
        call(draw.normal(B, 3), draw.normal(3, dtype=double)),
        call(draw.ints(1, 9, B, 3), draw.normal()),
        call(draw.ints(1, 9, B, 3, dtype=small), draw.ints(1, 9)),
        call(draw.ints(1, 9), draw.normal(B, 3)),
        call(draw.ints(1, 9, B, 3), draw.ints(1, 9, 3)),
        call(draw.normal(B, 3).to(half), draw.normal()),
    ]


def binary_bits(draw: Draw) -> list[Sample]:
    """Two operands of whole numbers, or of truth values."""
    return [
        call(draw.ints(0, 6, B, 3), draw.ints(0, 6, B, 3)),
        call(draw.ints(0, 6, B, 3), draw.ints(0, 6, 3)),
        call(draw.ints(0, 6, B, 3, dtype=torch.int32), draw.ints(0, 6)),
        call(draw.ints(0, 6), draw.ints(0, 6, B, 2)),
    ]


def binary_bools(draw: Draw) -> list[Sample]:
    return [*binary_bits(draw), call(draw.bools(B, 3), draw.bools(3)), call(draw.bools(), draw.bools(B, 3)), call(draw.bools(), draw.bools())]


def with_scalar(*scalars: Any, whole: bool = False, **kwargs: Any) -> Make:
    """A tensor and literals."""

    def make(draw: Draw) -> list[Sample]:
        own = [draw.ints(1, 9, B, 3), draw.ints(1, 9)] if whole else [draw.normal(B, 3, 4), draw.normal(), draw.normal(3, dtype=torch.float64)]
        return [call(x, *scalars, **kwargs) for x in own]

    return make


def along_dim(*rest: Any, **kwargs: Any) -> Make:
    """`(x, dim, ...)` over dims in front, in the middle and counted from behind, on floats of several ranks; 0-dim ones too."""

    def make(draw: Draw) -> list[Sample]:
        x = draw.normal(B, 4, 6)
        return [call(x, d, *rest, **kwargs) for d in (0, 1, -1, -3)] + [call(draw.normal(4), 0, *rest, **kwargs)]

    return make


def reduced(draw: Draw) -> list[Sample]:
    """`(x, dim, keepdim)` of one dim."""
    x = draw.normal(B, 4, 6)
    return [call(x, 0), call(x, 1, True), call(x, -1), call(draw.normal(4), -1, True), call(draw.normal(), 0)]


def reduced_dims(draw: Draw) -> list[Sample]:
    """`(x, dims, keepdim)` of several dims; `[]` means every dim."""
    x = draw.normal(B, 4, 6)
    return [call(x, [0]), call(x, [1, -1], True), call(x, [-1, 0]), call(x, []), call(x, [], True), call(draw.normal(4), [0], True)]


def reduced_none(draw: Draw) -> list[Sample]:
    """And `None` for every dim."""
    x = draw.normal(B, 4, 6)
    return [*reduced_dims(draw), call(x, None), call(x, None, True), call(draw.normal(), None)]


def whole(draw: Draw) -> list[Sample]:
    """`(x)`, every dim."""
    return [call(draw.normal(B, 4, 3)), call(draw.normal(4)), call(draw.normal())]
