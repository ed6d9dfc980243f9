"""Builds small artifacts for tests, and loads them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import widepack
from widepack.inference.model import WideModel


def save_members(make: Callable[[], nn.Module], folder: Path, members: int = 4) -> list[Path]:
    """Writes the checkpoints of members with random weights, and returns their paths."""
    paths = [folder / f"m{i}.pt" for i in range(members)]
    for i, path in enumerate(paths):
        torch.manual_seed(i)
        torch.save(make().state_dict(), path)
    return paths


def saved(make: Any, path: Path, *inputs: str, members: int = 4, **options: Any) -> WideModel:
    """Builds an artifact of members with random weights, and loads it."""
    files = save_members(make, path, members)
    widepack.build(files, path / "e.wide", model=make, inputs=list(inputs), pt2=False, race=False, **options)
    return widepack.load(path / "e.wide")
