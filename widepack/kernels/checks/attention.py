"""Checks the operands of the attention kernel for CPUs, which its public op checks before it calls it."""

from __future__ import annotations

from torch import Tensor
from torch import bool as bool_

from .require import OperandError, dense, of_shape, require


def attention(query: Tensor, key: Tensor, value: Tensor, *rest: object, **named: object) -> None:
    """Checks `aten.scaled_dot_product_attention`: on a CPU torch does not compare key and value."""
    dense("query", query)
    dense("key", key)
    dense("value", value)
    if min(key.dim(), value.dim()) < 2 or key.shape[-2] != value.shape[-2]:
        raise OperandError(f"key is {list(key.shape)} and value {list(value.shape)}; they differ in length")


def masked_attention(query: Tensor, key: Tensor, value: Tensor, *rest: object, **named: object) -> None:
    """Checks `widepack.masked_attention`. What the sizes of the mask may be, torch's op checks."""
    attention(query, key, value)
    mask = rest[0] if rest else named.get("attn_mask")
    if isinstance(mask, Tensor):
        dense("attn_mask", mask)
        require(
            mask.dtype.is_floating_point or mask.dtype == bool_, f"attn_mask is {mask.dtype}; bool is needed"
        )


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> None:
    """Checks `aten._scaled_dot_product_flash_attention_for_cpu`."""
    batch, heads, rows, width = dense("query", query, 4).shape
    columns = dense("key", key, 4).shape[2]
    of_shape("key", key, [batch, heads, columns, width], query)
    of_shape("value", value, [batch, heads, columns, width], query)
    require(query.dtype.is_floating_point, f"query is {query.dtype}; a floating dtype is needed")
    require(min(batch, heads, rows, columns, width) >= 1, "an operand is empty")
    for name, x in (("query", query), ("key", key), ("value", value)):
        require(x.stride(-1) == 1 or x.shape[-1] == 1, f"the last dim of {name} is not contiguous")
    if attn_mask is None:
        return
    require(not is_causal, "is_causal excludes attn_mask")
    sizes = dense("attn_mask", attn_mask, 2, 4).shape
    full = (batch, heads, rows, columns)[-len(sizes) :]
    if any(found not in (1, wanted) for found, wanted in zip(sizes, full)):
        raise OperandError(f"attn_mask is {list(sizes)}; it does not broadcast to {list(full)}")
    require(attn_mask.dtype in (query.dtype, query.new_empty(0).float().dtype), "attn_mask has another dtype")


def masked_softmax(self: Tensor, mask: Tensor, dim: int | None = None, mask_type: int | None = None) -> None:
    """Checks `aten._masked_softmax`, whose mask is for columns and rows, for a batch, or for all numbers."""
    dense("self", self)
    dense("mask", mask)
    require(self.numel(), f"self is {list(self.shape)}; it may not be empty")
    last = self.dim() - 1
    require(dim is None or dim in (-1, last), f"dim is {dim}; -1 is needed")
    shapes = {
        0: [*self.shape[-2:]],
        1: [self.shape[0], self.shape[-1]],
        2: [*self.shape],
        None: [*self.shape],
    }
    require(mask_type in shapes, f"mask_type is {mask_type}; 0, 1 or 2 are possible")
    require(mask_type not in (0, 1) or self.dim() == 4, f"self has {self.dim()} dims; 4 are needed")
    of_shape("mask", mask, shapes[mask_type])
