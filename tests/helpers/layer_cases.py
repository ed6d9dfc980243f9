"""Modules for the tests of the wide layers: all options of every module, with inputs of one member."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

Draw = Callable[[torch.Generator], tuple[Any, ...]]


@dataclass(frozen=True)
class Case:
    """make: makes a module. draw: one member's positional inputs. call: keyword arguments without tensors."""

    make: Callable[[], nn.Module]
    draw: Draw
    call: dict[str, Any] = field(default_factory=dict)
    named: Draw | None = None  # tensors that are passed by keyword: pairs of name and value


def x(*shapes: tuple[int, ...]) -> Draw:
    return lambda g: tuple(torch.randn(s, generator=g, dtype=torch.float64) for s in shapes)


def ids(high: int, *shape: int) -> Draw:
    return lambda g: (torch.randint(0, high, shape, generator=g),)


def allowed(g: torch.Generator, *shape: int) -> Tensor:
    """Returns a boolean mask. True hides a position; the first position is never hidden."""
    mask = torch.rand(shape, generator=g) < 0.4
    mask[..., 0] = False
    return mask


def bag(g: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randint(0, 9, (10,), generator=g), torch.tensor([0, 2, 2, 7])


def weighted(g: torch.Generator) -> tuple[Any, ...]:
    return torch.randint(0, 9, (4, 3), generator=g), None, torch.rand(4, 3, generator=g, dtype=torch.float64)


CASES: dict[str, Case] = {
    "Linear": Case(lambda: nn.Linear(4, 5), x((2, 4))),
    "Linear-no-batch": Case(lambda: nn.Linear(4, 5), x((4,))),
    "Linear-more-dims": Case(lambda: nn.Linear(4, 5, bias=False), x((2, 3, 2, 4))),
    "Bilinear": Case(lambda: nn.Bilinear(3, 4, 5), x((2, 3), (2, 4))),
    "Bilinear-more-dims": Case(lambda: nn.Bilinear(3, 4, 5, bias=False), x((2, 6, 3), (2, 6, 4))),
    "PReLU": Case(lambda: nn.PReLU(), x((2, 4, 3))),
    "PReLU-channels": Case(lambda: nn.PReLU(4), x((2, 4, 3, 2))),
    "PReLU-one-dim": Case(lambda: nn.PReLU(), x((4,))),
    "Embedding": Case(lambda: nn.Embedding(9, 4), ids(9, 2, 3)),
    "Embedding-padding": Case(lambda: nn.Embedding(5, 4, padding_idx=1), ids(5, 4, 6)),
    "Embedding-last-padding": Case(lambda: nn.Embedding(5, 4, padding_idx=-1), ids(5, 7)),
}
for mode in ("sum", "mean", "max"):
    CASES[f"EmbeddingBag-{mode}"] = Case(partial(nn.EmbeddingBag, 9, 4, mode=mode), ids(9, 2, 5))
    CASES[f"EmbeddingBag-{mode}-padding"] = Case(
        partial(nn.EmbeddingBag, 5, 4, mode=mode, padding_idx=2), ids(5, 3, 8)
    )
    CASES[f"EmbeddingBag-{mode}-offsets"] = Case(partial(nn.EmbeddingBag, 9, 4, mode=mode), bag)
CASES["EmbeddingBag-last-offset"] = Case(
    lambda: nn.EmbeddingBag(9, 4, mode="sum", include_last_offset=True),
    lambda g: (bag(g)[0], torch.tensor([0, 2, 7, 10])),
)
for table in (nn.Embedding, nn.EmbeddingBag):
    CASES[f"{table.__name__}-by-frequency"] = Case(
        partial(table, 5, 4, scale_grad_by_freq=True, padding_idx=2), ids(5, 4, 6)
    )
CASES["EmbeddingBag-weights"] = Case(lambda: nn.EmbeddingBag(9, 4, mode="sum"), weighted)
CASES["EmbeddingBag-weights-padding"] = Case(
    lambda: nn.EmbeddingBag(9, 4, mode="sum", padding_idx=3), weighted
)
for n, (conv, turned) in enumerate(
    ((nn.Conv1d, nn.ConvTranspose1d), (nn.Conv2d, nn.ConvTranspose2d), (nn.Conv3d, nn.ConvTranspose3d)), 1
):
    s = (7, 6, 5)[:n]
    CASES |= {
        f"Conv{n}d": Case(partial(conv, 4, 6, 3, padding=1), x((2, 4, *s))),
        f"Conv{n}d-groups": Case(partial(conv, 4, 6, 3, stride=2, groups=2, bias=False), x((2, 4, *s))),
        f"Conv{n}d-depthwise": Case(partial(conv, 4, 8, 2, dilation=2, groups=4), x((2, 4, *s))),
        f"Conv{n}d-no-batch": Case(partial(conv, 4, 6, 3), x((4, *s))),
        f"Conv{n}d-same": Case(partial(conv, 4, 6, 3, padding="same"), x((2, 4, *s))),
        f"Conv{n}d-valid": Case(partial(conv, 4, 6, 2, padding="valid"), x((2, 4, *s))),
        f"Conv{n}d-1x1": Case(partial(conv, 4, 6, 1), x((2, 4, *s))),
        f"ConvTranspose{n}d": Case(
            partial(turned, 4, 6, 3, stride=2, padding=1, output_padding=1), x((2, 4, *s))
        ),
        f"ConvTranspose{n}d-groups": Case(
            partial(turned, 4, 6, 2, groups=2, bias=False, dilation=2), x((2, 4, *s))
        ),
        f"ConvTranspose{n}d-no-batch": Case(partial(turned, 4, 6, 3), x((4, *s))),
        f"ConvTranspose{n}d-size": Case(
            partial(turned, 4, 6, 3, stride=2), x((2, 4, *s)), {"output_size": [2 * i + 2 for i in s]}
        ),
    }
    for padding_mode in ("reflect", "replicate", "circular"):
        CASES[f"Conv{n}d-{padding_mode}"] = Case(
            partial(conv, 4, 6, 3, padding=1, padding_mode=padding_mode), x((2, 4, *s))
        )
    CASES[f"Conv{n}d-reflect-same-no-batch"] = Case(
        partial(conv, 4, 6, 3, padding="same", padding_mode="reflect"), x((4, *s))
    )
for n, (batch, instance) in enumerate(
    (
        (nn.BatchNorm1d, nn.InstanceNorm1d),
        (nn.BatchNorm2d, nn.InstanceNorm2d),
        (nn.BatchNorm3d, nn.InstanceNorm3d),
    ),
    1,
):
    s = (4, 3, 2)[:n]
    CASES |= {
        f"BatchNorm{n}d": Case(partial(batch, 4), x((3, 4, *s))),
        f"BatchNorm{n}d-cumulative": Case(partial(batch, 4, momentum=None, eps=1e-3), x((3, 4, *s))),
        f"BatchNorm{n}d-no-affine": Case(partial(batch, 4, affine=False), x((3, 4, *s))),
        f"BatchNorm{n}d-no-statistics": Case(partial(batch, 4, track_running_stats=False), x((3, 4, *s))),
        f"InstanceNorm{n}d": Case(partial(instance, 4), x((3, 4, *s))),
        f"InstanceNorm{n}d-no-batch": Case(partial(instance, 4, affine=True), x((4, *s))),
        f"InstanceNorm{n}d-all": Case(
            partial(instance, 4, affine=True, track_running_stats=True, momentum=0.3), x((3, 4, *s))
        ),
    }
CASES |= {
    "BatchNorm1d-rank-2": Case(lambda: nn.BatchNorm1d(4), x((3, 4))),
    "LayerNorm": Case(lambda: nn.LayerNorm(4), x((2, 3, 4))),
    "LayerNorm-two-dims": Case(lambda: nn.LayerNorm((3, 4), eps=1e-3), x((2, 3, 4))),
    "LayerNorm-no-affine": Case(lambda: nn.LayerNorm(4, elementwise_affine=False), x((2, 4))),
    "LayerNorm-no-bias": Case(lambda: nn.LayerNorm(4, bias=False), x((4,))),
    "GroupNorm": Case(lambda: nn.GroupNorm(2, 4), x((2, 4, 3, 2))),
    "GroupNorm-rank-2": Case(lambda: nn.GroupNorm(2, 4), x((2, 4))),
    "GroupNorm-no-affine": Case(lambda: nn.GroupNorm(4, 4, affine=False, eps=1e-3), x((2, 4, 3))),
    "RMSNorm": Case(lambda: nn.RMSNorm(4), x((2, 3, 4))),
    "RMSNorm-two-dims": Case(lambda: nn.RMSNorm((3, 4), eps=1e-3), x((2, 3, 4))),
    "RMSNorm-no-affine": Case(lambda: nn.RMSNorm(4, elementwise_affine=False), x((2, 4))),
}


def attention(
    name: str, inputs: Draw, call: dict[str, Any] | None = None, named: Draw | None = None, **options: Any
) -> None:
    CASES[f"MultiheadAttention-{name}"] = Case(
        lambda: nn.MultiheadAttention(8, 2, **options), inputs, call or {}, named
    )


def self_attention(g: torch.Generator, *shape: int) -> tuple[Any, ...]:
    same = torch.randn(shape, generator=g, dtype=torch.float64)
    return same, same, same


QKV = x((5, 2, 8), (6, 2, 8), (6, 2, 8))
PLAIN = {"need_weights": False}
CAUSAL = torch.triu(torch.ones(5, 5, dtype=torch.bool), 1)
attention("self", lambda g: self_attention(g, 5, 2, 8))
attention("self-no-weights", lambda g: self_attention(g, 5, 2, 8), PLAIN)
attention("self-first", lambda g: self_attention(g, 2, 5, 8), PLAIN, batch_first=True)
attention("self-no-batch", lambda g: self_attention(g, 5, 8))
attention("cross", QKV)
attention("cross-no-weights", QKV, PLAIN, bias=False)
attention(
    "cross-one-context",
    lambda g: (x((5, 2, 8))(g)[0], *self_attention(g, 6, 2, 8)[:2]),
    {"average_attn_weights": False},
)
attention("other-widths", x((2, 5, 8), (2, 6, 3), (2, 6, 4)), kdim=3, vdim=4, batch_first=True)
attention("other-widths-no-bias", x((5, 2, 8), (6, 2, 3), (6, 2, 8)), PLAIN, kdim=3, bias=False)
attention("bias-kv", QKV, add_bias_kv=True)
attention("zero-attention", QKV, PLAIN, add_zero_attn=True)
attention(
    "both-and-masks",
    QKV,
    PLAIN,
    lambda g: (("attn_mask", allowed(g, 5, 6)), ("key_padding_mask", allowed(g, 2, 6))),
    add_bias_kv=True,
    add_zero_attn=True,
)
for kind, call in (("weights", {}), ("no-weights", PLAIN)):
    attention(f"boolean-{kind}", QKV, call, lambda g: (("attn_mask", allowed(g, 5, 6)),))
    attention(
        f"float-{kind}",
        QKV,
        call,
        lambda g: (("attn_mask", torch.randn(5, 6, generator=g, dtype=torch.float64)),),
    )
    attention(f"by-head-{kind}", QKV, call, lambda g: (("attn_mask", allowed(g, 4, 5, 6)),))
    attention(f"padding-{kind}", QKV, call, lambda g: (("key_padding_mask", allowed(g, 2, 6)),))
    attention(
        f"masks-{kind}",
        QKV,
        call,
        lambda g: (
            ("attn_mask", torch.randn(4, 5, 6, generator=g, dtype=torch.float64)),
            ("key_padding_mask", allowed(g, 2, 6).double() * -3),
        ),
    )
    attention(
        f"causal-{kind}",
        lambda g: self_attention(g, 5, 2, 8),
        {**call, "is_causal": True},
        lambda g: (("attn_mask", CAUSAL),),
    )
    attention(
        f"causal-padding-{kind}",
        lambda g: self_attention(g, 5, 2, 8),
        {**call, "is_causal": True},
        lambda g: (("attn_mask", CAUSAL), ("key_padding_mask", allowed(g, 2, 5))),
    )
attention(
    "no-batch-masks",
    x((5, 8), (6, 8), (6, 8)),
    PLAIN,
    lambda g: (("attn_mask", allowed(g, 2, 5, 6)), ("key_padding_mask", allowed(g, 6))),
)

for layer, states in ((nn.LSTM, 2), (nn.GRU, 1), (nn.RNN, 1)):
    name = layer.__name__

    def with_state(
        g: torch.Generator, rows: int, states: int = states, batch: tuple[int, ...] = (2,), width: int = 6
    ) -> tuple[Any, ...]:
        sequence = torch.randn(5, *batch, 4, generator=g, dtype=torch.float64)
        given = tuple(
            torch.randn(rows, *batch, w, generator=g, dtype=torch.float64)
            for w in ((width, 6) if states == 2 else (6,))
        )
        return sequence, given if states == 2 else given[0]

    CASES |= {
        name: Case(partial(layer, 4, 6), x((5, 2, 4))),
        f"{name}-all": Case(partial(layer, 4, 6, 2, bidirectional=True, batch_first=True), x((2, 5, 4))),
        f"{name}-no-bias": Case(partial(layer, 4, 6, 2, bias=False), x((5, 2, 4))),
        f"{name}-states": Case(partial(layer, 4, 6, bidirectional=True), partial(with_state, rows=2)),
        f"{name}-no-batch": Case(partial(layer, 4, 6, 2), x((5, 4))),
        f"{name}-no-batch-states": Case(partial(layer, 4, 6, 2), partial(with_state, rows=2, batch=())),
    }
CASES["LSTM-projections"] = Case(lambda: nn.LSTM(4, 6, 2, proj_size=3, bidirectional=True), x((5, 2, 4)))
CASES["LSTM-projections-states"] = Case(
    lambda: nn.LSTM(4, 6, proj_size=3), lambda g: (x((5, 2, 4))(g)[0], x((1, 2, 3), (1, 2, 6))(g))
)
CASES["RNN-relu"] = Case(lambda: nn.RNN(4, 6, 2, nonlinearity="relu"), x((5, 2, 4)))
for cell, states in ((nn.LSTMCell, 2), (nn.GRUCell, 1), (nn.RNNCell, 1)):
    name = cell.__name__

    def step(g: torch.Generator, states: int = states, batch: tuple[int, ...] = (2,)) -> tuple[Any, ...]:
        given = x((*batch, 4), *[(*batch, 6)] * states)(g)
        return given[0], given[1:] if states == 2 else given[1]

    CASES |= {
        name: Case(partial(cell, 4, 6), x((2, 4))),
        f"{name}-no-bias": Case(partial(cell, 4, 6, bias=False), step),
        f"{name}-no-batch": Case(partial(cell, 4, 6), partial(step, batch=())),
        f"{name}-no-batch-no-state": Case(partial(cell, 4, 6), x((4,))),
    }
CASES["RNNCell-relu"] = Case(lambda: nn.RNNCell(4, 6, nonlinearity="relu"), x((2, 4)))
for n in (1, 2, 3):
    s = (8, 6, 7)[:n]
    pools = {p: getattr(nn, f"{p}{n}d") for p in ("MaxPool", "AvgPool", "AdaptiveAvgPool", "AdaptiveMaxPool")}
    CASES |= {
        f"MaxPool{n}d": Case(partial(pools["MaxPool"], 2), x((2, 4, *s))),
        f"MaxPool{n}d-indices": Case(partial(pools["MaxPool"], 3, 2, 1, return_indices=True), x((2, 4, *s))),
        f"MaxPool{n}d-ceil": Case(partial(pools["MaxPool"], 3, 2, 1, 2, ceil_mode=True), x((2, 4, *s))),
        f"MaxPool{n}d-no-batch": Case(partial(pools["MaxPool"], 2, return_indices=True), x((4, *s))),
        f"AvgPool{n}d": Case(partial(pools["AvgPool"], 3, 2, 1), x((2, 4, *s))),
        f"AvgPool{n}d-ceil": Case(
            partial(pools["AvgPool"], 3, 2, 1, ceil_mode=True, count_include_pad=False), x((2, 4, *s))
        ),
        f"AvgPool{n}d-no-batch": Case(partial(pools["AvgPool"], 2), x((4, *s))),
        f"AdaptiveAvgPool{n}d": Case(partial(pools["AdaptiveAvgPool"], 3), x((2, 4, *s))),
        f"AdaptiveAvgPool{n}d-no-batch": Case(partial(pools["AdaptiveAvgPool"], 1), x((4, *s))),
        f"AdaptiveMaxPool{n}d": Case(partial(pools["AdaptiveMaxPool"], 3), x((2, 4, *s))),
        f"AdaptiveMaxPool{n}d-indices": Case(
            partial(pools["AdaptiveMaxPool"], 2, return_indices=True), x((2, 4, *s))
        ),
    }
CASES["AvgPool2d-divisor"] = Case(lambda: nn.AvgPool2d((2, 3), divisor_override=5), x((2, 4, 6, 6)))
CASES["AdaptiveAvgPool2d-none"] = Case(lambda: nn.AdaptiveAvgPool2d((None, 2)), x((2, 4, 5, 6)))
CASES["AdaptiveMaxPool3d-none"] = Case(lambda: nn.AdaptiveMaxPool3d((2, None, 1)), x((2, 4, 4, 5, 6)))
