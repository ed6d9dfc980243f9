"""Defines the wide layers of embeddings and of embedding bags."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import UsageError
from .arguments import shared_value
from .base import WideLayer

_MODES = {"sum": 0, "mean": 1, "max": 2}


class _EmbeddingLayer(WideLayer):
    def refuse_options(self) -> None:
        if self.options.max_norm is not None:
            raise UsageError(
                f"{self.name}: max_norm={self.options.max_norm} changes the rows that are read in every "
                "forward, also in eval mode. Scale the rows once (torch.renorm) and set max_norm=None"
            )
        if self.options.sparse:
            raise UsageError(
                f"{self.name}: sparse=True gives a sparse gradient, which parameters [N, V, D] cannot have; "
                "set sparse=False"
            )


class WideEmbedding(_EmbeddingLayer):
    """N `nn.Embedding` as one module. Refuses `max_norm` and `sparse`.

    Shape:
        Ids `[N, *]`; output `[N, *, D]`; `weight` `[N, V, D]`.
    """

    ops = ("embedding",)

    def wide(self, input: Tensor) -> Tensor:
        m = self.options
        padding = -1 if m.padding_idx is None else m.padding_idx
        return self.run("embedding", self.weight, input, padding, m.scale_grad_by_freq)  # type: ignore[no-any-return]


class WideEmbeddingBag(_EmbeddingLayer):
    """N `nn.EmbeddingBag` as one module. Refuses `max_norm` and `sparse`.

    For offsets that all members share, give `offsets.expand(N, -1)`. With other offsets the layer runs member
    after member.

    Shape:
        Ids `[N, B, L]`, or ids `[N, L]` with offsets `[N, B]`; output `[N, B, D]`.
    """

    ops = ("embedding_bag.padding_idx",)

    def wide(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        m = self.options
        if input.ndim == 3:  # bags of one length
            starts = shared_value(
                torch.arange(0, input[0].numel(), input.shape[2], dtype=input.dtype, device=input.device)
            )
            ids, include_last = input.flatten(1), False
            weights = None if per_sample_weights is None else per_sample_weights.flatten(1)
        else:
            starts, ids, weights = offsets, input, per_sample_weights  # type: ignore[assignment]
            include_last = m.include_last_offset
        rest = m.scale_grad_by_freq, _MODES[m.mode], False, weights, include_last, m.padding_idx
        return self.run(self.ops[0], self.weight, ids, starts, *rest)[0]  # type: ignore[no-any-return]
