"""Registers samples: example arguments of an op, which tests and `widepack selftest` run its strategies with.

    @samples("linear")
    def _linear(draw: Draw) -> list[Sample]:
        return [call(draw.normal(B, 4), draw.normal(3, 4), draw.normal(3))]

Two seeds give the same number of samples with the same shapes, dtypes and literals; only the numbers in the
tensors differ. So N draws are the arguments of N members. Every batch has size `B`, and no other dim has: a
test can then hide the batch from a rule, as a program with a dynamic batch does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..ir.ops import full_name

Sample = tuple[tuple[Any, ...], dict[str, Any]]
B = 5  # the batch size of every sample
SAMPLES: dict[str, Make] = {}


class Draw:
    """Draws random tensors from one seed, for the samples of an op.

    `Draw(i)` gives the arguments of member i. Two draws must make the same calls with the same shapes, so
    that only the numbers differ.

    Args:
        seed: The seed of the random generator.

    Attributes:
        generator: The `torch.Generator`, for draws that no method offers.

    Example:
        >>> from widepack.primitives import Draw
        >>> draw = Draw(0)
        >>> draw.normal(5, 3).shape
        torch.Size([5, 3])
        >>> draw.ints(0, 10, 4).dtype
        torch.int64
    """

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Returns numbers of the standard normal distribution.

        Args:
            *shape: The sizes of the member's tensor.
            dtype: The dtype of the tensor.

        Returns:
            A tensor.

        Example:
            >>> x = draw.normal(2, 3)
        """
        return torch.randn(shape, generator=self.generator, dtype=dtype)

    def uniform(
        self, low: float, high: float, *shape: int, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Returns numbers that are uniform between `low` and `high`.

        Args:
            low: The lower bound.
            high: The upper bound.
            *shape: The sizes of the member's tensor.
            dtype: The dtype of the tensor.

        Returns:
            A tensor.

        Example:
            >>> x = draw.uniform(0.5, 2.0, 2, 3)
        """
        return low + (high - low) * torch.rand(shape, generator=self.generator, dtype=dtype)

    def ints(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Returns integers from `low`, included, to `high`, not included.

        Args:
            low: The least number.
            high: One more than the largest number.
            *shape: The sizes of the member's tensor.
            dtype: The dtype of the tensor.

        Returns:
            A tensor.

        Example:
            >>> index = draw.ints(0, 10, 2, 3)
        """
        return torch.randint(low, high, shape, generator=self.generator).to(dtype)

    def bools(self, *shape: int) -> torch.Tensor:
        """Returns truth values; about 60% are true.

        Args:
            *shape: The sizes of the member's tensor.

        Returns:
            A tensor of bool.

        Example:
            >>> mask = draw.bools(2, 3)
        """
        return torch.rand(shape, generator=self.generator) < 0.6

    def complex(self, *shape: int) -> torch.Tensor:
        """Returns complex64 numbers of the standard normal distribution.

        Args:
            *shape: The sizes of the member's tensor.

        Returns:
            A tensor of complex64.

        Example:
            >>> z = draw.complex(2, 3)
        """
        return torch.randn(shape, generator=self.generator, dtype=torch.complex64)


Make = Callable[[Draw], list[Sample]]


def call(*args: Any, **kwargs: Any) -> Sample:
    """Returns one sample of an op: the arguments of one call.

    Args:
        *args: Positional arguments of the op, in the order of its schema: tensors and literals.
        **kwargs: Arguments by name.

    Returns:
        The pair `(args, kwargs)`.

    Example:
        >>> import torch
        >>> from widepack.primitives import call
        >>> call(torch.ones(5, 3), 2, keepdim=True)[1]
        {'keepdim': True}
    """
    return args, kwargs


def samples(ops: str) -> Callable[[Make], Make]:
    """Returns a decorator that registers a function as the samples of these ops.

    ops: their names, with spaces between them.

    Raises:
        ValueError: An op has samples; the message names both files.
    """

    def add(make: Make) -> Make:
        for op in map(full_name, ops.split()):
            if op in SAMPLES:
                other, file = SAMPLES[op].__code__.co_filename, make.__code__.co_filename
                raise ValueError(f"{op}: samples are registered twice, in {other} and in {file}")
            SAMPLES[op] = make
        return make

    return add


def unary(draw: Draw) -> list[Sample]:
    """Floats of several ranks, inside and outside the domains of logarithms and inverses."""
    return [
        call(draw.normal(B, 3, 4)),
        call(draw.uniform(0.1, 0.9, 3)),
        call(draw.uniform(1, 2)),
        call(draw.normal(B, 2, dtype=torch.float64)),
    ]


def integers(draw: Draw) -> list[Sample]:
    """Integers."""
    return [
        call(draw.ints(-9, 9, B, 3)),
        call(draw.ints(-9, 9)),
        call(draw.ints(-9, 9, 2, B, 3, dtype=torch.int32)),
    ]


def bits(draw: Draw) -> list[Sample]:
    """Integers and truth values."""
    return [*integers(draw), call(draw.bools(B, 3))]


def complexes(draw: Draw) -> list[Sample]:
    """Complex numbers."""
    return [call(draw.complex(B, 3)), call(draw.complex())]


def binary(draw: Draw) -> list[Sample]:
    """Two float operands: of one shape, with broadcasting, and with a 0-dim operand."""
    pairs = [
        ((B, 3, 4), (B, 3, 4)),
        ((B, 3, 4), (4,)),
        ((3, 1), (B, 3, 4)),
        ((B, 3), ()),
        ((), (4,)),
        ((), ()),
    ]
    return [call(draw.normal(*a), draw.normal(*b)) for a, b in pairs]


def binary_mixed(draw: Draw) -> list[Sample]:
    """The samples of `binary`, and operands of two dtypes.

    In type promotion a 0-dim operand does not promote operands with dims of its category; it promotes 0-dim
    operands.
    """
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
    """Two integer operands."""
    return [
        call(draw.ints(0, 6, B, 3), draw.ints(0, 6, B, 3)),
        call(draw.ints(0, 6, B, 3), draw.ints(0, 6, 3)),
        call(draw.ints(0, 6, B, 3, dtype=torch.int32), draw.ints(0, 6)),
        call(draw.ints(0, 6), draw.ints(0, 6, B, 2)),
    ]


def binary_bools(draw: Draw) -> list[Sample]:
    """Two operands: integers, or truth values."""
    return [
        *binary_bits(draw),
        call(draw.bools(B, 3), draw.bools(3)),
        call(draw.bools(), draw.bools(B, 3)),
        call(draw.bools(), draw.bools()),
    ]


def with_scalar(*scalars: Any, whole: bool = False, **kwargs: Any) -> Make:
    """Returns samples of a tensor and these literals. whole: integers instead of floats."""

    def make(draw: Draw) -> list[Sample]:
        tensors = (
            [draw.ints(1, 9, B, 3), draw.ints(1, 9)]
            if whole
            else [draw.normal(B, 3, 4), draw.normal(), draw.normal(3, dtype=torch.float64)]
        )
        return [call(x, *scalars, **kwargs) for x in tensors]

    return make


def along_dim(*rest: Any, **kwargs: Any) -> Make:
    """Returns samples `(x, dim, *rest)` with the first dim, a middle dim, and dims counted from the end."""

    def make(draw: Draw) -> list[Sample]:
        x = draw.normal(B, 4, 6)
        return [call(x, d, *rest, **kwargs) for d in (0, 1, -1, -3)] + [
            call(draw.normal(4), 0, *rest, **kwargs)
        ]

    return make


def reduced(draw: Draw) -> list[Sample]:
    """`(x, dim, keepdim)` with one dim."""
    x = draw.normal(B, 4, 6)
    return [call(x, 0), call(x, 1, True), call(x, -1), call(draw.normal(4), -1, True), call(draw.normal(), 0)]


def reduced_dims(draw: Draw) -> list[Sample]:
    """`(x, dims, keepdim)` with several dims; `[]` means all dims."""
    x = draw.normal(B, 4, 6)
    return [
        call(x, [0]),
        call(x, [1, -1], True),
        call(x, [-1, 0]),
        call(x, []),
        call(x, [], True),
        call(draw.normal(4), [0], True),
    ]


def reduced_none(draw: Draw) -> list[Sample]:
    """The samples of `reduced_dims`, and `None` for all dims."""
    x = draw.normal(B, 4, 6)
    return [*reduced_dims(draw), call(x, None), call(x, None, True), call(draw.normal(), None)]


def whole(draw: Draw) -> list[Sample]:
    """`(x)`: all dims."""
    return [call(draw.normal(B, 4, 3)), call(draw.normal(4)), call(draw.normal())]
