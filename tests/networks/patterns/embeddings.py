"""Patterns of everyday code: embeddings."""

from __future__ import annotations

import torch
from torch import nn

from networks.patterns.case import Case, case, chain, drawn, linear, net, of
from networks.patterns.shapes import TEXT

IDS = "ids=int64[B,T]:0..8"
BAG = "input=int64[B,T]:0..8"


CASES: dict[str, Case] = {
    "embedding": case(chain(of(nn.Embedding, 9, 4), linear(4, 5)), "input=int64[B,T]:0..8"),
    "embedding_padding": case(of(nn.Embedding, 9, 4, padding_idx=0), "input=int64[B,T]:0..8"),
    "embedding_short_ids": case(
        net(lambda self, ids: self.e(ids).sum(1), e=of(nn.Embedding, 9, 4, scale_grad_by_freq=True)),
        "ids=int32[B,T]:0..8",
    ),
    "embedding_max_norm": case(
        net(lambda self, ids: self.fc(self.e(ids)), e=of(nn.Embedding, 9, 4, max_norm=1.0), fc=linear(4, 5)),
        IDS,
    ),
    "embedding_positions": case(
        net(
            lambda self, ids: self.e(ids) + self.p(torch.arange(ids.shape[1], device=ids.device)),
            e=of(nn.Embedding, 9, 4),
            p=of(nn.Embedding, 16, 4),
        ),
        IDS,
        "T=1..16",
    ),
    "embedding_of_features": case(
        net(
            lambda self, x: self.fc(torch.cat([e(x[:, i]) for i, e in enumerate(self.tables)], 1)),
            tables=lambda: nn.ModuleList(nn.Embedding(7, 4) for _ in range(2)),
            fc=linear(8, 5),
        ),
        "x=int64[B,2]:0..6",
    ),
    "embedding_by_predicted_ids": case(
        net(lambda self, x: self.e(self.fc(x).argmax(-1)), fc=linear(8, 9), e=of(nn.Embedding, 9, 4)), TEXT
    ),
    "embedding_frozen": case(
        net(
            lambda self, ids: self.fc(self.e(ids)),
            e=lambda: nn.Embedding.from_pretrained(torch.arange(36.0).view(9, 4)),
            fc=linear(4, 5),
        ),
        IDS,
    ),
    "bag_mean": case(of(nn.EmbeddingBag, 9, 4), BAG),
    "bag_sum": case(of(nn.EmbeddingBag, 9, 4, mode="sum"), BAG),
    "bag_max": case(of(nn.EmbeddingBag, 9, 4, mode="max"), BAG),
    "bag_padding_mean": case(of(nn.EmbeddingBag, 9, 4, padding_idx=0), BAG),
    "bag_padding_sum": case(of(nn.EmbeddingBag, 9, 4, padding_idx=0, mode="sum"), BAG),
    "bag_padding_max": case(of(nn.EmbeddingBag, 9, 4, padding_idx=0, mode="max"), BAG),
    "bag_weights": case(of(nn.EmbeddingBag, 9, 4, mode="sum"), BAG, "per_sample_weights=float32[B,T]"),
    "bag_offsets": case(
        net(lambda self, ids: self.b(ids, torch.tensor([0, 2, 2, 4])), b=of(nn.EmbeddingBag, 9, 4)),
        "ids=int64[T]:0..8",
        "T=4..64",
    ),
    "bag_last_offset": case(
        net(
            lambda self, ids: self.b(ids, torch.tensor([0, 1, 4])),
            b=of(nn.EmbeddingBag, 9, 4, mode="sum", include_last_offset=True),
        ),
        "ids=int64[4]:0..8",
    ),
    "bag_own_offsets": Case(
        net(lambda self, ids, offsets: self.b(ids, offsets), b=of(nn.EmbeddingBag, 9, 4)),
        (),
        {},
        lambda sizes, seed: {
            "ids": drawn("ids=int64[6]:0..8", sizes, seed),
            "offsets": torch.tensor([0, 1 + seed % 2, 3]),
        },
    ),
}
