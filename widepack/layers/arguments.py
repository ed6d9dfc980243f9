"""Converts the arguments and answers of wide layers: options, tensors by name, forms, and keys for caches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from ..ir.values import Shared, Stacked, Value, WideValue
from ..registry.writer import EagerWriter

Form = tuple[Any, ...]  # the sizes of a tensor, and its dtype at the end


def shared_value(value: Tensor) -> WideValue:
    """Marks a tensor `[...]` as one value for all members."""
    return Shared(Value(None, value))


def option_list(value: Any, count: int) -> list[int]:
    """Returns an option of `torch.nn` (one number, or `count` of them) as a list of `count` numbers."""
    numbers = list(value) if isinstance(value, (list, tuple)) else [value]
    return numbers * count if len(numbers) == 1 else numbers


def stack_results(writer: EagerWriter, result: Any) -> Any:
    """Returns what a strategy computed as Values `[N, ...]`. Keeps tuples and None."""
    if isinstance(result, (list, tuple)):
        return tuple(stack_results(writer, r) for r in result)
    return None if result is None else writer.stack(result)


def tensors_in(result: Any) -> Any:
    """Returns the tensors of Values. Keeps tuples and None."""
    if isinstance(result, tuple):
        return tuple(tensors_in(r) for r in result)
    return None if result is None else result.fake


def literals(arguments: Any) -> Any:
    """Returns a hashable key of the arguments without their tensors: each tensor is replaced by a mark."""
    if isinstance(arguments, (Shared, Stacked)):
        return Value
    if isinstance(arguments, (list, tuple)):
        return tuple(map(literals, arguments))
    if isinstance(arguments, dict):
        return tuple((k, literals(v)) for k, v in arguments.items())
    return type(arguments), arguments


def named_tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[int | str, Tensor]]:
    """Yields each tensor of a call with the position or the name of its argument."""
    arguments: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for name, argument in arguments:
        for leaf in pytree.tree_leaves(argument):
            if isinstance(leaf, Tensor):
                yield name, leaf


def device_type(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Returns the device type of the first tensor of a call. Default: `"cpu"`."""
    if args and isinstance(args[0], Tensor):
        return args[0].device.type
    return next((t.device.type for _, t in named_tensors(args, kwargs)), "cpu")


def member_on_meta(tensor: Tensor, autocast: bool) -> Tensor:
    """Returns one member's part of a tensor on the meta device. With autocast every float is float32."""
    dtype = torch.float32 if autocast and tensor.is_floating_point() else tensor.dtype
    return torch.empty(tensor.shape[1:], dtype=dtype, device="meta")


def form_of(tensor: Tensor, first_axis: int = 0) -> Form:
    """Returns the sizes from `first_axis` on, and the dtype."""
    return (*tensor.shape[first_axis:], tensor.dtype)


def class_name(value: Any) -> str:
    """Returns the full name of a value's class."""
    return f"{type(value).__module__}.{type(value).__qualname__}"
