"""Lists networks of the kinds and sizes that a CPU serves, with their numbers of members, batches and inputs.

The first `KNOWN` were measured while plans were worked on. The others were not.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Make = Callable[[], nn.Module]
KNOWN = 12


@dataclass(frozen=True)
class ServedNetwork:
    """A network: what makes a member, how many there are, the batches, and the specs of the inputs."""

    make: Make
    members: int
    batches: tuple[int, ...]
    inputs: tuple[str, ...]


class SkipSum(nn.Module):
    """Adds what a body makes of its input: to the input, or to what another module makes of it."""

    def __init__(self, body: nn.Module, other: nn.Module | None = None) -> None:
        super().__init__()
        self.body, self.other = body, other or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.other(x) + self.body(x)
        return y


class Turned(nn.Module):
    """Turns dims, applies a body, and turns them back."""

    def __init__(self, body: nn.Module, a: int, b: int) -> None:
        super().__init__()
        self.body, self.a, self.b = body, a, b

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x.transpose(self.a, self.b)).transpose(self.a, self.b)
        return y


class MeanOver(nn.Module):
    """Returns the mean over a dim."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(self.dim)


class LastStep(nn.Module):
    """Runs a recurrent layer and returns its answer for the last step."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)[0][:, -1]
        return y


class Positions(nn.Module):
    """Adds a vector for each position, after a first token if `token`."""

    def __init__(self, length: int, width: int, token: bool = False) -> None:
        super().__init__()
        self.at = nn.Parameter(torch.randn(length + token, width) * 0.1)
        self.token = nn.Parameter(torch.randn(1, 1, width)) if token else None

    def forward(self, x: Tensor) -> Tensor:
        if self.token is not None:
            x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
        return x + self.at


class FirstToken(nn.Module):
    """Returns the first token."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, 0]


class GatedHalves(nn.Module):
    """Multiplies the two halves of channels, one of them through an activation."""

    def __init__(self, act: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, 1)
        return self.act(a) * torch.sigmoid(b)


class ChannelScale(nn.Module):
    """Multiplies by one number for each channel: squeeze and excitation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = seq(nn.AdaptiveAvgPool2d(1), nn.Conv2d(width, width // 4, 1), nn.SiLU(),
                        nn.Conv2d(width // 4, width, 1), nn.Sigmoid())  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x * self.body(x)
        return y


class Appended(nn.Module):
    """Appends the channels that a body makes to its input."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.body(x)], 1)


def seq(*parts: nn.Module) -> nn.Sequential:
    """Returns the parts in a row."""
    return nn.Sequential(*parts)


def mlp(
    sizes: Sequence[int], act: Make = nn.ReLU, norm: Callable[[int], nn.Module] | None = None
) -> nn.Module:
    """Returns linear layers of these sizes with activations, and norms, between them."""
    parts: list[nn.Module] = []
    for i, o in itertools.pairwise(sizes[:-1]):
        parts += [nn.Linear(i, o), *([norm(o)] if norm else []), act()]
    return seq(*parts, nn.Linear(sizes[-2], sizes[-1]))


def conv(
    i: int, o: int, k: int = 3, stride: int = 1, groups: int = 1, act: Make | None = nn.ReLU
) -> nn.Module:
    """Returns a convolution with a batch norm and an activation."""
    layer = nn.Conv2d(i, o, k, stride, k // 2, groups=groups, bias=False)
    return seq(layer, nn.BatchNorm2d(o), *([act()] if act else []))


def head(width: int, classes: int) -> nn.Module:
    """Returns the mean over the image and a linear layer."""
    return seq(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))


def residual(i: int, o: int, stride: int = 1) -> nn.Module:
    """Returns a block of ResNet-18."""
    other = conv(i, o, 1, stride, act=None) if stride > 1 or i != o else None
    return seq(SkipSum(seq(conv(i, o, 3, stride), conv(o, o, act=None)), other), nn.ReLU())


def resnet18() -> nn.Module:
    widths = (64, 64, 64, 128, 128, 256, 256, 512, 512)
    blocks = [residual(i, o, 2 if o > i else 1) for i, o in itertools.pairwise(widths)]
    return seq(conv(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1), *blocks, head(512, 10))


def inverted(i: int, o: int, stride: int, act: Make, scale: bool = False) -> nn.Module:
    """Returns a block with a convolution of each channel between two of 1x1."""
    m = 4 * i
    parts = [conv(i, m, 1, act=act), conv(m, m, 3, stride, m, act), *([ChannelScale(m)] if scale else [])]
    body = seq(*parts, conv(m, o, 1, act=None))
    return SkipSum(body) if stride == 1 and i == o else body


def mobilenet(widths: Sequence[int], act: Make, scale: bool = False) -> nn.Module:
    parts = [inverted(i, o, 2 if o > i else 1, act, scale) for i, o in itertools.pairwise(widths)]
    return seq(conv(3, widths[0], 3, 2, act=act), *parts, conv(widths[-1], 320, 1, act=act), head(320, 20))


def efficientnet() -> nn.Module:
    return mobilenet((16, 24, 24, 48, 48, 96), nn.SiLU, scale=True)


def encoder(width: int, layers: int, heads: int, first: bool = True, act: str = "gelu") -> nn.Module:
    """Returns the layers of an encoder. first: norms stand before the layers."""
    layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, act, batch_first=True, norm_first=first)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def series_encoder(width: int, layers: int, heads: int) -> nn.Module:
    body = encoder(width, layers, heads)
    return seq(nn.Linear(16, width), Positions(64, width), body, MeanOver(1), nn.Linear(width, 4))


def vit(width: int, layers: int, heads: int, image: int, patch: int, token: bool) -> nn.Module:
    count = (image // patch) ** 2
    return seq(nn.Conv2d(3, width, patch, patch), nn.Flatten(2), TokensLast(),
               Positions(count, width, token), encoder(width, layers, heads), nn.LayerNorm(width),
               FirstToken() if token else MeanOver(1), nn.Linear(width, 100))  # fmt: skip


class TokensLast(nn.Module):
    """Turns [B, C, T] and [B, T, C]."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


def convnext() -> nn.Module:
    def block(c: int) -> nn.Module:
        last = seq(nn.LayerNorm(c), nn.Linear(c, 4 * c), nn.GELU(), nn.Linear(4 * c, c))
        return SkipSum(seq(nn.Conv2d(c, c, 7, padding=3, groups=c), Turned(Turned(last, 1, 2), 1, 3)))

    widths, parts = (48, 96, 192), []
    for i, o in itertools.pairwise(widths):
        parts += [block(i), block(i), nn.Conv2d(i, o, 2, 2)]
    return seq(nn.Conv2d(3, 48, 4, 4), *parts, block(192), block(192), block(192), head(192, 20))


def tcn(inputs: int, width: int, layers: int, gated: bool) -> nn.Module:
    parts: list[nn.Module] = [nn.Conv1d(inputs, width, 1)]
    for i in range(layers):
        layer = nn.Conv1d(width, width * (1 + gated), 3, padding=2**i, dilation=2**i)
        parts.append(
            SkipSum(seq(layer, GatedHalves()) if gated else seq(layer, nn.BatchNorm1d(width), nn.ReLU()))
        )
    return seq(*parts, MeanOver(2), nn.Linear(width, 6))


def mixer(tokens: int, width: int, layers: int, first: nn.Module, last: nn.Module) -> nn.Module:
    """Returns layers over tokens and layers over channels in turns."""
    parts = []
    for _ in range(layers):
        over_tokens = Turned(mlp((tokens, 2 * tokens, tokens), nn.GELU), 1, 2)
        parts.append(SkipSum(seq(nn.LayerNorm(width), over_tokens)))
        parts.append(SkipSum(seq(nn.LayerNorm(width), mlp((width, 4 * width, width), nn.GELU))))
    return seq(first, *parts, nn.LayerNorm(width), last)


class Categories(nn.Module):
    """A tabular network over embedded categories and numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(200, 12) for _ in range(8))
        self.body = mlp((8 * 12 + 20, 256, 128, 1), nn.ReLU, nn.BatchNorm1d)

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        parts = [table(ids[:, i]) for i, table in enumerate(self.tables)]
        y: Tensor = self.body(torch.cat([*parts, x], 1))
        return y


class FeatureTokens(nn.Module):
    """Makes a token of each number: a transformer over tabular features."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.scale, self.shift = (nn.Parameter(torch.randn(features, width)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x.unsqueeze(2) * self.scale + self.shift


class Perceiver(nn.Module):
    """Attends from learned vectors to the input: a perceiver."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(1, count, width) * 0.1)
        self.first = nn.Linear(24, width)
        self.attend = nn.MultiheadAttention(width, 4, batch_first=True)
        self.rest, self.last = encoder(width, 2, 4), nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        values, start = self.first(x), self.latents.expand(x.shape[0], -1, -1)
        y: Tensor = self.last(self.rest(start + self.attend(start, values, values)[0]).mean(1))
        return y


class TwoTowers(nn.Module):
    """Two networks and the product of their answers."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = mlp((80, 256, 64)), mlp((120, 384, 64))

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        y: Tensor = (self.user(user) * self.item(item)).sum(1) / math.sqrt(64)
        return y


class SmallUNet(nn.Module):
    """Three levels with concatenated skips."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (seq(conv(i, o), conv(o, o)) for i, o in ((3, 24), (24, 48), (48, 96)))
        self.up_b, self.up_a = nn.ConvTranspose2d(96, 48, 2, 2), nn.ConvTranspose2d(48, 24, 2, 2)
        self.join_b, self.join_a, self.last = conv(96, 48), conv(48, 24), nn.Conv2d(24, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x)
        b = self.b(nn.functional.max_pool2d(a, 2))
        c = self.c(nn.functional.max_pool2d(b, 2))
        b = self.join_b(torch.cat([self.up_b(c), b], 1))
        y: Tensor = self.last(self.join_a(torch.cat([self.up_a(b), a], 1)))
        return y


def vgg() -> nn.Module:
    parts: list[nn.Module] = []
    for i, o in ((3, 32), (32, 64), (64, 128)):
        parts += [conv(i, o), conv(o, o), nn.MaxPool2d(2)]
    return seq(*parts, nn.Flatten(), mlp((128 * 16, 256, 10)))


def group_norms() -> nn.Module:
    def block(c: int) -> nn.Module:
        parts = [seq(nn.GroupNorm(8, c), nn.ReLU(), nn.Conv2d(c, c, 3, padding=1)) for _ in range(2)]
        return SkipSum(seq(*parts))

    down = nn.Conv2d(64, 128, 2, 2)
    return seq(
        nn.Conv2d(1, 64, 3, padding=1), block(64), block(64), down, block(128), block(128), head(128, 10)
    )


def separable_signal() -> nn.Module:
    def layer(c: int, k: int) -> nn.Module:
        each = nn.Conv1d(c, c, k, padding=k // 2, groups=c, bias=False)
        return SkipSum(seq(each, nn.Conv1d(c, c, 1, bias=False), nn.BatchNorm1d(c), nn.ReLU()))

    first = seq(nn.Conv1d(40, 96, 11, 2, 5), nn.BatchNorm1d(96), nn.ReLU())
    return seq(first, *(layer(96, k) for k in (11, 13, 15, 17)), MeanOver(2), nn.Linear(96, 30))


def densenet() -> nn.Module:
    def dense(i: int) -> nn.Module:
        return Appended(seq(nn.BatchNorm2d(i), nn.ReLU(), nn.Conv2d(i, 24, 3, padding=1, bias=False)))

    def half(i: int) -> nn.Module:
        return seq(conv(i, i // 2, 1), nn.AvgPool2d(2))

    blocks = [*(dense(48 + 24 * i) for i in range(4)), half(144), *(dense(72 + 24 * i) for i in range(4))]
    return seq(conv(3, 48, 3, 2), *blocks, head(168, 10))


def autoencoder() -> nn.Module:
    first = nn.Conv2d(1, 16, 3, 2, 1)
    down = seq(first, nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.Flatten())
    middle = seq(nn.Linear(32 * 64, 64), nn.ReLU(), nn.Linear(64, 32 * 64), nn.Unflatten(1, (32, 8, 8)))
    last = nn.ConvTranspose2d(16, 1, 4, 2, 1)
    up = seq(nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.ReLU(), last, nn.Sigmoid())
    return seq(down, middle, up)


def signal() -> nn.Module:
    sizes, parts = (8, 64, 96, 128), []
    for i, o in itertools.pairwise(sizes):
        parts += [nn.Conv1d(i, o, 5, 2, 2), nn.BatchNorm1d(o), nn.ReLU()]
    return seq(*parts, MeanOver(2), nn.Linear(128, 5))


def residual_mlp() -> nn.Module:
    blocks = (SkipSum(seq(nn.LayerNorm(192), mlp((192, 384, 192), nn.GELU))) for _ in range(4))
    return seq(nn.Linear(40, 192), *blocks, nn.LayerNorm(192), nn.Linear(192, 1))


def words(width: int) -> tuple[nn.Module, nn.Module]:
    """Returns an embedding of a vocabulary of 2000 words, and the last layer."""
    return nn.Embedding(2000, width), nn.Linear(width, 6)


def word_gru() -> nn.Module:
    table, last = words(128)
    return seq(table, LastStep(nn.GRU(128, 128, batch_first=True)), last)


def word_encoder() -> nn.Module:
    table, last = words(128)
    body = encoder(128, 3, 4, first=False)
    return seq(table, Positions(32, 128), nn.LayerNorm(128), body, FirstToken(), last)


def steps(layer: nn.Module, width: int, outputs: int) -> nn.Module:
    """Returns a recurrent layer and a linear layer over its answer for the last step."""
    return seq(LastStep(layer), nn.Linear(width, outputs))


def image_mixer() -> nn.Module:
    patches = seq(nn.Conv2d(3, 128, 8, 8), nn.Flatten(2), TokensLast())
    return mixer(64, 128, 4, patches, seq(MeanOver(1), nn.Linear(128, 10)))


def series_mixer() -> nn.Module:
    return mixer(96, 12, 4, nn.Identity(), seq(TokensLast(), nn.Linear(96, 24)))


def ft_transformer() -> nn.Module:
    return seq(FeatureTokens(32, 96), encoder(96, 3, 8, act="relu"), MeanOver(1), nn.Linear(96, 1))


def _net(members: int, batches: tuple[int, ...], shape: str, make: Make) -> ServedNetwork:
    """Returns a network with one input. shape: of a sample; or the specs of all inputs."""
    specs = tuple(shape.split(" ")) if "=" in shape else (f"input=float32[B,{shape}]",)
    return ServedNetwork(make, members, batches, specs)


FIRST = {"batch_first": True}
WORDS = "input=int64[B,32]:0..1999"
NETWORKS: dict[str, ServedNetwork] = {
    "tabular-256": _net(50, (1, 32), "54", lambda: mlp((54, 256, 256, 7))),
    "tabular-512": _net(8, (1, 4), "64", lambda: mlp((64, 512, 512, 512, 10))),
    "gru-160": _net(8, (1, 8), "64,32", lambda: steps(nn.GRU(32, 160, 2, **FIRST), 160, 5)),
    "lstm-128": _net(20, (1, 16), "48,24", lambda: steps(nn.LSTM(24, 128, 2, **FIRST), 128, 5)),
    "resnet-18": _net(8, (1, 8), "3,64,64", resnet18),
    "mobilenet": _net(8, (1, 8), "3,96,96", lambda: mobilenet((16, 16, 24, 24, 40, 40, 80), nn.ReLU6)),
    "encoder-256": _net(16, (1, 8), "64,16", lambda: series_encoder(256, 4, 4)),
    "encoder-768": _net(4, (1, 4), "64,16", lambda: series_encoder(768, 4, 12)),
    "vit-384": _net(4, (1, 4), "3,96,96", lambda: vit(384, 6, 6, 96, 16, token=True)),
    "convnext": _net(8, (1, 4), "3,64,64", convnext),
    "tcn-64": _net(16, (1, 8), "8,256", lambda: tcn(8, 64, 6, gated=False)),
    "mixer-128": _net(12, (1, 16), "3,64,64", image_mixer),
    "tabular-batch-norm": _net(20, (1, 16), "100", lambda: mlp((100, 384, 384, 384, 3), norm=nn.BatchNorm1d)),
    "tabular-residual": _net(10, (1, 32), "40", residual_mlp),
    "tabular-categories": _net(16, (4, 32), "ids=int64[B,8]:0..199 x=float32[B,20]", Categories),
    "tabular-1024": _net(4, (1, 8), "32", lambda: mlp((32, 1024, 1024, 1), nn.SiLU)),
    "tabular-selu": _net(50, (1, 32), "16", lambda: mlp((16, 64, 64, 2), nn.SELU)),
    "gru-both": _net(6, (1, 8), "32,20", lambda: steps(nn.GRU(20, 96, bidirectional=True, **FIRST), 192, 4)),
    "lstm-256": _net(4, (1, 8), "24,12", lambda: steps(nn.LSTM(12, 256, **FIRST), 256, 12)),
    "rnn-64": _net(30, (1, 16), "100,10", lambda: steps(nn.RNN(10, 64, 2, **FIRST), 64, 2)),
    "gru-words": _net(12, (1, 8), WORDS, word_gru),
    "signal": _net(12, (1, 16), "8,512", signal),
    "tcn-gated": _net(8, (1, 8), "6,200", lambda: tcn(6, 48, 6, gated=True)),
    "signal-separable": _net(10, (1, 8), "40,128", separable_signal),
    "vgg": _net(10, (1, 16), "3,32,32", vgg),
    "group-norms": _net(6, (1, 8), "1,28,28", group_norms),
    "efficientnet": _net(6, (1, 8), "3,64,64", efficientnet),
    "densenet": _net(6, (1, 8), "3,48,48", densenet),
    "u-net": _net(5, (1, 4), "x=float32[B,3,48,48]", SmallUNet),
    "autoencoder": _net(8, (1, 16), "1,32,32", autoencoder),
    "encoder-words": _net(24, (1, 8), WORDS, word_encoder),
    "perceiver": _net(8, (1, 8), "x=float32[B,100,24]", lambda: Perceiver(128, 16)),
    "vit-192": _net(10, (1, 4), "3,64,64", lambda: vit(192, 4, 3, 64, 8, token=False)),
    "mixer-series": _net(20, (1, 32), "96,12", series_mixer),
    "ft-transformer": _net(12, (1, 16), "32", ft_transformer),
    "two-towers": _net(16, (1, 32), "user=float32[B,80] item=float32[B,120]", TwoTowers),
}  # fmt: skip


def member(name: str) -> nn.Module:
    """Returns a member of a network: the factory for `widepack build --model`."""
    return NETWORKS[name].make()
