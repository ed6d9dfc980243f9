"""A tagger on a bidirectional LSTM of two layers. Its time axis is fixed at 12, because torch.export fixes
it.
"""

from typing import Any

import torch
from torch import Tensor, nn

from . import generator, trained

N = 4
RECURRENT = True
INPUTS = ["ids=int64[B,12]:0..99"]


class Tagger(nn.Module):
    def __init__(self, width: int, tags: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, width, padding_idx=0)
        self.lstm = nn.LSTM(width, width, num_layers=2, bidirectional=True, batch_first=True, dropout=0.1)
        self.head = nn.Linear(2 * width, tags)

    def forward(self, ids: Tensor) -> Tensor:  # [B, 12]
        y, _ = self.lstm(self.embed(ids))  # [B, 12, 2 C]
        return self.head(y)  # [B, 12, tags]


def model(width: int = 32, tags: int = 7) -> nn.Module:
    return Tagger(width, tags)


def sample(batch: int, seed: int) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    return (torch.randint(0, 100, (batch, 12), generator=generator(seed)),), {}


def member(i: int) -> nn.Module:
    return trained(model, 900 + i)
