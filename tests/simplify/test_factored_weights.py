"""Tests member programs with factored weights: what `with_factors` writes, what simplification does to them,
and that their wide programs equal the members' own programs with merged weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import small
import torch
from simplify_programs import conv_norm, layer_norm, simplify
from small import all_kinds, node, program
from torch import Tensor

from widepack.ir.cast import raise_program
from widepack.ir.kinds import kinds as kinds_of_values
from widepack.kernels.decompose import decompose
from widepack.kernels.factored import WEIGHT
from widepack.lowering.lower import lower
from widepack.planning.plan import NodeChoice, Plan
from widepack.planning.split_plans import split_layers
from widepack.runtime.executable import Executable
from widepack.runtime.graph_module import graph_module
from widepack.simplify.factored_weights import FactorNames, with_factors
from widepack_artifacts.program import Kind, Node, Program, Ref

SIZES, RANK = small.SIZES, 2


def names(*sources: str, rank: int = RANK, dtype: str = "float32") -> dict[str, FactorNames]:
    return {s: FactorNames(f"{s}.base", f"{s}.left", f"{s}.right", rank, dtype) for s in sources}


def kinds_of(factored: Program, x: Kind, **others: Kind) -> dict[str, Kind]:
    """Returns the kinds of slots: factors are Stacked, and so is every input if `x` is."""
    found = all_kinds(factored, **others)
    found |= {s.name: "stacked" for s in factored.weights if s.source.endswith((".left", ".right"))}
    return found | {s.name: x for s in factored.inputs}


def test_a_weight_becomes_three_slots_and_one_node() -> None:
    net = program(
        {"w": "bfloat16[6,4]", "w_base": "bfloat16[6]", "v": "bfloat16[6,6]"},
        {"x": "bfloat16[B,4]"},
        [
            node("h", "linear", Ref("x"), Ref("w"), Ref("w_base"), out="bfloat16[B,6]"),
            node("y", "linear", Ref("h"), Ref("v"), out="bfloat16[B,6]"),
        ],
        ["y"],
    )
    made = with_factors(net, names("w", rank=3))
    assert [(s.name, s.source, s.kind, s.type) for s in made.weights] == [
        ("w_base_", "w.base", "shared", "bfloat16[6,4]"),
        ("w_left", "w.left", "shared", "float32[6,3]"),
        ("w_right", "w.right", "shared", "float32[3,4]"),
        ("w_base", "w_base", "shared", "bfloat16[6]"),
        ("v", "v", "shared", "bfloat16[6,6]"),
    ]
    args = (Ref("w_base_"), Ref("w_left"), Ref("w_right"))
    assert made.nodes[0] == Node("w", WEIGHT, args, {}, "bfloat16[6,4]")
    assert made.nodes[1:] == net.nodes and made.inputs == net.inputs and made.outputs == net.outputs
    assert with_factors(net, {}) == net


def test_only_weights_of_two_dims_have_factors() -> None:
    with pytest.raises(ValueError, match="only matrices"):
        with_factors(layer_norm(), names("gamma"))


def test_filters_are_flattened_behind_the_first_dim() -> None:
    made = with_factors(conv_norm(), names("w"))
    assert [s.type for s in made.weights[:3]] == ["float32[6,2,3,3]", "float32[6,2]", "float32[2,18]"]


def drawn(factored: Program, kinds: Mapping[str, Kind], members: int) -> dict[str, Any]:
    """Returns the weights of the wide program by source. Norm weights are near those of trained layers."""
    found: dict[str, Any] = {}
    for k, slot in enumerate(factored.weights):
        many = [
            small.draw(slot.type, 31 * k + (i if kinds[slot.name] == "stacked" else 0))
            for i in range(members)
        ]
        if slot.name == "var":
            many = [v.abs() + 0.5 for v in many]
        found[slot.source] = small.of_kind(many, kinds[slot.name])
    return found


def merged_weight(stored: Mapping[str, Any], source: str, kind: Kind, i: int) -> Tensor:
    """Returns member i's weight in float64."""
    if f"{source}.base" in stored:
        base, left, right = (stored[f"{source}.{part}"] for part in ("base", "left", "right"))
        product = (left[i].double() @ right[i].double()).reshape(base.shape)
        return base.double() + product  # type: ignore[no-any-return]
    value: Tensor = stored[source][i] if kind == "stacked" else stored[source]
    return value.double()


def compare(net: Program, factored: Program, kinds: Mapping[str, Kind], chosen: Plan, members: int) -> Any:
    """Lowers the simplified program, runs it and its ATen form, and compares each member with `net`."""
    simple = simplify(factored, kinds, SIZES)
    lowered = lower([simple], [0] * members, kinds, chosen, SIZES)
    lowered.program.check()
    plainly = decompose(lowered.program)
    assert not any(n.op.startswith("widepack.") for n in plainly.nodes)
    stored = drawn(factored, kinds, members)
    inputs = [
        small.of_kind(
            [
                torch.randint(0, 7, (SIZES["B"],), generator=torch.Generator().manual_seed(i))
                if s.type.startswith("int")
                else small.draw(s.type, 997 + (i if kinds[s.name] == "stacked" else 0))
                for i in range(members)
            ],
            kinds[s.name],
        )
        for s in factored.inputs
    ]
    exact = graph_module(raise_program(net), small.CPU)
    for wide in (lowered.program, plainly):
        got = Executable(wide, stored, small.CPU).run(*inputs)
        for i in range(members):
            own = [merged_weight(stored, s.source, kinds.get(s.name, "shared"), i) for s in net.weights]
            given = [x[i] if kinds[s.name] == "stacked" else x for s, x in zip(factored.inputs, inputs)]
            given = [g.double() if g.is_floating_point() else g for g in given]
            for answer, want in zip(got, exact(*own, *given), strict=True):
                bound = 64 * torch.finfo(torch.float32).eps * float(want.abs().max())
                torch.testing.assert_close(answer[i].double(), want, rtol=0, atol=bound)
    return lowered


def plan_of(factored: Program, kinds: Mapping[str, Kind], split: bool) -> Plan:
    simple = simplify(factored, kinds, SIZES)
    chosen = split_layers(simple, kinds_of_values(simple, kinds))
    choices: dict[str, NodeChoice] = chosen if split else {}
    return Plan("cpu", "shared", (1, None), (), choices)


def block() -> Program:
    """Returns a table, a norm, three narrow layers over one value, a Conv1D of GPT-2 and a matrix product."""
    nodes = [
        node("e", "embedding", Ref("table"), Ref("ids"), out="float32[B,8]"),
        node("s", "add.Tensor", Ref("e"), Ref("x"), out="float32[B,8]"),
        node("n", "layer_norm", Ref("s"), [8], Ref("gamma"), Ref("beta"), out="float32[B,8]"),
        node("q", "linear", Ref("n"), Ref("wq"), Ref("bq"), out="float32[B,8]"),
        node("k", "linear", Ref("n"), Ref("wk"), out="float32[B,8]"),
        node("v", "linear", Ref("n"), Ref("wv"), out="float32[B,8]"),
        node("m", "mul.Tensor", Ref("q"), Ref("k"), out="float32[B,8]"),
        node("a", "add.Tensor", Ref("m"), Ref("v"), out="float32[B,8]"),
        node("c", "addmm", Ref("bc"), Ref("a"), Ref("wc"), out="float32[B,6]"),
        node("y", "matmul", Ref("c"), Ref("wm"), out="float32[B,4]"),
    ]
    weights = {
        "table": "float32[7,8]",
        "gamma": "float32[8]",
        "beta": "float32[8]",
        **dict.fromkeys(("wq", "wk", "wv"), "float32[8,8]"),
        "bq": "float32[8]",
        "bc": "float32[6]",
        "wc": "float32[8,6]",
        "wm": "float32[6,4]",
    }
    return program(weights, {"x": "float32[B,8]", "ids": "int64[B]"}, nodes, ["y"])


FACTORED = ("table", "wq", "wk", "wv", "wc", "wm")
LAYERS = {"e": "split", "q": "split", "k": "split", "v": "split", "c": "split", "y": "split"}


@pytest.mark.extended(keep=2)
@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("x", ["shared", "stacked"])
@pytest.mark.parametrize("norms", ["shared", "stacked"])
@pytest.mark.parametrize("split", [True, False])
def test_a_block_equals_the_members_with_merged_weights(
    members: int, x: Kind, norms: Kind, split: bool
) -> None:
    net, factored = block(), with_factors(block(), names(*FACTORED))
    kinds = kinds_of(factored, x, gamma=norms, beta=norms, bq=norms, bc=norms)
    chosen = plan_of(factored, kinds, split)
    assert {n: c.strategy for n, c in chosen.choices.items()} == (LAYERS if split else {})
    lowered = compare(net, factored, kinds, chosen, members)
    used = {n: lowered.used[n] for n in LAYERS}
    assert (used == LAYERS) if split else ("split" not in used.values())
    read = {s.source for s in lowered.program.weights}
    assert {f"{s}.base" for s in FACTORED} <= read
    merges = [n for n in lowered.program.nodes if n.member in FACTORED]
    assert bool(merges) is not split, "merged weights that no node reads are not computed"


def test_norms_are_not_folded_into_factored_weights_and_siblings_not_joined() -> None:
    factored = with_factors(block(), names(*FACTORED))
    kinds = kinds_of(factored, "stacked", gamma="stacked", beta="stacked")
    simple = simplify(factored, kinds, SIZES)
    by_name = {n.name: n for n in simple.nodes}
    assert [by_name[n].op for n in ("q", "k", "v")] == ["aten.linear.default"] * 3
    assert [by_name[n].args[1] for n in ("q", "k", "v")] == [Ref("wq"), Ref("wk"), Ref("wv")]
    assert by_name["n"].args[2:4] == (Ref("gamma"), Ref("beta"))
    slots: dict[str, Kind] = {**all_kinds(block()), **dict.fromkeys(FACTORED, "stacked")}
    plain = {n.name: n for n in simplify(block(), slots, SIZES).nodes}
    assert plain["k"].op == plain["v"].op == "operator.getitem", "plain siblings are joined"
    slots |= {"gamma": "stacked", "beta": "stacked"}
    plain = {n.name: n for n in simplify(block(), slots, SIZES).nodes}
    assert plain["n"].args[2:4] == (None, None), "a norm is folded into plain weights"


def image(groups: int = 1) -> Program:
    conv = node(
        "c", "conv2d", Ref("x"), Ref("w"), Ref("b"), [2, 1], [1, 1], [1, 1], groups, out="float32[B,6,3,5]"
    )
    net = conv_norm(conv=conv)
    weights = {s.name: s.type if s.name != "w" else f"float32[6,{4 // groups},3,3]" for s in net.weights}
    return program(weights, {"x": "float32[B,4,6,5]"}, net.nodes, ["r"])


@pytest.mark.extended(keep=4)
@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("x", ["shared", "stacked"])
@pytest.mark.parametrize("bias", ["shared", "stacked"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("split", [True, False])
def test_a_convolution_before_a_batch_norm_keeps_its_factors(
    members: int, x: Kind, bias: Kind, groups: int, split: bool
) -> None:
    net = image(groups)
    factored = with_factors(net, names("w"))
    kinds = kinds_of(factored, x, b=bias)
    simple = simplify(factored, kinds, SIZES)
    assert next(n for n in simple.nodes if n.name == "c").args[1] == Ref("w")
    assert any("batch_norm" in n.op for n in simple.nodes)
    chosen = plan_of(factored, kinds, split)
    assert set(chosen.choices) == ({"c"} if split and groups == 1 else set())
    lowered = compare(net, factored, kinds, chosen, members)
    assert (lowered.used["c"] == "split") is (split and groups == 1)


def turned() -> Program:
    """Returns a layer behind a transpose of its rows, of which one position is read, and a transposed
    convolution.
    """
    nodes = [
        node("t", "transpose.int", Ref("x"), 0, 1, out="float32[6,B,4]"),
        node("l", "linear", Ref("t"), Ref("w"), Ref("b"), out="float32[6,B,5]"),
        node("back", "transpose.int", Ref("l"), 0, 1, out="float32[B,6,5]"),
        node("one", "select.int", Ref("back"), 1, 2, out="float32[B,5]"),
        node("d", "conv_transpose1d", Ref("x"), Ref("f"), None, [1], [1], [0], 1, [1], out="float32[B,3,4]"),
    ]
    weights = {"w": "float32[5,4]", "b": "float32[5]", "f": "float32[6,3,3]"}
    return program(weights, {"x": "float32[B,6,4]"}, nodes, ["one", "d"])


@pytest.mark.extended(keep=2)
@pytest.mark.parametrize("x", ["shared", "stacked"])
@pytest.mark.parametrize("split", [True, False])
def test_other_passes_keep_the_answers(x: Kind, split: bool) -> None:
    net, factored = turned(), with_factors(turned(), names("w", "f"))
    kinds = kinds_of(factored, x)
    lowered = compare(net, factored, kinds, plan_of(factored, kinds, split), 3)
    layers = [n for n, s in lowered.used.items() if s == "split"]
    assert len(layers) == (1 if split else 0), "the linear layer; transposed convolutions are merged"


def test_factors_that_all_members_share_run_once() -> None:
    net, factored = block(), with_factors(block(), names("wc"))
    kinds = {**kinds_of(factored, "stacked"), "wc_left": "shared", "wc_right": "shared"}
    lowered = lower([factored], [0] * 3, kinds, small.plan(), SIZES)
    assert lowered.used["wc"] == "once" and lowered.kinds["wc"] == "shared"
    assert net.nodes == factored.nodes[1:]
