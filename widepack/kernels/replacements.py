"""Replaces ops that end the process, leave their values, or lose digits, on operands that a program may have.

A replacement returns what the op returns, and has the op's parameters. It decides nothing by values, so that
it can be traced: compiled programs contain it too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import exact_norms

_SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)


def reshape_alias(x: Tensor, size: Sequence[int], stride: Sequence[int]) -> Tensor:
    """Computes `aten._reshape_alias`, which checks nothing, by the op that it is a part of."""
    return x.reshape(size)


def empty(size: Sequence[int], **options: Any) -> Tensor:
    """Computes `aten.empty`. A program must not return memory that it never wrote: this is 0."""
    options.pop("memory_format", None)
    return torch.zeros(size, **options)


def empty_like(self: Tensor, **options: Any) -> Tensor:
    """Computes `aten.empty_like` as `empty` computes `aten.empty`."""
    return torch.zeros_like(self, **options)


def new_empty(self: Tensor, size: Sequence[int], **options: Any) -> Tensor:
    """Computes `aten.new_empty` as `empty` computes `aten.empty`."""
    return self.new_zeros(size, **options)


def as_strided(
    x: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Tensor:
    """Computes `aten.as_strided` over the value alone, which may be a part of one for all members."""
    return torch.as_strided(x.clone(memory_format=torch.contiguous_format), size, stride, storage_offset)


def as_strided_scatter(
    x: Tensor, src: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Tensor:
    """Computes `aten.as_strided_scatter` over the value alone."""
    return torch.as_strided_scatter(
        x.clone(memory_format=torch.contiguous_format), src, size, stride, storage_offset
    )


def stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Computes `aten._stack`, which does not check its tensors, by the op that checks them."""
    return torch.stack(list(tensors), dim)


def divide(self: Any, other: Any, *, rounding_mode: str | None = None) -> Tensor:
    """Computes `aten.div.Tensor_mode`. The processor stops at the least integer divided by -1.

    torch rounds with `trunc` by the instruction of the processor. Here -1 is divided by as a negation, which
    gives the least integer again, as `floor` does.
    """
    dtype = torch.result_type(self, other)
    if rounding_mode != "trunc" or dtype not in _SIGNED:
        return torch.div(self, other, rounding_mode=rounding_mode)
    if not isinstance(other, Tensor):
        other = torch.scalar_tensor(other, dtype=dtype, device=self.device)
    negative = other == -1
    quotient = torch.div(self, torch.where(negative, 1, other), rounding_mode="trunc")
    return torch.where(negative, -self.to(dtype), quotient)


def least_common_multiple(self: Tensor, other: Tensor) -> Tensor:
    """Computes `aten.lcm`. The processor stops if the least integer is divided by a divisor of -1."""
    dtype = torch.result_type(self, other)
    divisor = torch.gcd(self, other)
    quotient = divide(self.to(dtype), torch.where(divisor == 0, 1, divisor), rounding_mode="trunc")
    return torch.where(divisor == 0, 0, (quotient * other).abs())


def median(self: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Computes `aten.median.dim`, whose kernel reads an expanded tensor as if its stride were 1."""
    values, indices = torch.median(own_memory(self), dim, keepdim)
    return values, indices


def nanmedian(self: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Computes `aten.nanmedian.dim` as `median` computes `aten.median.dim`."""
    values, indices = torch.nanmedian(own_memory(self), dim, keepdim)
    return values, indices


def eigenvalues(self: Tensor) -> Tensor:
    """Computes `aten.linalg_eigvals`. LAPACK writes outside of its memory for a matrix that is not finite.

    torch refuses such a matrix in `linalg_eig`, but not here. Its eigenvalues are NaN, and LAPACK gets zeros
    in its place. The other matrices of a batch keep their values.
    """
    if self.dim() < 2 or self.is_meta:
        plain: Tensor = torch.ops.aten.linalg_eigvals.default(self)
        return plain
    finite = torch.isfinite(self).all(-1).all(-1)
    values: Tensor = torch.ops.aten.linalg_eigvals.default(torch.where(finite[..., None, None], self, 0))
    return values.masked_fill(~finite[..., None], complex("nan+nanj"))


def attention(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **named: Any) -> Tensor:
    """Computes `aten.scaled_dot_product_attention`. torch gives the answer the strides of the query.

    Where elements of the query are one place in memory, the kernel does not write all of the answer.
    """
    given = own_memory(query), own_memory(key), own_memory(value)
    y: Tensor = torch.ops.aten.scaled_dot_product_attention.default(*given, *rest, **named)
    return y


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, *rest: Any, **named: Any
) -> tuple[Tensor, Tensor]:
    """Computes `aten._scaled_dot_product_flash_attention_for_cpu` as `attention` its public op."""
    given = own_memory(query), own_memory(key), own_memory(value)
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    y, logarithms = op(*given, *rest, **named)
    return y, logarithms


def own_memory(x: Tensor) -> Tensor:
    """Returns the tensor, or a contiguous copy if several of its elements may be one place in memory.

    A tensor with sizes that a compiler traces is returned as it is, unless a stride is 0.
    """
    strides = x.stride()
    if x.is_contiguous():
        return x
    if 0 in strides:
        return x.contiguous()
    if any(isinstance(v, torch.SymInt) for v in (*strides, *x.shape)):
        return x
    reach = 0
    for stride, size in sorted((stride, size) for stride, size in zip(strides, x.shape) if size > 1):
        if stride <= reach:
            return x.contiguous()
        reach += stride * (size - 1)
    return x


def with_dense(name: str, *places: int) -> Callable[..., Any]:
    """Returns an op that gets contiguous tensors. Its kernel reads them as if their stride were 1.

    name: of the op in aten, with its overload. places: the positions of these tensors in the schema.
    """
    packet, overload = name.split(".")
    op = getattr(getattr(torch.ops.aten, packet), overload)
    names = {op._schema.arguments[place].name for place in places}

    def run(*args: Any, **kwargs: Any) -> Any:
        given = [x.contiguous() if k in places and isinstance(x, Tensor) else x for k, x in enumerate(args)]
        named = {k: x.contiguous() if k in names and isinstance(x, Tensor) else x for k, x in kwargs.items()}
        return op(*given, **named)

    return run


def with_small_memory(name: str) -> Callable[..., Any]:
    """Returns an op that copies its first tensor alone. Its kernel copies all of the memory that it is in.

    name: of the op in aten, with its overload.
    """
    packet, overload = name.split(".")
    op = getattr(getattr(torch.ops.aten, packet), overload)

    def run(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        return op(small_memory(self), *args, **kwargs)

    return run


def small_memory(x: Tensor) -> Tensor:
    """Returns the tensor, or a copy of it if it is a small part of its memory."""
    size: Any = x.numel() * x.element_size()
    try:
        memory: Any = x.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):  # a tensor of `vmap`, or one without memory
        return x
    if type(size) is not int or type(memory) is not int or memory <= 2 * size:  # symbols are not compared
        return x
    return x.clone(memory_format=torch.contiguous_format)


REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "aten._scaled_dot_product_flash_attention_for_cpu.default": flash_attention,
    "aten.scaled_dot_product_attention.default": attention,
    "aten._native_batch_norm_legit.no_stats": exact_norms.batch_norm_of_batch,
    "aten._native_batch_norm_legit_functional.default": exact_norms.batch_norm_functional,
    "aten._reshape_alias.default": reshape_alias,
    "aten._stack.default": stack,
    "aten.as_strided.default": as_strided,
    "aten.as_strided_scatter.default": as_strided_scatter,
    "aten.empty.memory_format": empty,
    "aten.empty_like.default": empty_like,
    "aten.new_empty.default": new_empty,
    "aten.linalg_eigvals.default": eigenvalues,
    "aten.group_norm.default": exact_norms.group_norm,
    "aten.lcm.default": least_common_multiple,
    "aten.median.dim": median,
    "aten.nanmedian.dim": nanmedian,
    "aten.native_group_norm.default": exact_norms.native_group_norm,
    "aten.div.Scalar_mode": divide,
    "aten.div.Tensor_mode": divide,
}
"""The replacement of each op by its name in programs."""

for _name, _places in {
    "_embedding_bag.default": (1, 2),
    "_embedding_bag_forward_only.default": (1, 2),
    "_masked_softmax.default": (0, 1),
    "_weight_norm_interface.default": (0, 1),
    "ctc_loss.IntList": (1,),
    "gru.data": (1,),
    "lstm.data": (1,),
    "rnn_relu.data": (1,),
    "rnn_tanh.data": (1,),
}.items():
    REPLACEMENTS[f"aten.{_name}"] = with_dense(_name, *_places)

for _name in ("copy.default", "diagonal_scatter.default", "select_scatter.default", "slice_scatter.default"):
    REPLACEMENTS[f"aten.{_name}"] = with_small_memory(_name)
