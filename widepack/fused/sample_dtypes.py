"""Converts the sample of a fused module to the CPU and to the dtypes that its weights have now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.utils._pytree as pytree

from ..capture.call import MemberCall
from ..ir.guards import InputLeaf
from ..ir.tensor_type import parse_slot
from ..spec.dtypes import dtype_name
from .programs import CPU


def with_dtypes(call: MemberCall, dtypes: Mapping[torch.dtype, torch.dtype]) -> MemberCall:
    """Returns a call with its tensors on the CPU. dtypes: the new dtype for each old one that changes."""

    def converted(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.detach().to(CPU, dtypes.get(value.dtype, value.dtype))

    args, kwargs = pytree.tree_map(converted, (call.args, call.kwargs))
    leaves = [_with_example(leaf, converted(leaf.example)) for leaf in call.leaves]
    return replace(call, args=args, kwargs=kwargs, leaves=tuple(leaves))


def _with_example(leaf: InputLeaf, example: torch.Tensor) -> InputLeaf:
    """Returns a leaf of the call with another example."""
    slot = parse_slot(leaf.type).with_dtype(dtype_name(example.dtype))
    return replace(leaf, example=example, type=str(slot))
