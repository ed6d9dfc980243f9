"""Patterns of everyday code: weights and buffers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from networks.patterns.case import Case, case, linear, net, of, param
from networks.patterns.shapes import IMAGE, ROWS, TEXT


class Buffers(nn.Module):
    """Has a persistent buffer, a non-persistent one, a buffer of integers, a plain tensor attribute, and a
    list of tensors.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.register_buffer("scale", torch.rand(8) + 0.5)
        self.register_buffer(
            "table", torch.sin(torch.arange(16.0)[:, None] * torch.arange(1, 9)), persistent=False
        )
        self.register_buffer("order", torch.tensor([3, 1, 0, 2, 7, 5, 6, 4]))
        self.shift = torch.linspace(0, 1, 8)
        self.extra = [torch.ones(8), torch.full((1, 8), 0.25)]

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x) * self.scale + self.table[: x.shape[1]]
        return y[..., self.order] + self.shift + self.extra[0] * self.extra[1]


class Tied(nn.Module):
    """Uses the embedding as output projection, and one layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layer = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layer(self.layer(self.embed(ids)).relu()))


class KeywordNames(nn.Module):
    """Has parts, a parameter and a buffer whose names are keywords of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({"class": nn.Linear(6, 4), "in": nn.LayerNorm(4)})
        self.register_parameter("lambda", nn.Parameter(torch.rand(4)))
        self.register_buffer("None", torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.heads["in"](self.heads["class"](x)) * getattr(self, "lambda")
        return y + getattr(self, "None")


def tied_encoder_decoder(self: Any, x: Tensor) -> Tensor:
    return F.linear(F.linear(x, self.fc.weight, self.fc.bias).relu(), self.fc.weight.t(), self.back)


CASES: dict[str, Case] = {
    "buffers": case(Buffers, TEXT, "T=1..16"),
    "keyword_names": case(KeywordNames, ROWS),
    "tied": case(Tied, "ids=int64[B,T]:0..10"),
    "tied_transposed": case(net(tied_encoder_decoder, fc=linear(6, 5), back=param(6)), ROWS),
    "parameters": case(
        net(
            lambda self, x: x * self.gain + self.bias - self.zero.sigmoid(),
            gain=param(6),
            bias=param(1, 6),
            zero=param(),
        ),
        ROWS,
    ),
    "parameter_list": case(
        net(
            lambda self, x: sum(x @ w for w in self.ws) * self.named["scale"],
            ws=lambda: nn.ParameterList(nn.Parameter(torch.randn(6, 5)) for _ in range(2)),
            named=lambda: nn.ParameterDict({"scale": nn.Parameter(torch.randn(5))}),
        ),
        ROWS,
    ),
    "module_dict": case(
        net(
            lambda self, x: self.by["a"](x) + self.by["b"](x),
            by=lambda: nn.ModuleDict({"a": nn.Linear(6, 5), "b": nn.Linear(6, 5)}),
        ),
        ROWS,
    ),
    "logit_scale": case(
        net(
            lambda self, x, y: (
                F.normalize(self.a(x), dim=-1) @ F.normalize(self.b(y), dim=-1).t() * self.scale.exp()
            ),
            a=linear(6, 4),
            b=linear(5, 4),
            scale=param(),
        ),
        ROWS,
        "y=float32[K,5]",
    ),
    "layer_scale": case(
        net(
            lambda self, x: x + self.gamma[:, None, None] * self.conv(x),
            conv=of(nn.Conv2d, 4, 4, 3, padding=1),
            gamma=param(4),
        ),
        IMAGE,
    ),
    "only_parameters": case(
        net(lambda self, x: x + (self.w @ self.w.t()).softmax(-1).sum(0), w=param(6, 4)), ROWS
    ),
    "weights_from_weights": case(
        net(
            lambda self, x: F.linear(x, self.a * torch.sigmoid(self.gate), self.low @ self.high),
            a=param(5, 6),
            gate=param(5, 1),
            low=param(5, 2),
            high=param(2),
        ),
        ROWS,
    ),
    "lora": case(
        net(
            lambda self, x: self.fc(x) + x @ self.down.t() @ self.up.t() * 0.5,
            fc=linear(6, 5),
            down=param(2, 6),
            up=param(5, 2),
        ),
        ROWS,
    ),
    "mixture_of_experts": case(
        net(
            lambda self, x: torch.einsum(
                "be,beo->bo", self.gate(x).softmax(-1), torch.einsum("bi,eio->beo", x, self.experts)
            ),
            gate=linear(6, 4),
            experts=param(4, 6, 5),
        ),
        ROWS,
    ),
    "hyper_network": case(
        net(
            lambda self, x, z: torch.bmm(self.make(z).view(-1, 5, 6), x.unsqueeze(-1)).squeeze(-1),
            make=linear(4, 30),
        ),
        ROWS,
        "z=float32[B,4]",
    ),
    "film": case(
        net(
            lambda self, x, z: (
                self.conv(x) * (1 + self.fc(z).chunk(2, 1)[0][..., None, None])
                + self.fc(z).chunk(2, 1)[1][..., None, None]
            ),
            conv=of(nn.Conv2d, 4, 5, 3),
            fc=linear(6, 10),
        ),
        IMAGE,
        "z=float32[B,6]",
    ),
    "squeeze_excite": case(
        net(
            lambda self, x: x * self.up(self.down(x.mean((2, 3))).relu()).sigmoid()[:, :, None, None],
            down=linear(4, 2),
            up=linear(2, 4),
        ),
        IMAGE,
    ),
    "residual": case(net(lambda self, x: x + self.b(self.a(x).relu()), a=linear(6, 6), b=linear(6, 6)), ROWS),
}
