"""Tests plans of members that train: convolutions in channels-last memory."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from small import all_kinds, program
from torch import Tensor, nn

import widepack
from widepack.fused import programs
from widepack.planning.channels_last_plans import CHANNELS_LAST, with_channels_last
from widepack.planning.heuristics import plans
from widepack.planning.plan import Plan
from widepack.planning.request import StrategyRequest
from widepack_artifacts.program import Kind, Node, Program, Ref


def network(channels: int, side: int, op: str = "conv2d") -> tuple[Program, dict[str, Kind]]:
    """Returns a convolution of a window of 3 that keeps the image's size."""
    spatial = int(op[4])
    window, image = ",".join("3" * spatial), ",".join([str(side)] * spatial)
    out = f"float32[B,{channels},{image}]"
    call = (Ref("x"), Ref("w"), None, [1] * spatial, [1] * spatial)
    net = program(
        {"w": f"float32[{channels},{channels},{window}]"},
        {"x": out},
        [Node("c", f"aten.{op}.default", call, {}, out)],
        ["c"],
    )
    return net, all_kinds(net, w="stacked")


def chosen(net: Program, slots: dict[str, Kind], requested: str = "auto") -> list[str]:
    request = replace(StrategyRequest.parse(requested), plain=True, training=True)
    sizes = {"B": 4}
    found = plans(net, slots, 4, sizes, "B", "cpu", "shared", request)
    choices = [plan.choices for plan in with_channels_last(found, net, slots, sizes, "B")]
    return [c["c"].strategy if "c" in c else "" for c in choices]


@pytest.mark.parametrize("op", ["conv2d", "conv3d"])
def test_large_images_run_in_channels_last_memory_in_wide_regions_and_in_loops(op: str) -> None:
    net, slots = network(8, 12, op)
    for requested in ("auto", "wide", "loop"):
        assert set(chosen(net, slots, requested)) == {CHANNELS_LAST}


def test_a_weight_that_is_larger_than_the_images_keeps_its_strategy() -> None:
    """Each step would reorder more numbers of the weight than of the images."""
    assert CHANNELS_LAST not in chosen(*network(256, 2))


def test_a_requested_strategy_stays() -> None:
    assert set(chosen(*network(8, 12), requested="grouped")) == {"grouped"}


def test_a_line_of_pixels_keeps_its_strategy() -> None:
    assert CHANNELS_LAST not in chosen(*network(8, 12, "conv1d"))


class Net(nn.Module):
    """Convolutions, a norm, a pooling, and a layer that reads all pixels in torch's own order."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.second, self.head = nn.Conv2d(6, 5, 3, groups=1), nn.Linear(5 * 3 * 3, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.max_pool2d(self.norm(self.first(x)).relu(), 2)
        y = self.second(y)
        answer: Tensor = self.head(y.flatten(1))
        return answer


@pytest.mark.extended
@pytest.mark.parametrize("strategies", ["auto", "wide", "loop"])
@pytest.mark.parametrize("own", [False, True], ids=["one input", "own inputs"])
def test_steps_are_those_of_the_members(strategies: str, own: bool) -> None:
    torch.manual_seed(0)
    members = [Net().train() for _ in range(3)]
    alone = [copy.deepcopy(m).double() for m in members]
    x = torch.randn(3, 4, 3, 10, 10) if own else torch.randn(4, 3, 10, 10)
    fused = widepack.fuse(members, x[0] if own else x, strategy=strategies)
    y = fused.each(x) if own else fused(x)
    y.square().sum().backward()
    for i, member in enumerate(alone):
        want = member((x[i] if own else x).double())
        want.square().sum().backward()
        torch.testing.assert_close(y[i].double(), want, rtol=1e-4, atol=1e-5)
        for name, p in member.named_parameters():
            grad = fused.tensor_of(name).grad
            assert grad is not None and p.grad is not None
            torch.testing.assert_close(grad[i].double(), p.grad, rtol=1e-3, atol=1e-4)


def test_programs_that_torch_compiles_keep_the_memory_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its compiler chooses the order itself. `compile` plans again what was planned already."""
    planned: list[int] = []

    def counted(plans: list[Plan], *rest: Any) -> list[Plan]:
        planned.append(len(plans))
        return with_channels_last(plans, *rest)

    monkeypatch.setattr(programs, "with_channels_last", counted)
    x = torch.randn(4, 3, 10, 10)
    fused = widepack.fuse([Net().train() for _ in range(2)], x)
    assert planned
    before = fused(x).detach()
    planned.clear()
    fused.compile(backend="eager")
    after = fused(x)
    after.sum().backward()
    assert not planned
    torch.testing.assert_close(after.detach(), before, rtol=1e-4, atol=1e-5)
