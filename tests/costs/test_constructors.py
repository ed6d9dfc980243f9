"""Tests costs of models that cannot be made or run without the right values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from widepack import primitives as primitives  # fills the registry
from widepack.building.costs import model_costs
from widepack.errors import CaptureError


def test_values_that_are_drawn_need_not_fit() -> None:
    """A model takes floats as numbers of categories, and its constructor reads values."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows, self.head = nn.Embedding(7, 4), nn.Linear(5, 2)
            assert float(self.rows.weight[0, 0]) > -100

        def forward(self, x: Tensor) -> Any:
            ids, other = (100 * x[:, 0]).long(), x[:, 1:]
            return self.head(torch.cat([self.rows(ids), other], 1))

    costs = model_costs(Net, ["x=float32[B,2]"])
    assert costs.totals["flops"] == ("0", "20*B") and not costs.lower_bound
    with pytest.raises(CaptureError, match="fails on the example"):
        model_costs(Net, ["x=float32[B,3]"])


def test_a_constructor_that_computes_its_sizes_with_tensors() -> None:
    """Sizes of fake tensors are no numbers, so the constructor raises a TypeError first."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            widths = set((8 * torch.arange(1, 3)).tolist())
            self.heads = nn.ModuleList(nn.Linear(4, width) for width in sorted(widths))

        def forward(self, x: Tensor) -> Any:
            return [head(x) for head in self.heads]

    costs = model_costs(Net, ["x=float32[B,4]"])
    assert costs.totals["flops"] == ("0", "192*B")


def test_what_a_constructor_raises_is_raised() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            raise ValueError("no such width")

    with pytest.raises(ValueError, match="no such width"):
        model_costs(Net, ["x=float32[B,4]"])
