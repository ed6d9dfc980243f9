"""A text classifier on nn.TransformerEncoder with a padding mask. A class token comes first, so that no row
is all padding.
"""

from typing import Any

import torch
from torch import Tensor, nn

from . import generator, trained

N = 5
RECURRENT = False
INPUTS = ["ids=int64[B,T]:0..199", "padding=bool[B,T]", "T=2..48"]


class Encoder(nn.Module):
    def __init__(self, width: int, depth: int, heads: int, classes: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(200, width)
        self.cls = nn.Parameter(torch.randn(1, 1, width))
        self.positions = nn.Embedding(49, width)
        layer = nn.TransformerEncoderLayer(width, heads, 2 * width, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, ids: Tensor, padding: Tensor) -> Tensor:  # [B, T], [B, T]: True where there is no token
        x = torch.cat([self.cls.expand(ids.shape[0], 1, -1), self.embed(ids)], dim=1)  # [B, 1 + T, C]
        x = x + self.positions(torch.arange(x.shape[1], device=x.device))
        mask = torch.cat([padding.new_zeros(padding.shape[0], 1), padding], dim=1)  # [B, 1 + T]
        return self.head(self.encoder(x, src_key_padding_mask=mask)[:, 0])


def model(width: int = 64, depth: int = 2, heads: int = 4, classes: int = 6) -> nn.Module:
    return Encoder(width, depth, heads, classes)


def sample(batch: int, seed: int, length: int = 11) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    ids = torch.randint(0, 200, (batch, length), generator=generator(seed))
    lengths = torch.randint(1, length + 1, (batch, 1), generator=generator(seed + 1))
    return (ids, torch.arange(length) >= lengths), {}


def member(i: int) -> nn.Module:
    # The layers of nn.TransformerEncoder start as copies of one layer. `trained` changes only their norms and
    # biases, which is enough to make the layers different.
    return trained(model, 800 + i)
