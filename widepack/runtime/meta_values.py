"""Runs ops on torch's meta device, where tensors have sizes and no memory."""

from __future__ import annotations

from typing import Any

import torch

from ..ir import ops
from ..ir.encoding import decode, map_arguments
from ..ir.limits import recurrent_result
from ..ir.op_records import is_recurrent_layer

META = torch.device("meta")


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
    return ops.checked(op)(*decode(args, META), **named)


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
