"""Shares member programs between the tests of simplification."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import small
from small import node, program

from widepack.ir.fake_values import Shapes
from widepack.lowering.lower import lower
from widepack.simplify.pipeline import fold_all, straighten_all
from widepack_artifacts.program import Kind, Node, Program, Ref

NORM = ("gamma", "beta", "mean", "var")


def ops_of(member_program: Program) -> list[str]:
    return [n.op.split(".")[1] for n in member_program.nodes]


def conv_norm(
    bias: bool = True,
    affine: bool = True,
    more: tuple[Node, ...] = (),
    outputs: tuple[str, ...] = ("r",),
    conv: Node | None = None,
) -> Program:
    """Returns the program conv -> batch norm in eval mode -> relu."""
    weights = {
        "w": "float32[6,2,3,3]",
        **({"b": "float32[6]"} if bias else {}),
        **dict.fromkeys(NORM if affine else NORM[2:], "float32[6]"),
    }
    first = conv or node(
        "c", "conv2d", Ref("x"), Ref("w"), Ref("b") if bias else None, [2, 1], [1, 1], [1, 1], 2
    )
    parameters = (Ref("gamma"), Ref("beta")) if affine else (None, None)
    nodes = [
        first,
        node(
            "n",
            "_native_batch_norm_legit_no_training",
            Ref("c"),
            *parameters,
            Ref("mean"),
            Ref("var"),
            0.1,
            1e-3,
        ),
        node("n0", "operator.getitem", Ref("n"), 0),
        node("r", "relu", Ref("n0")),
        *more,
    ]
    return program(weights, {"x": "float32[B,4,6,5]"}, nodes, list(outputs))


def all_stacked(member_program: Program) -> dict[str, Kind]:
    """Returns kinds where all weights differ between members."""
    names = (s.name for s in member_program.weights)
    return small.all_kinds(member_program, **dict.fromkeys(names, "stacked"))  # type: ignore[arg-type]


def simplify(member_program: Program, slots: Mapping[str, Kind], sizes: Mapping[str, int]) -> Program:
    return fold_all(straighten_all([member_program], [Shapes(sizes)]), slots)[0]


def simplified(member_program: Program, slots: dict[str, Kind]) -> Program:
    """Returns the simplified program, after a check that it gives the same outputs wide."""
    simple = simplify(member_program, slots, small.SIZES)
    small.check(member_program, wide_of(simple, slots), slots)
    return simple


def wide_of(member_program: Program, slots: dict[str, Kind]) -> Program:
    return lower([member_program], [0, 0, 0], slots, small.plan(), small.SIZES).program


def simple_members(simple: Program, slots: dict[str, Kind]) -> Program:
    """Returns the simplified member program as one loop. It is still a member program."""
    return lower(
        [simple], [0, 0, 0], slots, small.plan(all=[n.name for n in simple.nodes]), small.SIZES
    ).program


def layer_norm(layers: int = 2, width: int = 4, **options: Any) -> Program:
    nodes = [
        node("n", "layer_norm", Ref("x"), [width], Ref("gamma"), Ref("beta"), out=f"float32[B,T,{width}]")
    ]
    nodes += [
        node(
            f"y{i}", "linear", Ref("n"), Ref(f"w{i}"), *((Ref(f"b{i}"),) if i else ()), out="float32[B,T,40]"
        )
        for i in range(layers)
    ]
    weights = {
        "gamma": f"float32[{width}]",
        "beta": f"float32[{width}]",
        **{f"w{i}": f"float32[40,{width}]" for i in range(layers)},  # too wide to be joined (siblings.py)
        "b1": "float32[40]",
    }
    return program(
        weights,
        {"x": f"float32[B,T,{width}]"},
        [*nodes, *options.get("more", ())],
        [f"y{i}" for i in range(layers)] + list(options.get("outputs", ())),
    )
