"""Defines the op `masked_attention`: attention that skips keys which the mask forbids.

    masked_attention(query, key, value, attn_mask, ...) = scaled_dot_product_attention(query, key, ...)
    query: [B, H, T, D]    key, value: [B, H, S, D]    attn_mask: broadcasts to [B, H, T, S]

On a CPU, torch's kernel computes the scores of all pairs and then adds the mask. This op takes the queries in
blocks. It looks at the rows of the mask that a block has, and runs torch's kernel on the keys that at least
one of these rows allows. So a window costs T times its width, and a causal mask about half. The mask may be
of any origin: an argument, a buffer, or computed from sizes.

torch's kernel gets the whole call where the op would save little, and where a query may attend to no key:
such a row is NaN or a mean of all values, as torch decides. A key with NaN or inf reaches fewer queries than
in torch, where it reaches those that may not attend to it too.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .checks.layers import attention as check_attention
from .checks.require import dense, require
from .library import NodeList, in_aten, own_op
from .replacements import attention, own_memory

OP = "widepack.masked_attention.default"
PLAIN = "aten.scaled_dot_product_attention.default"

BLOCK = 64
"""Queries in a block. In smaller ones torch's kernel takes longer to start, larger ones skip less."""
LEAST = 128
"""The least number of queries and of keys for which the op looks at the mask. Below, it would save little."""
CAUSAL_MOST = 1024
"""The most queries of `is_causal` that run in blocks. For more, torch's kernel skips as much by itself."""
_START = 1.5e6
"""FLOP that take about as long as the start of a block: 20 us on one core."""
_GATHERED = 0.7
"""Copies the keys of a block if they are at most this part of the keys between the first and the last."""

_Keys = slice | Tensor


def _fake(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **named: Any) -> Tensor:
    y: Tensor = torch.ops.aten.scaled_dot_product_attention.default(query, key, value, *rest, **named)
    return y


@own_op(
    "masked_attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float dropout_p=0.0, "
    "bool is_causal=False, *, float? scale=None, bool enable_gqa=False) -> Tensor",
    _fake,
)
def _masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    check_attention(query, key, value)
    if attn_mask is not None:  # what its sizes may be, torch's op checks
        boolean = dense("attn_mask", attn_mask).dtype == torch.bool
        require(boolean or attn_mask.is_floating_point(), f"attn_mask is {attn_mask.dtype}; bool is needed")
    blocks = None
    if not dropout_p and _can_skip(query, key, value, enable_gqa):
        if attn_mask is None:
            blocks = _causal_blocks(query, key) if is_causal else None
        elif not is_causal:
            blocks = mask_blocks(attn_mask, query, key)
    options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    if blocks is None:
        return attention(query, key, value, attn_mask, dropout_p, is_causal, **options)
    query, key, value = own_memory(query), own_memory(key), own_memory(value)
    y = torch.empty_like(query)  # torch's kernel gives its answer the memory order of the query
    for first, keys in blocks:
        rows = slice(first, min(first + BLOCK, query.shape[2]))
        mask = _causal_rows(rows, keys, query) if attn_mask is None else _part(attn_mask, rows, keys)
        y[:, :, rows] = torch.nn.functional.scaled_dot_product_attention(
            query[:, :, rows], _of_keys(key, keys), _of_keys(value, keys), mask, **options
        )
    return y


def _can_skip(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> bool:
    """Whether all pairs take much longer than the starts of the blocks, in torch's kernel for CPUs."""
    return (
        query.device.type == "cpu"
        and query.dim() == key.dim() == value.dim() == 4
        and key.shape[:3] == value.shape[:3]
        and query.shape[0] == key.shape[0]
        and (query.shape[1] == key.shape[1] or enable_gqa)  # torch repeats other operands
        and query.shape[2] >= LEAST
        and key.shape[2] >= LEAST
        and query.shape[3] == value.shape[3]
        and 4 * query.numel() * key.shape[2] >= 4 * _START * math.ceil(query.shape[2] / BLOCK)
    )


def _pays(blocks: int, pairs: int, query: Tensor, key: Tensor) -> bool:
    """Whether blocks that compute this number of pairs take less time than all pairs in one call."""
    saved = query.shape[2] * key.shape[2] - pairs
    return 4.0 * query.shape[0] * query.shape[1] * query.shape[3] * saved >= _START * blocks


def _causal_blocks(query: Tensor, key: Tensor) -> list[tuple[int, _Keys]] | None:
    """Returns the blocks of `is_causal`: query i attends to the keys up to i."""
    starts = range(0, query.shape[2], BLOCK)
    ends = [min(key.shape[2], start + BLOCK) for start in starts]
    if query.shape[2] > CAUSAL_MOST or not _pays(len(ends), BLOCK * sum(ends), query, key):
        return None
    return [(start, slice(0, end)) for start, end in zip(starts, ends)]


def _causal_rows(rows: slice, keys: _Keys, like: Tensor) -> Tensor:
    assert isinstance(keys, slice)
    i = torch.arange(rows.start, rows.stop, device=like.device).unsqueeze(1)
    return i >= torch.arange(keys.stop, device=like.device)


def mask_blocks(mask: Tensor, query: Tensor, key: Tensor) -> list[tuple[int, _Keys]] | None:
    """Returns the first query of each block, and the keys that it may attend to.

    Returns None if the blocks would save little, or a query may attend to no key.
    """
    queries, keys = query.shape[2], key.shape[2]
    full = (*query.shape[:2], queries, keys)[-mask.dim() :]
    if not 2 <= mask.dim() <= 4 or tuple(mask.shape[-2:]) != (queries, keys):
        return None
    if any(blocks not in (1, wanted) for blocks, wanted in zip(mask.shape, full)):
        return None
    boolean = mask.dtype == torch.bool
    numbers = mask.view(torch.uint8) if boolean else mask  # a maximum is much faster than `any`
    least = 0 if boolean else torch.finfo(mask.dtype).min / 2  # -inf, and the least number, which many use
    if numbers.amax(-1).le(least).any():
        return None
    if mask.dim() > 2:
        numbers = numbers.amax(tuple(range(mask.dim() - 2)))
    whole = queries - queries % BLOCK
    parts = [torch.unflatten(numbers[:whole], 0, (-1, BLOCK)).amax(1)]
    if whole < queries:
        parts.append(numbers[whole:].amax(0, keepdim=True))
    read = torch.cat(parts).le(least).logical_not_()  # [blocks, keys]; NaN is allowed, as in torch
    counts = read.sum(1).tolist()
    first = read.to(torch.uint8).argmax(1).tolist()
    end = (keys - read.flip(1).to(torch.uint8).argmax(1)).tolist()
    blocks: list[tuple[int, _Keys]] = []
    pairs = 0
    for at, (count, begin, stop) in enumerate(zip(counts, first, end)):
        gathered = count <= _GATHERED * (stop - begin)
        blocks.append((at * BLOCK, read[at].nonzero().squeeze(1) if gathered else slice(begin, stop)))
        pairs += BLOCK * (count if gathered else stop - begin)
    return blocks if _pays(len(blocks), pairs, query, key) else None


def _of_keys(x: Tensor, keys: _Keys) -> Tensor:
    return x[:, :, keys] if isinstance(keys, slice) else x.index_select(2, keys)


def _part(mask: Tensor, rows: slice, keys: _Keys) -> Tensor:
    of_rows = mask[..., rows, :]
    return of_rows[..., keys] if isinstance(keys, slice) else of_rows.index_select(-1, keys)


@in_aten(OP)
def _in_aten(new: NodeList, _: int, *args: Any, **kwargs: Any) -> None:
    new.add(PLAIN, *args, **kwargs)
