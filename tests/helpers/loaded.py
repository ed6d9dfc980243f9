"""Builds small artifacts for tests, and loads them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import widepack
from widepack.inference.model import WideModel


def seeded(make: Any, seed: int) -> Any:
    """Returns a member with random weights of a seed, in eval mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make().eval()


def files_of(folder: Path, members: Iterable[nn.Module | Mapping[str, Any]]) -> list[Path]:
    """Saves the state dicts of members as m0.pt, m1.pt, ... in a folder."""
    files = []
    for i, member in enumerate(members):
        files.append(folder / f"m{i}.pt")
        torch.save(member.state_dict() if isinstance(member, nn.Module) else member, files[-1])
    return files


def built(
    folder: Path, make: Any, members: Iterable[nn.Module | Mapping[str, Any]], *inputs: str, **options: Any
) -> Path:
    """Builds the artifact `e.wide` of members in a folder, without what most tests do not need."""
    quick = {"pt2": False, "budget": 0, "targets": ("cpu",), "inputs": list(inputs) or None}
    widepack.build(files_of(folder, members), folder / "e.wide", model=make, **{**quick, **options})
    return folder / "e.wide"


def save_members(make: Callable[[], nn.Module], folder: Path, members: int = 4) -> list[Path]:
    """Writes the checkpoints of members with random weights, and returns their paths."""
    paths = [folder / f"m{i}.pt" for i in range(members)]
    for i, path in enumerate(paths):
        torch.manual_seed(i)
        torch.save(make().state_dict(), path)
    return paths


def saved(make: Any, path: Path, *inputs: str, members: int = 4, **options: Any) -> WideModel:
    """Builds an artifact of members with random weights, and loads it."""
    files, quick = save_members(make, path, members), {"pt2": False, "budget": 0, "targets": ("cpu",)}
    widepack.build(files, path / "e.wide", model=make, inputs=list(inputs), **{**quick, **options})
    return widepack.load(path / "e.wide")
