"""Lists every option of every module of torch.nn that the library runs, for test_module_options.py.

A case is a module and one member's inputs. Its name lists the options: `conv2d-reflect-same-g2-d1`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from layer_cases import Case, allowed, ids, x
from torch import Tensor, nn

SIZES = (7, 6, 5)


def named(*parts: Any) -> str:
    return "-".join(str(p) for p in parts if p not in ("", None))


def marks(**options: bool) -> str:
    return named(*(name.replace("_", " ") for name, on in options.items() if on))


def convolutions() -> Iterator[tuple[str, Case]]:
    kinds: Any = (
        (nn.Conv1d, nn.ConvTranspose1d),
        (nn.Conv2d, nn.ConvTranspose2d),
        (nn.Conv3d, nn.ConvTranspose3d),
    )
    for n, (conv, turned) in enumerate(kinds, 1):
        s, groups = SIZES[:n], (1, 2, 4) if n == 2 else (2,)
        for mode, padding, g, d in itertools.product(
            ("zeros", "reflect", "replicate", "circular"), (0, 2, "same", "valid"), groups, (1, 2)
        ):
            stride = 1 if padding == "same" else 1 + g % 2
            make = partial(
                conv,
                4,
                8,
                3,
                stride=stride,
                padding=padding,
                groups=g,
                dilation=d,
                bias=g != 2,
                padding_mode=mode,
            )
            yield named(f"conv{n}d", mode, padding, f"g{g}", f"d{d}"), Case(make, x((2, 4, *s)))
        for stride, more, g, d, padding in itertools.product((1, 2), (0, 1), groups, (1, 2), (0, 1)):
            if more < max(stride, d):
                make = partial(
                    turned,
                    4,
                    8,
                    2,
                    stride=stride,
                    padding=padding,
                    output_padding=more,
                    groups=g,
                    dilation=d,
                    bias=g != 2,
                )
                yield (
                    named(f"convtranspose{n}d", f"s{stride}", f"o{more}", f"g{g}", f"d{d}", f"p{padding}"),
                    Case(make, x((2, 4, *s))),
                )
        yield named(f"conv{n}d", "no batch"), Case(partial(conv, 4, 6, 3, padding=1, groups=2), x((4, *s)))


def norms() -> Iterator[tuple[str, Case]]:
    batches, instances = (
        (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
        (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
    )
    for n, (batch, instance) in enumerate(zip(batches, instances), 1):
        for affine, track, momentum in itertools.product((True, False), (True, False), (0.1, None)):
            options, s = marks(affine=affine, statistics=track, cumulative=momentum is None), SIZES[:n]
            yield (
                named(f"batchnorm{n}d", options),
                Case(
                    partial(batch, 4, affine=affine, track_running_stats=track, momentum=momentum, eps=1e-3),
                    x((3, 4, *s)),
                ),
            )
            if momentum is not None:
                yield (
                    named(f"instancenorm{n}d", options),
                    Case(
                        partial(instance, 4, affine=affine, track_running_stats=track, eps=1e-3),
                        x((3, 4, *s)),
                    ),
                )
    for shape, affine, bias in itertools.product(((4,), (3, 4), (2, 3, 4)), (True, False), (True, False)):
        options = named(len(shape), marks(affine=affine, bias=bias))
        yield (
            named("layernorm", options),
            Case(partial(nn.LayerNorm, shape, elementwise_affine=affine, bias=bias), x((2, 5, 2, 3, 4))),
        )
        if bias:
            yield (
                named("rmsnorm", options),
                Case(
                    partial(nn.RMSNorm, shape, elementwise_affine=affine, eps=None if affine else 1e-3),
                    x((2, 5, 2, 3, 4)),
                ),
            )
    for groups, affine, rank in itertools.product((1, 2, 4), (True, False), (2, 3, 4, 5)):
        yield (
            named("groupnorm", f"g{groups}", f"rank {rank}", marks(affine=affine)),
            Case(partial(nn.GroupNorm, groups, 4, affine=affine), x((3, 4, *(3, 2, 2)[: rank - 2]))),
        )


def recurrent() -> Iterator[tuple[str, Case]]:
    for layer, layers, both, first, bias in itertools.product(
        (nn.LSTM, nn.GRU, nn.RNN), (1, 2, 3), (False, True), (False, True), (True, False)
    ):
        for project, given in itertools.product((0, 2) if layer is nn.LSTM else (0,), (False, True)):

            def draw(
                g: torch.Generator,
                layer: Any = layer,
                rows: int = layers * (1 + both),
                first: bool = first,
                out: int = project or 6,
                given: bool = given,
            ) -> tuple[Any, ...]:
                sequence = torch.randn(*((2, 5) if first else (5, 2)), 4, generator=g, dtype=torch.float64)
                states = tuple(torch.randn(rows, 2, w, generator=g, dtype=torch.float64) for w in (out, 6))
                return (sequence, *([states if layer is nn.LSTM else states[0]] if given else []))

            options = {
                "num_layers": layers,
                "bidirectional": both,
                "batch_first": first,
                "bias": bias,
                **({"proj_size": project} if project else {}),
            }
            name = named(
                layer.__name__.lower(),
                layers,
                marks(both=both, first=first, bias=bias, projections=bool(project), states=given),
            )
            yield name, Case(partial(layer, 4, 6, **options), draw)
    yield "rnn-relu", Case(lambda: nn.RNN(4, 6, 2, nonlinearity="relu", bidirectional=True), x((5, 2, 4)))


MASKS: dict[str, Callable[[torch.Generator, int, int], dict[str, Tensor]]] = {
    "": lambda g, q, k: {},
    "hidden": lambda g, q, k: {"attn_mask": allowed(g, q, k)},
    "added": lambda g, q, k: {"attn_mask": torch.randn(q, k, generator=g, dtype=torch.float64)},
    "hidden by head": lambda g, q, k: {"attn_mask": allowed(g, 4, q, k)},
    "padding": lambda g, q, k: {"key_padding_mask": allowed(g, 2, k)},
    "added padding": lambda g, q, k: {"key_padding_mask": -3 * allowed(g, 2, k).double()},
    "hidden, padding": lambda g, q, k: {"attn_mask": allowed(g, q, k), "key_padding_mask": allowed(g, 2, k)},
}


def attention() -> Iterator[tuple[str, Case]]:
    for mask, kv, zero, first, weights in itertools.product(
        MASKS, (False, True), (False, True), (False, True), (True, False)
    ):
        shapes = [(2, 5, 8), (2, 6, 8), (2, 6, 8)] if first else [(5, 2, 8), (6, 2, 8), (6, 2, 8)]

        def masks(g: torch.Generator, mask: str = mask) -> tuple[Any, ...]:
            return tuple(MASKS[mask](g, 5, 6).items())

        make = partial(nn.MultiheadAttention, 8, 2, add_bias_kv=kv, add_zero_attn=zero, batch_first=first)
        name = named("attention", mask, marks(bias_kv=kv, zero=zero, first=first, weights=weights))
        yield name, Case(make, x(*shapes), {"need_weights": weights}, masks if mask else None)
    yield (
        "attention-other widths",
        Case(
            partial(nn.MultiheadAttention, 8, 2, kdim=3, vdim=4, bias=False),
            x((5, 2, 8), (6, 2, 3), (6, 2, 4)),
        ),
    )
    yield (
        "attention-each head's weights",
        Case(
            partial(nn.MultiheadAttention, 8, 2),
            x((5, 2, 8), (6, 2, 8), (6, 2, 8)),
            {"average_attn_weights": False},
        ),
    )


class Product(nn.Module):
    """Calls `scaled_dot_product_attention`. Here True in a mask keeps a position; in nn.MultiheadAttention it
    hides the position.
    """

    def __init__(self, causal: bool = False, scale: float | None = None) -> None:
        super().__init__()
        self.keys, self.causal, self.scale = nn.Linear(4, 4), causal, scale

    def forward(self, q: Tensor, k: Tensor, mask: Tensor | None = None) -> Tensor:
        return F.scaled_dot_product_attention(
            q, self.keys(k), k, mask, is_causal=self.causal, scale=self.scale
        )


def products() -> Iterator[tuple[str, Case]]:
    for shape in ((5, 6), (2, 1, 5, 6), (2, 3, 5, 6), (1, 1, 5, 6), (2, 1, 1, 6), (3, 5, 6)):
        for kind in ("seen", "added"):

            def draw(g: torch.Generator, shape: tuple[int, ...] = shape, kind: str = kind) -> tuple[Any, ...]:
                mask = (
                    torch.randn(shape, generator=g, dtype=torch.float64)
                    if kind == "added"
                    else ~allowed(g, *shape)
                )
                return *x((2, 3, 5, 4), (2, 3, 6, 4))(g), mask

            yield named("product", kind, "x".join(map(str, shape))), Case(Product, draw)
    yield "product-causal", Case(partial(Product, causal=True, scale=0.3), x((2, 3, 5, 4), (2, 3, 6, 4)))


def embeddings() -> Iterator[tuple[str, Case]]:
    for padding, bound in itertools.product((None, 0, -2), (None, 1.0)):
        name = marks(max_norm=bound is not None)
        yield (
            named("embedding", f"padding {padding}", name),
            Case(partial(nn.Embedding, 9, 4, padding_idx=padding, max_norm=bound), ids(9, 4, 3)),
        )
        for mode in ("sum", "mean", "max"):
            make = partial(nn.EmbeddingBag, 9, 4, mode=mode, padding_idx=padding, max_norm=bound)
            yield named("embeddingbag", mode, f"padding {padding}", name), Case(make, ids(9, 4, 3))
            last = partial(make, include_last_offset=True)
            yield (
                named("embeddingbag", mode, f"padding {padding}", name, "offsets"),
                Case(last, lambda g: (torch.randint(0, 9, (10,), generator=g), torch.tensor([0, 2, 2, 10]))),
            )


EVERY: dict[str, Case] = dict(
    itertools.chain(convolutions(), norms(), recurrent(), attention(), products(), embeddings())
)
QUICK = [
    "conv2d-reflect-same-g2-d2",
    "conv1d-circular-2-g2-d1",
    "convtranspose2d-s2-o1-g2-d1-p1",
    "batchnorm2d-affine",
    "layernorm-2-affine-bias",
    "groupnorm-g2-rank 3",
    "lstm-1-both-first-bias-projections-states",
    "attention-hidden, padding-bias kv-zero-first",
    "product-seen-2x1x5x6",
    "embedding-padding -2",
    "embeddingbag-mean-padding 0-max norm-offsets",
]
"""One case of each kind, which every run of the tests checks."""
