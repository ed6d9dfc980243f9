"""Refusals that name what a member does and what to write instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_builds import refused
from torch import Tensor, nn

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(7))


class OwnGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.generator = torch.Generator().manual_seed(1)  # type: ignore[assignment]
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        generator: Any = self.inner.generator
        y: Tensor = self.linear(x) + torch.rand(3, generator=generator)
        return F.dropout(y, training=True)


class TensorAsSwitch(nn.Module):
    """Passes a tensor where torch takes a bool."""

    active: Any

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("active", torch.tensor(True))

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.linear(x), 0.5, training=self.active)


class FirstCallSets(nn.Module):
    """Sets a mean in its first call, and a flag whose value it branches on."""

    ready: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("ready", torch.tensor(False))
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        if not self.ready:
            self.mean.copy_(y.mean(0))
            self.ready.fill_(True)
        return y - self.mean


HOW: dict[str, Any] = {"sample": (X,), "budget": 0}


def test_a_generator_of_the_member(tmp_path: Path) -> None:
    found = refused(OwnGenerator, tmp_path, dropout="on", **HOW)
    assert "with a torch.Generator of its own (inner.generator)" in found
    assert "--dropout on" in found and "lifted" not in found


def test_a_tensor_in_place_of_a_bool(tmp_path: Path) -> None:
    found = refused(TensorAsSwitch, tmp_path, **HOW)
    assert "must be bool, not Tensor" in found and "write bool(...) around it" in found
    assert "sizes" not in found


@pytest.mark.parametrize("state", [(), ("mean",)])
def test_a_flag_that_the_code_reads_is_not_proposed_as_a_state(tmp_path: Path, state: Any) -> None:
    found = refused(FirstCallSets, tmp_path, state=state, **HOW)
    assert "of its own ready, and forward changes it" in found and "--state ready" not in found
    assert "save the members after a call" in found
