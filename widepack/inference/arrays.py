"""Takes NumPy arrays and scalars as inputs of a call. NumPy is not imported for it."""

from __future__ import annotations

import sys
from typing import Any

import torch

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
