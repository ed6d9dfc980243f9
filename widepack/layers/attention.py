"""Defines the wide layer of multi-head attention. Projections run the strategies of linear layers.

    y[i] = softmax(q k^T / sqrt(D) + masks) v Wo[i]^T + bo[i]     q, k, v = query Wq[i]^T + bq[i], ...     D a
    head's width

A boolean mask has True where a position is masked out. A float mask is added to the scores. Masks have the
member axis in front, as all inputs have.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout, pad

from ..errors import UsageError
from ..ir.ops import full_name
from ..registry.registry import strategies_of
from .base import WideLayer

_ATTENTION = "scaled_dot_product_attention"


class WideMultiheadAttention(WideLayer):
    """N `nn.MultiheadAttention` as one module.

    Shape:
        - `query`: `[N, L, B, E]`; with `batch_first` `[N, B, L, E]`; without a batch `[N, L, E]`.
        - `key`, `value`: the same, with S positions instead of L.
        - `key_padding_mask`: `[N, B, S]` or `[N, S]`.
        - `attn_mask`: `[N, L, S]` or `[N, B * heads, L, S]`.
        - Returns the output, shaped as `query`, and the weights `[N, B, L, S]`, or None with
          `need_weights=False`. With `average_attn_weights=False` the weights are `[N, B, heads, L, S]`.
    """

    ops = ("linear", _ATTENTION)

    def wide(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        m = self.options
        self._check_call(need_weights, attn_mask, is_causal)
        unbatched = query.ndim == 3
        q, k, v = (self._heads(x) for x in self._projected(query, key, value))
        k, v = self._with_extra_positions(k, v)
        causal = is_causal and key_padding_mask is None and not need_weights
        extra = (m.bias_k is not None) + m.add_zero_attn
        mask = self._mask(None if causal else attn_mask, key_padding_mask, q, extra)
        p = m.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = self.run("matmul", q * (1.0 / m.head_dim) ** 0.5, k.transpose(-1, -2), main=False)
            weights = dropout(torch.softmax(scores if mask is None else scores + mask, -1), p)
            y = self.run("matmul", weights, v, main=False)
            weights = weights.mean(2) if average_attn_weights else weights
            weights = weights.squeeze(1) if unbatched else weights
        else:
            y = self.run(_ATTENTION, q, k, v, mask, p, causal, main=False)
        out: Any = self.out_proj
        y = y.transpose(2, 3).flatten(3)  # [N, B, L, E]
        y = self.run("linear", y, out.weight, out.bias, main=False)
        return y.squeeze(1) if unbatched else y if m.batch_first else y.transpose(1, 2), weights

    def _check_call(self, need_weights: bool, attn_mask: Tensor | None, is_causal: bool) -> None:
        """Raises UsageError for a strategy that cannot give weights, and for `is_causal` without a mask."""
        linear = strategies_of(full_name("linear"))
        if need_weights and self.strategy not in ("auto", "sequential", *linear):
            raise UsageError(
                f"{self.name}: strategy {self.strategy!r} gives no weights. "
                f"Call with need_weights=False, or choose one of {', '.join([*linear, 'sequential', 'auto'])}"
            )
        if is_causal and attn_mask is None:
            raise UsageError(f"{self.name}: is_causal=True needs attn_mask; give the causal mask too")

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Returns queries, keys and values `[N, B, *, E]`. Projections of one input run as one product."""
        ordered = {id(x): self._batch_first(x) for x in (query, key, value)}
        q, k, v = (ordered[id(x)] for x in (query, key, value))
        bias: Any = self.in_proj_bias
        packed: Any = self.in_proj_weight  # [N, 3 E, E], or None where key or value have another width
        if packed is None:
            matrices = [self.q_proj_weight, self.k_proj_weight, self.v_proj_weight]
            biases = [None] * 3 if bias is None else bias.chunk(3, 1)
            return [self.run("linear", x, w, b, main=False) for x, w, b in zip((q, k, v), matrices, biases)]
        width = packed.shape[2]
        inputs: list[tuple[Tensor, int]] = []  # each input, and how many projections in a row read it
        for x in (q, k, v):
            if inputs and inputs[-1][0] is x:
                inputs[-1] = (x, inputs[-1][1] + 1)
            else:
                inputs.append((x, 1))
        projected: list[Tensor] = []
        for x, count in inputs:
            rows = slice(len(projected) * width, (len(projected) + count) * width)
            y: Tensor = self.run(
                "linear", x, packed[:, rows], None if bias is None else bias[:, rows], main=False
            )
            projected += y.chunk(count, -1)
        return projected

    def _with_extra_positions(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Appends the positions of `add_bias_kv` and `add_zero_attn` to keys and values `[N, B, H, S, D]`."""
        if self.options.bias_k is not None:
            learned = ((k, self.bias_k), (v, self.bias_v))
            k, v = (torch.cat([x, self._heads(b.expand(-1, x.shape[1], -1, -1))], 3) for x, b in learned)  # type: ignore[operator]
        if self.options.add_zero_attn:
            k, v = (pad(x, (0, 0, 0, 1)) for x in (k, v))
        return k, v

    def _batch_first(self, x: Tensor) -> Tensor:
        """Returns an input as `[N, B, *, E]`."""
        return x.unsqueeze(1) if x.ndim == 3 else x if self.options.batch_first else x.transpose(1, 2)

    def _heads(self, x: Tensor) -> Tensor:
        """Splits the heads: `[N, B, *, E] -> [N, B, H, *, D]`."""
        return x.unflatten(-1, (self.options.num_heads, -1)).transpose(2, 3)  # type: ignore[no-any-return,no-untyped-call]

    def _mask(
        self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, q: Tensor, extra: int
    ) -> Tensor | None:
        """Returns what is added to the scores, `[N, B or 1, H or 1, L or 1, S + extra]`.

        `extra` positions at the end are visible to all queries.
        """
        mask = None
        if attn_mask is not None:
            mask = _additive(attn_mask, q)
            mask = mask[:, None, None] if mask.ndim == 3 else mask.unflatten(1, (q.shape[1], -1))  # type: ignore[no-untyped-call]
        if key_padding_mask is not None:
            keys = _additive(key_padding_mask, q)
            keys = (keys.unsqueeze(1) if keys.ndim == 2 else keys)[:, :, None, None]
            mask = keys if mask is None else mask + keys
        return mask if mask is None or not extra else pad(mask, (0, extra))

    def sizes(self) -> str:
        m = self.options
        words = [f"embed_dim={m.embed_dim}", f"num_heads={m.num_heads}"]
        words += [f"{k}={getattr(m, k)}" for k in ("kdim", "vdim") if getattr(m, k) != m.embed_dim]
        words += [f"dropout={m.dropout}"] * (m.dropout > 0)
        words += [f"{k}=True" for k in ("batch_first", "add_zero_attn") if getattr(m, k)]
        words += ["bias=False"] * (m.in_proj_bias is None) + ["add_bias_kv=True"] * (m.bias_k is not None)
        return ", ".join(words)


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    """Returns a mask as numbers that are added to the scores."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, float("-inf"))
