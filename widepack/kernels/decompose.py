"""Replaces widepack's own ops in a program by ATen ops, for readers that know no other ops."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from widepack_artifacts.program import Node, Program, Ref, refs, substitute

from . import (
    experts,
    factored,
    grouped_experts,
    masked,
    member_convs,
    member_products,
    mlp_chain,
    sequences,
    streamed,
)
from .factored_in_aten import factored_in_aten
from .node_list import NodeList

_RECURRENT = (
    "widepack.rnn_steps.default",
    "widepack.gru_steps.default",
    "widepack.lstm_steps.default",
    "widepack.packed_lstm.default",
    "widepack.rnn_training.default",
    "widepack.gru_training.default",
    "widepack.lstm_training.default",
)
FOR_CUDA = frozenset(
    {
        member_convs.OP,
        mlp_chain.OP,
        grouped_experts.OP,
        "widepack.rnn_steps.default",
        "widepack.gru_steps.default",
        "widepack.lstm_steps.default",
    }
)
"""The ops with kernels for CUDA that a compiler does not make from their ATen form."""
_PACKED_LAYERS = ("widepack.convolution.default", "widepack.linear.default")


def for_compiler(program: Program, backend: str, device: torch.device) -> Program:
    """Returns the program without the ops that the compiler of a backend does not take.

    Packed weights are for oneDNN: no compiler takes them. torch.compile calls ops that it does not know, so
    on a GPU it gets the ops with kernels for CUDA, and compiles what is between them.
    """
    kept = backend == "compile" and device.type == "cuda"
    return decompose(program, FOR_CUDA if kept else ())


def decompose(program: Program, kept: Collection[str] = ()) -> Program:
    """Returns the program with ATen ops in place of widepack's own, also in the bodies of loops.

    The answers are equal except for rounding. The memory layout may differ.

    Args:
        program: A wide program.
        kept: The ops of widepack that stay.
    """
    values: dict[str, Any] = {}  # what replaces a value of the program, by name
    packs: dict[str, Node] = {}  # the nodes of `pack_lstm`, by name
    pairs: dict[str, tuple[Any, Any]] = {}  # the two results of a node, which `operator.getitem` reads
    nodes: list[Node] = []

    def replaced(argument: Any) -> Any:
        return substitute(argument, lambda name: values.get(name, Ref(name)))

    for node in program.nodes:
        if any(r in values for r in refs((node.args, node.kwargs))):
            node = replace(node, args=replaced(node.args), kwargs=replaced(node.kwargs))
        if node.body is not None:
            nodes.append(replace(node, body=decompose(node.body, kept)))
        elif node.op in kept:
            nodes.append(node)
        elif node.op in ("widepack.pack_convolution.default", "widepack.pack_linear.default"):
            values[node.name] = node.args[0]
        elif node.op == "widepack.pack_convolutions.default":
            nodes.append(replace(node, op="aten.unbind.int", args=(node.args[0], 0)))
        elif node.op in _PACKED_LAYERS:
            nodes += _packed_layer_in_aten(node)
        elif node.op == member_products.PRODUCTS:
            nodes += _products_in_aten(node, program.members)
        elif node.op == member_convs.OP:
            nodes += member_convs.member_convs_in_aten(node, program.members)
        elif node.op == streamed.OP:
            nodes += _streamed_linear_in_aten(node, program.members)
        elif node.op == mlp_chain.OP:
            nodes += mlp_chain.mlp_chain_in_aten(node, program.members)
        elif node.op == masked.OP:
            nodes.append(replace(node, op=masked.PLAIN))
        elif node.op == experts.OP:
            nodes += experts.expert_linear_in_aten(node, program.members)
        elif node.op == grouped_experts.OP:
            nodes += grouped_experts.grouped_experts_in_aten(node, program.members)
        elif node.op == experts.OF_ONE_MEMBER:
            nodes += experts.expert_mm_in_aten(node)
        elif node.op == sequences.OP:
            nodes += sequences.sequence_lengths_in_aten(node)
        elif node.op in (factored.LINEAR, factored.WEIGHT):
            nodes += factored_in_aten(node, program.members)
        elif node.op == "widepack.pack_lstm.default":
            packs[node.name] = node
        elif node.op in _RECURRENT:
            more, y, last = _recurrent_in_aten(node, program.members, packs)
            nodes += more
            if last is not None or node.op == "widepack.gru_training.default":
                pairs[node.name] = y, last  # what else a training op gives is for its derivative
        elif node.op == "operator.getitem" and isinstance(node.args[0], Ref) and node.args[0].name in pairs:
            values[node.name] = pairs[node.args[0].name][node.args[1]]
        else:
            nodes.append(node)
    outputs = tuple(replace(o, value=replaced(o.value)) for o in program.outputs)
    return replace(program, nodes=tuple(nodes), outputs=outputs)


def _packed_layer_in_aten(node: Node) -> list[Node]:
    """Returns a linear layer or convolution over packed weights as ATen nodes over plain weights."""
    new = NodeList(node)
    is_convolution = node.op == "widepack.convolution.default"
    count = 7 if is_convolution else 3
    args, activation = node.args[:count], node.args[count] if len(node.args) > count else ""
    if is_convolution:
        y = new.add(f"aten.conv{len(args[3])}d.default", *args, suffix="plain")
    else:
        x, weight, bias = args
        transposed = new.add("aten.transpose.int", weight, 1, 2, suffix="turned")
        if bias is None:
            y = new.add("aten.bmm.default", x, transposed, suffix="plain")
        else:
            rows = new.add("aten.unsqueeze.default", bias, 1, suffix="bias")
            y = new.add("aten.baddbmm.default", rows, x, transposed, suffix="plain")
    if activation:
        new.add(f"aten.{activation}.default", y, suffix="act")
    return new.named_as_the_node()


def _streamed_linear_in_aten(node: Node, members: int) -> list[Node]:
    """Returns a `streamed_linear` node as a batched product."""
    new = NodeList(node)
    x, weight, bias = node.args
    return _batched_product(new, x, weight, bias, members)


def _products_in_aten(node: Node, members: int) -> list[Node]:
    """Returns a `member_products` node as a batched product."""
    new = NodeList(node)
    x, weight, bias = node.args
    return _batched_product(
        new, x, new.add("aten.transpose.int", weight, 1, 2, suffix="turned"), bias, members
    )


def _batched_product(new: NodeList, x: Any, weight: Any, bias: Any, members: int) -> list[Node]:
    """Returns the nodes of `x weight + bias`. x: `[N or 1, R, I]`, weight: `[N, I, O]`, bias: `[N, O]`."""
    rows = new.add("aten.expand.default", x, [members, -1, -1], suffix="rows")
    if bias is None:
        new.add("aten.bmm.default", rows, weight, suffix="product")
    else:
        added = new.add("aten.unsqueeze.default", bias, 1, suffix="bias")
        new.add("aten.baddbmm.default", added, rows, weight, suffix="product")
    return new.named_as_the_node()


@dataclass(frozen=True)
class _RecurrentArguments:
    """The arguments of a recurrent node, under one name for all ops.

    Attributes:
        op: ATen's op for one member.
        x: The input, or the input of all members.
        states: h, and c of an LSTM.
        w_x, w_h, b_x, b_h, w_p: The weights; biases and the projection may be None.
        reverse: Whether the layer runs from the last step to the first.
        lstm: Whether the node has two results, y and the last c.
    """

    op: str
    x: Any
    states: Sequence[Any]
    w_x: Any
    w_h: Any
    b_x: Any
    b_h: Any
    w_p: Any
    reverse: bool
    lstm: bool


def _recurrent_arguments(node: Node, packs: Mapping[str, Node]) -> _RecurrentArguments:
    """Reads the arguments of a recurrent node. `packs` has the nodes of `pack_lstm` by name."""
    if node.op == "widepack.packed_lstm.default":
        x, h, c, weights, b_x, b_h, reverse = node.args
        w_x, w_h = packs[weights.name].args[:2]
        return _RecurrentArguments("aten.lstm.input", x, (h, c), w_x, w_h, b_x, b_h, None, reverse, True)
    if node.op == "widepack.lstm_steps.default":
        x, h, c, w_x, w_h, b_x, b_h, w_p, reverse = node.args
        return _RecurrentArguments("aten.lstm.input", x, (h, c), w_x, w_h, b_x, b_h, w_p, reverse, True)
    if node.op == "widepack.lstm_training.default":
        x, h, c, w_x, w_h, b_x, b_h = node.args
        return _RecurrentArguments("aten.lstm.input", x, (h, c), w_x, w_h, b_x, b_h, None, False, True)
    if node.op == "widepack.gru_training.default":
        x, h, w_x, w_h, b_x, b_h = node.args
        return _RecurrentArguments("aten.gru.input", x, (h,), w_x, w_h, b_x, b_h, None, False, False)
    if node.op == "widepack.rnn_training.default":
        x, h, w_x, w_h, b_x, b_h, act = node.args
        return _RecurrentArguments(f"aten.rnn_{act}.input", x, (h,), w_x, w_h, b_x, b_h, None, False, False)
    x, h, w_x, w_h, b_x, b_h, reverse = node.args[:7]
    op = "aten.gru.input" if node.op == "widepack.gru_steps.default" else f"aten.rnn_{node.args[7]}.input"
    return _RecurrentArguments(op, x, (h,), w_x, w_h, b_x, b_h, None, reverse, False)


def _recurrent_in_aten(
    node: Node, members: int, packs: Mapping[str, Node]
) -> tuple[list[Node], Ref, Ref | None]:
    """Returns a recurrent node as ATen's op once for each member.

    Returns the nodes, the value y, and the last c of an LSTM.
    """
    r = _recurrent_arguments(node, packs)
    new = NodeList(node, "__")
    add = new.add

    def unbound(value: Any) -> list[Ref]:
        parts = add("aten.unbind.int", value, 0)
        return [add("operator.getitem", parts, i) for i in range(members)]

    x = add("aten.flip.default", r.x, [1]) if r.reverse else r.x
    inputs = unbound(add("aten.expand.default", x, [members, -1, -1, -1]))
    states = [unbound(add("aten.unsqueeze.default", s, 1)) for s in r.states]
    weights = [unbound(add("aten.transpose.int", w, 1, 2)) for w in (r.w_x, r.w_h)]
    biases = [unbound(b) for b in (r.b_x, r.b_h) if b is not None]
    projection = [] if r.w_p is None else [unbound(add("aten.transpose.int", r.w_p, 1, 2))]
    calls = []
    for i in range(members):
        params, state = [p[i] for p in (*weights, *biases, *projection)], [s[i] for s in states]
        options = bool(biases), 1, 0.0, False, False, False
        calls.append(add(r.op, inputs[i], state if r.lstm else state[0], params, *options))
    y = add("aten.stack.default", [add("operator.getitem", c, 0) for c in calls])
    if r.reverse:
        y = add("aten.flip.default", y, [1])
    if not r.lstm:
        return new.named_as_the_node(), Ref(node.name), None
    last = add("aten.stack.default", [add("operator.getitem", c, 2) for c in calls])
    return new.nodes, y, add("aten.squeeze.dim", last, 1)
