"""Tests which results have a size that random numbers, or memory that nothing has written, determine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from loaded import built
from small import node, program
from torch import Tensor, nn

import widepack
from widepack.errors import ArtifactError
from widepack.runtime.admission import admit, random_sizes
from widepack.runtime.budget import Budget
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
    sizes, draws = random_sizes(net)
    assert draws
    assert sizes == ([reader] if found else [])


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


class Unsort(Coupling):
    """Writes the inverse of an order into memory of its own, and reads by it, as mixtures of experts do."""

    def forward(self, x: Tensor) -> Tensor:
        order = x[:, 0].argsort()
        back = torch.empty_like(order)
        back[order] = torch.arange(x.shape[0])
        return (x[:, self.mask][order] * self.scale)[back]


def test_an_index_of_whole_numbers_determines_no_size(tmp_path: Path) -> None:
    members = [Unsort() for _ in range(3)]
    path, x = built(tmp_path, Unsort, members, "x=float32[B,4]"), torch.rand(5, 4)
    expected = torch.stack([m(x) for m in members])
    torch.testing.assert_close(widepack.load(path)(x), expected.detach())


def test_a_mask_in_memory_that_nothing_has_written_is_refused() -> None:
    nodes = [
        node("e", "empty_like", Ref("x")),
        node("m", "gt.Scalar", Ref("e"), 0.5),
        node("y", "index.Tensor", Ref("x"), [Ref("m")]),
    ]
    net = program({}, INPUTS, nodes, ["y"])
    budget, given = Budget.of(10**6, 10**6, use="load"), [torch.rand(2, 4), torch.zeros(3, dtype=torch.int64)]
    with pytest.raises(ArtifactError, match=r"node y .*size depends on random numbers"):
        admit(budget, "the program", net, {}, lambda values: given, torch.device("cpu"), False)
