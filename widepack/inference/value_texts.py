"""Describes the values of a call for messages: what a value is, and how a caller makes a tensor of it."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .arrays import is_array

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
    more = ", ..." if len(shapes) > _MAX_SHAPES else ""
    return f" with shapes {', '.join(shapes[:_MAX_SHAPES])}{more}" if len(shapes) > 1 else ""


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
