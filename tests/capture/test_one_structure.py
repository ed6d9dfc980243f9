"""A batch of one structure, distributions as outputs, and state in a buffer that is None at first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import widepack
from capture.size_members import Base, built, member
from widepack.errors import CaptureError, InputError


class Pooled(nn.Module):
    """Sums the energies of atoms by structure."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, x: Tensor, of: Tensor, cell: Tensor) -> Tensor:
        h = self.linear(x)
        return torch.zeros(cell.shape[0], 1).index_add(0, of, h) * cell


class Branching(Pooled):
    def forward(self, x: Tensor, of: Tensor, cell: Tensor) -> Tensor:
        y = super().forward(x, of, cell)
        return y if cell.shape[0] > 1 else 2 * y


SAMPLE = torch.randn(6, 3), torch.tensor([0, 0, 1, 1, 2, 2]), torch.rand(3, 1)
ONE = torch.randn(2, 3), torch.tensor([0, 0]), torch.rand(1, 1)
AXES = {"x": {0: "N"}, "of": {0: "N"}, "cell": {0: "B"}}


def of_sample(model: type[nn.Module], folder: Path) -> tuple[Any, list[nn.Module]]:
    members = []
    for i in range(2):
        torch.manual_seed(i)
        members.append(model().eval())
        torch.save(members[-1].state_dict(), folder / f"{i}.pt")
    paths = [folder / f"{i}.pt" for i in range(2)]
    widepack.build(paths, folder / "e.wide", model=model, sample=SAMPLE, dynamic=AXES, race=False)
    return widepack.load(folder / "e.wide"), members


def test_one_structure_is_accepted(tmp_path: Path) -> None:
    ens, members = of_sample(Pooled, tmp_path)
    for call in (SAMPLE, ONE):
        torch.testing.assert_close(ens(*call), torch.stack([m(*call) for m in members]))


def test_one_structure_is_refused_where_valid_inputs_differ(tmp_path: Path) -> None:
    ens, _ = of_sample(Branching, tmp_path)
    with pytest.raises(InputError, match="B = 1.*member's own answer there is not its captured program's"):
        ens(*ONE)


class Normal(Base):
    def forward(self, x: Tensor) -> Any:
        return torch.distributions.Normal(self.fc(x), torch.ones(4))


class Caching(Base):
    last: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", None)

    def forward(self, x: Tensor) -> Any:
        y: Tensor = self.fc(x)
        before: Tensor | None = self.last
        self.last = y.sum(0)
        return y if before is None else y + before


def test_a_distribution_is_taken_apart(tmp_path: Path) -> None:
    y = widepack.load(built(Normal, tmp_path, inputs=["x=float32[B,3]"]))(x := torch.randn(2, 3))
    assert list(y) == ["loc", "scale"]
    torch.testing.assert_close(y.loc[1], member(Normal, 1)(x).loc, rtol=1e-4, atol=1e-5)


def test_state_in_an_empty_buffer_is_named(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="keeps state in last: None at first.*--state last"):
        built(Caching, tmp_path, inputs=["x=float32[B,3]"])
