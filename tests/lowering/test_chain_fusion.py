"""Tests that layers of the strategy `chain` become one node, and that wide programs with it give the members'
answers.
"""

from __future__ import annotations

from typing import Any

import pytest
import small
from small import node, program, stacked_weights

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
    slots = stacked_weights(member, x=x)
    return lower([member], [0, 0, 0], slots, Plan("cuda", "shared", (1, None), (), choices), small.SIZES)


def chains(found: Program) -> list[list[str]]:
    return [n.args[3] for n in found.nodes if n.op == OP]


def joined(member: Program, expected: list[list[str]], x: Kind = "shared", **strategies: str) -> Lowered:
    """Lowers a program, and checks its chains and its answers in all forms."""
    found = lowered(member, x, **strategies)
    assert chains(found.program) == expected
    sizes = ({"B": 1, "T": 1}, {"B": 7, "T": 3})
    small.check_forms(member, found.program, stacked_weights(member, x=x), sizes=sizes)
    return found


@pytest.mark.extended(keep=3)
@pytest.mark.parametrize("x", ["shared", "stacked"])
@pytest.mark.parametrize("rows", ["", "B,", "B,T,"])
def test_a_network_of_layers_and_activations_is_one_node(rows: str, x: Any) -> None:
    member = net("relu", "tanh", None, rows=rows)
    found = joined(member, [["relu", "tanh", ""]] if rows else chains(lowered(member, x).program), x)
    assert set(found.used.values()) == {"chain", "pointwise"}


@pytest.mark.parametrize("name", PLAIN)
def test_every_activation_is_joined(name: str) -> None:
    member = net(name, name)
    joined(member, [[name, name]])


def test_gelu_has_two_forms() -> None:
    member = net(("gelu", {"approximate": "tanh"}), ("gelu", {"approximate": "none"}), None)
    joined(member, [["gelu_tanh", "gelu", ""]])


def test_another_activation_ends_a_chain() -> None:
    member = net("relu", "exp", None, "relu")
    joined(member, [["relu", ""], ["", "relu"]])


@pytest.mark.parametrize("rows", ["B,", "B,T,"])
def test_a_value_that_another_node_reads_is_kept(rows: str) -> None:
    chain = net("relu", "tanh", None, rows=rows)
    member = program(
        {w.name: w.type for w in chain.weights},
        {"x": chain.inputs[0].type},
        [*chain.nodes, node("other", "exp", Ref("a0")), node("before", "neg", Ref("l1"))],
        ["l2", "other", "before"],
    )
    joined(member, [["relu"], [""], [""]])


def test_two_activations_in_a_row_are_not_joined() -> None:
    chain = net("relu", "tanh")
    member = program(
        {w.name: w.type for w in chain.weights},
        {"x": chain.inputs[0].type},
        [*chain.nodes, node("again", "sigmoid", Ref("a1"))],
        ["again"],
    )
    joined(member, [["relu", "tanh"]])


def test_a_layer_of_another_strategy_ends_a_chain() -> None:
    member = net("relu", "tanh", None)
    joined(member, [["relu"], [""]], l1="bmm")


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("rows", ["B,", "B,T,"])
def test_a_node_has_at_most_the_layers_of_a_kernel(rows: str) -> None:
    member = net(*["relu"] * (MOST_LAYERS + 2), rows=rows)
    joined(member, [["relu"] * MOST_LAYERS, ["relu"] * 2])


def test_the_wide_values_of_members_nodes_are_named() -> None:
    """A value inside of a chain has no name; the result of the chain has that of the last node."""
    found = lowered(net("relu", "tanh"))
    (chain,) = (n.name for n in found.program.nodes if n.op == OP)
    assert found.values["a1"] == chain
    assert not {"l0", "a0", "l1"} & set(found.values)
    views = lowered(net("relu", "tanh", rows="B,T,"))
    assert views.values["a1"] in {n.name for n in views.program.nodes} and "a0" not in views.values
