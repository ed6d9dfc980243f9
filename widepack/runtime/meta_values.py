"""Runs ops on torch's meta device, where tensors have sizes and no memory."""

from __future__ import annotations

from typing import Any

import torch

from ..ir import ops
from ..ir.encoding import decode, map_arguments
from ..ir.limits import recurrent_result
from ..ir.op_records import is_recurrent_layer

META = torch.device("meta")
_ALIKE = frozenset(
    f"aten.{name}.{overload}"
    for names, overload in (
        (
            "relu gelu sigmoid silu tanh hardswish hardsigmoid relu6 leaky_relu elu softplus mish neg exp",
            "default",
        ),
        ("add sub mul div", "Tensor"),
        ("add sub mul div", "Scalar"),
    )
    for name in names.split()
)
"""Ops whose result is like their operands, if these are alike."""


def metas(value: Any) -> Any:
    """A value with its tensors on the meta device."""
    return map_arguments(value, _on_meta, as_lists=True)


def _on_meta(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.device == META:
        return value
    if value.layout is not torch.strided:
        return torch.empty(value.shape, dtype=value.dtype, device=META)
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=META)


def run_on_meta(op: str, args: Any, kwargs: Any) -> Any:
    """The result of an op on the meta device, also of an op that makes a tensor from nothing."""
    named = decode(kwargs, META)
    if any(name == "device" for name, _, _ in ops.arguments(op)):
        named["device"] = META
    if is_recurrent_layer(op) and (result := recurrent_result(op, args, kwargs)) is not None:
        return result
    if not named and (alike := like_operand(op, args)) is not None:
        return alike
    return ops.checked(op)(*decode(args, META), **named)


def like_operand(op: str, args: Any) -> torch.Tensor | None:
    """Returns the result of an op whose result is like its first operand; None for another one.

    torch takes half a millisecond for it, and for some ops it imports its compiler first, which takes a
    second. The first operand is dense and floating. The others have its dtype, and its shape and memory
    order, or repeat over it. The strides of dims of size 1 may be others than torch's.
    """
    count = 2 if op.endswith(".Tensor") else 1
    if op not in _ALIKE or not count <= len(args) <= len(ops.arguments(op)):
        return None
    x, others, numbers = args[0], args[1:count], args[count:]
    if not all(isinstance(t, torch.Tensor) and t.device == META for t in args[:count]):
        return None
    if not all(isinstance(n, (int, float)) for n in numbers) or not x.is_floating_point() or not _is_dense(x):
        return None
    if not all(t.dtype == x.dtype and _fits(t, x) for t in others):
        return None
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=META)


def _is_dense(x: torch.Tensor) -> bool:
    """Whether each number has a place of its own, with none between them."""
    expected = 1
    for stride, size in sorted((s, n) for n, s in zip(x.shape, x.stride()) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return x.numel() > 0


def _fits(y: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether an operand does not change the shape and the memory order of an op's result."""
    if y.shape == x.shape:
        return y.stride() == x.stride()
    pairs = zip(reversed(y.shape), reversed(x.shape))
    return 0 < y.dim() <= x.dim() and all(n in (1, m) for n, m in pairs) and y.numel() < x.numel()


def meta_key(value: Any) -> Any:
    """A key that is equal for arguments of equal results on the meta device.

    Numbers of different types have different keys: True, 1 and 1.0 are equal in Python.
    """
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.stride(), value.is_conj()
    if isinstance(value, (list, tuple)):
        return tuple(meta_key(v) for v in value)
    if isinstance(value, dict):
        return tuple((k, meta_key(v)) for k, v in value.items())
    if isinstance(value, float):
        return float, repr(value)  # NaN is not equal to itself
    return type(value), value
