"""Tests which products of a wide program get int8 weights, and their answers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small import CPU, node
from torch import Tensor

from widepack.errors import ArtifactError
from widepack.ir.ops import resolve
from widepack.kernels import int8
from widepack.lowering.int8_weights import Int8Program
from widepack.runtime.executable import Executable
from widepack_artifacts.opset import allowed
from widepack_artifacts.program import Node, Output, Program, Ref, Slot

N, OUT, IN = 3, 8, 16
X, W, B = Ref("x"), Ref("w"), Ref("b")
TURNED = node("t", "transpose.int", W, 1, 2, out=f"float32[{N},{IN},{OUT}]")
ADDED = node("u", "unsqueeze", B, 1, out=f"float32[{N},1,{OUT}]")
Y = f"float32[{N},s0,{OUT}]"


def wide(*nodes: Node, outputs: tuple[str, ...] = ("y",)) -> Program:
    """Returns a wide program of x [N, B, IN], w [N, O, I], b [N, O] and v [N, I, O]."""
    types = {"w": f"float32[{OUT},{IN}]", "b": f"float32[{OUT}]", "v": f"float32[{IN},{OUT}]"}
    return Program(
        tuple(Slot(n, n, "stacked", t) for n, t in types.items()),
        (Slot("x", "x", "stacked", f"float32[B,{IN}]"),),
        nodes,
        tuple(Output(Ref(o), "stacked") for o in outputs),
        N,
    )


def values() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"w": (N, OUT, IN), "b": (N, OUT), "v": (N, IN, OUT)}
    return {n: torch.randn(s, generator=generator) for n, s in shapes.items()}


def answers(program: Program, **others: Tensor) -> list[Any]:
    x = torch.randn(N, 2, IN, generator=torch.Generator().manual_seed(1))
    return Executable(program, {**values(), **others}, CPU).run(x)


def ops_of(program: Program) -> list[str]:
    return [n.op for n in program.nodes]


PRODUCTS = {
    "bmm": (TURNED, node("y", "bmm", X, Ref("t"), out=Y)),
    "with a bias": (TURNED, ADDED, node("y", "baddbmm", Ref("u"), X, Ref("t"), out=Y)),
    "a weight [N, I, O]": (node("y", "bmm", X, Ref("v"), out=Y),),
    "matmul": (TURNED, node("y", "matmul", X, Ref("t"), out=Y)),
    "another summand": (
        node("a", "sum.dim_IntList", X, [2], True, out=f"float32[{N},s0,1]"),
        TURNED,
        node("y", "baddbmm", Ref("a"), X, Ref("t"), out=Y),
    ),
    "a computed weight": (
        node("m", "mul.Scalar", W, 2.0, out=f"float32[{N},{OUT},{IN}]"),
        node("t", "transpose.int", Ref("m"), 1, 2, out=f"float32[{N},{IN},{OUT}]"),
        node("y", "bmm", X, Ref("t"), out=Y),
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_with_a_weight_gets_int8_weights(name: str) -> None:
    before = wide(*PRODUCTS[name])
    made = Int8Program(before, 1)
    assert made.layers == ("y",)
    assert ops_of(made.program).count(int8.LINEAR) == 1
    assert not {"aten.bmm.default", "aten.baddbmm.default", "aten.matmul.default"} & set(ops_of(made.program))
    (found,), (exact,) = answers(made.program), answers(before)
    assert found.shape == exact.shape
    error = (found - exact).abs().max() / exact.square().mean().sqrt()
    assert 1e-4 < float(error) < 0.03  # not the float numbers, and not others


def test_numbers_that_int8_represents_give_the_same_answers() -> None:
    generator = torch.Generator().manual_seed(2)
    w = torch.randint(-127, 128, (N, OUT, IN), generator=generator).float()
    w[..., 0] = 127
    before = wide(*PRODUCTS["with a bias"])
    (found,), (exact,) = answers(Int8Program(before, 1).program, w=w), answers(before, w=w)
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-3)


KEPT = {
    "an input on the right": (
        node("q", "transpose.int", X, 1, 2, out=f"float32[{N},{IN},s0]"),
        node("y", "bmm", X, Ref("q"), out=f"float32[{N},s0,s0]"),
    ),
    "a factor": (TURNED, ADDED, node("y", "baddbmm", Ref("u"), X, Ref("t"), out=Y, alpha=2.0)),
    "weights alone": (TURNED, node("y", "bmm", W, Ref("t"), out=f"float32[{N},{OUT},{OUT}]")),
}


@pytest.mark.parametrize("name", KEPT)
def test_other_products_stay(name: str) -> None:
    before = wide(*KEPT[name])
    made = Int8Program(before, 1)
    assert made.layers == ()
    assert made.program is before


def test_layers_of_few_weights_stay() -> None:
    before = wide(*PRODUCTS["bmm"])
    assert Int8Program(before, N * OUT * IN).layers == ("y",)
    assert Int8Program(before, N * OUT * IN + 1).program is before


def test_a_weight_of_two_layers_is_quantized_once() -> None:
    program = wide(
        TURNED,
        node("y", "bmm", X, Ref("t"), out=Y),
        node("r", "mul.Scalar", X, 2.0, out=f"float32[{N},s0,{IN}]"),
        node("z", "bmm", Ref("r"), Ref("t"), out=Y),
        outputs=("y", "z"),
    )
    made = Int8Program(program, 1)
    assert made.layers == ("y", "z")
    assert ops_of(made.program).count(int8.WEIGHT) == 1
    y, z = answers(made.program)
    torch.testing.assert_close(2 * y, z)


@pytest.mark.parametrize(("rows", "batch"), [(1, 1), (4, 4), (9, 9)])
def test_the_largest_batch_has_so_many_rows(rows: int, batch: int) -> None:
    assert Int8Program(wide(*PRODUCTS["bmm"]), 1).largest_batch({"B": 4}, "B", rows) == batch


def test_rows_that_no_batch_changes() -> None:
    made = Int8Program(wide(*PRODUCTS["bmm"]), 1)
    assert made.largest_batch({"B": 6}, "", 6) is None
    assert made.largest_batch({"B": 6}, "", 5) == 0


def test_no_file_may_contain_the_ops() -> None:
    for op in int8.OPS:
        assert not allowed(op)
        resolve(op)
    program = Int8Program(wide(*PRODUCTS["bmm"]), 1).program
    with pytest.raises(ArtifactError, match="widepack.int8"):
        program.check()
