"""Faces of embeddings and bags of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..errors import UsageError
from .base import Face, one_for_all

_MODES = {"sum": 0, "mean": 1, "max": 2}


class _Table(Face):
    def refuse_options(self) -> None:
        if self.options.max_norm is not None:
            raise UsageError(
                f"{self.name}: max_norm={self.options.max_norm} changes the weights in every forward, also in eval mode, by the rows that are asked for; "
                f"scale the rows once (torch.renorm) and set max_norm=None"
            )
        if self.options.sparse:
            raise UsageError(f"{self.name}: sparse=True gives a sparse gradient, which parameters [N, V, D] cannot have; set sparse=False")


class WideEmbedding(_Table):
    """N `nn.Embedding`: ids [N, *] -> [N, *, D]. max_norm and sparse are refused."""

    member = nn.Embedding
    ops = ("embedding",)

    def wide(self, input: Tensor) -> Tensor:
        m = self.options
        return self.run("embedding", self.weight, input, -1 if m.padding_idx is None else m.padding_idx, m.scale_grad_by_freq)  # type: ignore[no-any-return]


class WideEmbeddingBag(_Table):
    """N `nn.EmbeddingBag`: ids [N, B, L], or ids [N, L] with offsets [N, B] -> [N, B, D].

    Offsets that all members share are `offsets.expand(N, -1)`; others run once a member. max_norm and sparse are refused.
    """

    member = nn.EmbeddingBag
    ops = ("embedding_bag.padding_idx",)

    def wide(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        m = self.options
        if input.ndim == 3:  # bags of one length
            starts = one_for_all(torch.arange(0, input[0].numel(), input.shape[2], dtype=input.dtype, device=input.device))
            ids, last = input.flatten(1), False
            each = None if per_sample_weights is None else per_sample_weights.flatten(1)
        else:
            starts, ids, each, last = offsets, input, per_sample_weights, m.include_last_offset  # type: ignore[assignment]
        rest = m.scale_grad_by_freq, _MODES[m.mode], False, each, last, m.padding_idx
        return self.run("embedding_bag.padding_idx", self.weight, ids, starts, *rest)[0]  # type: ignore[no-any-return]
