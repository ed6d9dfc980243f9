"""Blocks of diffusion transformers like those of FLUX.1 (Black Forest Labs 2024) and SD3 (Esser et al. 2024).
Two streams (image, text) share one attention.

    x: image tokens [B, T, dim]    text: [B, S, dim]    vector: [B, dim], of time step and pooled text
        rope: cos and sin [B, 1, tokens, head/2, 2], text first

Queries and keys of each head are normalized (RMS) before they are rotated by their positions.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention, silu

from .embedders import rotate


class QKV(nn.Module):
    """Computes queries, keys and values of all heads, with normalized queries and keys: [B, T, dim] -> three
    times [B, H, T, head].
    """

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.linear = nn.Linear(dim, 3 * dim)
        self.query, self.key = (nn.RMSNorm(dim // heads, eps=1e-6) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = self.linear(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return self.query(query), self.key(key), value


def attend(query: Tensor, key: Tensor, value: Tensor, rope: Tensor | None) -> Tensor:
    """Computes attention over rotated queries and keys: [B, H, T, head] -> [B, T, dim]."""
    if rope is not None:
        query, key = rotate(query, rope), rotate(key, rope)
    return scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)


class MLPBlock(nn.Module):
    """A norm, a perceptron of four times the width, and a residual."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(gelu(self.up(self.norm(x)), approximate="tanh"))
        return y


class AttentionBlock(nn.Module):
    """A norm, self-attention with normalized queries and keys, and a residual."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(dim, eps=1e-6), QKV(dim, heads), nn.Linear(dim, dim)

    def forward(self, x: Tensor, rope: Tensor | None = None) -> Tensor:
        query, key, value = self.qkv(self.norm(x))
        y: Tensor = x + self.out(attend(query, key, value, rope))
        return y


class JointAttention(nn.Module):
    """One attention over both streams. Each stream has separate projections; text comes first."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.image, self.text = QKV(dim, heads), QKV(dim, heads)
        self.image_out, self.text_out = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, text: Tensor, rope: Tensor | None = None) -> tuple[Tensor, Tensor]:
        both = [torch.cat([t, i], 2) for t, i in zip(self.text(text), self.image(x))]
        y = attend(both[0], both[1], both[2], rope)
        return self.image_out(y[:, text.shape[1] :]), self.text_out(y[:, : text.shape[1]])


class Modulation(nn.Module):
    """Computes `count` shifts, scales and gates from one vector: [B, dim] -> `count` times [B, 1, dim]."""

    def __init__(self, dim: int, count: int) -> None:
        super().__init__()
        self.count = count
        self.linear = nn.Linear(dim, count * dim)

    def forward(self, vector: Tensor) -> tuple[Tensor, ...]:
        return self.linear(silu(vector)).unsqueeze(1).chunk(self.count, -1)  # type: ignore[no-any-return]


class Stream(nn.Module):
    """The parts of one stream around the joint attention: modulation, norms, perceptron."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.modulation = Modulation(dim, 6)
        self.first, self.second = (nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6) for _ in range(2))
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)


class DoubleStream(nn.Module):
    """Two streams, each modulated by the vector, with one joint attention."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.image, self.text = Stream(dim), Stream(dim)
        self.attention = JointAttention(dim, heads)

    def forward(
        self, x: Tensor, text: Tensor, vector: Tensor, rope: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        own = [stream.modulation(vector) for stream in (self.image, self.text)]
        normed = [
            stream.first(t) * (1 + m[1]) + m[0]
            for stream, t, m in zip((self.image, self.text), (x, text), own)
        ]
        y, y_text = self.attention(normed[0], normed[1], rope)
        return self._close(self.image, x, y, own[0]), self._close(self.text, text, y_text, own[1])

    def _close(self, stream: Stream, x: Tensor, y: Tensor, own: tuple[Tensor, ...]) -> Tensor:
        """Applies the gated residuals and the perceptron."""
        x = x + own[2] * y
        inner = stream.second(x) * (1 + own[4]) + own[3]
        y = x + own[5] * stream.down(gelu(stream.up(inner), approximate="tanh"))
        return y


class SingleStream(nn.Module):
    """One linear layer into parallel attention and perceptron, one linear layer out of both, and a gate."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.dim, self.heads = dim, heads
        self.modulation = Modulation(dim, 3)
        self.norm = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)
        self.first, self.second = nn.Linear(dim, 7 * dim), nn.Linear(5 * dim, dim)
        self.query, self.key = (nn.RMSNorm(dim // heads, eps=1e-6) for _ in range(2))

    def forward(self, x: Tensor, vector: Tensor, rope: Tensor | None = None) -> Tensor:
        shift, scale, gate = self.modulation(vector)
        qkv, hidden = self.first(self.norm(x) * (1 + scale) + shift).split([3 * self.dim, 4 * self.dim], -1)
        query, key, value = qkv.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        y = attend(self.query(query), self.key(key), value, rope)
        return x + gate * self.second(torch.cat([y, gelu(hidden, approximate="tanh")], -1))  # type: ignore[no-any-return]


def mlp(dim: int = 64) -> nn.Module:
    """[B, T, dim] -> the same."""
    return MLPBlock(dim)


def attention(dim: int = 64, heads: int = 4) -> nn.Module:
    """[B, T, dim] and rope -> [B, T, dim]."""
    return AttentionBlock(dim, heads)


def joint_attention(dim: int = 64, heads: int = 4) -> nn.Module:
    """[B, T, dim], [B, S, dim] and rope -> both."""
    return JointAttention(dim, heads)


def double_stream(dim: int = 64, heads: int = 4) -> nn.Module:
    """[B, T, dim], [B, S, dim], [B, dim] and rope -> both streams."""
    return DoubleStream(dim, heads)


def single_stream(dim: int = 64, heads: int = 4) -> nn.Module:
    """[B, T, dim], [B, dim] and rope -> [B, T, dim]."""
    return SingleStream(dim, heads)
