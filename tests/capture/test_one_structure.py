"""A batch of one structure, distributions as outputs, and state in a buffer that is None at first."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from small_builds import agree, loaded, member, refused
from torch import Tensor, nn

from capture.size_members import Base
from widepack.errors import InputError


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


OF_SAMPLE: dict[str, Any] = {"sample": SAMPLE, "dynamic": AXES, "budget": 0}


@pytest.mark.extended
def test_one_structure_is_accepted(tmp_path: Path) -> None:
    ens = loaded(Pooled, tmp_path, **OF_SAMPLE)
    for call in (SAMPLE, ONE):
        agree(ens, Pooled, *call)


def test_one_structure_is_refused_where_valid_inputs_differ(tmp_path: Path) -> None:
    ens = loaded(Branching, tmp_path, **OF_SAMPLE)
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
    y = loaded(Normal, tmp_path, "x=float32[B,3]")(x := torch.randn(2, 3))
    assert list(y) == ["loc", "scale"]
    torch.testing.assert_close(y.loc[1], member(Normal, 1)(x).loc, rtol=1e-4, atol=1e-5)


def test_state_in_an_empty_buffer_is_named(tmp_path: Path) -> None:
    message = refused(Caching, tmp_path, inputs=["x=float32[B,3]"])
    assert re.search("keeps state in last: None at first.*--state last", message)
