"""Parts of diffusion transformers outside the blocks: an embedder, norms that a vector scales and shifts,
rotary positions, attention over another sequence.

The embedder and the rotary positions are those of FLUX.1 (Black Forest Labs 2024). The adaptive norms are
from DiT (Peebles and Xie 2023), the rotary positions from Su et al. 2021.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu


class MLPEmbedder(nn.Module):
    """silu(x W1 + b1) W2 + b2: maps a vector (of a time step or pooled text) to the width of the model."""

    def __init__(self, inputs: int, dim: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(inputs, dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:  # [B, inputs]
        y: Tensor = self.second(silu(self.first(x)))
        return y  # [B, dim]


class AdaLayerNormZeroSingle(nn.Module):
    """A norm without parameters. A vector determines its scale, shift and gate."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.modulation = nn.Linear(dim, 3 * dim)
        self.norm = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)

    def forward(self, x: Tensor, vector: Tensor) -> tuple[Tensor, Tensor]:  # [B, T, dim], [B, dim]
        shift, scale, gate = self.modulation(silu(vector)).unsqueeze(1).chunk(3, -1)
        return self.norm(x) * (1 + scale) + shift, gate  # [B, T, dim], [B, 1, dim]


class Rotary(nn.Module):
    """Returns cos and sin of the angles of positions on several axes (of an image: frame, row, column). Each
    axis has a part of the dims of a head. The highest frequency is 1, the lowest 1 / base.
    """

    frequencies: Tensor

    def __init__(self, axes: tuple[int, ...], base: float = 10_000.0) -> None:
        super().__init__()
        self.axes = axes
        parts = [base ** -(torch.arange(0, dims, 2, dtype=torch.float64) / dims) for dims in axes]
        self.register_buffer("frequencies", torch.cat(parts).float(), persistent=False)

    def forward(self, positions: Tensor) -> Tensor:  # [B, T, axes]
        repeated = [positions[..., i : i + 1].expand(-1, -1, dims // 2) for i, dims in enumerate(self.axes)]
        angles = torch.cat(repeated, -1) * self.frequencies  # [B, T, D/2]
        return torch.stack([angles.cos(), angles.sin()], -1).unsqueeze(1)  # [B, 1, T, D/2, 2]


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Rotates each pair of dims of `x` `[B, H, T, D]` by its angle. rope: `[B or 1, 1, T, D/2, 2]`, cos and
    sin.
    """
    pairs = x.unflatten(-1, (-1, 2))  # type: ignore[no-untyped-call]
    cos, sin = rope.unbind(-1)
    one, two = pairs.unbind(-1)
    return torch.stack([one * cos - two * sin, one * sin + two * cos], -1).flatten(-2)


class RotaryHeads(nn.Module):
    """A linear layer into heads. Each head is rotated by the position of the token."""

    def __init__(self, dim: int, heads: int, axes: tuple[int, ...]) -> None:
        super().__init__()
        self.heads = heads
        self.linear, self.rotary = nn.Linear(dim, dim), Rotary(axes)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:  # [B, T, dim], [B, T, axes]
        heads: Tensor = self.linear(x)
        heads = heads.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # type: ignore[no-untyped-call]
        return rotate(heads, self.rotary(positions))  # [B, H, T, D]


class MultiheadCrossAttention(nn.Module):
    """Attention of one sequence over another sequence of a different width."""

    def __init__(self, dim: int, context: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key_value, self.out = (
            nn.Linear(dim, dim),
            nn.Linear(context, 2 * dim),
            nn.Linear(dim, dim),
        )

    def forward(self, x: Tensor, context: Tensor) -> Tensor:  # [B, T, dim], [B, S, context]
        query = self.query(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        key, value = (
            self.key_value(context).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        )
        y: Tensor = self.out(scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))
        return y  # [B, T, dim]


def mlp_embedder(inputs: int = 32, dim: int = 64) -> nn.Module:
    """[B, inputs] -> [B, dim]."""
    return MLPEmbedder(inputs, dim)


def ada_norm(dim: int = 64) -> nn.Module:
    """[B, T, dim] and [B, dim] -> [B, T, dim] and a gate [B, 1, dim]."""
    return AdaLayerNormZeroSingle(dim)


def rotary(dim: int = 64, heads: int = 4, axes: tuple[int, ...] = (4, 6, 6)) -> nn.Module:
    """[B, T, dim] and positions [B, T, 3] -> heads [B, H, T, 16]."""
    return RotaryHeads(dim, heads, tuple(axes))


def cross_attention(dim: int = 64, context: int = 48, heads: int = 4) -> nn.Module:
    """[B, T, dim] over [B, S, context] -> [B, T, dim]."""
    return MultiheadCrossAttention(dim, context, heads)
