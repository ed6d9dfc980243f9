"""Defines members with different plain attributes, and factories that make them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from loaded import files_of, seeded
from torch import Tensor, nn

from widepack import build, load
from widepack.errors import WidepackError

QUICK: dict[str, Any] = {"pt2": False, "targets": ("cpu",)}
X = ["x=float32[B,6]"]
Act = Callable[[Tensor], Tensor]


class Net(nn.Module):
    """A module with two layers. Tests add attributes to it."""

    def __init__(self, act: Act = torch.relu, eps: float = 1e-5) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6, eps=eps)
        self.first = nn.Linear(6, 5)
        self.last = nn.Linear(5, 3)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:  # [B, 6]
        return self.last(self.act(self.first(self.norm(x))))


def save(folder: Path, make: Callable[[], nn.Module] = Net, count: int = 3) -> list[str]:
    return [str(path) for path in files_of(folder, [seeded(make, i) for i in range(count)])]


def in_turn(make: Callable[[Any], nn.Module], *values: Any) -> Callable[[], nn.Module]:
    """Returns a factory that is not deterministic: each call uses the next value."""
    turns = itertools.cycle(values)
    return lambda: make(next(turns))


def by_member(make: Callable[[Any], nn.Module], *values: Any) -> Callable[..., nn.Module]:
    """Returns a factory that gives value i to member i, which it identifies by its last bias.

    Pickled modules and factories that read the weights can differ in this way.
    """

    def factory(state_dict: Mapping[str, Tensor]) -> nn.Module:
        return make(values[int(state_dict["last.bias"][0])])

    return factory


def numbered(folder: Path, make: Callable[[], nn.Module] = Net, count: int = 3) -> list[str]:
    paths = save(folder, make, count)
    for i, path in enumerate(paths):
        state = torch.load(path)
        state["last.bias"][0] = i
        torch.save(state, path)
    return paths


def refused(error: type[WidepackError], folder: Path, paths: list[str], **kwargs: Any) -> str:
    with pytest.raises(error) as caught:
        build(paths, folder / "e.wide", **{"inputs": X, **QUICK, **kwargs})
    assert not (folder / "e.wide").exists()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def right(
    folder: Path, paths: list[str], model: Callable[..., nn.Module], plain: Callable[[], nn.Module] = Net
) -> None:
    """Checks that the answers of a build are those of each member alone."""
    build(paths, folder / "e.wide", model=model, inputs=X, **QUICK)
    x = torch.randn(7, 6)
    y = load(folder / "e.wide")(x)
    for answer, path in zip(y, paths):
        member = plain().eval()
        member.load_state_dict(torch.load(path))
        with torch.no_grad():
            torch.testing.assert_close(answer, member(x))


@dataclass
class Config:
    eps: float = 1e-5
    sizes: list[int] = field(default_factory=lambda: [3, 4])
    nested: dict[str, Any] = field(default_factory=lambda: {"scale": 0.5, "deep": SimpleNamespace(flag=True)})
    scale: int = 0

    def most(self) -> int:
        return self.scale


class Words(str):
    """A text with an attribute."""

    def __new__(cls, text: str, number: int) -> Words:
        value = super().__new__(cls, text)
        value.number = number
        return value

    number: int


class Mangled:
    __slots__ = ("__k",)

    def __init__(self, k: int = 3) -> None:
        self.__k = k

    @property
    def most(self) -> int:
        return self.__k


class Scaled(Net):
    """A module with variances so large that eps does not change the answers."""

    def __init__(self, eps: float = 1e-5) -> None:
        super().__init__()
        self.batch = nn.BatchNorm1d(6, eps=eps)
        self.batch.load_state_dict({"running_var": torch.full((6,), 1e4)}, strict=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.batch(x)[:, :3]
