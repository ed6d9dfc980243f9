"""Tests which results have a size that random numbers, or memory that nothing has written, determine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from loaded import built
from small import node, program
from torch import Tensor, nn

import widepack
from widepack.runtime.admission import random_size
from widepack_artifacts.program import Node, Ref

INPUTS = {"x": "float32[B,4]", "i": "int64[3]"}


@pytest.mark.parametrize(
    ("reader", "found"),
    [
        (node("y", "index.Tensor", Ref("e"), [None, Ref("i")]), False),
        (node("y", "index.Tensor", Ref("x"), [Ref("e")]), True),
        (node("y", "masked_select", Ref("e"), Ref("i")), False),
        (node("y", "masked_select", Ref("x"), Ref("e")), True),
        (node("y", "repeat_interleave.self_Tensor", Ref("e"), Ref("i")), False),
        (node("y", "repeat_interleave.self_Tensor", Ref("x"), Ref("e")), True),
        (node("y", "nonzero", Ref("e")), True),
    ],
    ids=lambda value: value.op if isinstance(value, Node) else str(value),
)
def test_only_arguments_that_determine_a_size_count(reader: Node, found: bool) -> None:
    net = program({}, INPUTS, [node("e", "empty_like", Ref("x")), reader], ["y"])
    wrong, draws = random_size(net)
    assert draws
    assert (wrong is reader) == found


class Coupling(nn.Module):
    """Writes two halves into memory of its own, and reads them by a mask, as normalizing flows do."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tensor([True, False, True, False]))
        self.scale = nn.Parameter(torch.rand(2))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        y[..., self.mask] = x[..., self.mask] * self.scale
        y[..., ~self.mask] = x[..., ~self.mask]
        return y[..., self.mask] + y[..., ~self.mask]


@pytest.mark.extended
def test_a_network_that_reads_its_own_memory_by_a_mask_loads(tmp_path: Path) -> None:
    members = [Coupling() for _ in range(3)]
    path, x = built(tmp_path, Coupling, members, "x=float32[B,4]"), torch.rand(5, 4)
    expected = torch.stack([m(x) for m in members])
    torch.testing.assert_close(widepack.load(path)(x), expected.detach())
