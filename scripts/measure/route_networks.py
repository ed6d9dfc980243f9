"""The networks of the measurements of routes and servers: their factories, numbers of members, shapes of a
row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))


def deep() -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(64, 256), nn.ReLU()]
    for _ in range(7):
        layers += [nn.Linear(256, 256), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(256, 10))


def conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


class Trunk(nn.Module):
    """A trunk that all members share, and a head for each."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU()
        )
        self.head = nn.Linear(512, 10)

    def forward(self, input: Tensor) -> Tensor:
        y: Tensor = self.head(self.trunk(input))
        return y


def trunk(name: str) -> bool:
    """Returns whether all members share a weight."""
    return name.startswith("trunk.")


NETWORKS: dict[str, tuple[Callable[[], nn.Module], int, tuple[int, ...]]] = {
    "MLP 64-128-64": (mlp, 100, (64,)),
    "frozen trunk 64-512-512-512, heads 10": (Trunk, 100, (64,)),
    "MLP of eight layers of 256": (deep, 20, (64,)),
    "convolutional, 32x32": (conv, 10, (3, 32, 32)),
}


def members_of(kind: str, batch: int, count: int) -> list[int]:
    """Returns the member of each row: drawn evenly, by Zipf's law, or one for all."""
    if kind == "one":
        return [count // 2] * batch
    g = torch.Generator().manual_seed(batch)
    weights = torch.ones(count) if kind == "uniform" else 1.0 / torch.arange(1, count + 1)
    return torch.multinomial(weights, batch, replacement=True, generator=g).tolist()
