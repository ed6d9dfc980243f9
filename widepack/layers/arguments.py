"""Checks the modules of a wide layer, and converts its arguments and outputs: options, tensors, forms."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from ..errors import UsageError
from ..ir.values import Shared, Stacked, Value, WideValue
from ..registry.writer import EagerWriter

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

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


def checked_modules(modules: Any, member: type[nn.Module], layer: str) -> list[nn.Module]:
    """Returns the modules as a list. `layer` is the name of the wide layer, for messages.

    Raises:
        UsageError: There are no modules, the first is not of the class `member`, or a module would run code
            that a wide layer does not run.
    """
    if not isinstance(modules, Iterable):
        raise UsageError(f"{layer} takes a list of modules, not a {class_name(modules)}")
    members: list[nn.Module] = list(modules)
    if not members:
        raise UsageError(f"{layer}: there are no modules; give at least one {member.__name__}")
    if type(members[0]) is not member:
        raise UsageError(
            f"{layer} takes modules of class torch.nn.{member.__name__}, and member 0 is of class "
            f"{class_name(members[0])}. For a class of your own, or a module with parametrized weights, use "
            "widepack.fuse, which takes whole modules"
        )
    _refuse_instance_code(members, layer)
    return members


def _refuse_instance_code(modules: Sequence[Any], layer: str) -> None:
    """Raises UsageError for hooks and for a forward on an instance: a wide layer calls neither."""
    for i, module in enumerate(modules):
        for name, part in module.named_modules() if isinstance(module, nn.Module) else ():
            where = f"{name} of member {i}" if name else f"member {i}"
            if any(getattr(part, hooks) for hooks in _HOOKS):
                raise UsageError(
                    f"{layer}: {where} has hooks, which a wide layer does not call. "
                    "Remove them (weight_norm of torch.nn.utils is a hook)"
                )
            if "forward" in vars(part):
                raise UsageError(
                    f"{layer}: {where} has a forward of its own, which a wide layer does not call. "
                    "Use widepack.fuse, which takes such modules whole"
                )
