"""Defines members of two layers, and helpers that check refused builds of them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import widepack
from widepack.errors import CaptureError, WidepackError

BTC = "x=float32[B,T,3]"


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 4)


def saved(make: Callable[[], nn.Module], folder: Path) -> list[Path]:
    paths = [folder / f"m{i}.pt" for i in range(2)]
    for i, path in enumerate(paths):
        torch.save(member(make, i).state_dict(), path)
    return paths


def member(make: Callable[[], nn.Module], i: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(70 + i)
        return make().eval()


def built(make: Callable[[], nn.Module], folder: Path, **how: Any) -> Path:
    widepack.build(saved(make, folder), folder / "e.wide", model=make, pt2=False, targets=("cpu",), **how)
    return folder / "e.wide"


def refused(
    make: Callable[[], nn.Module], folder: Path, error: type[WidepackError] = CaptureError, **how: Any
) -> str:
    """Checks that a build is refused. Returns its message, which is one paragraph."""
    with pytest.raises(error) as caught:
        built(make, folder, **how)
    assert not (folder / "e.wide").exists()
    assert caught.value.exit_code == 1
    message = str(caught.value)
    assert "\n" not in message
    return message


def line_in_class(message: str, make: type) -> str:
    """Returns the source line that a message names, after a check that it is in the class."""
    file = Path(inspect.getfile(make))
    found = re.search(rf"{re.escape(file.name)}:(\d+) in forward", message)
    assert found, message
    text = file.read_text().splitlines()
    number = int(found[1])
    above = [row for row in text[:number] if row.startswith("class ")][-1]
    assert above.startswith(f"class {make.__name__}("), message
    return text[number - 1].strip()
