"""Tests that a program is rewritten without random ops: dropout returns its input, a draw returns a fixed
number, and no other node changes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small import node, program

from widepack.ir.ops import full_name
from widepack.ir.random_ops import without_randomness
from widepack.runtime.graph_module import graph_module
from widepack_artifacts.program import Program, Ref

CPU = torch.device("cpu")


def run(program: Program | None, x: torch.Tensor) -> torch.Tensor:
    assert program is not None
    value: torch.Tensor = graph_module(program, CPU)(x)[0]
    return value


def of(op: str, *args: Any) -> Program:
    return program({}, {"x": "float32[B,4]"}, [node("y", op, *args)], ["y"])


@pytest.mark.parametrize(
    ("program", "value"),
    [
        (of("dropout", Ref("x"), 0.5, True), "x"),
        (of("feature_dropout", Ref("x"), 0.5, True), "x"),
        (of("bernoulli.p", Ref("x"), 0.3), 1.0),
        (of("rand_like", Ref("x")), 0.5),
        (of("randn", [3, 4]), 0.5),
        (of("randint", 7, [3, 4]), 0),
        (of("normal.Tensor_float", Ref("x"), 2.0), "x + 2"),
        (of("scaled_dot_product_attention", Ref("x"), Ref("x"), Ref("x"), None, 0.5), "attention"),
        (of("relu", Ref("x")), "relu"),
    ],
)
def test_random_ops_return_fixed_values(program: Program, value: object) -> None:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    known = {
        "x": x,
        "x + 2": x + 2,
        "attention": torch.nn.functional.scaled_dot_product_attention(x, x, x),
        "relu": x.relu(),
    }
    expected = known[value] if isinstance(value, str) else torch.full((3, 4), value)  # type: ignore[call-overload]
    torch.testing.assert_close(run(without_randomness(program), x), expected)


def test_an_op_without_a_fixed_value_is_reported() -> None:
    assert full_name("multinomial") == "aten.multinomial.default"
    assert without_randomness(of("multinomial", Ref("x"), 2)) is None
