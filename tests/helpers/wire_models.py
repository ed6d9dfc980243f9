"""Builds the artifacts that the tests of the server serve, one for each kind of model."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import cases
import widepack


class Plain(nn.Module):
    """A small classifier with a second entry, `encode`."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.body(x).relu())
        return y

    def encode(self, x: Tensor) -> Tensor:
        z: Tensor = self.body(x)
        return z


class Text(nn.Module):
    """An embedding of ids, a second input, a flag, and three outputs with other dims and dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8)
        self.mixed = nn.Linear(12, 5)
        self.word = nn.Linear(8, 2)

    def forward(self, ids: Tensor, x: Tensor, loud: Tensor) -> dict[str, Tensor]:
        words = self.table(ids)
        logits = self.mixed(torch.cat([words.mean(1), x], -1))
        logits = torch.where(loud[:, None], logits * 2, logits)
        return {"logits": logits, "words": self.word(words), "label": logits.argmax(-1)}


class Scaled(nn.Module):
    """A model with an input that has no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        y: Tensor = self.head(x) * scale
        return y


class Mixing(nn.Module):
    """A model whose rows depend on each other."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(x - x.mean(0))
        return y


class Counting(nn.Module):
    """A model with states: a running sum of rows, and a counter."""

    total: Tensor
    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 6)
        self.register_buffer("total", torch.zeros(6))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.tanh(self.head(x)) + 0.1 * self.total
        self.total.add_(y.mean(0))
        self.steps += 1
        return y


class Score(nn.Module):
    """A model with one number for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(x).squeeze(-1)
        return y


class Typed(nn.Module):
    """A model that takes and gives the small types: bytes, whole numbers and half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)

    def forward(self, pixels: Tensor, half: Tensor, small: Tensor) -> dict[str, Tensor]:
        dtype = self.head.weight.dtype
        y = self.head(pixels.to(dtype) / 255 + half.to(dtype) + small.to(dtype))
        return {"y": y, "half": y.half(), "brain": y.bfloat16(), "byte": pixels, "odd": small % 2 == 1}


@dataclass(frozen=True)
class WireModel:
    """One artifact: `make` makes a member; the rest are options of `widepack.build`."""

    make: Callable[[], nn.Module]
    inputs: tuple[str, ...]
    members: int = 3
    options: Mapping[str, Any] = field(default_factory=dict)

    def member(self, i: int) -> nn.Module:
        """Returns a member in eval mode."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(100 + i)
            return self.make().eval()


MODELS: dict[str, WireModel] = {
    "plain": WireModel(
        Plain, ("forward:x=float32[B,6]", "encode:x=float32[B,6]"), 4, {"entries": ["forward", "encode"]}
    ),
    "text": WireModel(Text, ("ids=int64[B,T]:0..19", "x=float32[B,4]", "loud=bool[B]")),
    "scaled": WireModel(Scaled, ("x=float32[B,6]", "scale=float32[3]")),
    "mixing": WireModel(Mixing, ("x=float32[B,6]",)),
    "counting": WireModel(Counting, ("x=float32[B,6]",), options={"state": ["total", "steps"]}),
    "score": WireModel(Score, ("x=float32[B,6]",)),
    "typed": WireModel(Typed, ("pixels=uint8[B,4]", "half=float16[B,4]", "small=int32[B,4]")),
}
CASES = ("guard_size",)
"""The artifacts of networks from `tests/cases`, beside those that other tests build, too."""


def checkpoints(name: str, folder: Path) -> list[Path]:
    """Writes the members of a model as `fold0.pt`, `fold1.pt`, ..."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"fold{i}.pt" for i in range(MODELS[name].members)]
    for i, path in enumerate(paths):
        torch.save(MODELS[name].member(i).state_dict(), path)
    return paths


def built(name: str, folder: Path) -> Path:
    """Builds one artifact in a folder, unless it is there. Returns: its path."""
    path = folder / f"{name}.wide"
    if name in MODELS:
        model = MODELS[name]
        files, make, inputs, options = (
            checkpoints(name, folder / name),
            model.make,
            model.inputs,
            model.options,
        )
    else:
        case = cases.load(name)
        files = [Path(p) for p in cases.write_checkpoints(name, folder / name)]
        make, inputs, options = case.model, case.INPUTS, {}
    widepack.build(
        files, path, model=make, inputs=list(inputs), pt2=False, budget=0, targets=("cpu",), **options
    )
    return path


def all_built(folder: Path) -> dict[str, Path]:
    """Builds all artifacts once in a folder that several processes share. Returns: their paths by name."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return {
            name: path if (path := folder / f"{name}.wide").exists() else built(name, folder)
            for name in (*MODELS, *CASES)
        }
