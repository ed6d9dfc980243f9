"""Replaces widepack's own ops in a program by ATen ops, for readers that know no other ops."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from widepack_artifacts.program import Node, Program, Ref, refs, substitute

from . import grouped_experts, member_convs, mlp_chain
from .library import ATEN_FORMS, NodeList

_OF_MEMBERS = {
    "widepack.rnn_steps.default": "aten.rnn_{act}.input",
    "widepack.gru_steps.default": "aten.gru.input",
    "widepack.lstm_steps.default": "aten.lstm.input",
    "widepack.packed_lstm.default": "aten.lstm.input",
    "widepack.rnn_training.default": "aten.rnn_{act}.input",
    "widepack.gru_training.default": "aten.gru.input",
    "widepack.lstm_training.default": "aten.lstm.input",
}
"""ATen's op for one member, by the recurrent op for all members."""
_PACKS = {f"widepack.pack_{layer}.default" for layer in ("convolution", "inner_product", "linear")}
"""The ops that reorder a weight."""
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
        elif node.op in _PACKS:
            values[node.name] = node.args[0]
        elif node.op in ATEN_FORMS:
            new = NodeList(node)
            ATEN_FORMS[node.op](new, program.members, *node.args, **node.kwargs)
            nodes += new.named_as_the_node()
        elif node.op == "widepack.pack_lstm.default":
            packs[node.name] = node
        elif node.op in _OF_MEMBERS:
            more, y, last = _recurrent_in_aten(node, program.members, packs)
            nodes += more
            if last is not None or node.op == "widepack.gru_training.default":
                pairs[node.name] = y, last  # what else a training op gives is for its derivative
        elif node.op == "operator.getitem" and isinstance(node.args[0], Ref) and node.args[0].name in pairs:
            values[node.name] = pairs[node.args[0].name][node.args[1]]
        elif node.op == "aten.div.Tensor_mode" and _is_number(node.args[1], nodes):
            nodes.append(replace(node, op="aten.div.Scalar_mode"))
        else:
            nodes.append(node)
    outputs = tuple(replace(o, value=replaced(o.value)) for o in program.outputs)
    return replace(program, nodes=tuple(nodes), outputs=outputs)


def _is_number(value: Any, nodes: Sequence[Node]) -> bool:
    """Returns whether an operand is a number, or one of these nodes computes it from sizes.

    Compilers take only tensors where the schema of an op has them.
    """
    if not isinstance(value, Ref):
        return True
    found = next((n.op for n in nodes if n.name == value.name), "")
    return found.startswith("aten.sym_") or (found.startswith("operator.") and found != "operator.getitem")


def _recurrent_in_aten(
    node: Node, members: int, packs: Mapping[str, Node]
) -> tuple[list[Node], Ref, Ref | None]:
    """Returns a recurrent node as ATen's op once for each member. packs: the nodes of `pack_lstm` by name.

    Returns the nodes, the value y, and the last c of an LSTM.
    """
    schema = getattr(torch.ops.widepack, node.op.split(".")[1]).default._schema
    given = dict(zip((a.name for a in schema.arguments), node.args))
    if "weights" in given:
        given["w_x"], given["w_h"] = packs[given["weights"].name].args[:2]
    op = _OF_MEMBERS[node.op].format(act=given.get("act"))
    new = NodeList(node, "__")
    add = new.add

    def unbound(value: Any) -> list[Ref]:
        parts = add("aten.unbind.int", value, 0)
        return [add("operator.getitem", parts, i) for i in range(members)]

    reverse, is_lstm = given.get("reverse", False), "c" in given
    x = add("aten.flip.default", given["x"], [1]) if reverse else given["x"]
    inputs = unbound(add("aten.expand.default", x, [members, -1, -1, -1]))
    states = [unbound(add("aten.unsqueeze.default", given[s], 1)) for s in ("h", "c") if s in given]
    weights = [unbound(add("aten.transpose.int", given[w], 1, 2)) for w in ("w_x", "w_h")]
    biases = [unbound(given[b]) for b in ("b_x", "b_h") if given[b] is not None]
    projected = given.get("w_p") is not None
    projection = [unbound(add("aten.transpose.int", given["w_p"], 1, 2))] if projected else []
    calls = []
    for i in range(members):
        params, state = [p[i] for p in (*weights, *biases, *projection)], [s[i] for s in states]
        options = bool(biases), 1, 0.0, False, False, False
        calls.append(add(op, inputs[i], state if is_lstm else state[0], params, *options))
    y = add("aten.stack.default", [add("operator.getitem", c, 0) for c in calls])
    if reverse:
        y = add("aten.flip.default", y, [1])
    if not is_lstm:
        return new.named_as_the_node(), Ref(node.name), None
    last = add("aten.stack.default", [add("operator.getitem", c, 2) for c in calls])
    return new.nodes, y, add("aten.squeeze.dim", last, 1)
