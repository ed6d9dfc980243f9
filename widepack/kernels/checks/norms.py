"""Checks the operands of normalizations: their kernels trust the sizes of weights and statistics."""

from __future__ import annotations

import torch
from torch import Tensor

from .require import OperandError, dense, require

_REDUCED = (torch.float16, torch.bfloat16)


def _per_channel(name: str, x: Tensor | None, channels: int, like: Tensor) -> None:
    """Checks one number for each channel, in the dtype of the input, or in float32 for a shorter one."""
    if x is None:
        return
    dense(name, x, 1)
    if x.shape[0] != channels:
        raise OperandError(f"{name} is for {x.shape[0]} channels; {channels} are needed")
    if x.dtype != like.dtype and not (like.dtype in _REDUCED and x.dtype is torch.float32):
        raise OperandError(f"{name} is {x.dtype}; {like.dtype} is needed")


def batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    *rest: object,
) -> None:
    """Checks batch normalizations with running statistics."""
    dense("input", input)
    if input.dim() < 2:
        raise OperandError(f"input has {input.dim()} dims; at least 2 are needed")
    given = {"weight": weight, "bias": bias, "running_mean": running_mean, "running_var": running_var}
    for name, x in given.items():
        _per_channel(name, x, input.shape[1], input)
    dtypes = {x.dtype for x in given.values() if x is not None}
    require(len(dtypes) < 2, "the weights and the statistics have different dtypes")
    require((running_mean is None) == (running_var is None), "running_mean and running_var belong together")


def batch_norm_without_statistics(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, *rest: object
) -> None:
    """Checks batch normalizations without running statistics."""
    batch_norm(input, weight, bias, None, None)
    require(rest and rest[0] is True, "training is not True, but there are no running statistics")


def group_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    N: int,  # the schema's names
    C: int,
    HxW: int,
    group: int,
    eps: float,
) -> None:
    """Checks `aten.native_group_norm`."""
    dense("input", input)
    require(group >= 1 and C >= 0 and C % group == 0, f"{C} channels do not form {group} groups")
    require(N >= 0 and HxW >= 0 and N * C * HxW == input.numel(), "N, C and HxW are not the sizes of input")
    _per_channel("weight", weight, C, input)
    _per_channel("bias", bias, C, input)


def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> None:
    """Checks `aten._weight_norm` and `aten._weight_norm_interface`."""
    dense("v", v)
    dense("g", g)
    require(v.numel() and v.dim() >= 1, f"v is {list(v.shape)}; it may not be empty")
    require(isinstance(dim, int) and -1 <= dim < v.dim(), f"dim is {dim}; v has {v.dim()} dims")
    if dim >= 0 and g.numel() != v.shape[dim]:
        raise OperandError(f"g has {g.numel()} numbers; dim {dim} of v has {v.shape[dim]}")
    if g.dtype != v.dtype and not (v.dtype in _REDUCED and g.dtype is torch.float32):
        raise OperandError(f"g is {g.dtype}; {v.dtype} is needed")


def weight_norm_kernel(v: Tensor, g: Tensor, dim: int = 0) -> None:
    """Checks `aten._weight_norm_interface`, which knows the first and the last dim alone."""
    weight_norm(v, g, dim)
    require(dim in (0, v.dim() - 1), f"dim is {dim}; 0 or {v.dim() - 1} are possible")
