"""Builds artifacts of small members, and compares loaded models with the members."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from loaded import files_of
from support import leaves
from torch import Tensor, nn

import widepack
from widepack.errors import CaptureError, WidepackError

QUICK: dict[str, Any] = {"pt2": False, "targets": ("cpu",)}
Make = Callable[[], nn.Module]


def member(make: Make, i: int) -> nn.Module:
    """Returns member i, all of whose parameters differ from those of the others."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(40 + i)
        module = make().eval()
        with torch.no_grad():
            for p in module.parameters():
                p.add_(0.1 * torch.randn_like(p))
    return module


def saved(make: Make, folder: Path, count: int = 2) -> list[Path]:
    """Saves the state dicts of members."""
    return files_of(folder, [member(make, i) for i in range(count)])


def built(make: Make, folder: Path, count: int = 2, **how: Any) -> Path:
    """Returns the artifact of members. how: options of `widepack.build`."""
    widepack.build(saved(make, folder, count), folder / "e.wide", model=make, **{**QUICK, **how})
    return folder / "e.wide"


def loaded(make: Make, folder: Path, *inputs: str, count: int = 2, **how: Any) -> widepack.WideModel:
    """Returns the loaded artifact of members. inputs: the input specs."""
    given = {"inputs": inputs} if inputs else {}
    return widepack.load(built(make, folder, count, **given, **how))


def agree(
    ens: Any,
    make: Make,
    *given: Any,
    rtol: float | None = None,
    atol: float | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Checks that a model, given these inputs, gives the outputs of each member alone.

    dtype: that of the members.
    """
    found = leaves(ens(*given))
    for i in range(len(ens)):
        alone = leaves(member(make, i).to(dtype)(*(x.clone() if isinstance(x, Tensor) else x for x in given)))
        for wide, own in zip(found, alone, strict=True):
            torch.testing.assert_close(wide[i].clone(), own.detach(), rtol=rtol, atol=atol)


def refused(make: Make, folder: Path, error: type[WidepackError] = CaptureError, **how: Any) -> str:
    """Checks that a build is refused. Returns its message, which is one paragraph."""
    with pytest.raises(error) as caught:
        built(make, folder, **how)
    assert not (folder / "e.wide").exists()
    assert caught.value.exit_code == 1
    message = str(caught.value)
    assert "\n" not in message
    return message
