"""Tests that costs of N members are `shared + N * member`: of what runs wide, and of the weights."""

from __future__ import annotations

import pytest
import torch
from counted import flops
from torch import Tensor, nn

from cases import NAMES, load
from widepack import primitives as primitives  # fills the registry
from widepack.building.costs import model_costs
from widepack.building.preview import Preview
from widepack_bench.measure.roofline import work

SIZES = {"unet": {"B": 3, "H": 2, "W": 5}} | {
    name: {"B": 3, "T": 29} for name in ("bert", "gpt2", "encoder", "textcnn")
}


LONG = ("depthwise", "unet", "bert", "gpt2", "encoder", "resnet18")


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in LONG else n for n in NAMES])
def test_flop_of_the_wide_program(name: str) -> None:
    """The formulas come from programs for 2 and 3 members."""
    case = load(name)
    preview = Preview(case.model, case.INPUTS)
    plan = preview.of(8).plan("cpu")
    costs = model_costs(case.model, case.INPUTS, wide=8)
    sizes = SIZES.get(name, {"B": 3})
    for members in (1, 3, 100):
        program = preview.of(members).lower(plan).program
        assert flops(costs, sizes, members) == work(program, sizes).flop > 0


class FrozenTrunk(nn.Module):
    """A trunk whose weights are no part of the state dict, so that all members share them, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk: Tensor
        self.register_buffer("trunk", torch.zeros(64, 32), persistent=False)
        self.head = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(x @ self.trunk))  # type: ignore[no-any-return]


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("wide", [0, 4])
def test_a_shared_trunk_is_paid_once(wide: int) -> None:
    costs = model_costs(FrozenTrunk, ["x=float32[B,64]"], wide=wide)
    assert costs.totals["flops"] == ("4096*B", "512*B")
    assert costs.weights == ("2048*w_bytes", "264*w_bytes")
    assert costs.parameters == ("2048", "264")
    for members in (1, 3, 100):
        assert flops(costs, {"B": 5}, members) == 5 * (4096 + 512 * members)


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("name", NAMES)
def test_the_bytes_of_weights_are_those_of_the_state_dict(name: str) -> None:
    case = load(name)
    costs = model_costs(case.model, case.INPUTS)
    sizes = dict.fromkeys(costs.dims, 32)
    found = costs.at(costs.values(sizes, members=3))["weights"]
    state = Preview(case.model, case.INPUTS).captured
    used = {s.source for s in state.program.weights}
    saved = {n: t for n, t in case.model().state_dict().items() if n in used}
    others = [t for n, (_, t) in state.weights.items() if n in used and n not in saved]
    assert found == 3 * sum(t.nbytes for t in saved.values()) + sum(t.nbytes for t in others)


def test_bits_of_weights_and_activations_are_free() -> None:
    costs = model_costs(FrozenTrunk, ["x=float32[B,64]"])
    whole = costs.at(costs.values({"B": 8}))
    small = costs.at(costs.values({"B": 8}, weight_bits=4, activation_bits=16))
    assert small["weights"] == whole["weights"] // 8
    assert small["acts_written"] == whole["acts_written"] // 2
    assert small["flops"] == whole["flops"]
