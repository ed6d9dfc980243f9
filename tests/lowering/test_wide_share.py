"""Tests that nearly all nodes run in wide strategies, and that a wide program starts about as many kernels as
one member.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import Artifacts
from torch.utils._python_dispatch import TorchDispatchMode

import cases
from widepack import load
from widepack.ir.torch_internals import schema_of
from widepack_artifacts.reader import Reader

QUICK = ("mlp", "resnet18", "frozen_trunk")


def _cases(names: list[str]) -> list[Any]:
    return [n if n in QUICK else pytest.param(n, marks=pytest.mark.extended) for n in names]


@pytest.mark.parametrize("name", _cases(cases.NAMES))
def test_nearly_all_nodes_run_wide(name: str, artifacts: Artifacts) -> None:
    report = artifacts.report(name, "wide")
    assert report.wide_share >= 0.95
    if (
        name != "ragged_heads"
    ):  # after the first Ragged value, members run one after the other with every strategy
        assert not {"loop", "sequential"} & set(report.strategies)


@pytest.mark.parametrize("name", _cases([n for n in cases.NAMES if not cases.load(n).RECURRENT]))
def test_the_wide_program_starts_few_kernels(name: str, artifacts: Artifacts) -> None:
    report = artifacts.report(name, "wide")
    assert report.kernels_member > 0
    assert report.kernels_wide <= 1.2 * report.kernels_member, (
        f"{report.kernels_wide} kernels, a member has {report.kernels_member}"
    )


class Counted(TorchDispatchMode):
    """Counts the calls of each op."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = schema_of(func).name.partition("::")[2]
        self.calls[name] = self.calls.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def convolutions(model: Any, x: torch.Tensor) -> int:
    """Returns the number of convolutions that torch dispatches in one call."""
    model(x)
    with torch.inference_mode(False), torch.no_grad(), Counted() as counted:
        model(x)
    return sum(n for op, n in counted.calls.items() if "conv" in op and "backward" not in op)


@pytest.mark.extended(keep=2)
@pytest.mark.parametrize("strategy", [None, "wide", "loop"])
@pytest.mark.parametrize("batch", [2, 1000])
def test_a_frozen_trunk_runs_once(strategy: str | None, batch: int, artifacts: Artifacts) -> None:
    ens = load(artifacts("frozen_trunk"), strategies=strategy)
    member = cases.load("frozen_trunk").member(0)
    x = torch.randn(batch, 3, 32, 32)
    assert convolutions(member, x) == 3
    assert convolutions(ens, x) == 3
    assert (
        convolutions(load(artifacts("resnet18", "wide"), strategies="loop"), torch.randn(1, 3, 64, 64))
        == 3 * 20
    )  # where each member has a different trunk


def test_a_frozen_trunk_is_shared(artifacts: Artifacts) -> None:
    report = artifacts.report("frozen_trunk")
    manifest = Reader(artifacts("frozen_trunk")).manifest
    for weight in manifest.weights:
        assert weight.kind == ("shared" if weight.name.startswith("trunk") else "stacked"), weight.name
    assert report.weights["shared"] == sum(
        v.numel() * v.element_size() for v in cases.load("frozen_trunk").member(0).trunk.state_dict().values()
    )
    assert report.kinds["stacked"] == 3  # linear, relu, linear
    assert report.kinds["ragged"] == 0


def test_the_plan_explains_its_choices(artifacts: Artifacts) -> None:
    """Every wide node has its strategy and a reason in the artifact's plan."""
    plan = load(artifacts("mlp", "wide")).plan
    named = {n for r in plan.regions if r.strategy == "wide" for n in r.nodes}
    assert named
    assert named <= set(plan.choices)
    assert all(c.strategy and c.because for c in plan.choices.values())
    assert all(r.because for r in plan.regions)
