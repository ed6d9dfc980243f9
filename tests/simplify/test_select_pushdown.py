"""Tests that selects move before ops, that linear layers move before permutations of their rows, and that
attention without dropout is pure.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import small
from simplify_programs import simplify
from small import all_kinds, node, program

from widepack.ir import ops
from widepack.ir.fake_values import Shapes
from widepack.ir.kinds import kinds
from widepack.lowering.lower import lower
from widepack.simplify.select_pushdown import narrow
from widepack.simplify.view_chains import merge_views, rows_in_order
from widepack_artifacts.program import Node, Program, Ref, Tag

X, W, V = Ref("x"), Ref("w"), Ref("v")
WEIGHTS = {"w": "float32[5,5]", "v": "float32[5]"}
SELECT, BIG = "aten.select.int", (1 << 63) - 1


def ops_of(net: Program) -> list[str]:
    return [n.op.split(".")[1] for n in net.nodes]


def chosen(nodes: Sequence[Node], dim: int, index: int, inputs: dict[str, str] | None = None) -> Program:
    """Returns a program whose only output is one position of the result of its last node."""
    return program(
        WEIGHTS,
        inputs or {"x": "float32[B,T,5]"},
        [*nodes, node("y", "select.int", Ref(nodes[-1].name), dim, index)],
        ["y"],
    )


def equal(net: Program, other: Program) -> None:
    """Checks that the other program, wide and in a loop, equals the members of the first."""
    for slots in (all_kinds(net), all_kinds(net, w="stacked"), all_kinds(net, x="stacked", v="stacked")):
        for plan in (small.plan(), small.plan(all=[n.name for n in other.nodes])):
            if any(k != "shared" for k in slots.values()):
                small.check(net, lower([other], [0, 0, 0], slots, plan, small.SIZES).program, slots)


MOVES = {
    "pointwise": ([node("a", "add.Tensor", X, Ref("b")), node("r", "relu", Ref("a"))], 1, -1),
    "pointwise, one spread over all": ([node("a", "mul.Tensor", X, Ref("c"))], 1, 3),
    "pointwise, fewer dims": ([node("a", "add.Tensor", X, V, alpha=0.5)], 1, 2),
    "linear": ([node("l", "linear", X, W, V)], 1, 0),
    "linear, batch": ([node("l", "linear", X, W)], 0, 1),
    "layer norm": ([node("l", "layer_norm", X, [5], V)], -2, 2),
    "transpose": ([node("t", "transpose.int", X, 0, 1)], 0, 3),
    "permute": ([node("t", "permute", X, [2, 0, 1])], 2, 3),
    "unsqueeze": ([node("u", "unsqueeze", X, 1)], 2, 1),
    "unsqueeze at the end": ([node("u", "unsqueeze", X, -1)], 1, 1),
    "squeeze": (
        [node("u", "unsqueeze", X, 0), node("r", "relu", Ref("u")), node("s", "squeeze.dims", Ref("r"), [0])],
        1,
        1,
    ),
    "unflatten": ([node("u", "unflatten.int", X, 2, [5, 1])], 1, 1),
    "unflatten before": ([node("u", "unflatten.int", Ref("b"), 0, [1, 6])], 2, 1),
    "flatten": ([node("e", "relu", Ref("d")), node("f", "flatten.using_ints", Ref("e"), 2)], 1, -2),
    "flatten before": ([node("e", "relu", Ref("d")), node("f", "flatten.using_ints", Ref("e"), 0, 1)], 1, 1),
    "reshape": (
        [
            node("e", "relu", Ref("d")),
            node("n", "sym_size.int", X, 0),
            node("f", "reshape", Ref("e"), [Ref("n"), 6, -1]),
        ],
        1,
        4,
    ),
    "slice of another dim": ([node("e", "relu", X), node("s", "slice.Tensor", Ref("e"), 2, 1, -1)], 1, -1),
    "slice": ([node("e", "relu", X), node("s", "slice.Tensor", Ref("e"), 1, 2, BIG)], 1, 1),
}


@pytest.mark.extended(keep=3)
@pytest.mark.parametrize("name", MOVES)
def test_a_select_moves_before_ops(name: str) -> None:
    nodes, dim, index = MOVES[name]
    net = chosen(
        nodes,
        dim,
        index,
        {"x": "float32[B,T,5]", "b": "float32[6,5]", "c": "float32[B,1,5]", "d": "float32[B,6,5,2]"},
    )
    moved = narrow(net, Shapes(small.SIZES))
    first = [n for n in moved.nodes if n.op == SELECT]
    assert first and all(
        a.name in {s.name for s in net.inputs} for n in first for a in n.args if isinstance(a, Ref)
    ), ops_of(moved)
    equal(net, moved)


@pytest.mark.extended
def test_a_select_stays_where_it_would_change_the_op() -> None:
    stays = [
        ([node("l", "linear", X, W)], 2, 1),
        ([node("l", "layer_norm", X, [5])], 2, 1),
        ([node("f", "flatten.using_ints", X, 0, 1)], 0, 1),
        ([node("u", "unsqueeze", X, 1)], 1, 0),
        ([node("s", "softmax.int", X, 1)], 1, 0),
        ([node("c", "cumsum", X, 1)], 1, 2),
        ([node("s", "slice.Tensor", X, 1, 0, -1)], 1, -1),
        # the op refuses an index out of range in any argument
        (
            [
                node("i", "ge.Scalar", X, 0.0),
                node("j", "_to_copy", Ref("i"), dtype=Tag("dtype", "int64")),
                node("em", "embedding", W, Ref("j")),
            ],
            1,
            2,
        ),
    ]
    for nodes, dim, index in stays:
        net = chosen(nodes, dim, index)
        assert narrow(net, Shapes(small.SIZES)).nodes == net.nodes
        equal(net, net)


def test_a_value_that_another_node_reads_is_computed_completely() -> None:
    relu, pick = node("r", "relu", X), node("y", "select.int", Ref("r"), 1, 0)
    for more, outputs in (
        ([node("z", "sum", Ref("r"))], ["y", "z"]),
        ([node("z", "select.int", Ref("r"), 1, 1)], ["y", "z"]),
        ([], ["y", "r"]),
    ):
        net = program({}, {"x": "float32[B,T,5]"}, [relu, pick, *more], outputs)
        assert narrow(net, Shapes(small.SIZES)).nodes == net.nodes


def test_a_tensor_keeps_a_dim_where_types_are_promoted() -> None:
    net = program(
        {},
        {"x": "float32[B]", "d": "float64[B]"},
        [node("a", "add.Tensor", X, Ref("d")), node("y", "select.int", Ref("a"), 0, 1)],
        ["y"],
    )
    assert narrow(net, Shapes(small.SIZES)).nodes == net.nodes


def layer(causal: bool = False, mask: str | None = None) -> Program:
    """Returns a residual attention block whose first token is the output."""
    heads = [node("h", "unflatten.int", X, 2, [1, 5]), node("q", "transpose.int", Ref("h"), 1, 2)]
    attention = node(
        "a",
        "scaled_dot_product_attention",
        Ref("q"),
        Ref("q"),
        Ref("q"),
        Ref("m") if mask else None,
        0.0,
        causal,
    )
    after = [
        node("t", "transpose.int", Ref("a"), 1, 2),
        node("f", "flatten.using_ints", Ref("t"), 2),
        node("o", "linear", Ref("f"), W),
        node("s", "add.Tensor", X, Ref("o")),
        node("n", "layer_norm", Ref("s"), [5]),
        node("g", "gelu", Ref("n")),
        node("z", "add.Tensor", Ref("n"), Ref("g")),
    ]
    return chosen([*heads, attention, *after], 1, 0, {"x": "float32[B,T,5]", **({"m": mask} if mask else {})})


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("mask", [None, "float32[B,1,1,T]", "float32[T,T]", "float32[B,1,T,T]"])
def test_one_token_needs_one_query(mask: str | None) -> None:
    net = layer(mask=mask)
    moved = narrow(net, Shapes(small.SIZES))
    attention = next(n for n in moved.nodes if "attention" in n.op)
    reads = {n.name: n for n in moved.nodes}
    assert reads[attention.args[0].name].op == "aten.unsqueeze.default"
    assert all(
        n.args[0].name in ("x", "m", "q") or n.args[0].name == attention.name
        for n in moved.nodes
        if n.op == SELECT
    ), ops_of(moved)
    equal(net, moved)


@pytest.mark.extended
def test_causal_attention_does_not_change() -> None:
    moved = narrow(layer(causal=True), Shapes(small.SIZES))
    assert SELECT in [n.op for n in moved.nodes if n.args[0] == Ref("a")]
    equal(layer(causal=True), moved)


ROWS = {
    "transpose": [node("t", "transpose.int", X, 0, 1)],
    "permute": [node("t", "permute", Ref("d"), [2, 0, 1, 3])],
    "heads": [node("t", "permute", Ref("e"), [2, 0, 1, 3]), node("v1", "reshape", Ref("t"), [-1, 5])],
    "merged": [node("t", "transpose.int", X, 0, 1), node("v1", "reshape", Ref("t"), [-1, 5])],
}


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("back", [True, False], ids=["turned back", "as it is"])
def test_linear_layers_read_rows_in_memory_order(name: str, back: bool) -> None:
    inputs = {"x": "float32[B,T,5]", "d": "float32[B,4,T,5]", "e": "float32[B,5,T,1]"}
    n = [
        node("n", "sym_size.int", Ref("e" if name == "heads" else "x"), 0),
        node("t1", "sym_size.int", Ref("e" if name == "heads" else "x"), 2 if name == "heads" else 1),
    ]
    last = ROWS[name][-1].name
    nodes = [*n, *ROWS[name], node("l", "linear", Ref(last), W, V)]
    if back and name in ("heads", "merged"):
        nodes += [
            node("p", "reshape", Ref("l"), [Ref("t1"), Ref("n"), 5]),
            node("y", "transpose.int", Ref("p"), 0, 1),
        ]
    elif back:
        nodes += [node("y", "transpose.int", Ref("l"), 0, 1)]
    net = program(WEIGHTS, inputs, nodes, ["y" if back else "l"])
    moved = merge_views(rows_in_order(net, shapes := Shapes(small.SIZES)), shapes)
    if name == "transpose" and back:
        assert ops_of(moved) == ["linear"]
    if name == "merged" and back:
        assert ops_of(moved)[-1] == "linear" or "reshape" not in ops_of(moved)
    equal(net, moved)


def test_a_copy_of_rows_stays_before_the_layer_if_no_copy_is_saved() -> None:
    net = program(
        WEIGHTS,
        {"x": "float32[B,T,5]"},
        [
            node("t", "transpose.int", X, 0, 1),
            node("f", "reshape", Ref("t"), [-1, 5]),
            node("l", "linear", Ref("f"), W),
            node("y", "relu", Ref("l")),
        ],
        ["y"],
    )
    assert rows_in_order(net, Shapes(small.SIZES)).nodes == net.nodes


def test_attention_without_dropout_is_pure_and_may_be_shared() -> None:
    net = layer()
    found = kinds(net, all_kinds(net, w="stacked"))
    assert found["a"] == "shared" and found["o"] == "stacked"
    assert ops.pure("aten.scaled_dot_product_attention.default", (1, 2, 3))
    assert not ops.pure("aten.scaled_dot_product_attention.default", (1, 2, 3, None, 0.1))
    assert ops.pure("aten.dropout.default", (1, 0.5, False)) and not ops.pure(
        "aten.dropout.default", (1, 0.5, True)
    )
    assert not ops.pure("aten.rand_like.default", (1,)) and not ops.pure("aten.bernoulli.default", (1,))


def test_simplification_computes_only_the_selected_token() -> None:
    net = layer()
    slots = all_kinds(net, w="stacked", x="stacked")
    equal(net, simplify(net, slots, small.SIZES))
