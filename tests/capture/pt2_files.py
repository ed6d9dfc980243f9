"""Writes `.pt2` files, and reads them as a build does."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from loaded import seeded
from torch import Tensor, nn
from torch.export import Dim

import cases
from widepack import build
from widepack.building.read import choose_factory
from widepack.capture.pt2.factory import unreadable
from widepack.checkpoints.discovery import open_checkpoint
from widepack.errors import CheckpointError, WidepackError

QUICK: dict[str, Any] = {"pt2": False, "targets": ("cpu",)}
DYNAMIC = Dim.DYNAMIC


class Net(nn.Module):
    """Norms, a recurrent layer, dropout, an unsaved buffer, a tensor attribute and several outputs."""

    def __init__(self, free: float = 1.0, width: int = 4) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 6, 3, padding=1)
        self.norm = nn.BatchNorm1d(6)
        self.lstm = nn.LSTM(6, 4, batch_first=True)
        self.drop = nn.Dropout(0.1)
        self.fc = nn.Linear(4, width)
        self.register_buffer("kept", torch.full((width,), free), persistent=False)
        self.free = torch.full((width,), -free)
        nn.init.normal_(self.norm.running_mean)  # type: ignore[arg-type]
        nn.init.uniform_(self.norm.running_var, 0.5, 1.5)  # type: ignore[arg-type]

    def forward(self, x: Tensor, scale: Tensor | None = None, *, twice: bool = False) -> Any:  # [B, 2, T]
        h, _ = self.lstm(self.norm(self.conv(x)).relu().transpose(1, 2))
        a, b = self.drop(h).split(2, -1)
        y = self.fc(torch.cat([b, a], -1)) + 2 * self.get_buffer("kept") + self.free + torch.tensor(0.5)
        y = y if scale is None else y * scale
        return {"y": y, "parts": (a, 3), "none": None} if twice else {"y": y}


def exported(
    module: nn.Module, *args: Any, dims: Any = None, functional: bool = True, **kwargs: Any
) -> torch.export.ExportedProgram:
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")  # torch warns about its own code
        program = torch.export.export(module, args, kwargs, dynamic_shapes=dims, strict=False)
        return program.run_decompositions({}) if functional else program


def save(path: Path, module: nn.Module, *args: Any, **kwargs: Any) -> str:
    return written(path, exported(module, *args, **kwargs))


def written(path: Path, program: torch.export.ExportedProgram) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(program, path)
    return str(path)


def nets(folder: Path, count: int = 2, functional: bool = True, **kwargs: Any) -> list[str]:
    x, dims = torch.randn(4, 2, 8, generator=cases.generator(1)), {"x": {0: DYNAMIC}, **dict.fromkeys(kwargs)}
    return [
        save(
            folder / f"m{i}.pt2",
            seeded(lambda i=i: Net(i + 1.0), i),
            x,
            dims=dims,
            functional=functional,
            **kwargs,
        )
        for i in range(count)
    ]


def program_of(path: str | Path) -> None:
    """Reads the program of a file as a build does."""
    opened = open_checkpoint(path)
    if why := unreadable(opened):
        raise CheckpointError(why)
    choose_factory(None, None, [opened], None).of(opened, {})


def refused(path: str | Path, error: type[WidepackError] = CheckpointError) -> str:
    with pytest.raises(error) as caught:
        build([path], f"{path}.wide", **QUICK)
    assert "\n" not in str(caught.value)
    assert not os.path.exists(f"{path}.wide/manifest.json")
    return str(caught.value)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.fc(x))
