"""Tests products over matrices that an index selects: the strategy `experts`, `expert_linear`, `expert_mm`.

The oracle (test_oracle.py) compares the strategy with the op for each member. Here the rows choose their
experts in uneven ways, and the strategy must not apply where it would not help.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from widepack import primitives as primitives  # fills the registry
from widepack.ir.ops import full_name
from widepack.ir.values import Shared, Stacked, Value
from widepack.kernels.checks import OperandError
from widepack.kernels.decompose import decompose
from widepack.kernels.library import FUNCTIONS
from widepack.primitives.experts import NUMBERS
from widepack.registry.registry import REGISTRY
from widepack.registry.writer import EagerWriter
from widepack.runtime.executable import Executable
from widepack.runtime.op_costs import cost, rate
from widepack_artifacts.errors import ArtifactError
from widepack_artifacts.program import Node, Output, Program, Ref, Slot

OP = "widepack.expert_linear.default"
OF_ONE_MEMBER = "widepack.expert_mm.default"
EXPERTS, WIDTH = 5, math.isqrt(NUMBERS) + 1
EVEN, ONE, FEW = "even", "one expert", "few rows"


def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def routes(kind: str, members: int, rows: int, experts: int = EXPERTS) -> Tensor:
    """Returns the expert of each row. Some experts are counted from the end, as an index allows."""
    if kind == ONE:
        return torch.full((members, rows), experts - 1)
    generator = torch.Generator().manual_seed(7)
    return torch.randint(-experts, experts, (members, rows), generator=generator)


def operands(
    kind: str, members: int, outputs: int, inputs: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    rows = 2 if kind == FEW else 4 * EXPERTS
    weight = drawn(1, members, EXPERTS, outputs, inputs, dtype=dtype) / math.sqrt(inputs)
    return drawn(2, members, rows, inputs, dtype=dtype), weight, routes(kind, members, rows)


def exact(x: Tensor, weight: Tensor, index: Tensor) -> Tensor:
    """Returns the products in float64."""
    rows = [w.double()[i] @ r.double().unsqueeze(-1) for r, w, i in zip(x, weight, index)]
    return torch.stack(rows).squeeze(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("turned", [False, True], ids=["plain", "turned"])
@pytest.mark.parametrize("size", [(6, 4), (129, 130)], ids=["small", "large"])
@pytest.mark.parametrize("kind", [EVEN, ONE, FEW])
@pytest.mark.parametrize("members", [1, 3])
def test_the_op_equals_one_product_for_each_row(
    members: int, kind: str, size: tuple[int, int], turned: bool, dtype: torch.dtype
) -> None:
    x, weight, index = operands(kind, members, *size, dtype)
    if turned:
        weight = weight.transpose(2, 3).contiguous().transpose(2, 3)
    y = FUNCTIONS[OP](x, weight, index)
    assert y.dtype == dtype
    bound = 16 * torch.finfo(dtype).eps
    torch.testing.assert_close(y.double(), exact(x, weight, index), rtol=bound, atol=bound)


def test_the_op_reads_one_table_for_all_members() -> None:
    x, weight, index = operands(EVEN, 3, 6, 4)
    table = weight[:1].expand(3, -1, -1, -1)
    torch.testing.assert_close(FUNCTIONS[OP](x, table, index), exact(x, table, index).float())


def test_the_op_takes_no_rows() -> None:
    x, weight, _ = operands(EVEN, 3, 6, 4)
    y = FUNCTIONS[OP](x[:, :0], weight, torch.zeros(3, 0, dtype=torch.int64))
    assert y.shape == (3, 0, 6)


@pytest.mark.parametrize("size", [(6, 4), (129, 130)], ids=["small", "large"])
def test_an_expert_of_nan_changes_its_own_rows_only(size: tuple[int, int]) -> None:
    x, weight, index = operands(EVEN, 3, *size)
    weight[1, 2] = float("nan")
    chosen = torch.zeros(index.shape, dtype=torch.bool)
    chosen[1] = index[1] % EXPERTS == 2
    found = FUNCTIONS[OP](x, weight, index).isnan()
    assert chosen.any() and torch.equal(found.all(-1), chosen) and torch.equal(found.any(-1), chosen)


@pytest.mark.parametrize("number", [EXPERTS, -EXPERTS - 1])
def test_the_op_refuses_an_expert_of_another_member(number: int) -> None:
    x, weight, index = operands(EVEN, 3, 6, 4)
    index[0, 1] = number
    with pytest.raises(IndexError, match=f"index {number} is out of bounds for dimension 0 with size 5"):
        FUNCTIONS[OP](x, weight, index)


WRONG: list[tuple[str, int, Any, str]] = [
    (OP, 1, torch.zeros(3, 6, 4), "weight has 3 dims"),
    (OP, 0, torch.zeros(2, 20, 4), r"x is \[2, 20, 4\]; \[3, 20, 4\] is needed"),
    (OP, 0, torch.zeros(3, 20, 5), r"x is \[3, 20, 5\]; \[3, 20, 4\] is needed"),
    (OP, 0, torch.zeros(3, 20, 4).double(), "x is torch.float64"),
    (OP, 2, torch.zeros(3, 19, dtype=torch.int64), r"index is \[3, 19\]"),
    (OP, 2, torch.zeros(3, 20), "index is torch.float32"),
    (OP, 1, torch.zeros(3, 0, 6, 4), "no experts"),
    (OP, 1, torch.zeros(3, 5, 6, 4, dtype=torch.int64), "a float is needed"),
    (OF_ONE_MEMBER, 1, torch.zeros(1, 5, 4, 6), "weight has 4 dims"),
    (OF_ONE_MEMBER, 0, torch.zeros(20, 5), r"x is \[20, 5\]; \[20, 4\] is needed"),
    (OF_ONE_MEMBER, 0, torch.zeros(20, 4).double(), "x is torch.float64"),
    (OF_ONE_MEMBER, 2, torch.zeros(19, dtype=torch.int64), r"index is \[19\]"),
    (OF_ONE_MEMBER, 2, torch.zeros(20), "index is torch.float32"),
    (OF_ONE_MEMBER, 1, torch.zeros(0, 4, 6), "no experts"),
    (OF_ONE_MEMBER, 1, torch.zeros(5, 4, 6, dtype=torch.int64), "a float is needed"),
]


@pytest.mark.parametrize(("op", "at", "wrong", "message"), WRONG)
def test_wrong_operands_are_refused(op: str, at: int, wrong: Tensor, message: str) -> None:
    x, weight, index = operands(EVEN, 3, 6, 4)
    args: list[Any] = [x, weight, index] if op == OP else [x[0], weight[0].transpose(1, 2), index[0]]
    args[at] = wrong
    with pytest.raises(OperandError, match=message):
        FUNCTIONS[op](*args)


@pytest.mark.parametrize("few", [False, True])
def test_the_op_equals_its_decomposition(few: bool) -> None:
    given = operands(EVEN, 3, 6, 4)
    kinds: Any = ("x", "float32[20,4]"), ("w", "float32[5,6,4]"), ("e", "int64[20]")
    slots = tuple(Slot(name, name, "stacked", type_) for name, type_ in kinds)
    check_decomposition(Node("y", OP, (*(Ref(s.name) for s in slots), few)), slots, 3, given)


@pytest.mark.parametrize("few", [False, True])
def test_the_op_of_one_member_equals_its_decomposition(few: bool) -> None:
    x, weight, index = operands(EVEN, 1, 6, 4)
    given = x[0], weight[0].transpose(1, 2), index[0]
    kinds: Any = ("x", "float32[20,4]"), ("w", "float32[5,4,6]"), ("e", "int64[20]")
    slots = tuple(Slot(name, name, "shared", type_) for name, type_ in kinds)
    node = Node("y", OF_ONE_MEMBER, (*(Ref(s.name) for s in slots), few))
    check_decomposition(node, slots, 0, given)
    torch.testing.assert_close(FUNCTIONS[OF_ONE_MEMBER](*given), exact(x, weight, index)[0].float())


def check_decomposition(node: Node, slots: tuple[Slot, ...], members: int, given: Any) -> None:
    program = Program((), slots, (node,), (Output(Ref("y"), slots[0].kind),), members)
    program.check()
    plain = decompose(program)
    plain.check()
    assert all(n.op.startswith("aten.") for n in plain.nodes)
    (own,), (aten,) = (Executable(p, {}, torch.device("cpu")).run(*given) for p in (program, plain))
    torch.testing.assert_close(own, aten)


def test_a_program_of_one_member_has_no_other_op_of_widepack() -> None:
    slots = tuple(Slot(n, n, "shared", "float32[2,3,4]") for n in ("x", "w", "e"))
    program = Program((), slots, (Node("y", OP, tuple(map(Ref, "xwe"))),), (Output(Ref("y"), "shared"),))
    with pytest.raises(ArtifactError, match="which only wide programs may use"):
        program.check()


def test_the_cost_has_no_matrix_for_each_row() -> None:
    x, weight, index = operands(EVEN, 3, 129, 130)
    x, index = x.repeat(1, 10, 1), index.repeat(1, 10)
    y = FUNCTIONS[OP](x, weight, index)
    gathered = weight[torch.arange(3).unsqueeze(1), index]
    found = cost(OP, (x, weight, index), {}, y)
    assert found.room < gathered.numel() * 4 / 5
    assert found.work >= y.numel() * x.shape[-1] * rate(x)


def selected(table: Tensor, index: Tensor) -> Any:
    """Returns the matrices as the op that reads them gives them."""
    rule = REGISTRY[full_name("index.Tensor")].strategies["members"].rule
    wide = rule(EagerWriter(table.shape[0]), Stacked(Value(None, table)), [Stacked(Value(None, index))])
    return wide


FORMS: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    # equation of a member: the shape of its index, and of its rows
    "bkoi,bi->bko": ((6, 2), (6, WIDTH)),
    "bkoi,bki->bko": ((6, 2), (6, 2, WIDTH)),
    "bio,bi->ob": ((6,), (6, WIDTH)),
    "boi,i->bo": ((6,), (WIDTH,)),
}


@pytest.mark.parametrize("equation", FORMS)
@pytest.mark.parametrize("shared", [False, True], ids=["own rows", "shared rows"])
def test_an_einsum_over_selected_matrices_runs_by_expert(equation: str, shared: bool) -> None:
    at, rows = FORMS[equation]
    table = drawn(1, 3, EXPERTS, WIDTH, WIDTH) / math.sqrt(WIDTH)
    index = routes(EVEN, 3, math.prod(at)).view(3, *at)
    x = drawn(2, *rows) if shared else drawn(2, 3, *rows)
    wide = Shared(Value(None, x)) if shared else Stacked(Value(None, x))
    rule = REGISTRY["aten.einsum.default"].strategies["experts"]
    args = EagerWriter(3), equation, [selected(table, index), wide]
    assert rule.when(*args)
    got = rule.rule(*args).value.fake
    for i in range(3):
        want = torch.einsum(equation, table[i][index[i]], x if shared else x[i])
        torch.testing.assert_close(got[i], want)


OTHERS: Mapping[str, tuple[str, tuple[int, ...], tuple[int, ...]]] = {
    "several rows for a matrix": ("boi,bti->bto", (6, WIDTH, WIDTH), (6, 2, WIDTH)),
    "a sum over rows": ("boi,bi->o", (6, WIDTH, WIDTH), (6, WIDTH)),
    "no sum": ("boi,bi->boi", (6, WIDTH, WIDTH), (6, WIDTH)),
    "both dims summed": ("boi,boi->b", (6, WIDTH, WIDTH), (6, WIDTH, WIDTH)),
    "small matrices": ("boi,bi->bo", (6, 8, 8), (6, 8)),
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_products_over_selected_matrices_run_as_before(case: str) -> None:
    equation, matrices, rows = OTHERS[case]
    table, index = drawn(1, 3, EXPERTS, *matrices[1:]), routes(EVEN, 3, 6)
    x = Stacked(Value(None, drawn(2, 3, *rows)))
    rule = REGISTRY["aten.einsum.default"].strategies["experts"]
    assert not rule.when(EagerWriter(3), equation, [selected(table, index), x])


def test_a_gpu_runs_such_products_as_before() -> None:
    table, index = drawn(1, 3, EXPERTS, WIDTH, WIDTH), routes(EVEN, 3, 6)
    x = Stacked(Value(None, drawn(2, 3, 6, WIDTH)))
    rule = REGISTRY["aten.einsum.default"].strategies["experts"]
    assert not rule.when(EagerWriter(3, "cuda"), "boi,bi->bo", [selected(table, index), x])


@pytest.mark.parametrize(("outputs", "inputs"), [(8, 6), (130, 140)])
def test_no_member_changes_a_bit_of_another(outputs: int, inputs: int) -> None:
    """The rows that other members send to each expert, and their NaN, do not matter."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(3, 20, inputs, generator=generator), torch.randn(3, 4, outputs, inputs)
    index = torch.randint(0, 4, (3, 20), generator=generator)
    before = FUNCTIONS["widepack.expert_linear.default"](x, weight, index)
    other, broken = index.clone(), weight.clone()
    other[1], broken[1] = 0, float("nan")
    after = FUNCTIONS["widepack.expert_linear.default"](x, broken, other)
    assert torch.equal(before[[0, 2]], after[[0, 2]]) and bool(after[1].isnan().all())


def test_the_derivatives_of_one_member_are_those_of_differences() -> None:
    x, weight, index = operands(EVEN, 1, 6, 4, torch.float64)
    given = x[0].requires_grad_(), weight[0].transpose(1, 2).detach().requires_grad_()
    op = torch.ops.widepack.expert_mm
    assert torch.autograd.gradcheck(lambda x, w: op(x, w, index[0], True), given, fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda x, w: op(x, w, index[0], True), given, fast_mode=True)
