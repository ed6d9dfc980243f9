"""Patterns of everyday code: attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from networks.patterns.case import Case, Make, case, linear, net, of, param


def attention(forward: Callable[..., Any], **options: Any) -> Make:
    return net(forward, m=of(nn.MultiheadAttention, 8, 2, **options))


def plain(self: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
    return self.m(x, x, x)


def rotary(self: Any, x: Tensor) -> Tensor:
    q, k = self.qk(x).view(x.shape[0], x.shape[1], 2, 2, 4).permute(2, 0, 3, 1, 4)
    angle = torch.arange(x.shape[1])[:, None] * self.freq
    cos, sin = torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()
    turn = lambda t: t * cos + torch.cat([-t[..., 2:], t[..., :2]], -1) * sin  # noqa: E731
    return F.scaled_dot_product_attention(
        turn(q), turn(k), x.unflatten(-1, (2, 4)).transpose(1, 2), is_causal=True
    )


def relative_bias(self: Any, x: Tensor) -> Tensor:
    t = torch.arange(x.shape[1])
    bias = self.bias((t[:, None] - t[None]).clamp(-4, 4) + 4).permute(2, 0, 1)
    q, k, v = (p.unflatten(-1, (2, 4)).transpose(1, 2) for p in self.qkv(x).chunk(3, -1))
    return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None]).transpose(1, 2).flatten(2))


def window_attention(self: Any, x: Tensor) -> Tensor:
    b, c, h, w = x.shape
    y = x.view(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 3, 5, 1).reshape(-1, 4, c)
    q, k, v = self.qkv(y).reshape(-1, 4, 3, 2, c // 2).permute(2, 0, 3, 1, 4)
    y = ((q @ k.transpose(-2, -1)) * 0.5 + self.bias[self.index]).softmax(-1) @ v
    return y.transpose(1, 2).reshape(b, h // 2, w // 2, 2, 2, c).permute(0, 5, 1, 3, 2, 4).reshape(b, c, h, w)


def linear_attention(self: Any, x: Tensor) -> Tensor:
    q, k, v = self.qkv(x).chunk(3, -1)
    q, k = F.elu(q) + 1, F.elu(k) + 1
    return torch.einsum("btd,bde->bte", q, torch.einsum("btd,bte->bde", k, v)) / (q @ k.sum(1).unsqueeze(-1))


def grouped_query(self: Any, x: Tensor) -> Tensor:
    q = self.q(x).unflatten(-1, (4, 4)).transpose(1, 2)
    k, v = (p.unflatten(-1, (2, 4)).transpose(1, 2) for p in self.kv(x).chunk(2, -1))
    return (
        F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=0.3)
        .transpose(1, 2)
        .flatten(2)
    )


BATCH, TIME = "x=float32[B,T,8]", "x=float32[T,B,8]"
CAUSAL = "mask=float32[T,T]"
ENCODER: dict[str, Any] = {"d_model": 8, "nhead": 2, "dim_feedforward": 12}


def causal(x: Tensor, t: int) -> Tensor:
    return torch.full((t, t), float("-inf")).triu(1)


CASES: dict[str, Case] = {
    "mha": case(attention(plain, batch_first=True), BATCH),
    "mha_time_first": case(attention(plain), TIME),
    "mha_no_weights": case(
        attention(lambda self, x: self.m(x, x, x, need_weights=False)[0], batch_first=True, bias=False), BATCH
    ),
    "mha_weights_by_head": case(
        attention(lambda self, x: self.m(x, x, x, average_attn_weights=False), batch_first=True), BATCH
    ),
    "mha_key_padding": case(
        attention(lambda self, x, mask: self.m(x, x, x, key_padding_mask=mask), batch_first=True),
        BATCH,
        "mask=bool[B,T]",
    ),
    "mha_key_padding_no_weights": case(
        attention(lambda self, x, mask: self.m(x, x, x, key_padding_mask=mask, need_weights=False)[0]),
        TIME,
        "mask=bool[B,T]",
    ),
    "mha_float_padding": case(
        attention(
            lambda self, x, mask: self.m(x, x, x, key_padding_mask=mask, need_weights=False)[0],
            batch_first=True,
        ),
        BATCH,
        "mask=float32[B,T]",
    ),
    "mha_bool_mask": case(
        attention(
            lambda self, x, mask: self.m(x, x, x, attn_mask=mask, need_weights=False)[0], batch_first=True
        ),
        BATCH,
        "mask=bool[T,T]",
    ),
    "mha_float_mask": case(
        attention(lambda self, x, mask: self.m(x, x, x, attn_mask=mask), batch_first=True), BATCH, CAUSAL
    ),
    "mha_mask_by_head": case(
        attention(
            lambda self, x, mask: self.m(x, x, x, attn_mask=mask.flatten(0, 1), need_weights=False)[0],
            batch_first=True,
        ),
        BATCH,
        "mask=float32[B,2,T,T]",
    ),
    "mha_both_masks": case(
        attention(
            lambda self, x, mask, pad: self.m(x, x, x, attn_mask=mask, key_padding_mask=pad)[0],
            batch_first=True,
        ),
        BATCH,
        "mask=bool[T,T]",
        "pad=bool[B,T]",
    ),
    "mha_causal": case(
        attention(
            lambda self, x: self.m(
                x, x, x, attn_mask=causal(x, x.shape[1]), is_causal=True, need_weights=False
            )[0],
            batch_first=True,
        ),
        BATCH,
    ),
    "mha_cross": case(
        attention(lambda self, x, y: self.m(x, y, y), batch_first=True),
        BATCH,
        "y=float32[B,S,8]",
        S=(6, 9, 2),
    ),
    "mha_other_sizes": case(
        attention(
            lambda self, x, y, z: self.m(x, y, z, need_weights=False)[0], batch_first=True, kdim=6, vdim=4
        ),
        BATCH,
        "y=float32[B,S,6]",
        "z=float32[B,S,4]",
        S=(6, 9, 2),
    ),
    "mha_bias_kv": case(attention(plain, batch_first=True, add_bias_kv=True), BATCH),
    "mha_zero_attn": case(attention(plain, batch_first=True, add_zero_attn=True), BATCH),
    "mha_unbatched": case(attention(plain), "x=float32[T,8]"),
    "sdpa_mask": case(
        net(
            lambda self, x, mask: F.scaled_dot_product_attention(self.q(x), x, x, attn_mask=~mask),
            q=linear(8, 8),
        ),
        BATCH,
        "mask=bool[T,T]",
    ),
    "grouped_query": case(net(grouped_query, q=linear(8, 16), kv=linear(8, 16)), BATCH),
    "rotary": case(net(rotary, qk=linear(8, 16), freq=lambda: torch.tensor([1.0, 0.1])), BATCH),
    "relative_bias": case(
        net(relative_bias, qkv=linear(8, 24), out=linear(8, 8), bias=of(nn.Embedding, 9, 2)), BATCH
    ),
    "patch_softmax": case(
        net(
            lambda self, x: self.fc(x.unfold(2, 2, 2).unfold(3, 2, 2).flatten(-2)).softmax(-1),
            fc=linear(4, 5),
        ),
        "x=float32[B,4,2*H,2*W]",
        H=(4, 1, 3),
        W=(2, 5, 4),
    ),
    "swin_window": case(
        net(window_attention, qkv=linear(4, 12), bias=param(2, 4, 4), index=lambda: torch.tensor([1, 0])),
        "x=float32[B,4,2*H,2*W]",
        B=(5, 2, 1),
        H=(4, 1, 3),
        W=(2, 5, 4),
    ),
    "linear_attention": case(net(linear_attention, qkv=linear(8, 24)), BATCH),
    "encoder_layer": case(of(nn.TransformerEncoderLayer, **ENCODER, batch_first=True), "src=float32[B,T,8]"),
    "encoder_layer_norm_first": case(
        of(nn.TransformerEncoderLayer, **ENCODER, norm_first=True, activation="gelu"), "src=float32[T,B,8]"
    ),
    "encoder": case(
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(**ENCODER, batch_first=True),
            2,
            norm=nn.LayerNorm(8),
            enable_nested_tensor=False,
        ),
        "src=float32[B,T,8]",
        "src_key_padding_mask=bool[B,T]",
    ),
    "encoder_masks": case(
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(**ENCODER, batch_first=True, bias=False), 1, enable_nested_tensor=False
        ),
        "src=float32[B,T,8]",
        "mask=bool[T,T]",
        "src_key_padding_mask=bool[B,T]",
    ),
    "encoder_causal": case(
        net(
            lambda self, x: self.e(x, mask=causal(x, x.shape[1]), is_causal=True),
            e=lambda: nn.TransformerEncoder(
                nn.TransformerEncoderLayer(**ENCODER, batch_first=True), 1, enable_nested_tensor=False
            ),
        ),
        BATCH,
    ),
    "decoder": case(
        lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(**ENCODER, batch_first=True), 2),
        "tgt=float32[B,T,8]",
        "memory=float32[B,S,8]",
        "tgt_mask=float32[T,T]",
        "memory_key_padding_mask=bool[B,S]",
        S=(6, 9, 2),
    ),
    "decoder_layer": case(
        of(nn.TransformerDecoderLayer, **ENCODER, norm_first=True),
        "tgt=float32[T,B,8]",
        "memory=float32[S,B,8]",
        "memory_mask=bool[T,S]",
        "tgt_key_padding_mask=bool[B,T]",
        S=(6, 9, 2),
    ),
    "transformer": case(
        net(
            lambda self, x, y: self.t(x, y, tgt_mask=causal(y, y.shape[1]), tgt_is_causal=True),
            t=of(nn.Transformer, 8, 2, 1, 1, 12, batch_first=True),
        ),
        BATCH,
        "y=float32[B,S,8]",
        S=(6, 9, 2),
    ),
}
