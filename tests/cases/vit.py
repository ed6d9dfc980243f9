"""A vision transformer (Dosovitskiy et al. 2020): patch convolution, class token, learned positions, pre-norm
blocks with one projection for q, k and v.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import generator, trained

N = 4
RECURRENT = False
INPUTS = ["x=float32[B,3,32,32]"]


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, C]
        b, t, c = x.shape
        q, k, v = (
            self.qkv(x).reshape(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        )  # [B, heads, T, C / heads]
        y = F.scaled_dot_product_attention(q, k, v)
        return self.proj(y.transpose(1, 2).reshape(b, t, c))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attn = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self, width: int, depth: int, heads: int, classes: int) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 8, stride=8)
        self.cls_token = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, 17, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:  # [B, 3, 32, 32]
        x = self.patch(x).flatten(2).transpose(1, 2)  # [B, 16, C]
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1) + self.pos_embed  # [B, 17, C]
        return self.head(self.norm(self.blocks(x))[:, 0])


def model(width: int = 64, depth: int = 3, heads: int = 4, classes: int = 10) -> nn.Module:
    return ViT(width, depth, heads, classes)


def sample(batch: int, seed: int) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    return (torch.randn(batch, 3, 32, 32, generator=generator(seed)),), {}


def member(i: int) -> nn.Module:
    return trained(model, 500 + i)
