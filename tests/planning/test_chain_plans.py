"""Tests for which layers and batches a plan of a GPU joins linear layers into one kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from small import all_kinds, node, program

from widepack.ir.kinds import kinds
from widepack.kernel_times.call_time import CallTime
from widepack.kernels.triton_kernels.predictions import MOST_ROWS
from widepack.planning.chain_plans import PlannedChain, divided, linear_chains
from widepack.planning.heuristics import plans
from widepack.planning.plan import REQUESTED, NodeChoice, Plan
from widepack.planning.request import StrategyRequest
from widepack.planning.separate_layers import SeparateLayers
from widepack_artifacts.program import Kind, Node, Program, Ref

SMALL = (64, *[128] * 5, 64)
WIDE = (64, *[256] * 5, 10)
LAYERS = [f"l{i}" for i in range(6)]


def mlp(widths: Sequence[int], activation: str = "relu", tokens: str = "", dtype: str = "float32") -> Program:
    nodes: list[Node] = []
    weights: dict[str, str] = {}
    last = "x"
    for i, (inputs, outputs) in enumerate(pairwise(widths)):
        weights |= {f"w{i}": f"{dtype}[{outputs},{inputs}]", f"b{i}": f"{dtype}[{outputs}]"}
        nodes.append(node(f"l{i}", "linear", Ref(last), Ref(f"w{i}"), Ref(f"b{i}")))
        nodes.append(node(f"a{i}", activation, Ref(f"l{i}")))
        last = f"a{i}"
    return program(weights, {"x": f"{dtype}[B,{tokens}{widths[0]}]"}, nodes, [last])


def slots_of(net: Program, shared: Sequence[str] = ()) -> dict[str, Kind]:
    own: dict[str, Kind] = {w.name: "stacked" for w in net.weights if w.name not in shared}
    return {**all_kinds(net), **own}


def plans_of(
    net: Program,
    requested: str | list[str] = "auto",
    device: str = "cuda",
    members: int = 100,
    batch: str = "B",
    shared: Sequence[str] = (),
    sizes: Mapping[str, int] | None = None,
    training: bool = False,
) -> list[Plan]:
    slots = slots_of(net, shared)
    request = replace(StrategyRequest.parse(requested), training=training)
    return plans(net, slots, members, sizes or {"B": 32}, batch, device, "shared", request)


def chained(plan: Plan) -> list[str]:
    return sorted(n for n, c in plan.choices.items() if c.strategy == "chain")


def chains_of(net: Program, shared: Sequence[str] = ()) -> list[list[str]]:
    slots = slots_of(net, shared)
    return linear_chains(net, kinds(net, slots))


def test_small_layers_are_joined_up_to_a_batch() -> None:
    small, large = plans_of(mlp(SMALL))
    assert small.batch == (1, MOST_ROWS) and chained(small) == LAYERS and not small.looped()
    assert large.batch == (MOST_ROWS + 1, None) and chained(large) == []


def test_the_reason_states_both_predictions() -> None:
    because = plans_of(mlp(SMALL))[0].choices["l0"].because
    assert because == (
        "one kernel for 6 layers takes 18.8 us on an H100 as predicted, separate kernels take 68.4 us "
        "(32 rows, in a CUDA graph)"
    )


def test_the_rows_of_a_member_count_and_not_the_batch() -> None:
    small, large = plans_of(mlp(SMALL, tokens="8,"))
    assert small.batch == (1, MOST_ROWS // 8) and large.batch == (MOST_ROWS // 8 + 1, None)
    (plan,) = plans_of(mlp(SMALL), batch="", sizes={"B": 32})
    assert chained(plan) == LAYERS and plan.batch == (1, None)


def test_chains_whose_starts_cost_less_than_that_of_their_op_are_not_joined() -> None:
    (plan,) = plans_of(mlp((64, 128, 64)))
    assert chained(plan) == []


def test_layers_that_fit_no_kernel_divide_a_chain() -> None:
    """The layers after a wide one may read it: the width of what a chain reads is not limited."""
    (plan, *_) = plans_of(mlp((64, *[128] * 6, 512, *[128] * 6)))
    assert set(chained(plan)) == {f"l{i}" for i in range(13)} - {"l6"}
    assert plan.choices["l0"].because.startswith("one kernel for 6 layers")
    assert plan.choices["l6"].strategy != "chain"


def test_a_chain_has_at_most_the_layers_of_a_kernel() -> None:
    (plan, *_) = plans_of(mlp((64,) * 17))
    assert len(chained(plan)) == 16
    assert all(plan.choices[f"l{i}"].because.startswith("one kernel for 8 layers") for i in range(16))
    (plan, *_) = plans_of(mlp((64,) * 10))  # one layer is left
    assert chained(plan) == [f"l{i}" for i in range(8)]


def test_each_chain_ends_at_its_own_batch() -> None:
    """Of two towers, one has eight rows for each row of the other."""
    few, many = mlp(SMALL), mlp(SMALL, tokens="8,")
    names = {n: f"t_{n}" for n in (*(w.name for w in many.weights), *(n.name for n in many.nodes), "x")}

    def tower(n: Node) -> Node:
        return replace(
            n, name=names[n.name], args=tuple(Ref(names[a.name]) if isinstance(a, Ref) else a for a in n.args)
        )

    net = program(
        {w.name: w.type for w in few.weights} | {names[w.name]: w.type for w in many.weights},
        {"x": few.inputs[0].type, "t_x": many.inputs[0].type},
        [*few.nodes, *map(tower, many.nodes)],
        ["a5", "t_a5"],
    )
    both, one, none = plans_of(net)
    assert both.batch == (1, MOST_ROWS // 8) and set(chained(both)) == {*LAYERS, *(f"t_{n}" for n in LAYERS)}
    assert one.batch == (MOST_ROWS // 8 + 1, MOST_ROWS) and chained(one) == LAYERS
    assert none.batch == (MOST_ROWS + 1, None) and not chained(none)


def test_few_batches_divide_a_plan() -> None:
    """Chains that end between two batches of classes end at the smaller one."""
    (plan, *_) = plans_of(mlp(SMALL), "wide")
    ends = (10, 20, 30, 40, None)
    parts = divided(plan, [PlannedChain((f"l{i}",), most, "") for i, most in enumerate(ends)])
    assert [p.batch for p in parts] == [(1, 10), (11, 30), (31, 40), (41, None)]
    assert [chained(p) for p in parts] == [LAYERS[:5], LAYERS[2:5], LAYERS[3:5], LAYERS[4:5]]


def test_a_chain_is_faster_than_the_strategies_of_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain torch, by which the op decides, would take the kernel for larger batches."""
    net = mlp((256,) * 9, dtype="bfloat16")
    assert plans_of(net)[0].batch == (1, 32)
    monkeypatch.setattr(SeparateLayers, "compared", lambda self, times, rows: times)
    assert plans_of(net)[0].batch == (1, 64)


def test_the_strategies_of_a_plan_are_those_that_are_timed() -> None:
    net = mlp(SMALL[:3])
    found = kinds(net, slots_of(net))

    def times(strategy: str) -> CallTime | None:
        choices = {f"l{i}": NodeChoice(strategy, "") for i in range(2)}
        return SeparateLayers(net.nodes, found, choices, 100, SMALL[:3], "float32").at(32)

    one, loop = times("turned"), times("sequential")
    assert one is not None and loop is not None
    assert loop.kernels >= 200 and one.kernels < 10


def test_wide_layers_are_not_joined() -> None:
    (plan,) = plans_of(mlp((64, 512, 512, 10)))
    assert chained(plan) == []
    assert chained(plans_of(mlp(WIDE))[0]) == []
    assert chained(plans_of(mlp(WIDE, dtype="bfloat16"))[0]) == LAYERS
    (plan,) = plans_of(mlp(SMALL, dtype="float64"))
    assert chained(plan) == []


def test_a_cpu_a_loop_and_training_have_no_chains() -> None:
    net = mlp(SMALL)
    for found in (
        plans_of(net, device="cpu"),
        plans_of(net, "loop"),
        plans_of(net, "wide"),
        plans_of(net, training=True),
    ):
        assert not any(chained(p) for p in found)


def test_a_strategy_that_the_user_names_is_kept() -> None:
    (plan,) = plans_of(mlp(SMALL), "turned")
    assert {c.because for n, c in plan.choices.items() if n.startswith("l")} == {REQUESTED}
    (on_cpu,) = plans_of(mlp(SMALL), ["wide", "chain"], device="cpu")
    assert chained(on_cpu) == LAYERS


def test_chains_end_where_something_else_reads_or_computes() -> None:
    net = mlp((8, 16, 16, 16, 16))
    assert chains_of(net) == [["l0", "l1", "l2", "l3"]]
    assert chains_of(net, ["w1"]) == [["l2", "l3"]]
    assert chains_of(mlp((8, 16, 16), "exp")) == []
    branched = program(
        {w.name: w.type for w in net.weights},
        {"x": "float32[B,8]"},
        [*net.nodes, node("other", "exp", Ref("a1"))],
        ["a3", "other"],
    )
    assert chains_of(branched) == [["l0", "l1"], ["l2", "l3"]]


def test_a_layer_of_a_weight_that_is_an_activation_is_no_chain() -> None:
    """The first argument of the second layer is a weight, and its weight is the first layer's result."""
    net = program(
        {"w0": "float32[6,4]", "v": "float32[3,6]"},
        {"x": "float32[B,4]"},
        [node("l0", "linear", Ref("x"), Ref("w0")), node("l1", "linear", Ref("v"), Ref("l0"))],
        ["l1"],
    )
    assert chains_of(net) == []
