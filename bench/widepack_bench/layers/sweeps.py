"""Lists what `widepack bench-layers` measures: how each layer of torch.nn is made, and its inputs.

    Sweep("linear", nn.Linear, Shape((256, 256), 16, ("input=float32[B,256]",)), Shape((8, 6), 16,
    ("input=float32[B,8]",)), "linear")

Every layer that has a wide layer (`widepack.primitives`) is here by its name in torch.nn, and attention over
other sequences and without weights beside them. Each has one shape as in published tables of such layers, and
a small one that shows whether it works. Every dim but the batch B is a number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from torch import Tensor, nn

from widepack.errors import UsageError

MEMBERS: Mapping[str, tuple[int, ...]] = {"ci": (2,), "quick": (4, 8), "full": (4, 8, 16, 32)}
"""The numbers of members of each preset."""
PRESETS = tuple(MEMBERS)


@dataclass(frozen=True, slots=True)
class Shape:
    """A layer's sizes and inputs.

    args, options: of the layer's constructor. batch: the size of B. inputs: specs as `widepack build --input`
    takes them, in the order of forward.
    """

    args: tuple[Any, ...]
    batch: int
    inputs: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sweep:
    """One layer.

    name: letter case and underscores do not matter when it is typed. family: of the primitive that runs it.
    aliases: other names for it.
    """

    name: str
    layer: Callable[..., nn.Module]
    shape: Shape
    small: Shape
    family: str
    aliases: tuple[str, ...] = ()

    def at(self, preset: str) -> Shape:
        """Returns the shape of a preset."""
        return self.small if preset == "ci" else self.shape

    def make(self, preset: str) -> nn.Module:
        """Makes a member in eval mode."""
        shape = self.at(preset)
        return self.layer(*shape.args, **shape.options).eval()


class SelfAttention(nn.MultiheadAttention):
    """Self-attention: queries, keys and values of one sequence. It returns the answer without weights."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # [B, T, d] -> [B, T, d]
        answer: Tensor = super().forward(x, x, x, need_weights=False)[0]
        return answer


class CrossAttention(nn.MultiheadAttention):
    """Cross-attention: queries of one sequence, keys and values of another. It returns the answer without
    weights.
    """

    def forward(self, x: Tensor, context: Tensor) -> Tensor:  # type: ignore[override]  # [B, T, d], [B, S, d] -> [B, T, d]
        answer: Tensor = super().forward(x, context, context, need_weights=False)[0]
        return answer


class DotProduct(nn.Module):
    """Attention without weights of its own."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # 3 x [B, h, T, d]
        return nn.functional.scaled_dot_product_attention(query, key, value)


def _sweep(
    name: str,
    layer: Callable[..., nn.Module],
    family: str,
    large: tuple[Any, ...],
    inputs: Sequence[str],
    small: tuple[Any, ...],
    less: Sequence[str],
    *aliases: str,
    batch: int = 16,
    **options: Any,
) -> Sweep:
    """Makes a sweep. large, small: what the constructor takes. inputs, less: the specs of both shapes."""
    shape = Shape(large, batch, tuple(inputs), options)
    return Sweep(name, layer, shape, Shape(small, 16, tuple(less), options), family, aliases)


def _image(
    name: str,
    layer: Callable[..., nn.Module],
    rank: int,
    args: Callable[[int], tuple[Any, ...]],
    family: str,
    *aliases: str,
    **options: Any,
) -> Sweep:
    """Makes a sweep of a layer over `[B, C, ...]` with 1, 2 or 3 dims of space. args: of the number of
    channels.
    """
    batch, channels, space = {1: (8, 64, "256"), 2: (8, 64, "32,32"), 3: (4, 32, "16,16,16")}[rank]
    inputs = [f"input=float32[B,{channels},{space}]"]
    less = [f"input=float32[B,4,{ {1: '6', 2: '6,5', 3: '4,5,6'}[rank] }]"]
    return _sweep(
        name, layer, family, args(channels), inputs, args(4), less, *aliases, batch=batch, **options
    )


def _rows(width: int) -> list[str]:
    return [f"input=float32[B,{width}]"]


def _pair(first: int, second: int) -> list[str]:
    return [f"input1=float32[B,{first}]", f"input2=float32[B,{second}]"]


def _heads(*sizes: int) -> list[str]:
    return [f"{n}=float32[B,{','.join(map(str, sizes))}]" for n in ("query", "key", "value")]


def _tokens(
    name: str, layer: Callable[..., nn.Module], family: str, args: Any, less: Any, *aliases: str
) -> Sweep:
    """Makes a sweep of a layer over `[B, T, d]`."""
    first = "x" if layer is nn.RMSNorm else "input"
    inputs, small = [f"{first}=float32[B,128,256]"], [f"{first}=float32[B,5,8]"]
    return _sweep(name, layer, family, args, inputs, less, small, *aliases, batch=8)


def _ids(name: str, layer: Callable[..., nn.Module], *aliases: str) -> Sweep:
    inputs, less = ["input=int64[B,128]:0..999"], ["input=int64[B,5]:0..9"]
    return _sweep(name, layer, "embedding", (1000, 256), inputs, (10, 4), less, *aliases, batch=8)


def _steps(name: str, layer: Callable[..., nn.Module]) -> Sweep:
    inputs, less = ["input=float32[B,32,64]"], ["input=float32[B,5,4]"]
    return _sweep(name, layer, "recurrent", (64, 128), inputs, (4, 6), less, batch=8, batch_first=True)


def _cell(name: str, layer: Callable[..., nn.Module], *states: str) -> Sweep:
    """Makes a sweep of a cell with its state as input. LSTMCell has two states in one tuple: they stay at
    zero here.
    """
    inputs = ["input=float32[B,64]", *(f"{s}=float32[B,128]" for s in states)]
    less = ["input=float32[B,4]", *(f"{s}=float32[B,6]" for s in states)]
    return _sweep(name, layer, "recurrent", (64, 128), inputs, (4, 6), less, batch=8)


def _attention(name: str, layer: Callable[..., nn.Module], names: Sequence[str], *aliases: str) -> Sweep:
    inputs = [f"{n}=float32[B,128,256]" for n in names]
    less = [f"{n}=float32[B,5,8]" for n in names]
    return _sweep(
        name, layer, "attention", (256, 8), inputs, (8, 2), less, *aliases, batch=8, batch_first=True
    )


def _same(channels: int) -> tuple[int, int, int]:
    return channels, channels, 3


def _one(channels: int) -> tuple[int]:
    return (channels,)


def _none(channels: int) -> tuple[()]:
    return ()


def _halved(channels: int) -> tuple[int]:
    """Pooling by two."""
    return (2,)


def _whole(channels: int) -> tuple[int]:
    """Pooling to one number a channel."""
    return (1,)


SWEEPS: tuple[Sweep, ...] = (
    _sweep("linear", nn.Linear, "linear", (256, 256), _rows(256), (8, 6), _rows(8), "dense"),
    _sweep("bilinear", nn.Bilinear, "linear", (64, 64, 64), _pair(64, 64), (5, 4, 6), _pair(5, 4)),
    _ids("embedding", nn.Embedding),
    _ids("embeddingbag", nn.EmbeddingBag, "bag"),
    _image("conv1d", nn.Conv1d, 1, _same, "conv", padding=1),
    _image("conv2d", nn.Conv2d, 2, _same, "conv", padding=1),
    _image("conv3d", nn.Conv3d, 3, _same, "conv", padding=1),
    _image("convtranspose1d", nn.ConvTranspose1d, 1, _same, "conv", "deconv1d", padding=1),
    _image("convtranspose2d", nn.ConvTranspose2d, 2, _same, "conv", "deconv2d", padding=1),
    _image("convtranspose3d", nn.ConvTranspose3d, 3, _same, "conv", "deconv3d", padding=1),
    _image("batchnorm1d", nn.BatchNorm1d, 1, _one, "norm", "bn1d"),
    _image("batchnorm2d", nn.BatchNorm2d, 2, _one, "norm", "bn2d"),
    _image("batchnorm3d", nn.BatchNorm3d, 3, _one, "norm", "bn3d"),
    _tokens("layernorm", nn.LayerNorm, "norm", (256,), (8,), "ln"),
    _tokens("rmsnorm", nn.RMSNorm, "norm", (256,), (8,)),
    _image("groupnorm", nn.GroupNorm, 2, lambda channels: (channels // 2, channels), "norm", "gn"),
    _image("instancenorm1d", nn.InstanceNorm1d, 1, _one, "norm", "in1d", affine=True),
    _image("instancenorm2d", nn.InstanceNorm2d, 2, _one, "norm", "in2d", affine=True),
    _image("instancenorm3d", nn.InstanceNorm3d, 3, _one, "norm", "in3d", affine=True),
    _attention("multiheadattention", SelfAttention, ("x",), "attention", "mha", "selfattention"),
    _attention("multiheadcrossattention", CrossAttention, ("x", "context"), "crossattention"),
    _sweep(
        "scaleddotproductattention",
        DotProduct,
        "attention",
        (),
        _heads(8, 128, 32),
        (),
        _heads(2, 5, 4),
        "sdpa",
        batch=8,
    ),
    _steps("lstm", nn.LSTM),
    _steps("gru", nn.GRU),
    _steps("rnn", nn.RNN),
    _cell("lstmcell", nn.LSTMCell),
    _cell("grucell", nn.GRUCell, "hx"),
    _cell("rnncell", nn.RNNCell, "hx"),
    _tokens("dropout", nn.Dropout, "dropout", (), ()),
    _image("dropout1d", nn.Dropout1d, 1, _none, "dropout"),
    _image("dropout2d", nn.Dropout2d, 2, _none, "dropout"),
    _image("dropout3d", nn.Dropout3d, 3, _none, "dropout"),
    _tokens("alphadropout", nn.AlphaDropout, "dropout", (), ()),
    _image("featurealphadropout", nn.FeatureAlphaDropout, 2, _none, "dropout"),
    _image("prelu", nn.PReLU, 2, _one, "pointwise"),
    _image("avgpool1d", nn.AvgPool1d, 1, _halved, "pool"),
    _image("avgpool2d", nn.AvgPool2d, 2, _halved, "pool"),
    _image("avgpool3d", nn.AvgPool3d, 3, _halved, "pool"),
    _image("maxpool1d", nn.MaxPool1d, 1, _halved, "pool"),
    _image("maxpool2d", nn.MaxPool2d, 2, _halved, "pool"),
    _image("maxpool3d", nn.MaxPool3d, 3, _halved, "pool"),
    _image("adaptiveavgpool1d", nn.AdaptiveAvgPool1d, 1, _whole, "pool"),
    _image("adaptiveavgpool2d", nn.AdaptiveAvgPool2d, 2, _whole, "pool"),
    _image("adaptiveavgpool3d", nn.AdaptiveAvgPool3d, 3, _whole, "pool"),
    _image("adaptivemaxpool1d", nn.AdaptiveMaxPool1d, 1, _whole, "pool"),
    _image("adaptivemaxpool2d", nn.AdaptiveMaxPool2d, 2, _whole, "pool"),
    _image("adaptivemaxpool3d", nn.AdaptiveMaxPool3d, 3, _whole, "pool"),
)


def plain(name: str) -> str:
    """`LayerNorm`, `layer_norm` and `layer-norm` -> `layernorm`."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def find(names: str, among: Sequence[Sweep] = SWEEPS) -> list[Sweep]:
    """Finds sweeps by name, alias or family, separated by commas, or `all`. Raises: UsageError."""
    sweeps: dict[str, Sweep] = {}
    for part in filter(str.strip, names.split(",")) if names.strip(", ") else [names]:
        word = plain(part)
        chosen = [s for s in among if word in map(plain, (s.name, *s.aliases))] or [
            s for s in among if word == s.family or (word == "all" and s in SWEEPS)
        ]
        if not chosen:
            known = [n for s in among for n in (s.name, *s.aliases)]
            near = get_close_matches(word, known, n=1)
            raise UsageError(
                f"there is no primitive {part.strip()!r}{f', did you mean {near[0]}?' if near else ';'} "
                "known: "
                f"{', '.join(dict.fromkeys(['all', *(s.family for s in among), *(s.name for s in among)]))}"
            )
        sweeps.update({s.name: s for s in chosen})
    return list(sweeps.values())
