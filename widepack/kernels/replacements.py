"""Replaces ops that end the process, leave their values, or lose digits, on operands that a program may have.

A replacement returns what the op returns, and has the op's parameters. It decides nothing by values, so that
it can be traced: compiled programs contain it too.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import exact_norms
from .checks.require import OperandError

_NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)
_MOST = 2**63
_MOST_EXPONENT = 64
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


def contiguous(x: Tensor) -> Tensor:
    """Returns the tensor in contiguous memory."""
    return x.contiguous()


def resolved(x: Tensor) -> Tensor:
    """Returns the tensor with its conjugation in memory, not as a view that says so."""
    return x.resolve_conj()


def alone(x: Tensor) -> Tensor:
    """Returns a copy of the tensor, which may be a part of one for all members."""
    return x.clone(memory_format=torch.contiguous_format)


def prepared(name: str, prepare: Callable[[Tensor], Tensor], *places: int) -> Callable[..., Any]:
    """Returns an op that gets some of its tensors in another memory.

    Args:
        name: The op in aten, with its overload.
        prepare: Returns a tensor of the same numbers.
        *places: The positions of these tensors in the schema.
    """
    packet, overload = name.split(".")
    op = getattr(getattr(torch.ops.aten, packet), overload)
    names = [(place, op._schema.arguments[place].name) for place in places]

    def run(*args: Any, **kwargs: Any) -> Any:
        given = list(args)
        for place, key in names:
            if place < len(given):
                if isinstance(given[place], Tensor):
                    given[place] = prepare(given[place])
            elif isinstance(kwargs.get(key), Tensor):
                kwargs[key] = prepare(kwargs[key])
        return op(*given, **kwargs)

    return run


attention: Callable[..., Tensor] = prepared("scaled_dot_product_attention.default", own_memory, 0, 1, 2)


def limited(name: str, op: Callable[..., Any]) -> Callable[..., Any]:
    """Returns an operator that takes numbers of 64 bits and returns one.

    name: in messages. The operator raises OperandError for other operands, for which it would repeat texts,
    and for larger results, which may never end.
    """

    def run(*args: Any) -> Any:
        for value in args:
            if not isinstance(value, _NUMBERS):
                raise OperandError(f"{name} reads {type(value).__name__}, which is not a number")
        if op is operator.pow and isinstance(args[1], int) and abs(args[1]) > _MOST_EXPONENT:
            raise OperandError(f"{name} has the exponent {args[1]}; at most {_MOST_EXPONENT} is allowed")
        result = op(*args)
        if isinstance(result, int) and abs(result) >= _MOST:
            raise OperandError(f"{name} gives a number of {result.bit_length()} bits; at most 63 are allowed")
        return result

    run.__name__ = name
    return run


REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "aten.scaled_dot_product_attention.default": attention,
    "aten._native_batch_norm_legit.no_stats": exact_norms.batch_norm_of_batch,
    "aten._native_batch_norm_legit_functional.default": exact_norms.batch_norm_functional,
    "aten._reshape_alias.default": reshape_alias,
    "aten._stack.default": stack,
    "aten.empty.memory_format": empty,
    "aten.empty_like.default": empty_like,
    "aten.new_empty.default": new_empty,
    "aten.linalg_eigvals.default": eigenvalues,
    "aten.group_norm.default": exact_norms.group_norm,
    "aten.lcm.default": least_common_multiple,
    "aten.native_group_norm.default": exact_norms.native_group_norm,
    "aten.div.Scalar_mode": divide,
    "aten.div.Tensor_mode": divide,
}
"""The replacement of each op by its name in programs."""

_PREPARED: dict[Callable[[Tensor], Tensor], dict[str, tuple[int, ...]]] = {
    # the program's value alone is the memory that these ops read
    alone: {"as_strided.default": (0,), "as_strided_scatter.default": (0,)},
    # their kernels read these tensors as if their stride were 1
    contiguous: {
        "_embedding_bag.default": (1, 2),
        "_embedding_bag_forward_only.default": (1, 2),
        "_masked_softmax.default": (0, 1),
        "_weight_norm_interface.default": (0, 1),
        "ctc_loss.IntList": (1,),
        "gru.data": (1,),
        "lstm.data": (1,),
        "rnn_relu.data": (1,),
        "rnn_tanh.data": (1,),
    },
    # Medians read an expanded tensor as if its stride were 1. Attention gives its answer the strides of the
    # query: where elements of the query are one place in memory, the kernel does not write all of the answer.
    own_memory: {
        "median.dim": (0,),
        "nanmedian.dim": (0,),
        "_scaled_dot_product_flash_attention_for_cpu.default": (0, 1, 2),
    },
    resolved: {"view_as_real.default": (0,)},
    # their kernels copy all of the memory that their first tensor is in
    small_memory: {
        "copy.default": (0,),
        "diagonal_scatter.default": (0,),
        "select_scatter.default": (0,),
        "slice_scatter.default": (0,),
    },
}
for _prepare, _ops in _PREPARED.items():
    for _name, _places in _ops.items():
        REPLACEMENTS[f"aten.{_name}"] = prepared(_name, _prepare, *_places)
