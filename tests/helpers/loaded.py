"""Builds small artifacts for tests, and loads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import widepack
from widepack.inference.model import WideModel


def saved(make: Any, path: Path, *inputs: str, members: int = 4, **options: Any) -> WideModel:
    """Builds an artifact of members with random weights, and loads it."""
    files = []
    for i in range(members):
        torch.manual_seed(i)
        files.append(path / f"m{i}.pt")
        torch.save(make().state_dict(), files[-1])
    widepack.build(files, path / "e.wide", model=make, inputs=list(inputs), pt2=False, race=False, **options)
    return widepack.load(path / "e.wide")
