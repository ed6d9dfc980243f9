"""A small BERT for classification, from transformers: dynamic length up to its 64 positions, a padding mask,
and a ModelOutput as result.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

from . import generator, trained

N = 3
RECURRENT = False
INPUTS = ["input_ids=int64[B,T]:0..499", "attention_mask=int64[B,T]:0..1", "T=2..64"]


def model(hidden: int = 64, layers: int = 2, labels: int = 5) -> nn.Module:
    config = BertConfig(
        vocab_size=500,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=2 * hidden,
        max_position_embeddings=64,
        num_labels=labels,
    )
    return BertForSequenceClassification(config)


def sample(batch: int, seed: int, length: int = 12) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    ids = torch.randint(0, 500, (batch, length), generator=generator(seed))
    lengths = torch.randint(2, length + 1, (batch, 1), generator=generator(seed + 1))
    return (), {"input_ids": ids, "attention_mask": (torch.arange(length) < lengths).long()}


def member(i: int) -> nn.Module:
    return trained(model, 600 + i)
