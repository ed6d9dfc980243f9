"""Members for tests of fused modules: small networks whose members differ in weights and statistics."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Mlp(nn.Module):
    def __init__(self, width: int = 6, eps: float = 1e-5) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, width), nn.LayerNorm(width, eps=eps), nn.GELU(), nn.Linear(width, 3)
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y


class Cnn(nn.Module):
    """A convolution with a batch norm, one without a norm, and a head."""

    def __init__(self, momentum: float = 0.1) -> None:
        super().__init__()
        self.conv1, self.norm1 = (
            nn.Conv2d(3, 6, 3, padding=1, bias=False),
            nn.BatchNorm2d(6, momentum=momentum),
        )
        self.conv2 = nn.Conv2d(6, 8, 3, stride=2)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm1(self.conv1(x)))
        y = torch.relu(self.conv2(y))
        return self.head(y.mean((2, 3)))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """An embedding, one encoder layer and a head. Dropout is optional."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.place = nn.Parameter(torch.randn(1, 5, 8) * 0.1)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout, batch_first=True)
        self.head = nn.Linear(8, 11)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layer(self.tokens(ids) + self.place))  # type: ignore[no-any-return]


def members(
    make: Callable[[], nn.Module], count: int = 3, seed: int = 0, dtype: torch.dtype = torch.float32
) -> list[Any]:
    """Returns members in eval mode. Their weights and statistics differ, even where a factory makes equal
    ones.
    """
    modules: list[Any] = []
    for i in range(count):
        g = torch.Generator().manual_seed(100 * seed + i)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(100 * seed + i)
            module = make().to(dtype).eval()
        for p in module.parameters():
            p.data += 0.1 * torch.randn(p.shape, generator=g).to(dtype)
        for name, b in module.named_buffers():
            if name.endswith("running_mean"):
                b += 0.3 * torch.randn(b.shape, generator=g).to(dtype)
            elif name.endswith("running_var"):
                b *= 0.5 + torch.rand(b.shape, generator=g).to(dtype)
        modules.append(module)
    return modules


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ids(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 11, shape, generator=torch.Generator().manual_seed(seed))


def copies(modules: Sequence[Any]) -> list[Any]:
    return [copy.deepcopy(m) for m in modules]


def stacked(modules: Sequence[Any]) -> dict[str, Tensor]:
    """Returns every weight and buffer, stacked as `[N, ...]`."""
    states = [m.state_dict() for m in modules]
    return {n: torch.stack([s[n] for s in states]) for n in states[0]}


def gradients(modules: Sequence[Any]) -> dict[str, Tensor]:
    result = {}
    for name, _ in modules[0].named_parameters():
        parameters = [dict(m.named_parameters())[name] for m in modules]
        result[name] = torch.stack(
            [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
        )
    return result
