"""Tests attention with masks: causal, windows, prefixes, blocks; in buffers, of sizes, of inputs.

Each network is built, loaded, and compared with every member alone in float64, at several lengths, with one
input for all members and with one for each.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from networks.patterns.case import Case, Make, case, linear, net
from networks.patterns.check import check_case

ROWS = "x=float32[B,T,8]"
LONGEST = 40
INF = float("-inf")


def ij(t: int, s: int | None = None) -> tuple[Tensor, Tensor]:
    return torch.arange(t)[:, None], torch.arange(t if s is None else s)[None]


def causal(t: int) -> Tensor:
    i, j = ij(t)
    return j <= i


def window(t: int) -> Tensor:
    i, j = ij(t)
    return (j <= i) & (i - j < 4)


def both_sides(t: int) -> Tensor:
    i, j = ij(t)
    return (i - j).abs() < 3


def prefix(t: int) -> Tensor:
    i, j = ij(t)
    return (j < 5) | (j <= i)


def blocks(t: int) -> Tensor:
    i, j = ij(t)
    return i // 3 == j // 3


def sparse_blocks(t: int) -> Tensor:
    """Causal blocks: the own block, the one before it, and the first."""
    i, j = ij(t)
    apart = i // 3 - j // 3
    return (j <= i) & ((apart < 2) | (j < 3))


def dilated(t: int) -> Tensor:
    i, j = ij(t)
    return (j <= i) & ((i - j) % 2 == 0)


MASKS: dict[str, Callable[[int], Tensor]] = {
    f.__name__: f for f in (causal, window, both_sides, prefix, blocks, sparse_blocks, dilated)
}


def heads(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (p.unflatten(-1, (2, 4)).transpose(1, 2) for p in self.qkv(x).chunk(3, -1))
    return q, k, v


def joined(self: Any, y: Tensor) -> Tensor:
    answer: Tensor = self.out(y.transpose(1, 2).flatten(2))
    return answer


def additive(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape).masked_fill(~mask, INF)


def as_argument(self: Any, x: Tensor, mask: Tensor) -> Tensor:
    return joined(self, F.scaled_dot_product_attention(*heads(self, x), attn_mask=mask))


def added(self: Any, x: Tensor, mask: Tensor) -> Tensor:
    q, k, v = heads(self, x)
    scores = q @ k.transpose(-1, -2) / 2 + (additive(mask) if mask.dtype == torch.bool else mask)
    return joined(self, scores.softmax(-1) @ v)


def filled(self: Any, x: Tensor, mask: Tensor) -> Tensor:
    q, k, v = heads(self, x)
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * 0.5
    weights = scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(-1)
    return joined(self, torch.einsum("bhqk,bhkd->bhqd", weights, v))


def chosen(self: Any, x: Tensor, mask: Tensor) -> Tensor:
    q, k, v = heads(self, x)
    scores = torch.where(mask, torch.tanh(q @ k.mT / 10) * 10, INF)
    return joined(self, F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ v)


WAYS: dict[str, Callable[..., Tensor]] = {f.__name__: f for f in (as_argument, added, filled, chosen)}


def of_sizes(way: Callable[..., Tensor], mask: Callable[[int], Tensor], floating: bool = False) -> Make:
    """Returns a network that computes its mask from the length."""

    def forward(self: Any, x: Tensor) -> Tensor:
        made = mask(x.shape[1])
        return way(self, x, additive(made) if floating else made)

    return net(forward, qkv=linear(8, 24), out=linear(8, 8))


def of_buffer(way: Callable[..., Tensor], mask: Callable[[int], Tensor], floating: bool = False) -> Make:
    """Returns a network whose mask is part of a table in a buffer."""

    def table() -> Tensor:
        return additive(mask(LONGEST)) if floating else mask(LONGEST)

    def forward(self: Any, x: Tensor) -> Tensor:
        return way(self, x, self.table[: x.shape[1], : x.shape[1]])

    return net(forward, qkv=linear(8, 24), out=linear(8, 8), table=table)


def is_causal(self: Any, x: Tensor) -> Tensor:
    return joined(self, F.scaled_dot_product_attention(*heads(self, x), is_causal=True))


def by_head(self: Any, x: Tensor) -> Tensor:
    """Each head has a window of another size."""
    i, j = ij(x.shape[1])
    sizes = torch.tensor([2, 6]).view(2, 1, 1)
    mask = (j <= i) & (i - j < sizes)
    return joined(self, F.scaled_dot_product_attention(*heads(self, x), attn_mask=mask))


def learned_bias(self: Any, x: Tensor) -> Tensor:
    """A bias that each member has learned, beside a mask of sizes."""
    i, j = ij(x.shape[1])
    bias = self.bias[(i - j).clamp(-3, 3) + 3].masked_fill(~window(x.shape[1]), INF)
    return joined(self, F.scaled_dot_product_attention(*heads(self, x), attn_mask=bias))


def with_padding(self: Any, x: Tensor, pad: Tensor) -> Tensor:
    mask = window(x.shape[1]) & (~pad[:, None, None, :] | torch.eye(x.shape[1], dtype=torch.bool))
    return joined(self, F.scaled_dot_product_attention(*heads(self, x), attn_mask=mask))


def grouped(self: Any, x: Tensor) -> Tensor:
    q = self.q(x).unflatten(-1, (4, 4)).transpose(1, 2)
    k, v = (p.unflatten(-1, (2, 4)).transpose(1, 2) for p in self.kv(x).chunk(2, -1))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=window(x.shape[1]), enable_gqa=True)
    return y.transpose(1, 2).flatten(2)


def cross(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """The last queries of a longer text."""
    i, j = ij(x.shape[1], y.shape[1])
    mask = (j <= i + 5) & (i + 5 - j < 4)
    return F.scaled_dot_product_attention(self.q(x), self.k(y), y, attn_mask=mask | (j == 0))


def empty_rows(self: Any, x: Tensor) -> Tensor:
    """The first query may attend to no key: NaN, or the number that torch's kernel gives."""
    i, j = ij(x.shape[1])
    return joined(self, F.scaled_dot_product_attention(*heads(self, x), attn_mask=j < i).nan_to_num(9.0))


OWN: dict[str, Case] = {
    "is_causal": case(net(is_causal, qkv=linear(8, 24), out=linear(8, 8)), ROWS),
    "by_head": case(net(by_head, qkv=linear(8, 24), out=linear(8, 8)), ROWS),
    "learned_bias": case(
        net(learned_bias, qkv=linear(8, 24), out=linear(8, 8), bias=lambda: nn.Parameter(torch.randn(7))),
        ROWS,
    ),
    "with_padding": case(net(with_padding, qkv=linear(8, 24), out=linear(8, 8)), ROWS, "pad=bool[B,T]"),
    "grouped": case(net(grouped, q=linear(8, 16), kv=linear(8, 16)), ROWS),
    "cross": case(net(cross, q=linear(8, 8), k=linear(8, 8)), ROWS, "y=float32[B,S,8]", S=(12, 18, 9)),
    "empty_rows": case(net(empty_rows, qkv=linear(8, 24), out=linear(8, 8)), ROWS),
}
FAST = ("window", "sparse_blocks")


def _cases() -> list[Any]:
    found: list[Any] = []
    for name, mask in MASKS.items():
        marks = () if name in FAST else (pytest.mark.slow,)
        for floating in (False, True):
            text = "float" if floating else "bool"
            found += [
                pytest.param(of_sizes(as_argument, mask, floating), id=f"{name}-{text}-sizes", marks=marks),
                pytest.param(of_buffer(as_argument, mask, floating), id=f"{name}-{text}-buffer", marks=marks),
            ]
        for way in ("added", "filled", "chosen"):
            slow = () if name == "window" else (pytest.mark.slow,)
            found.append(pytest.param(of_sizes(WAYS[way], mask), id=f"{name}-{way}-sizes", marks=slow))
    return found


@pytest.mark.extended(keep=2)
@pytest.mark.parametrize("make", _cases())
def test_masks_of_the_length(make: Make, tmp_path: Path) -> None:
    check_case(case(make, ROWS, T=(7, 25, 3)), tmp_path, set())


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("name", OWN)
def test_other_masks(name: str, tmp_path: Path) -> None:
    check_case(OWN[name], tmp_path, set())


def language_model(kind: str, **more: Any) -> nn.Module:
    transformers: Any = pytest.importorskip("transformers")
    config = transformers.CONFIG_MAPPING[kind](
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=40,
        head_dim=4,
        use_cache=False,
        sliding_window=4,
        **more,
    )
    module: nn.Module = transformers.AutoModelForCausalLM.from_config(config).eval()
    return module


@pytest.mark.extended
@pytest.mark.parametrize(
    ("kind", "attention"),
    [("mistral", "sdpa"), ("mistral", "eager"), pytest.param("gemma2", "eager", marks=pytest.mark.slow)],
)
def test_language_models_with_windows(kind: str, attention: str, tmp_path: Path) -> None:
    """Lengths below, at and above the window of 4."""
    make = partial(language_model, kind, attn_implementation=attention)
    check_case(case(make, "input_ids=int64[B,T]:1..39", T=(9, 4, 3, 17), B=(2, 1, 3)), tmp_path, set())
