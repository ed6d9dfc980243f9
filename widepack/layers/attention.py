"""Face of multi-head attention: projections by the strategies of linear layers, attention by its own.

    y[i] = softmax(q k^T / sqrt(D) + masks) v Wo[i]^T + bo[i]     q, k, v = query Wq[i]^T + bq[i], ...     by head, D numbers each

A boolean mask says True where a position may NOT be looked at, a float one is added. Masks have the member axis in front as all inputs have.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, pad

from ..errors import UsageError
from .base import Face
from ..registry.registry import REGISTRY, full_name

_ATTENTION = "scaled_dot_product_attention"


class WideMultiheadAttention(Face):
    """N `nn.MultiheadAttention`: query [N, L, B, E], with batch_first [N, B, L, E], without a batch [N, L, E]; key and value alike, S positions.

    key_padding_mask: [N, B, S] or [N, S]. attn_mask: [N, L, S] or [N, B * heads, L, S]. Gives the answer and the weights [N, B, L, S], or None.
    """

    member, ops = nn.MultiheadAttention, ("linear", _ATTENTION)

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
        if need_weights and self.strategy not in ("auto", "sequential") and not self.has("linear"):
            raise UsageError(
                f"{self.name}: strategy {self.strategy!r} gives no weights; call with need_weights=False, or take {', '.join(self.plain())}"
            )
        alone = query.ndim == 3
        q, k, v = (self._heads(x) for x in self._projected(query, key, value))
        if m.bias_k is not None:
            k, v = (torch.cat([x, self._heads(b.expand(-1, x.shape[1], -1, -1))], 3) for x, b in ((k, self.bias_k), (v, self.bias_v)))  # type: ignore[operator]
        if m.add_zero_attn:
            k, v = (pad(x, (0, 0, 0, 1)) for x in (k, v))
        if is_causal and attn_mask is None:
            raise UsageError(f"{self.name}: is_causal says that attn_mask is causal; give the mask too")
        causal = is_causal and key_padding_mask is None and not need_weights
        mask = self._mask(None if causal else attn_mask, key_padding_mask, q, (m.bias_k is not None) + m.add_zero_attn)
        p = m.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = self.run("matmul", q * (1.0 / m.head_dim) ** 0.5, k.transpose(-1, -2), main=False)
            weights = dropout(torch.softmax(scores if mask is None else scores + mask, -1), p)
            y = self.run("matmul", weights, v, main=False)
            weights = weights.mean(2) if average_attn_weights else weights
            weights = weights.squeeze(1) if alone else weights
        else:
            y = self.run(_ATTENTION, q, k, v, mask, p, causal, main=False)
        out: Any = self.out_proj
        y = y.transpose(2, 3).flatten(3)  # [N, B, L, E]
        y = self.run("linear", y, out.weight, out.bias, main=False)
        return y.squeeze(1) if alone else y if m.batch_first else y.transpose(1, 2), weights

    def has(self, op: str) -> bool:
        """Whether the strategy that is named is one of this op."""
        return self.strategy in REGISTRY[full_name(op)].strategies

    def plain(self) -> list[str]:
        """Strategies with which the weights can be had."""
        return [*REGISTRY[full_name("linear")].strategies, "sequential", "auto"]

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Queries, keys and values [N, B, *, E]; one product where they are of one input."""
        given = {id(x): self._ordered(x) for x in (query, key, value)}
        q, k, v = (given[id(x)] for x in (query, key, value))
        bias: Any = self.in_proj_bias
        if not self.options._qkv_same_embed_dim:
            matrices = [self.q_proj_weight, self.k_proj_weight, self.v_proj_weight]
            biases = [None] * 3 if bias is None else bias.chunk(3, 1)
            return [self.run("linear", x, w, b, main=False) for x, w, b in zip((q, k, v), matrices, biases)]
        packed: Any = self.in_proj_weight  # [N, 3 E, E]
        width = packed.shape[2]
        inputs: list[tuple[Tensor, int]] = []
        for x in (q, k, v):
            if inputs and inputs[-1][0] is x:
                inputs[-1] = (x, inputs[-1][1] + 1)
            else:
                inputs.append((x, 1))
        made: list[Tensor] = []
        for x, count in inputs:
            part = slice(len(made) * width, (len(made) + count) * width)
            y: Tensor = self.run("linear", x, packed[:, part], None if bias is None else bias[:, part], main=False)
            made += y.chunk(count, -1)
        return made

    def _ordered(self, x: Tensor) -> Tensor:
        """`[N, B, *, E]`."""
        return x.unsqueeze(1) if x.ndim == 3 else x if self.options.batch_first else x.transpose(1, 2)

    def _heads(self, x: Tensor) -> Tensor:
        """`[N, B, *, E] -> [N, B, H, *, D]`."""
        return x.unflatten(-1, (self.options.num_heads, -1)).transpose(2, 3)  # type: ignore[no-any-return,no-untyped-call]

    def _mask(self, of_pairs: Tensor | None, of_keys: Tensor | None, q: Tensor, more: int) -> Tensor | None:
        """What is added to the scores, [N, B or 1, H or 1, L or 1, S]. more: positions behind the keys that everybody sees."""
        made = None
        if of_pairs is not None:
            made = _added(of_pairs, q)
            made = made[:, None, None] if made.ndim == 3 else made.unflatten(1, (q.shape[1], -1))  # type: ignore[no-untyped-call]
        if of_keys is not None:
            keys = _added(of_keys, q)
            keys = (keys.unsqueeze(1) if keys.ndim == 2 else keys)[:, :, None, None]
            made = keys if made is None else made + keys
        return made if made is None or not more else pad(made, (0, more))

    def sizes(self) -> str:
        m = self.options
        words = [f"embed_dim={m.embed_dim}", f"num_heads={m.num_heads}"]
        words += [f"{k}={getattr(m, k)}" for k in ("kdim", "vdim") if getattr(m, k) != m.embed_dim]
        words += [f"dropout={m.dropout}"] * (m.dropout > 0) + [f"{k}=True" for k in ("batch_first", "add_zero_attn") if getattr(m, k)]
        return ", ".join(words + ["bias=False"] * (m.in_proj_bias is None) + ["add_bias_kv=True"] * (m.bias_k is not None))


def _added(mask: Tensor, like: Tensor) -> Tensor:
    """A mask as what is added to the scores."""
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, float("-inf")) if mask.dtype == torch.bool else mask
