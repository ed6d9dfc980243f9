"""Tests the op `grouped_experts` and the strategy `grouped_mm`: answers, operands, and the plans that use
it.
"""

from __future__ import annotations

from typing import Any

import pytest
import small
import torch
from small import all_kinds, node, program
from torch import Tensor

from widepack.ir import ops
from widepack.kernels import grouped_experts
from widepack.kernels.checks.require import OperandError
from widepack.planning.heuristics import plans
from widepack.planning.plan import Plan
from widepack.planning.request import StrategyRequest
from widepack_artifacts.program import Program, Ref

OP = torch.ops.widepack.grouped_experts
HALF = torch.bfloat16
N, EXPERTS = 3, 5


def operands(rows: int, inputs: int = 16, outputs: int = 24) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(N, rows, inputs, generator=generator).to(HALF)
    weight = torch.randn(N, EXPERTS, inputs, outputs, generator=generator).to(HALF)
    return x, weight, torch.randint(-EXPERTS, EXPERTS, (N, rows), generator=generator)


def turned(weight: Tensor) -> Tensor:
    """Returns the same matrices in the memory order of their columns."""
    return weight.mT.contiguous().mT


def with_gaps(weight: Tensor) -> Tensor:
    """Returns the same matrices in memory whose rows begin at odd places."""
    wide = torch.zeros(*weight.shape[:-1], weight.shape[-1] + 3, dtype=weight.dtype)
    wide[..., 3:] = weight
    return wide[..., 3:]


@pytest.mark.parametrize("layout", [lambda w: w, turned, with_gaps], ids=["rows", "columns", "gaps"])
@pytest.mark.parametrize("rows", [0, 1, 7, 64])
def test_answers_are_those_of_each_row_in_float64(rows: int, layout: Any) -> None:
    x, weight, index = operands(rows)
    y = OP(x, layout(weight), index)
    assert y.shape == (N, rows, 24) and y.dtype is HALF
    assert y.is_contiguous()
    for i in range(N):
        exact = torch.einsum("ri,rio->ro", x[i].double(), weight[i][index[i]].double())
        error = (y[i].double() - exact).abs()
        assert (error <= torch.finfo(HALF).eps * (exact.abs() + 1e-3 * 16)).all()


def test_the_order_of_members_and_rows_is_kept_and_nan_stays_in_its_member() -> None:
    x, weight, index = operands(9)
    before = OP(x, weight, index)
    broken = weight.clone()
    broken[1] = float("nan")
    after = OP(x, broken, index)
    assert after[1].isnan().all()
    assert torch.equal(after[0], before[0]) and torch.equal(after[2], before[2])


@pytest.mark.parametrize("wrong", [EXPERTS, -EXPERTS - 1, 2 * EXPERTS])
def test_an_expert_of_another_member_is_refused(wrong: int) -> None:
    x, weight, index = operands(4)
    index[0, 2] = wrong
    with pytest.raises(IndexError, match="out of bounds"):
        OP(x, weight, index)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, w, i: (x, w.float(), i), "weight is torch.float32; bfloat16 is needed"),
        (lambda x, w, i: (x[..., :9], w[:, :, :9], i), "9 and 24 are not multiples of 8"),
        (lambda x, w, i: (x, w[:, :0], i), "weight has no experts"),
        (lambda x, w, i: (x[:2], w, i), "x is"),
        (lambda x, w, i: (x, w, i[:, :2]), "index is"),
        (lambda x, w, i: (x, w, i.float()), "index is torch.float32"),
    ],
)
def test_wrong_operands_are_refused(change: Any, message: str) -> None:
    with pytest.raises(OperandError, match=message):
        ops.function(grouped_experts.OP)(*change(*operands(4)))


@pytest.mark.parametrize(("most", "expected"), [(14, [10, 5]), (5, [5, 5, 5]), (4, [])])
def test_more_groups_than_one_product_takes_are_divided(
    most: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight, index = operands(7)
    whole, groups, run = OP(x, weight, index), list[int](), torch.nn.functional.grouped_mm

    def recorded(rows: Tensor, matrices: Tensor, *, offs: Tensor) -> Tensor:
        groups.append(offs.numel())
        return run(rows, matrices, offs=offs)

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", recorded)
    monkeypatch.setattr(grouped_experts, "MOST_GROUPS", most)
    y = OP(x, weight, index)
    torch.testing.assert_close(y, whole)
    assert y.is_contiguous() and groups == expected


def net(experts: int = 5, size: int = 64) -> Program:
    type_, few = f"bfloat16[B,{size}]", experts < 32
    return program({"w": f"bfloat16[{experts},{size},{size}]"}, {"x": type_, "e": "int64[B]"}, [
        node("y", "widepack.expert_mm.default", Ref("x"), Ref("w"), Ref("e"), few, out=type_),
    ], ["y"])  # fmt: skip


def planned(member: Program, requested: str, device: str) -> list[Plan]:
    slots = all_kinds(member, x="stacked", w="stacked", e="stacked")
    return plans(member, slots, N, {"B": 4}, "B", device, "each", StrategyRequest.parse(requested))


def test_a_program_and_its_aten_form_give_each_members_answer() -> None:
    slots = all_kinds(net(), x="stacked", w="stacked", e="stacked")
    (plan,) = planned(net(), "grouped_mm", "cuda")
    lowered = small.lowered(net(), slots, plan, N)
    assert lowered.used == {"y": "grouped_mm"}
    small.check_forms(net(), lowered.program, slots, N)


def test_a_gpu_runs_many_rows_by_groups_and_a_cpu_by_expert() -> None:
    few, many = (net(), net(40, 256))
    assert [plan.strategies() for plan in planned(few, "auto", "cuda")] == [{"dense": 1}]
    assert planned(many, "auto", "cuda")[-1].strategies() == {"grouped_mm": 1}
    for plan in planned(many, "auto", "cpu"):
        assert plan.strategies() == {"experts": 1}


def test_a_plan_has_no_grouped_product_of_more_groups_than_a_gpu_takes() -> None:
    assert grouped_experts.MOST_GROUPS == 1023
    for experts, expected in ((341, {"grouped_mm": 1}), (342, {"copied": 1})):
        assert planned(net(experts, 256), "auto", "cuda")[-1].strategies() == expected
