"""Tests that simplification keeps the results and raises no kind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import small
from simplify_programs import (
    all_stacked,
    conv_norm,
    layer_norm,
    ops_of,
    simple_members,
    simplified,
    simplify,
    wide_of,
)
from small import all_kinds, node, program

from widepack.ir.edit import drop_duplicates, sweep
from widepack.ir.kinds import kinds
from widepack.simplify.horizontal_fusion import NARROW, join_siblings
from widepack.simplify.pipeline import drop_copies
from widepack_artifacts.program import Kind, Node, Program, Ref, Tag


def copies() -> Program:
    return program({"w": "float32[4,4]"}, {"x": "float32[B,4]"}, [
        node("a", "clone", Ref("x"), out="float32[B,4]",
             memory_format=Tag("memory_format", "contiguous_format")),
        node("b", "_to_copy", Ref("a"), out="float32[B,4]", dtype=Tag("dtype", "float32")),
        node("c", "_to_copy", Ref("b"), out="float64[B,4]", dtype=Tag("dtype", "float64")),
        node("d", "_to_copy", Ref("c"), out="float32[B,4]", dtype=Tag("dtype", "float32")),
        node("e", "dropout", Ref("d"), 0.5, False, out="float32[B,4]"),
        node("f", "linear", Ref("e"), Ref("w"), out="float32[B,4]"),
        node("g", "transpose.int", Ref("f"), 0, 1, out="float32[4,B]"),
        node("h", "contiguous", Ref("g"), out="float32[4,B]"),
        node("i", "view", Ref("h"), [-1], out="float32[4*B]"),
        node("j", "alias", Ref("i"), out="float32[4*B]"),
    ], ["j", "a", "c"])  # fmt: skip


def test_copies_and_casts_without_effect_are_removed() -> None:
    net = copies()
    simple = drop_copies(net)
    assert ops_of(simple) == ["_to_copy", "_to_copy", "linear", "transpose", "reshape"]
    assert [o.value for o in simple.outputs] == [Ref("i"), Ref("x"), Ref("c")]
    simple.check()
    for slots in (all_kinds(net, w="stacked"), all_kinds(net, x="stacked")):
        simplified(net, slots)


def test_a_write_of_the_whole_dim_is_the_written_value() -> None:
    end = (1 << 63) - 1
    net = program({"w": "float32[4,4]"}, {"x": "float32[B,4]"}, [
        node("a", "linear", Ref("x"), Ref("w"), out="float32[B,4]"),
        node("b", "slice_scatter", Ref("x"), Ref("a"), 0, 0, end, out="float32[B,4]"),
        node("c", "slice_scatter", Ref("b"), Ref("x"), 1, out="float32[B,4]"),
        node("h", "slice.Tensor", Ref("a"), 1, 0, 2, out="float32[B,2]"),
        node("d", "slice_scatter", Ref("b"), Ref("h"), 1, 2, end, out="float32[B,4]"),
        node("e", "slice_scatter", Ref("d"), Ref("h"), 1, 0, end, 2, out="float32[B,4]"),
        node("i", "_to_copy", Ref("x"), out="float64[B,4]", dtype=Tag("dtype", "float64")),
        node("f", "slice_scatter", Ref("e"), Ref("i"), 0, out="float32[B,4]"),
    ], ["b", "c", "d", "e", "f"])  # fmt: skip
    simple = drop_copies(net)
    assert ops_of(simple).count("slice_scatter") == 3, "a part, every second column, another dtype"
    assert [o.value for o in simple.outputs] == [Ref("a"), Ref("x"), Ref("d"), Ref("e"), Ref("f")]
    for slots in (all_kinds(net, w="stacked"), all_kinds(net, x="stacked")):
        simplified(net, slots)


def attention_views() -> Program:
    """Returns rows that are split into heads and transposed, as torch's attention does."""
    return program({"w": "float32[12,12]"}, {"x": "float32[T,B,12]"}, [
        node("q", "linear", Ref("x"), Ref("w"), out="float32[T,B,12]"),
        node("t", "sym_size.int", Ref("x"), 0, out="int"),
        node("b", "sym_size.int", Ref("x"), 1, out="int"),
        node("bh", "operator.mul", Ref("b"), 3, out="int"),
        node("v", "view", Ref("q"), [Ref("t"), Ref("bh"), 4], out="float32[T,3*B,4]"),
        node("o", "transpose.int", Ref("v"), 0, 1, out="float32[3*B,T,4]"),
        node("h", "view", Ref("o"), [Ref("b"), 3, Ref("t"), 4], out="float32[B,3,T,4]"),
        node("y", "mul.Scalar", Ref("h"), 2.0, out="float32[B,3,T,4]"),
    ], ["y"])  # fmt: skip


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize(
    "chosen_kinds", [{"w": "stacked"}, {"x": "stacked"}, {"w": "stacked", "x": "stacked"}]
)
def test_merged_views_give_the_same_answers(chosen_kinds: dict[str, Kind]) -> None:
    net = attention_views()
    slots = all_kinds(net, **chosen_kinds)
    simple = simplify(net, slots, small.SIZES)
    assert not {"reshape", "view"} & set(ops_of(simple)), "the chain becomes views"
    for sizes in ({"B": 2, "T": 3}, {"B": 5, "T": 7}, {"B": 1, "T": 1}):
        small.check(net, wide_of(simple, slots), slots, sizes=sizes)


def twice() -> Program:
    """Returns a program that computes the same values twice, with equal and with different nodes."""
    return program({"w": "float32[4,4]"}, {"x": "float32[B,4]"}, [
        node("a", "linear", Ref("x"), Ref("w"), out="float32[B,4]"),
        node("b", "clone", Ref("x"), out="float32[B,4]"),
        node("c", "linear", Ref("b"), Ref("w"), out="float32[B,4]"),
        node("p", "mul.Scalar", Ref("a"), 1, out="float32[B,4]"),
        node("q", "mul.Scalar", Ref("c"), 1, out="float32[B,4]"),
        node("r", "add.Scalar", Ref("p"), 0.0, out="float32[B,4]"),
        node("s", "add.Scalar", Ref("q"), -0.0, out="float32[B,4]"),
        node("t", "sum", Ref("r"), dtype=Tag("dtype", "float64"), out="float64[]"),
        node("u", "sum", Ref("s"), out="float32[]"),
    ], ["r", "s", "t", "u", "q"])  # fmt: skip


def test_equal_nodes_are_merged() -> None:
    net = twice()
    simple = drop_duplicates(drop_copies(net))
    assert ops_of(simple) == ["linear", "mul", "add", "add", "sum", "sum"], (
        "0.0 and -0.0 are different, and so are two dtypes"
    )
    assert [o.value for o in simple.outputs] == [Ref("r"), Ref("s"), Ref("t"), Ref("u"), Ref("p")]
    for slots in (all_kinds(net, w="stacked"), all_kinds(net, x="stacked"), all_kinds(net)):
        simplified(net, slots)


def test_random_ops_and_ops_with_sizes_from_data_are_never_merged() -> None:
    net = program({}, {"x": "float32[B,4]"}, [
        node("a", "rand_like", Ref("x")),
        node("b", "rand_like", Ref("x")),
        node("c", "nonzero", Ref("x")),
        node("d", "nonzero", Ref("x")),
        node("e", "dropout", Ref("x"), 0.5, True),
        node("f", "dropout", Ref("x"), 0.5, True),
    ], ["a", "b", "c", "d", "e", "f"])  # fmt: skip
    assert drop_duplicates(net).nodes == net.nodes


def heads(width: int = 3, biases: tuple[bool, ...] = (True, False, True), inner: str = "B,T,") -> Program:
    """Returns layers over one value, some without bias. The last weight is computed after the first layer."""
    last = len(biases) - 1
    weights = {f"w{i}": f"float32[{width + i},4]" for i in range(len(biases))} | {
        f"b{i}": f"float32[{width + i}]" for i, b in enumerate(biases) if b
    }
    nodes = []
    for i, bias in enumerate(biases):
        if i == last:
            nodes.append(node("doubled", "mul.Scalar", Ref(f"w{i}"), 2.0, out=f"float32[{width + i},4]"))
        weight = Ref("doubled") if i == last else Ref(f"w{i}")
        nodes.append(
            node(
                f"y{i}",
                "linear",
                Ref("x"),
                weight,
                *((Ref(f"b{i}"),) if bias else ()),
                out=f"float32[{inner}{width + i}]",
            )
        )
    nodes.append(node("z", "relu", Ref("y0"), out=f"float32[{inner}{width}]"))
    return program(
        weights, {"x": f"float32[{inner}4]"}, nodes, ["z", *(f"y{i}" for i in range(1, len(biases)))]
    )


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("inner", ["", "B,", "B,T,"])
@pytest.mark.parametrize("biases", [(True, True), (False, False), (True, False, True), (False, True, True)])
@pytest.mark.parametrize("x", ["shared", "stacked"])
def test_narrow_layers_over_one_value_are_joined(inner: str, biases: tuple[bool, ...], x: Kind) -> None:
    net = heads(biases=biases, inner=inner)
    for kind in ("stacked", "shared"):
        slots = all_kinds(net, **dict.fromkeys((s.name for s in net.weights), kind), x=x)
        simple = simplified(net, slots)
        assert ops_of(simple).count("linear") == 1
        simple.check()
        before, after = kinds(net, slots), kinds(simple, slots)
        assert all(after[n] == before[n] for n in before if n in after)
        small.check(net, simple_members(simple, slots), slots)


@pytest.mark.extended
def test_layers_of_other_kinds_are_not_joined() -> None:
    net = heads(biases=(True, True, True))
    for chosen_kinds in (
        {"w0": "stacked"},
        {"w1": "stacked", "w2": "stacked"},
        {"b0": "stacked"},
        {"w0": "stacked", "b0": "stacked", "x": "stacked"},
    ):
        slots = all_kinds(net, **chosen_kinds)  # type: ignore[arg-type]
        simple = simplified(net, slots)
        before, after = kinds(net, slots), kinds(simple, slots)
        assert all(after[n] == before[n] for n in before if n in after)
        assert ops_of(simple).count("linear") == 2
        for n in simple.nodes:
            if n.op == "aten.cat.default":
                assert len({after[r.name] for r in n.args[0]}) == 1, (
                    "a Shared weight joined with a Stacked one would be stored N times"
                )


def test_wide_layers_and_ragged_ones_are_not_joined() -> None:
    net = heads(width=NARROW)
    slots = all_stacked(net)
    assert ops_of(simplify(net, slots, small.SIZES)).count("linear") == 3, (
        "two of three layers are too wide, and a single layer is not joined"
    )
    net = heads()
    slots = all_kinds(net, w0="ragged", b0="ragged")
    assert join_siblings(net, slots).nodes != net.nodes
    assert [n.args[1] for n in join_siblings(net, slots).nodes if n.name == "y0"] == [Ref("w0")]


@pytest.mark.extended(keep=3)
@pytest.mark.parametrize(
    "make", [conv_norm, layer_norm, copies, attention_views, small.classifier, twice, heads]
)
def test_a_second_simplification_changes_nothing(make: Any) -> None:
    net = make()
    slots = all_stacked(net)
    once = simplify(net, slots, small.SIZES)
    once.check()
    assert simplify(once, slots, small.SIZES).to_json() == once.to_json()
    assert [p.to_json() for p in [simplify(p, slots, small.SIZES) for p in (net, net)]] == [
        once.to_json()
    ] * 2


def test_sweep_keeps_random_ops() -> None:
    net = program({"w": "float32[4]", "u": "float32[4]"}, {"x": "float32[B,4]"}, [
        node("noise", "rand_like", Ref("w")),
        node("dead", "exp", Ref("u")),
        node("deader", "exp", Ref("dead")),
        node("y", "relu", Ref("x")),
    ], ["y"])  # fmt: skip
    swept = sweep(net)
    assert [n.name for n in swept.nodes] == ["noise", "y"]
    assert [s.name for s in swept.weights] == ["w"]
    assert swept.inputs == net.inputs


TRANSPOSED: dict[str, tuple[str, tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "1d": ("1d.default", (2, 3, 3), (2, 7), {"padding": [2]}),
    "2d, groups": ("2d.input", (4, 3, 3, 2), (4, 5, 6), {"padding": [1, 1], "groups": 2}),
    "2d, depthwise and dilated": (
        "2d.input",
        (4, 1, 2, 3),
        (4, 5, 8),
        {"padding": [1, 3], "dilation": [2, 3], "groups": 4},
    ),
    "3d, no bias": ("3d.input", (1, 6, 2, 1, 2), (1, 3, 4, 5), {"padding": [1, 0, 1]}),
    "1d, no bias, apart": ("1d.default", (2, 3, 3), (2, 7), {"stride": [3]}),
    "2d, apart": ("2d.input", (4, 3, 2, 2), (4, 5, 6), {"stride": [2, 2]}),
    "2d, groups, apart": ("2d.input", (4, 3, 3, 2), (4, 5, 6), {"stride": [3, 2], "groups": 2}),
    "3d, apart": ("3d.input", (2, 3, 2, 1, 2), (2, 3, 4, 5), {"stride": [2, 1, 2]}),
}


def transposed(kind: str, dtype: str = "float32", **more: Any) -> Program:
    op, weight, x, options = TRANSPOSED[kind]
    rank = len(weight) - 2
    given: dict[str, Any] = (
        {
            "padding": [0] * rank,
            "dilation": [1] * rank,
            "groups": 1,
            "stride": [1] * rank,
            "output_padding": [0] * rank,
        }
        | options
        | more
    )
    outputs = given["groups"] * weight[1]
    weights = {"w": f"{dtype}[{','.join(map(str, weight))}]", "b": f"{dtype}[{outputs}]"}
    bias = None if "no bias" in kind else Ref("b")
    order = [given[k] for k in ("stride", "padding", "output_padding", "groups", "dilation")]
    net = Node("c", f"aten.conv_transpose{op}", (Ref("x"), Ref("w"), bias, *order))
    return program(weights, {"x": f"{dtype}[B,{','.join(map(str, x))}]"}, [net], ["c"])


@pytest.mark.extended(keep=3)
@pytest.mark.parametrize("w", ["shared", "stacked"])
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(kind, dtype) for kind in TRANSPOSED for dtype in ("float32", *["bfloat16"] * kind.endswith("apart"))],
)
def test_a_transposed_convolution_becomes_a_convolution(kind: str, dtype: str, w: Kind) -> None:
    """Of stride 1, or of windows that do not overlap (`apart`)."""
    net = transposed(kind, dtype)
    _, (_, outputs, *window), (_, *image), more = TRANSPOSED[kind]
    if "stride" in more:
        sizes = [outputs * more.get("groups", 1), *(n * k for n, k in zip(image, window))]
        net = replace(net, nodes=(replace(net.nodes[0], out=f"{dtype}[B,{','.join(map(str, sizes))}]"),))
    names = ops_of(simplified(net, all_kinds(net, w=w, b="stacked", x="stacked")))
    assert any(o.startswith("conv") for o in names) and not any("conv_transpose" in o for o in names)


@pytest.mark.parametrize("more", [{"stride": [2, 1]}, {"padding": [3, 1]}, {"padding": [0, 1]}], ids=str)
def test_other_transposed_convolutions_do_not_change(more: dict[str, Any]) -> None:
    """A larger stride, padding beyond the kernel, and an output larger than the input prevent it."""
    net = transposed("2d, groups", **more)
    slots = all_kinds(net, w="stacked", b="stacked", x="stacked")
    simple = simplified(net, slots)
    assert "conv_transpose2d" in ops_of(simple)


@pytest.mark.parametrize(("dtype", "w"), [("float64", "stacked"), ("float32", "ragged")])
def test_transposed_convolutions_of_float64_or_ragged_weights_do_not_change(dtype: str, w: Kind) -> None:
    """In float64 a convolution is not faster, and Ragged weights would be transposed in every call."""
    net = transposed("2d, groups", dtype)
    simple = simplify(net, all_kinds(net, w=w, b="stacked", x="stacked"), small.SIZES)
    assert "conv_transpose2d" in ops_of(simple)
