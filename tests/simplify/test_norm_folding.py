"""Tests that norms are folded into the weights next to them, with equal answers and no higher kind."""

from __future__ import annotations

import itertools

import pytest
import small
from simplify_programs import (
    NORM,
    all_stacked,
    conv_norm,
    layer_norm,
    ops_of,
    simple_members,
    simplified,
    simplify,
)
from small import all_kinds, node, program

from widepack.ir.kinds import kinds
from widepack.simplify.norm_folding import fold_batch_norms
from widepack_artifacts.program import Kind, Node, Program, Ref


@pytest.mark.extended(keep=4)
@pytest.mark.parametrize(
    "chosen_kinds", list(itertools.product(("shared", "stacked"), repeat=3)), ids="-".join
)
def test_a_batch_norm_is_folded_where_no_kind_rises(chosen_kinds: tuple[Kind, Kind, Kind]) -> None:
    net = conv_norm()
    w, gamma, x = chosen_kinds
    slots = all_kinds(net, w=w, gamma=gamma, x=x)
    simple = simplified(net, slots)
    folded = not (w == "shared" and gamma == "stacked")
    assert ("_native_batch_norm_legit_no_training" not in ops_of(simple)) is folded
    before, after = kinds(net, slots), kinds(simple, slots)
    assert after["c"] == before["c"]


@pytest.mark.parametrize("name", ["b", "beta", "mean", "var"])
def test_a_norm_with_a_parameter_of_each_member_is_not_folded_into_a_shared_convolution(name: str) -> None:
    net = conv_norm()
    for kind in ("stacked", "ragged"):
        slots = all_kinds(net, **{name: kind})  # type: ignore[arg-type]
        simple = fold_batch_norms(net, slots)
        assert simple.nodes == net.nodes
        assert kinds(simple, slots) == kinds(net, slots)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("affine", [True, False])
def test_a_norm_without_a_bias_or_without_scale_and_shift_is_folded_too(bias: bool, affine: bool) -> None:
    net = conv_norm(bias, affine)
    slots = all_stacked(net)
    simple = simplified(net, slots)
    assert ops_of(simple)[-2:] == ["conv2d", "relu"]
    small.check(net, simple_members(simple, slots), slots)


@pytest.mark.parametrize("conv", [
    node("c", "conv2d.padding", Ref("x"), Ref("w"), Ref("b"), [1, 1], "same", [1, 1], 2),
    node("c", "conv2d", Ref("x"), Ref("w"), groups=2),
    node("c", "conv2d", Ref("x"), Ref("w"), bias=Ref("b"), groups=2),
])  # fmt: skip
def test_other_calls_of_a_convolution_are_folded_too(conv: Node) -> None:
    net = conv_norm(conv=conv)
    slots = all_stacked(net)
    simple = simplified(net, slots)
    assert "_native_batch_norm_legit_no_training" not in ops_of(simple)


def test_a_convolution_that_another_node_reads_does_not_change() -> None:
    reader = node("other", "relu", Ref("c"))
    for net in (conv_norm(more=(reader,), outputs=("r", "other")), conv_norm(outputs=("r", "c"))):
        slots = all_kinds(net, w="stacked")
        assert fold_batch_norms(net, slots).nodes == net.nodes


def test_two_consecutive_norms_are_folded_each_into_its_convolution() -> None:
    more = (
        node("c2", "conv2d", Ref("r"), Ref("w2")),
        node(
            "m",
            "_native_batch_norm_legit_no_training",
            Ref("c2"),
            None,
            None,
            Ref("mean"),
            Ref("var"),
            0.1,
            1e-5,
        ),
        node("m0", "operator.getitem", Ref("m"), 0),
    )
    first = conv_norm()
    weights = {s.name: s.type for s in first.weights} | {"w2": "float32[6,6,1,1]"}
    net = program(weights, {"x": "float32[B,4,6,5]"}, [*first.nodes, *more], ["m0", "r"])
    slots = all_kinds(net, w="stacked", w2="stacked", mean="stacked")
    simple = simplified(net, slots)
    assert "_native_batch_norm_legit_no_training" not in ops_of(simple)


@pytest.mark.extended(keep=2)
@pytest.mark.parametrize(
    "chosen_kinds", list(itertools.product(("shared", "stacked"), repeat=3)), ids="-".join
)
def test_a_layer_norm_raises_no_kind(chosen_kinds: tuple[Kind, Kind, Kind]) -> None:
    net = layer_norm()
    slots = all_kinds(net, **dict(zip(("gamma", "w0", "w1"), chosen_kinds)))
    simple = simplified(net, slots)
    before, after = kinds(net, slots), kinds(simple, slots)
    assert all(after[n] == before[n] for n in ("y0", "y1"))
    order = ("shared", "stacked")
    assert all(order.index(after[n]) <= order.index(before[n]) for n in before if n in after)
    for n in simple.nodes:
        if n.op == "aten.linear.default" and slots[f"w{n.name[1:]}"] == "shared":
            assert after[n.args[1].name] == "shared", "a Shared weight became Stacked"


@pytest.mark.parametrize(("width", "folded"), [(400, True), (420, False)])
def test_a_layer_norm_is_not_folded_into_large_weights(width: int, folded: bool) -> None:
    net = layer_norm(width=width)  # 40 outputs
    slots = all_kinds(net, gamma="stacked", beta="stacked", w0="stacked", w1="stacked")
    norm = next(n for n in simplify(net, slots, small.SIZES).nodes if n.name == "n")
    assert (norm.args[2] is None) == folded


def test_a_layer_norm_that_another_node_reads_does_not_change() -> None:
    more = (node("s", "sum", Ref("n")),)
    for net in (layer_norm(more=more, outputs=("s",)), layer_norm(outputs=("n",))):
        slots = all_kinds(net, gamma="stacked", w0="stacked", w1="stacked")
        simple = simplified(net, slots)
        assert next(n for n in simple.nodes if n.name == "n").args[2] == Ref("gamma")


def channels(
    layer: Node,
    before: bool,
    weight: str = "float32[6,4]",
    x: str = "float32[B,4]",
    out: str = "float32[B,6]",
) -> Program:
    """Returns a layer with a batch norm in eval mode after it, or before it."""
    width = 4 if before else 6
    norm = node(
        "n", "_native_batch_norm_legit_no_training", Ref("x" if before else "c"), *map(Ref, NORM), 0.1, 1e-3
    )
    item = node("n0", "operator.getitem", Ref("n"), 0, out=x if before else out)
    nodes = [norm, item, layer] if before else [layer, norm, item]
    weights = {"w": weight, "b": "float32[6]", **dict.fromkeys(NORM, f"float32[{width}]")}
    return program(weights, {"x": x}, [*nodes, node("r", "relu", Ref("c" if before else "n0"))], ["r"])


def linear(x: str, bias: bool = True) -> Node:
    return node("c", "linear", Ref(x), Ref("w"), *((Ref("b"),) if bias else ()), out="float32[B,6]")


IMAGE = {"x": "float32[B,4,6,5]", "out": "float32[B,6,4,3]"}


FOLDED = {
    "linear, norm": channels(linear("x"), False),
    "linear without bias, norm": channels(linear("x", False), False),
    "norm, linear": channels(linear("n0"), True),
    "norm, linear without bias": channels(linear("n0", False), True),
    "norm, conv": channels(
        node("c", "conv2d", Ref("n0"), Ref("w"), Ref("b"), [1, 1], [0, 0]),
        True,
        weight="float32[6,4,3,3]",
        **IMAGE,
    ),
    "norm, grouped conv": channels(
        node("c", "conv2d", Ref("n0"), Ref("w"), None, groups=2), True, weight="float32[6,2,3,3]", **IMAGE
    ),
    "norm, conv without padding by name": channels(
        node("c", "conv2d.padding", Ref("n0"), Ref("w"), Ref("b"), [2, 1], "valid"),
        True,
        weight="float32[6,4,3,3]",
        **IMAGE,
    ),
    "transposed conv, norm": channels(
        node("c", "conv_transpose2d.input", Ref("x"), Ref("w"), Ref("b"), [2, 2], [1, 1]),
        False,
        weight="float32[4,6,3,3]",
        **IMAGE,
    ),
    "grouped transposed conv, norm": channels(
        node("c", "conv_transpose2d.input", Ref("x"), Ref("w"), None, [2, 1], [1, 0], [1, 0], 2),
        False,
        weight="float32[4,3,3,3]",
        **IMAGE,
    ),
}


@pytest.mark.extended(keep=6)
@pytest.mark.parametrize("name", FOLDED)
@pytest.mark.parametrize(
    "chosen_kinds",
    [
        {"w": "stacked", "gamma": "stacked"},
        {"w": "stacked"},
        {"x": "stacked"},
        dict.fromkeys(("w", "b", *NORM), "stacked"),
    ],
)
def test_a_norm_is_folded_into_the_layer_before_or_after_it(name: str, chosen_kinds: dict[str, Kind]) -> None:
    net = FOLDED[name]
    slots = all_kinds(
        net, **{n: k for n, k in chosen_kinds.items() if n in {s.name for s in (*net.weights, *net.inputs)}}
    )
    simple = simplified(net, slots)
    assert "_native_batch_norm_legit_no_training" not in ops_of(simple)
    assert kinds(simple, slots)["c"] == kinds(net, slots)["c"]


@pytest.mark.extended(keep=18)
@pytest.mark.parametrize("name", FOLDED)
@pytest.mark.parametrize("parameter", ["gamma", "beta", "mean", "var"])
def test_a_norm_of_each_member_is_not_folded_into_a_shared_layer(name: str, parameter: str) -> None:
    net = FOLDED[name]
    slots = all_kinds(net, **{parameter: "stacked"})  # type: ignore[arg-type]
    simple = simplify(net, slots, small.SIZES)
    assert "_native_batch_norm_legit_no_training" in ops_of(simple)
    assert kinds(simple, slots)[next(n for n in simple.nodes if n.name == "c").args[1].name] == "shared"


def test_a_norm_before_a_layer_is_not_folded_if_that_is_not_exact() -> None:
    padded = channels(
        node("c", "conv2d", Ref("n0"), Ref("w"), Ref("b"), [1, 1], [1, 0]),
        True,
        weight="float32[6,4,3,3]",
        **IMAGE,
    )
    named = channels(
        node("c", "conv2d.padding", Ref("n0"), Ref("w"), Ref("b"), [1, 1], "same"),
        True,
        weight="float32[6,4,3,3]",
        **IMAGE,
    )
    rows = channels(  # dim 1 of a linear layer over three dims is not a channel
        node("c", "linear", Ref("n0"), Ref("w"), Ref("b"), out="float32[B,4,6]"), True, x="float32[B,4,4]"
    )
    norm_after = channels(
        node("c", "linear", Ref("x"), Ref("w"), Ref("b"), out="float32[B,6,6]"),
        False,
        x="float32[B,6,4]",
        out="float32[B,6,6]",
    )
    for net in (padded, named, rows, norm_after):
        slots = all_stacked(net)
        assert fold_batch_norms(net, slots).nodes == net.nodes


def test_a_norm_between_two_layers_is_folded_into_the_first() -> None:
    first = channels(linear("x"), False)
    net = program({s.name: s.type for s in first.weights} | {"w2": "float32[3,6]"}, {"x": "float32[B,4]"}, [
        *first.nodes[:-1], node("r", "linear", Ref("n0"), Ref("w2"), out="float32[B,3]"),
    ], ["r"])  # fmt: skip
    slots = all_stacked(net)
    simple = simplified(net, slots)
    assert [n.args[1] for n in simple.nodes if n.name == "r"] == [Ref("w2")]


def test_a_norm_after_a_transposed_convolution_is_folded_first() -> None:
    conv = Node(
        "c", "aten.conv_transpose2d.input", (Ref("x"), Ref("w"), Ref("b"), [1, 1], [1, 1], [0, 0], 1, [1, 1])
    )
    net = conv_norm(conv=conv)
    net = Program(
        tuple(
            type(s)(s.name, s.source, s.kind, "float32[4,6,3,3]") if s.name == "w" else s for s in net.weights
        ),
        net.inputs,
        net.nodes,
        net.outputs,
    )
    slots = all_kinds(net, w="stacked", gamma="stacked", x="stacked")
    simple = simplified(net, slots)
    assert (
        "conv2d" in ops_of(simple)
        and "_native_batch_norm_legit_no_training" not in ops_of(simple)
        and "conv_transpose2d" not in ops_of(simple)
    )
