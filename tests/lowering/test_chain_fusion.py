"""Tests that layers of the strategy `chain` become one node, and that wide programs with it give the members'
answers.
"""

from __future__ import annotations

from typing import Any

import pytest
import small
from small import all_kinds, node, program

from widepack.kernels.decompose import decompose
from widepack.kernels.mlp_chain import OP
from widepack.kernels.triton_kernels.launches import MOST_LAYERS
from widepack.lowering.lower import Lowered, lower
from widepack.planning.plan import NodeChoice, Plan
from widepack_artifacts.program import Kind, Node, Program, Ref

PLAIN = ("relu", "tanh", "sigmoid", "silu", "gelu")


def net(*activations: Any, rows: str = "B,", dtype: str = "float64") -> Program:
    """Returns linear layers, each with the activation after it: a name, None, or nodes of its own."""
    nodes: list[Node] = []
    weights: dict[str, str] = {}
    last, width = "x", 4
    for i, activation in enumerate(activations):
        weights |= {f"w{i}": f"{dtype}[{5 + i},{width}]", f"b{i}": f"{dtype}[{5 + i}]"}
        bias = [Ref(f"b{i}")] if i != 1 else []
        nodes.append(node(f"l{i}", "linear", Ref(last), Ref(f"w{i}"), *bias))
        last, width = f"l{i}", 5 + i
        if activation is not None:
            name, options = activation if isinstance(activation, tuple) else (activation, {})
            nodes.append(node(f"a{i}", name, Ref(last), **options))
            last = f"a{i}"
    weights.pop("b1", None)
    return program(weights, {"x": f"{dtype}[{rows}4]"}, nodes, [last])


def lowered(member: Program, x: Kind = "shared", **strategies: str) -> Lowered:
    chains = {n.name: "chain" for n in member.nodes if n.op == "aten.linear.default"} | strategies
    choices = {name: NodeChoice(strategy, "of the test") for name, strategy in chains.items()}
    slots = slots_of(member, x)
    return lower([member], [0, 0, 0], slots, Plan("cuda", "shared", (1, None), (), choices), small.SIZES)


def slots_of(member: Program, x: Kind) -> dict[str, Kind]:
    return all_kinds(member, x=x, **dict.fromkeys((w.name for w in member.weights), "stacked"))  # type: ignore[arg-type]


def chains(found: Program) -> list[list[str]]:
    return [n.args[3] for n in found.nodes if n.op == OP]


def check(member: Program, found: Lowered, x: Kind) -> None:
    """Checks the program as lowered, after a round trip, and as ATen ops."""
    again = Program.from_json(found.program.to_json())
    again.check()
    plain = decompose(found.program)
    plain.check()
    assert not [n.op for n in plain.nodes if n.op.startswith("widepack.")]
    for form in (found.program, again, plain):
        for sizes in ({"B": 1, "T": 1}, {"B": 7, "T": 3}):
            small.check(member, form, slots_of(member, x), sizes=sizes)


@pytest.mark.extended(keep=3)
@pytest.mark.parametrize("x", ["shared", "stacked"])
@pytest.mark.parametrize("rows", ["", "B,", "B,T,"])
def test_a_network_of_layers_and_activations_is_one_node(rows: str, x: Any) -> None:
    member = net("relu", "tanh", None, rows=rows)
    found = lowered(member, x)
    if rows:
        assert chains(found.program) == [["relu", "tanh", ""]]
    assert set(found.used.values()) == {"chain", "pointwise"}
    check(member, found, x)


@pytest.mark.parametrize("name", PLAIN)
def test_every_activation_is_joined(name: str) -> None:
    member = net(name, name)
    found = lowered(member)
    assert chains(found.program) == [[name, name]]
    check(member, found, "shared")


def test_gelu_has_two_forms() -> None:
    member = net(("gelu", {"approximate": "tanh"}), ("gelu", {"approximate": "none"}), None)
    found = lowered(member)
    assert chains(found.program) == [["gelu_tanh", "gelu", ""]]
    check(member, found, "shared")


def test_another_activation_ends_a_chain() -> None:
    member = net("relu", "exp", None, "relu")
    found = lowered(member)
    assert chains(found.program) == [["relu", ""], ["", "relu"]]
    check(member, found, "shared")


@pytest.mark.parametrize("rows", ["B,", "B,T,"])
def test_a_value_that_another_node_reads_is_kept(rows: str) -> None:
    chain = net("relu", "tanh", None, rows=rows)
    member = program(
        {w.name: w.type for w in chain.weights},
        {"x": chain.inputs[0].type},
        [*chain.nodes, node("other", "exp", Ref("a0")), node("before", "neg", Ref("l1"))],
        ["l2", "other", "before"],
    )
    found = lowered(member)
    assert chains(found.program) == [["relu"], [""], [""]]
    check(member, found, "shared")


def test_two_activations_in_a_row_are_not_joined() -> None:
    chain = net("relu", "tanh")
    member = program(
        {w.name: w.type for w in chain.weights},
        {"x": chain.inputs[0].type},
        [*chain.nodes, node("again", "sigmoid", Ref("a1"))],
        ["again"],
    )
    found = lowered(member)
    assert chains(found.program) == [["relu", "tanh"]]
    check(member, found, "shared")


def test_a_layer_of_another_strategy_ends_a_chain() -> None:
    member = net("relu", "tanh", None)
    found = lowered(member, l1="bmm")
    assert chains(found.program) == [["relu"], [""]]
    check(member, found, "shared")


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("rows", ["B,", "B,T,"])
def test_a_node_has_at_most_the_layers_of_a_kernel(rows: str) -> None:
    member = net(*["relu"] * (MOST_LAYERS + 2), rows=rows)
    found = lowered(member)
    assert chains(found.program) == [["relu"] * MOST_LAYERS, ["relu"] * 2]
    check(member, found, "shared")


def test_the_wide_values_of_members_nodes_are_named() -> None:
    """A value inside of a chain has no name; the result of the chain has that of the last node."""
    found = lowered(net("relu", "tanh"))
    (chain,) = (n.name for n in found.program.nodes if n.op == OP)
    assert found.values["a1"] == chain
    assert not {"l0", "a0", "l1"} & set(found.values)
    views = lowered(net("relu", "tanh", rows="B,T,"))
    assert views.values["a1"] in {n.name for n in views.program.nodes} and "a0" not in views.values
