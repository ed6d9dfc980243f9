"""Tests that a named tuple of torch, such as `x.max(1)` returns, keeps its type and fields in all answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fusing import members
from torch import Tensor, nn

import widepack
from widepack.inference.output import Output, named_values

FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "max": lambda x: x.max(1),
    "mode": lambda x: x.mode(1),
    "kthvalue": lambda x: x.kthvalue(2, 1),
    "cummax": lambda x: x.cummax(1),
    "topk": lambda x: x.topk(2, 1),
    "aminmax": lambda x: torch.aminmax(x, dim=1),
    "frexp": lambda x: torch.frexp(x.abs() + 1.0),  # the mantissa of a number near 0 is all rounding
    "linalg_qr": lambda x: torch.linalg.qr(x[:, :, None] * x[:, None, :] + torch.eye(5)),
}


class Net(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 5)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.fc(x))


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_a_fused_module_returns_the_type_of_torch(name: str) -> None:
    originals = members(lambda: Net(FUNCTIONS[name]))
    x = torch.randn(6, 4)
    y, expected = widepack.fuse(originals, x)(x), [m(x) for m in originals]
    assert type(y) is type(expected[0]) is getattr(torch.return_types, name)
    for k, field in enumerate(y.__match_args__):
        torch.testing.assert_close(getattr(y, field), torch.stack([r[k] for r in expected]))


def test_an_artifact_its_members_and_packed_modules_return_the_type_of_torch(tmp_path: Path) -> None:
    originals = members(lambda: Net(lambda x: {"a": x.max(1), "b": [tuple(x.min(1)), x]}))
    x = torch.randn(6, 4)
    fused = widepack.fuse(originals, x)
    fused.save(tmp_path / "a.wide")
    ens = widepack.load(tmp_path / "a.wide")
    for y in (ens(x), ens.each(torch.stack([x] * 3)), ens[1](x), widepack.fuse(originals, x, packed=True)(x)):
        assert type(y["a"]) is torch.return_types.max
        assert type(y["b"][0]) is tuple
    values, indices = ens(x)["a"]
    torch.testing.assert_close(values[2], originals[2](x)["a"].values)
    assert torch.equal(indices[2], originals[2](x)["a"].indices)
    widepack.export(tmp_path / "a.wide", tmp_path / "a.pt2", to="pt2")
    y = torch.export.load(tmp_path / "a.pt2").module()(x)
    torch.testing.assert_close(y["a"]["values"], values)


@pytest.mark.parametrize(
    "name", ["max", "torch.return_types.SequenceKey", "torch.return_types.inspect", "torch.return_types.qr"]
)
def test_a_type_name_with_other_fields_gives_a_plain_output(name: str) -> None:
    assert type(named_values(name, [("values", 1), ("indices", 2)])) is Output
