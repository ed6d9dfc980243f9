"""A text CNN (Kim 2014): embedding, three convolutions in parallel, the maximum over time, one linear layer.
The length is dynamic, from 5, the widest kernel.
"""

from typing import Any

import torch
from torch import Tensor, nn

from . import generator, trained

N = 6
RECURRENT = False
INPUTS = ["ids=int64[B,T]:0..199", "T=5..64"]


class TextCNN(nn.Module):
    def __init__(self, width: int, filters: int, classes: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(200, width)
        self.convs = nn.ModuleList(nn.Conv1d(width, filters, k) for k in (3, 4, 5))
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(3 * filters, classes)

    def forward(self, ids: Tensor) -> Tensor:  # [B, T]
        x = self.embed(ids).transpose(1, 2)  # [B, C, T]
        pooled = [torch.relu(conv(x)).max(dim=2).values for conv in self.convs]  # three of [B, filters]
        return self.head(self.drop(torch.cat(pooled, dim=1)))


def model(width: int = 32, filters: int = 24, classes: int = 5) -> nn.Module:
    return TextCNN(width, filters, classes)


def sample(batch: int, seed: int, length: int = 13) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    return (torch.randint(0, 200, (batch, length), generator=generator(seed)),), {}


def member(i: int) -> nn.Module:
    return trained(model, 1000 + i)
