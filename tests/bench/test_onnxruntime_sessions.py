"""Tests the baseline of N sessions of ONNX Runtime: weights, folded norms, threads, routed rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from widepack_bench.as_built.contestant import routed
from widepack_bench.baselines.members import loop
from widepack_bench.baselines.onnxruntime_sessions import Exported, Sessions, exported
from widepack_bench.baselines.routes import by_dict
from widepack_bench.models.weights import states

for package in ("onnxruntime", "onnx", "onnxscript"):
    pytest.importorskip(package)
COUNT = 3


def convolutional() -> nn.Module:
    parts = (nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    return nn.Sequential(*parts)


@pytest.fixture(scope="module")
def members() -> list[nn.Module]:
    """Members whose weights and statistics differ."""
    found = []
    for state in states(convolutional, COUNT):
        found.append(convolutional().eval().requires_grad_(requires_grad=False))
        found[-1].load_state_dict(state)
    return found


@pytest.fixture(scope="module")
def made(members: list[nn.Module]) -> Exported:
    """The members' models for rows of any number."""
    with torch.no_grad():
        one = exported(members, False, (torch.randn(2, 2, 6, 6),), {}, dynamic=True)
        return Exported(list(one.models), one.inputs, one.outputs, one.each, one.single)


def test_each_members_norms_are_folded_into_its_own_weights(made: Exported) -> None:
    import onnx

    models = [onnx.load_from_string(data) for data in made.models if isinstance(data, bytes)]
    assert len(models) == COUNT
    assert all({n.op_type for n in m.graph.node}.isdisjoint({"BatchNormalization"}) for m in models)


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("workers", [1, 2])
def test_sessions_answer_as_the_members(members: list[nn.Module], each: bool, workers: int) -> None:
    x = torch.randn(COUNT, 2, 2, 6, 6) if each else torch.randn(2, 2, 6, 6)
    with torch.no_grad():
        want: Tensor = loop(members, each)(x)
        sessions = Sessions(exported(members, each, (x,), {}), workers)
    torch.testing.assert_close(sessions.run([x]), want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(sessions.run([2 * x]), loop(members, each)(2 * x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("workers", [1, 2])
def test_routed_rows_reach_their_member(members: list[nn.Module], made: Exported, workers: int) -> None:
    x, ids = torch.randn(5, 2, 6, 6), [2, 0, 2, 2, 1]
    with torch.no_grad():
        want = by_dict(members, (x,), ids)
    torch.testing.assert_close(routed(made, (x,), ids, workers)(), want, rtol=1e-4, atol=1e-5)
