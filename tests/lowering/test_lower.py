"""Tests lowering: small graphs give each member's answers with every plan, and errors name the node."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import small
import torch
from small import all_kinds, classifier, lowered, node, plan, program

from widepack.errors import ArtifactError, LoweringError
from widepack.ir.values import Shared, Stacked
from widepack.lowering.lower import lower
from widepack.planning.plan import NodeChoice, Plan, Region
from widepack.registry.registry import REGISTRY, Rule, Strategy, always
from widepack.registry.sequential import sequential
from widepack.runtime.executable import Executable
from widepack_artifacts.program import Kind, Program, Ref, refs

OWN_HEAD: dict[str, Kind] = {"w_head": "stacked", "w_bias": "stacked"}
PLANS = {
    "wide": plan(),
    "loop": plan(all=["y", "dead", "z", "v", "total"]),
    "mixed": plan(head=["y"], tail=["total"]),
    "middle": plan(middle=["dead", "z"]),
    "sequential": replace(
        plan(), choices={n: NodeChoice.by_user("sequential") for n in ("y", "z", "v", "total")}
    ),
}


@pytest.mark.extended(keep=3)
@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize(
    "chosen_kinds",
    [OWN_HEAD, {**OWN_HEAD, "x": "stacked"}, {**OWN_HEAD, "w_trunk": "stacked"}],
    ids=["shared", "each", "trunk"],
)
@pytest.mark.parametrize("chosen", PLANS)
def test_every_plan_gives_the_answers_of_the_members(
    chosen: str, chosen_kinds: dict[str, Kind], members: int
) -> None:
    net = classifier()
    kinds = all_kinds(net, **chosen_kinds)
    wide = lowered(net, kinds, PLANS[chosen], members).program
    wide.check()
    for batch in (1, 2, 5):
        small.check(net, wide, kinds, members, {**small.SIZES, "B": batch})
    small.check(net, wide, kinds, members, prologue=False)


@pytest.mark.parametrize("chosen", PLANS)
def test_shared_nodes_run_once(chosen: str) -> None:
    net = classifier()
    found = lowered(net, all_kinds(net, **OWN_HEAD), PLANS[chosen])
    assert {n: found.used[n] for n in ("h", "made", "r")} == dict.fromkeys(("h", "made", "r"), "once")
    for name in ("h", "made", "r"):
        (once,) = [n for n in found.program.nodes if n.member == name]
        assert once.op == next(n.op for n in net.nodes if n.name == name)
    assert [o.kind for o in found.program.outputs] == ["stacked", "shared", "stacked"]


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("chosen", ["loop", "mixed", "wide"])
def test_the_length_of_a_program_does_not_depend_on_the_members(chosen: str) -> None:
    net = classifier()
    few, many = (lowered(net, all_kinds(net, **OWN_HEAD), PLANS[chosen], n).program for n in (3, 50))
    assert [n.op for n in few.nodes] == [n.op for n in many.nodes]
    assert [n.op for n in few.nodes].count("loop") == {"loop": 1, "mixed": 2, "wide": 0}[chosen]
    small.check(net, many, all_kinds(net, **OWN_HEAD), 50)


@pytest.mark.parametrize("chosen", PLANS)
def test_a_lowered_program_is_equal_after_a_round_trip(chosen: str) -> None:
    net = classifier()
    wide = lowered(net, all_kinds(net, **OWN_HEAD), PLANS[chosen]).program
    assert Program.from_json(json.loads(json.dumps(wide.to_json()))).to_json() == wide.to_json()
    assert Plan.from_json(json.loads(json.dumps(PLANS[chosen].to_json()))) == PLANS[chosen]


def test_data_that_is_not_a_plan_is_refused() -> None:
    for data in (
        None,
        {},
        {**plan().to_json(), "batch": [1]},
        {**plan().to_json(), "regions": [{"name": "a"}]},
        {**plan().to_json(), "choices": []},
    ):
        with pytest.raises(ArtifactError, match="the data is not a plan. Build the artifact again"):
            Plan.from_json(data)


def test_unused_nodes_are_not_in_the_program() -> None:
    net = classifier()
    wide = lowered(net, all_kinds(net, **OWN_HEAD), plan()).program
    assert "dead" not in {n.member for n in wide.nodes}
    assert "w_unused" not in {s.source for s in wide.weights}
    read = {r for n in wide.nodes for r in refs((n.args, n.kwargs))} | {
        r for o in wide.outputs for r in refs(o.value)
    }
    assert {n.name for n in wide.nodes} <= read


def test_every_node_names_the_members_node_and_line() -> None:
    net = classifier()
    for chosen in PLANS.values():
        wide = lowered(net, all_kinds(net, **OWN_HEAD), chosen).program
        for made_node in wide.nodes:
            assert made_node.member in {n.name for n in net.nodes}
            assert made_node.source == "net.py:1 in forward"


def test_the_strategy_of_the_plan_runs_where_it_applies() -> None:
    net = program(
        {"w": "float32[3,4]"}, {"x": "float32[B,4]"}, [node("y", "linear", Ref("x"), Ref("w"))], ["y"]
    )
    for chosen_kinds, requested, used in (
        ({"w": "stacked"}, "bmm", "bmm"),
        ({"w": "stacked"}, None, "one_gemm"),
        ({"w": "stacked"}, "fold", "one_gemm"),  # does not apply: the first that does
        ({"x": "stacked"}, "fold", "fold"),
        ({"w": "stacked"}, "sequential", "sequential"),
    ):
        kinds = all_kinds(net, **chosen_kinds)  # type: ignore[arg-type]
        chosen = replace(plan(), choices={"y": NodeChoice.by_user(requested)} if requested else {})
        found = lowered(net, kinds, chosen)
        assert found.used["y"] == used
        small.check(net, found.program, kinds)


def lost_axis(w: Any, x: Stacked) -> Any:
    return Stacked(w.call("select.int", x.value, 0, 0))


def other_dtype(w: Any, x: Stacked) -> Any:
    return Stacked(w.call("_to_copy", x.value, dtype=torch.float64))


def other_rank(w: Any, x: Stacked) -> Any:
    return Stacked(w.call("unsqueeze", x.value, -1))


def other_size(w: Any, x: Stacked) -> Any:
    return Stacked(w.call("slice.Tensor", x.value, -1, 0, 2))


def member_0_for_everybody(w: Any, x: Stacked) -> Any:
    return Shared(w.call("unsqueeze", w.call("select.int", x.value, 0, 0), 0))


def raises_an_error(w: Any, x: Stacked) -> Any:
    raise KeyError("a rule that met what it does not know")


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (lost_axis, "its first axis is not the 3 members"),
        (other_dtype, "the wide value is torch.float64, the member's own torch.float32"),
        (other_rank, "the member's own float32"),
        (other_size, "the member's own float32"),
        (member_0_for_everybody, "the member's own float32"),
        (raises_an_error, "KeyError: 'a rule that met what it does not know'"),
    ],
)
def test_a_wrong_rule_is_reported_at_its_node(
    rule: Rule, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        REGISTRY["aten.relu.default"], "strategies", {"wrong": Strategy("wrong", rule, always, "")}
    )
    net = program(
        {"w": "float32[5,4]"},
        {"x": "float32[B,4]"},
        [node("y", "linear", Ref("x"), Ref("w")), node("r", "relu", Ref("y"), source="net.py:7 in forward")],
        ["r"],
    )
    with pytest.raises(LoweringError) as caught:
        lowered(net, all_kinds(net, w="stacked"), plan())
    for word in ("node r (aten.relu.default)", "Stacked float32[3,", "net.py:7 in forward", words):
        assert word in str(caught.value)
    assert rule is raises_an_error or "'wrong'" in str(caught.value)


def test_an_op_without_a_strategy_runs_once_for_each_member() -> None:
    net = program(
        {"w": "float32[4,4]"},
        {},
        [node("y", "pdist", Ref("w")), node("z", "nuclear_norm", Ref("w"))],
        ["y", "z"],
    )
    assert not {"aten.pdist.default", "aten.nuclear_norm.default"} & set(REGISTRY)
    found = lowered(net, all_kinds(net, w="stacked"), plan())
    assert set(found.used.values()) == {"sequential"}
    assert [n.op for n in found.program.nodes].count("aten.pdist.default") == 3
    assert sequential.__doc__


def test_random_numbers_are_drawn_once_for_each_member() -> None:
    net = program(
        {},
        {"x": "float32[B,4]"},
        [node("noise", "rand_like", Ref("x")), node("y", "add.Tensor", Ref("x"), Ref("noise"))],
        ["y"],
    )
    found = lowered(net, all_kinds(net), plan())
    assert found.kinds["noise"] == found.kinds["y"] == "stacked"
    (y,) = Executable(found.program, {}, small.CPU).run(torch.zeros(2, 4))
    assert y.shape == (3, 2, 4)
    assert not torch.equal(y[0], y[1])


def test_a_dim_that_the_program_fixes_is_an_error() -> None:
    net = program(
        {"w": "float32[4,4]"},
        {"x": "float32[B,4]"},
        [node("y", "reshape", Ref("x"), [4, 4]), node("z", "matmul", Ref("y"), Ref("w"))],
        ["z"],
    )
    with pytest.raises(LoweringError, match="the dim B was fixed to 4 while the program was read"):
        lowered(net, all_kinds(net, w="stacked"), plan())


def test_regions_that_depend_on_each_other_are_refused() -> None:
    net = classifier()
    with pytest.raises(LoweringError, match="no value may leave a region and enter it again"):
        lowered(net, all_kinds(net, **OWN_HEAD), plan(one=["y", "v"]))


def heads(width: int, *, scale: float = 2.0) -> Program:
    """Returns a head of `width` classes, with its literals, and sums that are equal in all members."""
    nodes = [
        node("h", "relu", Ref("x"), out="float32[B,4]"),
        node("y", "linear", Ref("h"), Ref("w_head"), out=f"float32[B,{width}]"),
        node("s", "mul.Scalar", Ref("y"), scale, out=f"float32[B,{width}]"),
        node("v", "reshape", Ref("s"), [-1, 1, width], out=f"float32[B,1,{width}]"),
        node("n", "operator.add", width, 1, out="int"),
        node("t", "sum.dim_IntList", Ref("v"), [1, 2], out="float32[B]"),
        node("e", "exp", Ref("t"), out="float32[B]"),
    ]
    return program({"w_head": f"float32[{width},4]"}, {"x": "float32[B,4]"}, nodes, ["v", "t", "e"])


WIDTHS, SIGNATURES = (3, 5), [0, 1, 1, 0]
RAGGED = plan(heads=["y", "s", "v", "n", "t", "e"])


@pytest.mark.parametrize("kind", ["shared", "stacked"])
def test_a_ragged_region_keeps_the_shape_of_each_member(kind: Kind) -> None:
    members = [heads(w) for w in WIDTHS]
    found = lower(members, SIGNATURES, {"w_head": "ragged", "x": kind}, RAGGED, small.SIZES)
    found.program.check()
    assert [o.kind for o in found.program.outputs] == ["ragged", "stacked", "stacked"]
    assert [n.op for n in found.program.nodes].count("loop") == 1
    again = Program.from_json(json.loads(json.dumps(found.program.to_json())))
    weights = [small.draw(members[s].weights[0].type, i) for i, s in enumerate(SIGNATURES)]
    x = (
        small.draw("float32[B,4]", 9, {"B": 2})
        if kind == "shared"
        else torch.stack([small.draw("float32[B,4]", 9 + i, {"B": 2}) for i in range(4)])
    )
    v, t, e = Executable(again, {"w_head": weights}, small.CPU).run(x)
    assert isinstance(v, list)
    for i, w in enumerate(weights):
        want = 2 * torch.relu(x if kind == "shared" else x[i]) @ w.t()
        torch.testing.assert_close(v[i], want.unsqueeze(1))
        torch.testing.assert_close(t[i], want.sum(1))
        torch.testing.assert_close(e[i], want.sum(1).exp())


def test_members_of_other_shapes_may_differ_in_integers_only() -> None:
    with pytest.raises(
        LoweringError,
        match=r"node s \(aten\.mul\.Scalar, net\.py:1 in forward\) differs between members of other shapes "
        r"in more than integers: 2\.0 and 3\.0",
    ):
        lower(
            [heads(3), heads(5, scale=3.0)],
            SIGNATURES,
            {"w_head": "ragged", "x": "shared"},
            RAGGED,
            small.SIZES,
        )


def test_a_ragged_value_outside_a_loop_region_is_an_error() -> None:
    with pytest.raises(LoweringError, match="node y reads a Ragged value outside a loop region"):
        lower(
            [heads(w) for w in WIDTHS], SIGNATURES, {"w_head": "ragged", "x": "shared"}, plan(), small.SIZES
        )


def test_a_plan_counts_its_strategies() -> None:
    chosen = Plan(
        "cpu",
        "shared",
        (1, None),
        (Region("a", "loop", ("x", "y"), ""), Region("b", "wide", ("z",), "")),
        {"z": NodeChoice("bmm", "")},
    )
    assert chosen.strategies() == {"loop": 2, "bmm": 1}
