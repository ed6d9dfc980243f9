"""Refusals that name what a member does and what to write instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_builds import refused
from torch import Tensor, nn

import widepack

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


class Registers(nn.Module):
    """Registers a buffer in each call."""

    def __init__(self, by_input: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.by_input = by_input

    def forward(self, x: Tensor) -> Tensor:
        self.register_buffer("cache", x if self.by_input else torch.arange(3.0), persistent=False)
        y: Tensor = self.linear(x) + self.cache
        return y


class DrawnBuffer(nn.Module):
    """Its features are drawn by the constructor, and no checkpoint has them."""

    directions: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("directions", torch.randn(3, 3), persistent=False)
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear((x @ self.directions).sin())
        return y


class MaskedInPlace(nn.Linear):
    """Masks its own weight in each call."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.register_buffer("mask", torch.tril(torch.ones(3, 3)))

    def forward(self, input: Tensor) -> Tensor:
        self.weight.data *= self.mask
        return super().forward(input)


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


@pytest.mark.parametrize("by_input", [False, True])
def test_a_buffer_that_forward_registers(tmp_path: Path, by_input: bool) -> None:
    found = refused(lambda: Registers(by_input), tmp_path, **HOW)
    assert "registers the buffer cache when forward runs" in found and "in __init__" in found
    assert "changes x" not in found and "--state" not in found


def test_a_drawn_buffer_is_named(tmp_path: Path) -> None:
    torch.save(DrawnBuffer().state_dict(), tmp_path / "m.pt")
    with pytest.raises(widepack.VerificationError) as caught:
        widepack.build([tmp_path / "m.pt"], tmp_path / "e.wide", model=DrawnBuffer, **HOW)
    assert "differ in directions: the factory is not deterministic" in str(caught.value)
    assert "report" not in str(caught.value)


def test_a_weight_that_forward_writes_is_named() -> None:
    with pytest.raises(widepack.VerificationError) as caught:
        widepack.fuse([MaskedInPlace().eval() for _ in range(2)], X)
    assert "forward writes into weight where torch.export does not see it" in str(caught.value)
    assert "report" not in str(caught.value)
