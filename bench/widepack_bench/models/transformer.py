"""Transformers: a vision transformer (Dosovitskiy et al. 2020), BERT (Devlin et al. 2018), FT-Transformer for
tables (Gorishniy et al. 2021), and a decoder.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention


class Attention(nn.Module):
    """Multi-head self-attention with one linear layer each for query, key and value."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:  # [B, T, dim], [B, 1, 1, T]
        query, key, value = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        y: Tensor = self.out(scaled_dot_product_attention(query, key, value, bias).transpose(1, 2).flatten(2))
        return y


class Block(nn.Module):
    """Attention and a two-layer perceptron, both residual. early: the norms come first (ViT,
    FT-Transformer), else last (BERT).
    """

    def __init__(self, dim: int, heads: int, hidden: int, early: bool) -> None:
        super().__init__()
        self.attention = Attention(dim, heads)
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.first, self.second = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.early = early

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y: Tensor
        if self.early:
            x = x + self.attention(self.first(x), bias)
            y = x + self.down(gelu(self.up(self.second(x))))
            return y
        x = self.first(x + self.attention(x, bias))
        y = self.second(x + self.down(gelu(self.up(x))))
        return y


class ViT(nn.Module):
    """A vision transformer: patches, a class token, positions, blocks, classifier."""

    def __init__(self, image: int, patch: int, dim: int, depth: int, heads: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, dim, patch, patch)
        self.token = nn.Parameter(torch.randn(1, 1, dim) * 0.02)
        self.positions = nn.Parameter(torch.randn(1, (image // patch) ** 2 + 1, dim) * 0.02)
        self.blocks = nn.ModuleList([Block(dim, heads, 4 * dim, True) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def forward(self, x: Tensor) -> Tensor:  # [B, 3, image, image]
        y: Tensor = self.patches(x).flatten(2).transpose(1, 2)
        y = torch.cat([self.token.expand(y.shape[0], -1, -1), y], 1) + self.positions
        for block in self.blocks:
            y = block(y)
        y = self.head(self.norm(y[:, 0]))
        return y  # [B, classes]


class Encoder(nn.Module):
    """BERT without its head: embeddings of words and positions, and the blocks."""

    def __init__(self, dim: int, depth: int, heads: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(vocabulary, dim), nn.Embedding(length, dim)
        self.norm = nn.LayerNorm(dim)
        self.blocks = nn.ModuleList([Block(dim, heads, 4 * dim, False) for _ in range(depth)])

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:  # [B, T], [B, T] of 0 and 1
        y: Tensor = self.norm(self.words(ids) + self.positions.weight[: ids.shape[1]])
        bias = (mask[:, None, None, :].to(y.dtype) - 1) * 1e4
        for block in self.blocks:
            y = block(y, bias)
        return y  # [B, T, dim]


class Classifier(nn.Module):
    """BERT with a pooler and a classifier over the first position."""

    def __init__(self, dim: int, depth: int, heads: int, vocabulary: int, length: int, classes: int) -> None:
        super().__init__()
        self.trunk = Encoder(dim, depth, heads, vocabulary, length)
        self.head = nn.Sequential(nn.Linear(dim, dim), nn.Tanh(), nn.Linear(dim, classes))

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        y: Tensor = self.head(self.trunk(ids, mask)[:, 0])
        return y  # [B, classes]


class FT(nn.Module):
    """An FT-Transformer: one token for each number of a row, blocks, a classifier over the class token."""

    def __init__(self, features: int, dim: int, depth: int, heads: int, classes: int) -> None:
        super().__init__()
        self.scale, self.shift = (nn.Parameter(torch.randn(features, dim) * 0.1) for _ in range(2))
        self.token = nn.Parameter(torch.randn(1, 1, dim) * 0.1)
        self.blocks = nn.ModuleList([Block(dim, heads, 2 * dim, True) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def forward(self, x: Tensor) -> Tensor:  # [B, features]
        y: Tensor = x[..., None] * self.scale + self.shift
        y = torch.cat([self.token.expand(y.shape[0], -1, -1), y], 1)
        for block in self.blocks:
            y = block(y)
        y = self.head(torch.relu(self.norm(y[:, 0])))
        return y  # [B, classes]


def vit(
    image: int = 224, patch: int = 16, dim: int = 384, depth: int = 12, heads: int = 6, classes: int = 1000
) -> nn.Module:
    return ViT(image, patch, dim, depth, heads, classes)


def bert(
    dim: int = 768,
    depth: int = 12,
    heads: int = 12,
    vocabulary: int = 30522,
    length: int = 512,
    classes: int = 2,
) -> nn.Module:
    return Classifier(dim, depth, heads, vocabulary, length, classes)


def ft(features: int = 32, dim: int = 192, depth: int = 3, heads: int = 8, classes: int = 2) -> nn.Module:
    return FT(features, dim, depth, heads, classes)


class Decoder(nn.Module):
    """A decoder like GPT-2 (Radford et al. 2019): causal attention, norms first, and scores of the word that
    follows. The head has the weights of the word embedding.
    """

    def __init__(self, dim: int, depth: int, heads: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(vocabulary, dim), nn.Embedding(length, dim)
        self.blocks = nn.ModuleList([Block(dim, heads, 4 * dim, True) for _ in range(depth)])
        self.norm = nn.LayerNorm(dim)

    def forward(self, ids: Tensor) -> Tensor:  # [B, T]
        steps = ids.shape[1]
        y: Tensor = self.words(ids) + self.positions.weight[:steps]
        future = torch.full((steps, steps), float("-inf"), dtype=y.dtype, device=y.device).triu(1)
        for block in self.blocks:
            y = block(y, future)
        y = self.norm(y[:, -1]) @ self.words.weight.T
        return y  # [B, vocabulary]


def decoder(
    dim: int = 768, depth: int = 6, heads: int = 12, vocabulary: int = 32000, length: int = 512
) -> nn.Module:
    return Decoder(dim, depth, heads, vocabulary, length)


def block(dim: int = 64, heads: int = 4) -> nn.Module:
    """Returns one block with norms before its parts: [B, T, dim] -> the same."""
    return Block(dim, heads, 4 * dim, True)
