"""Provides what checks of operands share: the error, and conditions on sizes and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

INTEGERS = (torch.int32, torch.int64)
LARGEST = 2**31 - 1


Check = Callable[..., None]
CHECKS: dict[str, Check] = {}
"""The check of each of torch's ops that needs one, by its name in programs. widepack's own ops check their
operands themselves."""
OF_VALUES: set[str] = set()
"""Ops whose check reads values. A compiler traces sizes alone, so its code would run without the check."""
OF_SIZES: dict[str, tuple[str, ...]] = {}
"""Operands of ops of `OF_VALUES` whose sizes and types alone are checked."""

C = TypeVar("C", bound=Check)


class OperandError(RuntimeError):
    """Raised if an op would read or write outside its operands. The message names the operand."""


def check_of(*names: str, reads_values: bool = False, sizes_of: tuple[str, ...] = ()) -> Callable[[C], C]:
    """Says of which ops the decorated function is the check.

    Args:
        *names: The ops of aten, with their overloads.
        reads_values: Whether it reads values.
        sizes_of: The operands whose sizes and types alone it reads then.
    """

    def decorate(check: C) -> C:
        for name in names:
            CHECKS[f"aten.{name}"] = check
            if reads_values:
                OF_VALUES.add(f"aten.{name}")
            if sizes_of:
                OF_SIZES[f"aten.{name}"] = sizes_of
        return check

    return decorate


def require(condition: object, message: str) -> None:
    """Raises OperandError with the message unless the condition is true."""
    if not condition:
        raise OperandError(message)


def dense(name: str, x: Any, *ranks: int) -> Tensor:
    """Returns a tensor with memory of its own strides. Raises OperandError for other values and ranks."""
    if not isinstance(x, Tensor) or x.layout is not torch.strided:
        raise OperandError(f"{name} is not a dense tensor")
    if ranks and x.dim() not in ranks:
        wanted = " or ".join(map(str, ranks))
        raise OperandError(f"{name} has {x.dim()} dims; {wanted} are needed")
    return x


def of_shape(name: str, x: Any, shape: Sequence[int], like: Tensor | None = None) -> None:
    """Checks the shape of a tensor, and that its dtype is that of another. None is no tensor, and passes."""
    if x is None:
        return
    dense(name, x)
    if list(x.shape) != list(shape):
        raise OperandError(f"{name} is {list(x.shape)}; {list(shape)} is needed")
    if like is None or (x.device == like.device and _cast_by_autocast(x, like)):
        return
    if x.dtype != like.dtype or x.device != like.device:
        raise OperandError(f"{name} is {x.dtype} on {x.device}; {like.dtype} on {like.device} is needed")


def for_members(name: str, x: Any, members: int, sizes: Sequence[int | None], like: Tensor) -> None:
    """Checks a tensor of each member, or one for all members: `[N or 1, *sizes]`, where None is any size."""
    actual = dense(name, x, 1 + len(sizes)).shape
    require(actual[0] in (1, members), f"{name} is for {actual[0]} members; {members} are needed")
    shape = [actual[0], *(own if size is None else size for own, size in zip(actual[1:], sizes))]
    of_shape(name, x, shape, like)


def _cast_by_autocast(x: Tensor, like: Tensor) -> bool:
    """Returns whether autocast is on, and casts both tensors to one dtype before the op."""
    device = x.device.type
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return False
    return {x.dtype, like.dtype} <= {torch.float32, torch.get_autocast_dtype(device)}


def readable(*tensors: Tensor | None) -> bool:
    """Returns whether the values of these tensors can be read: not while a compiler traces sizes."""
    return not torch.compiler.is_compiling() and all(
        t is None or (type(t) in (Tensor, torch.nn.Parameter) and not t.is_meta) for t in tensors
    )


def between(name: str, x: Tensor, low: int, high: int) -> None:
    """Checks that all numbers of an integer tensor are from `low` to `high`, both included."""
    if not x.numel():
        return
    least, most = (int(v) for v in torch.aminmax(x))
    if least < low or most > high:
        raise OperandError(f"{name} contains {least if least < low else most}; {low} to {high} are possible")


def integers(name: str, x: Any, *ranks: int) -> Tensor:
    """Returns an int32 or int64 tensor. Raises OperandError for other values and ranks."""
    tensor = dense(name, x, *ranks)
    require(tensor.dtype in INTEGERS, f"{name} is {tensor.dtype}; int64 is needed")
    require(not tensor.is_neg(), f"{name} is a negated view; its numbers are needed")
    return tensor


def numbers(name: str, values: Any, count: int, low: int, high: int = LARGEST) -> None:
    """Checks a list of `count` integers from `low` to `high`."""
    if isinstance(values, (str, Tensor)) or len(values) != count:
        raise OperandError(f"{name} is {values!r}; {count} numbers are needed")
    for value in values:
        if isinstance(value, torch.SymInt):
            continue
        if not isinstance(value, int) or not low <= value <= high:
            raise OperandError(f"{name} contains {value!r}; numbers from {low} to {high} are possible")
