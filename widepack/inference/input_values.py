"""Defines what a caller may give as an input: tensors, NumPy arrays, `widepack.each`; and describes others"""

from __future__ import annotations

import numbers
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from widepack_artifacts.errors import some

from ..errors import InputError


def is_array(value: Any) -> bool:
    """Returns whether a value is a NumPy array or scalar."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic))


def tensor_of(value: Any, title: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns a NumPy array or scalar as a tensor on a device.

    Args:
        value: The array.
        title: The input in messages: `input x`.
        dtype: The dtype that the model takes. An array of another one is not converted.
        device: Where the tensor is placed.

    Raises:
        InputError: torch has no such dtype, the model takes another one, or numbers are masked out.
    """
    name = str(dtype).removeprefix("torch.")
    numpy = sys.modules["numpy"]
    if type(value) is not numpy.ndarray and numpy.ma.is_masked(value):
        raise InputError(
            f"{title} is a masked array, and the model computes with all of its numbers; give a number for "
            "the masked ones with .filled(...)"
        )
    try:
        # a copy, where torch cannot read the memory as it is: read-only, negative strides, other byte order
        readable = numpy.require(value, value.dtype.newbyteorder("="), ["W", "C"])
        found = torch.from_numpy(readable)
    except TypeError as e:
        way = f"; give it .astype({name!r})" if value.dtype == object and name in numpy.sctypeDict else ""
        raise InputError(f"{title} is a NumPy array of {value.dtype}; the model takes {name}{way}") from e
    if found.dtype != dtype:
        way = f".astype({name!r})" if name in numpy.sctypeDict else f"as a tensor of torch.{name}"
        raise InputError(f"{title} is {value.dtype}, the model takes {name}; give it {way}")
    return found.to(device)


class Each:
    """An input that has one value for each member, `[N, ...]`. `widepack.each` makes it."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"widepack.each({self.value!r})"


def each(value: Any) -> Each:
    """Marks an input of a call as one value for each member.

    Args:
        value: A tensor `[N, ...]`, or a list of N tensors of one shape. N is the number of loaded members.

    Returns:
        The marked input, to be passed in place of the tensor. Inputs without a mark are the same for all
        members.

    Example:
        >>> y = ens(x, h=widepack.each(h))  # member i gets x and h[i]
    """
    return Each(value)


def each_if_tensor(value: Any) -> Any:
    """Marks an input that has tensors as one value for each member."""
    return Each(value) if holds_tensor(value) else value


def holds_tensor(value: Any) -> bool:
    """Returns whether an input is a tensor, or a container with a tensor in it."""
    if isinstance(value, Mapping):
        return any(map(holds_tensor, value.values()))
    return (
        isinstance(value, torch.Tensor)
        or is_array(value)
        or (isinstance(value, (list, tuple)) and any(map(holds_tensor, value)))
    )


_MAX_SHAPES = 3  # the most shapes that a message lists


def describe(value: Any) -> str:
    """Returns what a value is: `a tuple of 2`, `a dict with the keys a, b`, `a Tensor`, `None`."""
    if value is None:
        return "None"
    name = type(value).__name__
    if isinstance(value, (list, tuple)):
        content = f" of {len(value)}"
    elif isinstance(value, Mapping):
        content = f" with the keys {', '.join(map(str, value))}"
    else:
        content = ""
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}{content}"


def different_shapes(values: Sequence[Any]) -> str:
    """Returns the shapes of the tensors in a list, as the end of a message; "" if they are equal."""
    shapes = list(dict.fromkeys(str(list(v.shape)) for v in values if isinstance(v, torch.Tensor)))
    return f" with shapes {some(shapes, _MAX_SHAPES)}" if len(shapes) > 1 else ""


def way_to_tensor(value: Any, name: str, dtype: torch.dtype) -> str:
    """Returns how a caller makes a tensor of a value, as the end of a message; "" if it is not known.

    name: of the input. dtype: what the model takes.
    """
    text = name if name.isidentifier() else "..."
    first = value
    while isinstance(first, (list, tuple)) and first:
        first = first[0]
    if isinstance(first, numbers.Number):
        is_ids = dtype == torch.int64 and first is not value
        tokenizer = " (a tokenizer gives tensors with return_tensors='pt', padding=True)" if is_ids else ""
        return f"; make one: torch.tensor({text}, dtype={dtype}){tokenizer}"
    if isinstance(first, torch.Tensor) or is_array(first):
        return (
            f"; a list with one value for each member is given as widepack.each({text}), and a batch as one "
            "tensor (torch.stack)"
        )
    return f"; give it as numpy.asarray({text})" if hasattr(value, "__array__") else ""
