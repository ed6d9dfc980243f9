"""The members of the artifacts of these tests."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from widepack.inference.model import WideModel


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y


def exact(ens: WideModel, x: Tensor) -> Tensor:
    """Returns the answers of each member alone, in float64, `[N, rows, 3]`."""
    answers = []
    for name in ens.members:
        module = Net().double()
        module.load_state_dict({k: v.double() for k, v in ens.state_dict(name).items()})
        answers.append(module(x.double()).detach())
    return torch.stack(answers)


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, ids: Tensor, scale: Tensor) -> dict[str, Tensor]:
        h = self.table(ids).mean(1) * scale[:, None]
        return {"logits": self.head(h), "map": h.view(-1, 2, 3)}


class Centered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(x - x.mean(0))
        return y


class Steps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(x).cumsum(0)
        return y


class Paired(nn.Module):
    """Takes an even number of rows from 4 on."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] % 2:
            raise ValueError("an odd number of rows")
        y: Tensor = self.head(x) * (3.0 if x.shape[0] >= 4 else 1.0)
        return y


class Classes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(1, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(x).argmax(1)
        return y
