"""Simplification: equal answers, and no value of a higher kind than before."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

import small
from small import all_kinds, node, program
from widepack.simplify.common_subexpressions import drop_duplicates
from widepack.simplify.norm_folding import fold_batch_norms
from widepack.ir.edit import sweep
from widepack.ir.kinds import kinds
from widepack.lowering.lower import lower
from widepack.simplify.horizontal_fusion import NARROW, join_siblings
from widepack.simplify.pipeline import drop_copies, simplify
from widepack_artifacts.program import Kind, Node, Program, Ref, Tag

NORM = ("gamma", "beta", "mean", "var")


def ops_of(made: Program) -> list[str]:
    return [n.op.split(".")[1] for n in made.nodes]


def conv_norm(
    bias: bool = True, affine: bool = True, more: tuple[Node, ...] = (), outputs: tuple[str, ...] = ("r",), conv: Node | None = None
) -> Program:
    """conv -> eval batch norm -> relu."""
    weights = {"w": "float32[6,2,3,3]", **({"b": "float32[6]"} if bias else {}), **dict.fromkeys(NORM if affine else NORM[2:], "float32[6]")}
    made = conv or node("c", "conv2d", Ref("x"), Ref("w"), Ref("b") if bias else None, [2, 1], [1, 1], [1, 1], 2)
    parameters = (Ref("gamma"), Ref("beta")) if affine else (None, None)
    nodes = [
        made,
        node("n", "_native_batch_norm_legit_no_training", Ref("c"), *parameters, Ref("mean"), Ref("var"), 0.1, 1e-3),
        node("n0", "operator.getitem", Ref("n"), 0),
        node("r", "relu", Ref("n0")),
        *more,
    ]
    return program(weights, {"x": "float32[B,4,6,5]"}, nodes, list(outputs))


def wide_of(made: Program, slots: dict[str, Kind]) -> Program:
    return lower([made], [0, 0, 0], slots, small.plan(), small.SIZES).program


@pytest.mark.parametrize("own", list(itertools.product(("shared", "stacked"), repeat=3)), ids="-".join)
def test_a_batch_norm_is_folded_where_no_kind_rises(own: tuple[Kind, Kind, Kind]) -> None:
    made = conv_norm()
    w, gamma, x = own
    slots = all_kinds(made, w=w, gamma=gamma, x=x)
    simple = simplify(made, slots, small.SIZES)
    folded = not (w == "shared" and gamma == "stacked")
    assert ("_native_batch_norm_legit_no_training" not in ops_of(simple)) is folded
    before, after = kinds(made, slots), kinds(simple, slots)
    assert after["c"] == before["c"]
    small.check(made, wide_of(simple, slots), slots)


@pytest.mark.parametrize("name", ["b", "beta", "mean", "var"])
def test_one_parameter_of_a_members_own_keeps_a_norm_out_of_a_shared_convolution(name: str) -> None:
    made = conv_norm()
    for kind in ("stacked", "ragged"):
        slots = all_kinds(made, **{name: kind})  # type: ignore[arg-type]
        simple = fold_batch_norms(made, slots)
        assert simple.nodes == made.nodes
        assert kinds(simple, slots) == kinds(made, slots)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("affine", [True, False])
def test_a_norm_without_a_bias_or_without_scale_and_shift_is_folded_too(bias: bool, affine: bool) -> None:
    made = conv_norm(bias, affine)
    slots = all_kinds(made, **dict.fromkeys((s.name for s in made.weights), "stacked"))  # type: ignore[arg-type]
    simple = simplify(made, slots, small.SIZES)
    assert ops_of(simple)[-2:] == ["conv2d", "relu"]
    small.check(made, wide_of(simple, slots), slots)
    small.check(made, simple_members(simple, slots), slots)


def simple_members(simple: Program, slots: dict[str, Kind]) -> Program:
    """The simplified member program as one loop: it is a member program still."""
    return lower([simple], [0, 0, 0], slots, small.plan(all=[n.name for n in simple.nodes]), small.SIZES).program


@pytest.mark.parametrize("conv", [
    node("c", "conv2d.padding", Ref("x"), Ref("w"), Ref("b"), [1, 1], "same", [1, 1], 2),
    node("c", "conv2d", Ref("x"), Ref("w"), groups=2),
    node("c", "conv2d", Ref("x"), Ref("w"), bias=Ref("b"), groups=2),
])  # fmt: skip
def test_a_convolution_written_otherwise_is_folded_too(conv: Node) -> None:
    made = conv_norm(conv=conv)
    slots = all_kinds(made, **dict.fromkeys((s.name for s in made.weights), "stacked"))  # type: ignore[arg-type]
    simple = simplify(made, slots, small.SIZES)
    assert "_native_batch_norm_legit_no_training" not in ops_of(simple)
    small.check(made, wide_of(simple, slots), slots)


def test_a_convolution_that_something_else_reads_is_left_alone() -> None:
    reader = node("other", "relu", Ref("c"))
    for made in (conv_norm(more=(reader,), outputs=("r", "other")), conv_norm(outputs=("r", "c"))):
        slots = all_kinds(made, w="stacked")
        assert fold_batch_norms(made, slots).nodes == made.nodes


def test_two_norms_one_behind_the_other_fold_each_into_its_convolution() -> None:
    more = (
        node("c2", "conv2d", Ref("r"), Ref("w2")),
        node("m", "_native_batch_norm_legit_no_training", Ref("c2"), None, None, Ref("mean"), Ref("var"), 0.1, 1e-5),
        node("m0", "operator.getitem", Ref("m"), 0),
    )
    first = conv_norm()
    weights = {s.name: s.type for s in first.weights} | {"w2": "float32[6,6,1,1]"}
    made = program(weights, {"x": "float32[B,4,6,5]"}, [*first.nodes, *more], ["m0", "r"])
    slots = all_kinds(made, w="stacked", w2="stacked", mean="stacked")
    simple = simplify(made, slots, small.SIZES)
    assert "_native_batch_norm_legit_no_training" not in ops_of(simple)
    small.check(made, wide_of(simple, slots), slots)


def layer_norm(layers: int = 2, width: int = 4, **options: Any) -> Program:
    nodes = [node("n", "layer_norm", Ref("x"), [width], Ref("gamma"), Ref("beta"), out=f"float32[B,T,{width}]")]
    nodes += [node(f"y{i}", "linear", Ref("n"), Ref(f"w{i}"), *((Ref(f"b{i}"),) if i else ()), out="float32[B,T,40]") for i in range(layers)]
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


@pytest.mark.parametrize("own", list(itertools.product(("shared", "stacked"), repeat=3)), ids="-".join)
def test_a_layer_norm_raises_no_kind(own: tuple[Kind, Kind, Kind]) -> None:
    made = layer_norm()
    slots = all_kinds(made, **dict(zip(("gamma", "w0", "w1"), own)))
    simple = simplify(made, slots, small.SIZES)
    before, after = kinds(made, slots), kinds(simple, slots)
    assert all(after[n] == before[n] for n in ("y0", "y1"))
    order = ("shared", "stacked")
    assert all(order.index(after[n]) <= order.index(before[n]) for n in before if n in after)
    for n in simple.nodes:
        if n.op == "aten.linear.default" and slots[f"w{n.name[1:]}"] == "shared":
            assert after[n.args[1].name] == "shared", "a Shared weight became one a member"
    small.check(made, wide_of(simple, slots), slots)


def test_a_layer_norm_that_something_else_reads_is_left_alone() -> None:
    more = (node("s", "sum", Ref("n")),)
    for made in (layer_norm(more=more, outputs=("s",)), layer_norm(outputs=("n",))):
        slots = all_kinds(made, gamma="stacked", w0="stacked", w1="stacked")
        simple = simplify(made, slots, small.SIZES)
        assert next(n for n in simple.nodes if n.name == "n").args[2] == Ref("gamma")
        small.check(made, wide_of(simple, slots), slots)


def copies() -> Program:
    return program({"w": "float32[4,4]"}, {"x": "float32[B,4]"}, [
        node("a", "clone", Ref("x"), out="float32[B,4]", memory_format=Tag("memory_format", "contiguous_format")),
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


def test_copies_and_casts_that_change_nothing_go() -> None:
    made = copies()
    simple = drop_copies(made)
    assert ops_of(simple) == ["_to_copy", "_to_copy", "linear", "transpose", "reshape"]
    assert [o.value for o in simple.outputs] == [Ref("i"), Ref("x"), Ref("c")]
    simple.check()
    for slots in (all_kinds(made, w="stacked"), all_kinds(made, x="stacked")):
        small.check(made, wide_of(simplify(made, slots, small.SIZES), slots), slots)


def attention_views() -> Program:
    """Rows split into heads and turned, as torch's own attention writes it."""
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


@pytest.mark.parametrize("own", [{"w": "stacked"}, {"x": "stacked"}, {"w": "stacked", "x": "stacked"}])
def test_views_that_are_merged_mean_the_same(own: dict[str, Kind]) -> None:
    made = attention_views()
    slots = all_kinds(made, **own)
    simple = simplify(made, slots, small.SIZES)
    assert not {"reshape", "view"} & set(ops_of(simple)), "the chain comes down to views"
    for sizes in ({"B": 2, "T": 3}, {"B": 5, "T": 7}, {"B": 1, "T": 1}):
        small.check(made, wide_of(simple, slots), slots, sizes=sizes)


def channels(layer: Node, before: bool, weight: str = "float32[6,4]", x: str = "float32[B,4]", out: str = "float32[B,6]") -> Program:
    """A layer and an eval batch norm behind it, or before it."""
    width = 4 if before else 6
    norm = node("n", "_native_batch_norm_legit_no_training", Ref("x" if before else "c"), *map(Ref, NORM), 0.1, 1e-3)
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
    "norm, conv": channels(node("c", "conv2d", Ref("n0"), Ref("w"), Ref("b"), [1, 1], [0, 0]), True, weight="float32[6,4,3,3]", **IMAGE),
    "norm, grouped conv": channels(node("c", "conv2d", Ref("n0"), Ref("w"), None, groups=2), True, weight="float32[6,2,3,3]", **IMAGE),
    "norm, conv without padding by name": channels(
        node("c", "conv2d.padding", Ref("n0"), Ref("w"), Ref("b"), [2, 1], "valid"), True, weight="float32[6,4,3,3]", **IMAGE
    ),
    "transposed conv, norm": channels(
        node("c", "conv_transpose2d.input", Ref("x"), Ref("w"), Ref("b"), [2, 2], [1, 1]), False, weight="float32[4,6,3,3]", **IMAGE
    ),
    "grouped transposed conv, norm": channels(
        node("c", "conv_transpose2d.input", Ref("x"), Ref("w"), None, [2, 1], [1, 0], [1, 0], 2), False, weight="float32[4,3,3,3]", **IMAGE
    ),
}


@pytest.mark.parametrize("name", FOLDED)
@pytest.mark.parametrize(
    "own", [{"w": "stacked", "gamma": "stacked"}, {"w": "stacked"}, {"x": "stacked"}, dict.fromkeys(("w", "b", *NORM), "stacked")]
)
def test_a_norm_is_folded_into_the_layer_before_it_or_behind_it(name: str, own: dict[str, Kind]) -> None:
    made = FOLDED[name]
    slots = all_kinds(made, **{n: k for n, k in own.items() if n in {s.name for s in (*made.weights, *made.inputs)}})
    simple = simplify(made, slots, small.SIZES)
    assert "_native_batch_norm_legit_no_training" not in ops_of(simple)
    assert kinds(simple, slots)["c"] == kinds(made, slots)["c"]
    small.check(made, wide_of(simple, slots), slots)


@pytest.mark.parametrize("name", FOLDED)
@pytest.mark.parametrize("parameter", ["gamma", "beta", "mean", "var"])
def test_a_members_own_norm_stays_out_of_a_shared_layer(name: str, parameter: str) -> None:
    made = FOLDED[name]
    slots = all_kinds(made, **{parameter: "stacked"})  # type: ignore[arg-type]
    simple = simplify(made, slots, small.SIZES)
    assert "_native_batch_norm_legit_no_training" in ops_of(simple)
    assert kinds(simple, slots)[next(n for n in simple.nodes if n.name == "c").args[1].name] == "shared"


def test_a_norm_before_a_layer_stays_where_folding_would_not_be_exact() -> None:
    padded = channels(node("c", "conv2d", Ref("n0"), Ref("w"), Ref("b"), [1, 1], [1, 0]), True, weight="float32[6,4,3,3]", **IMAGE)
    named = channels(node("c", "conv2d.padding", Ref("n0"), Ref("w"), Ref("b"), [1, 1], "same"), True, weight="float32[6,4,3,3]", **IMAGE)
    rows = channels(  # dim 1 is no channel of a linear layer over three dims
        node("c", "linear", Ref("n0"), Ref("w"), Ref("b"), out="float32[B,4,6]"), True, x="float32[B,4,4]"
    )
    behind = channels(node("c", "linear", Ref("x"), Ref("w"), Ref("b"), out="float32[B,6,6]"), False, x="float32[B,6,4]", out="float32[B,6,6]")
    for made in (padded, named, rows, behind):
        slots = all_kinds(made, **dict.fromkeys((s.name for s in made.weights), "stacked"))  # type: ignore[arg-type]
        assert fold_batch_norms(made, slots).nodes == made.nodes


def test_a_norm_between_two_layers_goes_into_the_first() -> None:
    first = channels(linear("x"), False)
    made = program({s.name: s.type for s in first.weights} | {"w2": "float32[3,6]"}, {"x": "float32[B,4]"}, [
        *first.nodes[:-1], node("r", "linear", Ref("n0"), Ref("w2"), out="float32[B,3]"),
    ], ["r"])  # fmt: skip
    slots = all_kinds(made, **dict.fromkeys((s.name for s in made.weights), "stacked"))  # type: ignore[arg-type]
    simple = simplify(made, slots, small.SIZES)
    assert [n.args[1] for n in simple.nodes if n.name == "r"] == [Ref("w2")]
    small.check(made, wide_of(simple, slots), slots)


def twice() -> Program:
    """The same values made twice, in other words and in the same."""
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


def test_equal_nodes_are_one() -> None:
    made = twice()
    simple = drop_duplicates(drop_copies(made))
    assert ops_of(simple) == ["linear", "mul", "add", "add", "sum", "sum"], "0.0 and -0.0 are two numbers, and so are two dtypes"
    assert [o.value for o in simple.outputs] == [Ref("r"), Ref("s"), Ref("t"), Ref("u"), Ref("p")]
    for slots in (all_kinds(made, w="stacked"), all_kinds(made, x="stacked"), all_kinds(made)):
        small.check(made, wide_of(simplify(made, slots, small.SIZES), slots), slots)


def test_what_draws_or_has_as_many_places_as_the_data_say_is_never_one() -> None:
    made = program({}, {"x": "float32[B,4]"}, [
        node("a", "rand_like", Ref("x")),
        node("b", "rand_like", Ref("x")),
        node("c", "nonzero", Ref("x")),
        node("d", "nonzero", Ref("x")),
        node("e", "dropout", Ref("x"), 0.5, True),
        node("f", "dropout", Ref("x"), 0.5, True),
    ], ["a", "b", "c", "d", "e", "f"])  # fmt: skip
    assert drop_duplicates(made).nodes == made.nodes


def heads(width: int = 3, biases: tuple[bool, ...] = (True, False, True), inner: str = "B,T,") -> Program:
    """Layers over one value, some without a bias; the last weight is made after the first layer."""
    last = len(biases) - 1
    weights = {f"w{i}": f"float32[{width + i},4]" for i in range(len(biases))} | {f"b{i}": f"float32[{width + i}]" for i, b in enumerate(biases) if b}
    nodes = []
    for i, bias in enumerate(biases):
        if i == last:
            nodes.append(node("doubled", "mul.Scalar", Ref(f"w{i}"), 2.0, out=f"float32[{width + i},4]"))
        weight = Ref("doubled") if i == last else Ref(f"w{i}")
        nodes.append(node(f"y{i}", "linear", Ref("x"), weight, *((Ref(f"b{i}"),) if bias else ()), out=f"float32[{inner}{width + i}]"))
    nodes.append(node("z", "relu", Ref("y0"), out=f"float32[{inner}{width}]"))
    return program(weights, {"x": f"float32[{inner}4]"}, nodes, ["z", *(f"y{i}" for i in range(1, len(biases)))])


@pytest.mark.parametrize("inner", ["", "B,", "B,T,"])
@pytest.mark.parametrize("biases", [(True, True), (False, False), (True, False, True), (False, True, True)])
@pytest.mark.parametrize("x", ["shared", "stacked"])
def test_narrow_layers_over_one_value_are_one(inner: str, biases: tuple[bool, ...], x: Kind) -> None:
    made = heads(biases=biases, inner=inner)
    for kind in ("stacked", "shared"):
        slots = all_kinds(made, **dict.fromkeys((s.name for s in made.weights), kind), x=x)
        simple = simplify(made, slots, small.SIZES)
        assert ops_of(simple).count("linear") == 1
        simple.check()
        before, after = kinds(made, slots), kinds(simple, slots)
        assert all(after[n] == before[n] for n in before if n in after)
        small.check(made, wide_of(simple, slots), slots)
        small.check(made, simple_members(simple, slots), slots)


def test_layers_of_other_kinds_are_not_joined() -> None:
    made = heads(biases=(True, True, True))
    for own in ({"w0": "stacked"}, {"w1": "stacked", "w2": "stacked"}, {"b0": "stacked"}, {"w0": "stacked", "b0": "stacked", "x": "stacked"}):
        slots = all_kinds(made, **own)  # type: ignore[arg-type]
        simple = simplify(made, slots, small.SIZES)
        before, after = kinds(made, slots), kinds(simple, slots)
        assert all(after[n] == before[n] for n in before if n in after)
        assert ops_of(simple).count("linear") == 2
        for n in simple.nodes:
            if n.op == "aten.cat.default":
                assert len({after[r.name] for r in n.args[0]}) == 1, "a Shared weight beside a member's own would be held N times"
        small.check(made, wide_of(simple, slots), slots)


def test_wide_layers_and_ragged_ones_are_not_joined() -> None:
    made = heads(width=NARROW)
    slots = all_kinds(made, **dict.fromkeys((s.name for s in made.weights), "stacked"))  # type: ignore[arg-type]
    assert ops_of(simplify(made, slots, small.SIZES)).count("linear") == 3, "two of three are too wide, and one alone is not joined"
    made = heads()
    slots = all_kinds(made, w0="ragged", b0="ragged")
    assert join_siblings(made, slots).nodes != made.nodes
    assert [n.args[1] for n in join_siblings(made, slots).nodes if n.name == "y0"] == [Ref("w0")]


@pytest.mark.parametrize("make", [conv_norm, layer_norm, copies, attention_views, small.classifier, twice, heads])
def test_simplifying_twice_is_simplifying_once(make: Any) -> None:
    made = make()
    slots = all_kinds(made, **dict.fromkeys((s.name for s in made.weights), "stacked"))  # type: ignore[arg-type]
    once = simplify(made, slots, small.SIZES)
    once.check()
    assert simplify(once, slots, small.SIZES).to_json() == once.to_json()
    assert [p.to_json() for p in [simplify(p, slots, small.SIZES) for p in (made, made)]] == [once.to_json()] * 2


def test_sweep_keeps_what_draws_random_numbers() -> None:
    made = program({"w": "float32[4]", "u": "float32[4]"}, {"x": "float32[B,4]"}, [
        node("noise", "rand_like", Ref("w")),
        node("dead", "exp", Ref("u")),
        node("deader", "exp", Ref("dead")),
        node("y", "relu", Ref("x")),
    ], ["y"])  # fmt: skip
    swept = sweep(made)
    assert [n.name for n in swept.nodes] == ["noise", "y"]
    assert [s.name for s in swept.weights] == ["w"]
    assert swept.inputs == made.inputs


TRANSPOSED: dict[str, tuple[str, tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "1d": ("1d.default", (2, 3, 3), (2, 7), {"padding": [2]}),
    "2d, groups": ("2d.input", (4, 3, 3, 2), (4, 5, 6), {"padding": [1, 1], "groups": 2}),
    "2d, depthwise and dilated": ("2d.input", (4, 1, 2, 3), (4, 5, 8), {"padding": [1, 3], "dilation": [2, 3], "groups": 4}),
    "3d, no bias": ("3d.input", (1, 6, 2, 1, 2), (1, 3, 4, 5), {"padding": [1, 0, 1]}),
}


def transposed(kind: str, dtype: str = "float32", **more: Any) -> Program:
    op, weight, x, options = TRANSPOSED[kind]
    rank = len(weight) - 2
    given: dict[str, Any] = (
        {"padding": [0] * rank, "dilation": [1] * rank, "groups": 1, "stride": [1] * rank, "output_padding": [0] * rank} | options | more
    )
    outputs = given["groups"] * weight[1]
    weights = {"w": f"{dtype}[{','.join(map(str, weight))}]", "b": f"{dtype}[{outputs}]"}
    bias = None if "no bias" in kind else Ref("b")
    order = [given[k] for k in ("stride", "padding", "output_padding", "groups", "dilation")]
    made = Node("c", f"aten.conv_transpose{op}", (Ref("x"), Ref("w"), bias, *order))
    return program(weights, {"x": f"{dtype}[B,{','.join(map(str, x))}]"}, [made], ["c"])


@pytest.mark.parametrize("w", ["shared", "stacked"])
@pytest.mark.parametrize("kind", TRANSPOSED)
def test_a_transposed_convolution_of_stride_1_is_a_convolution(kind: str, w: Kind) -> None:
    made = transposed(kind)
    slots = all_kinds(made, w=w, b="stacked", x="stacked")
    simple = simplify(made, slots, small.SIZES)
    assert ops_of(simple)[-1].startswith("conv") and not any("transpose" in o and "conv" in o for o in ops_of(simple))
    small.check(made, wide_of(simple, slots), slots)


@pytest.mark.parametrize("more", [{"stride": [2, 1]}, {"padding": [3, 1]}, {"padding": [0, 1]}], ids=str)
def test_another_transposed_convolution_stays(more: dict[str, Any]) -> None:
    """A wider step, a margin that cuts off more than the kernel reaches, an output larger than the input."""
    made = transposed("2d, groups", **more)
    slots = all_kinds(made, w="stacked", b="stacked", x="stacked")
    simple = simplify(made, slots, small.SIZES)
    assert "conv_transpose2d" in ops_of(simple)
    small.check(made, wide_of(simple, slots), slots)


@pytest.mark.parametrize(("dtype", "w"), [("float64", "stacked"), ("float32", "ragged")])
def test_a_transposed_convolution_of_other_weights_stays(dtype: str, w: Kind) -> None:
    """In float64 it is no faster, and ragged weights would be turned at every call."""
    made = transposed("2d, groups", dtype)
    simple = simplify(made, all_kinds(made, w=w, b="stacked", x="stacked"), small.SIZES)
    assert "conv_transpose2d" in ops_of(simple)


def test_a_norm_behind_a_transposed_convolution_is_folded_first() -> None:
    conv = Node("c", "aten.conv_transpose2d.input", (Ref("x"), Ref("w"), Ref("b"), [1, 1], [1, 1], [0, 0], 1, [1, 1]))
    made = conv_norm(conv=conv)
    made = Program(
        tuple(type(s)(s.name, s.source, s.kind, "float32[4,6,3,3]") if s.name == "w" else s for s in made.weights),
        made.inputs,
        made.nodes,
        made.outputs,
    )
    slots = all_kinds(made, w="stacked", gamma="stacked", x="stacked")
    simple = simplify(made, slots, small.SIZES)
    assert "conv2d" in ops_of(simple) and "_native_batch_norm_legit_no_training" not in ops_of(simple) and "conv_transpose2d" not in ops_of(simple)
    small.check(made, wide_of(simple, slots), slots)
