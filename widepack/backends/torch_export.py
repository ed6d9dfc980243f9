"""torch.export programs of a wide program, for readers without widepack: weightless, loops written out, ATen ops only.

The ExportedProgram is put together from the nodes that are there already instead of being exported again: an export would add conditions of its own
(a convolution's choice of kernel limits the batch to below 16) and take seconds. widepack itself never opens a `.pt2`: loading one can run code.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.utils._pytree as pytree
from torch._export.serde import serialize
from torch.export import ExportedProgram
from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import ExportGraphSignature, InputKind, InputSpec, OutputKind, OutputSpec, TensorArgument
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.symbol import SymT, symbol_is_type
from torch.utils._sympy.value_ranges import ValueRanges

from widepack_artifacts import tree
from widepack_artifacts.program import Node, Output, Program, Ref

from ..kernels.packed import decompose
from ..ir.fake_values import CPU, Fakes, bind_sizes_of_data, replay
from ..runtime.graph_module import graph_module, unroll


def export_program(program: Program, fakes: Fakes, dims: Mapping[str, tuple[int, int | None]], result: tree.Tree, keywords: frozenset[str]) -> bytes:
    """A wide program as the bytes of a weightless `.pt2`. Arguments: as `exported_program`."""
    file = io.BytesIO()
    save_program(exported_program(program, fakes, dims, result, keywords), file)
    return file.getvalue()


def save_program(exported: ExportedProgram, file: Any) -> None:
    """Write a `.pt2`. file: has `write`."""
    # torch makes a canonical form of a deep copy and throws it away: two thirds of the time of a save
    with patch.object(serialize, "canonicalize", lambda program, *_: program):
        torch.export.save(exported, file)


def exported_program(
    program: Program,
    fakes: Fakes,
    dims: Mapping[str, tuple[int, int | None]],
    result: tree.Tree,
    keywords: frozenset[str],
    weights: Mapping[str, torch.Tensor] | None = None,
) -> ExportedProgram:
    """A wide program, or a member's own, as a torch.export program.

    fakes: the world in which its values get their shapes. dims: their bounds. result: the member's result; leaves come out `[N, ...]`, or as lists of N where Ragged.
    keywords: the inputs that are given by keyword. In `state_dict` the weights have the names that they have in the weights file (`name@i` where Ragged). weights: by those names; None for a weightless program.
    """
    flat = spread(decompose(unroll(flat_weights(program))))
    values = replay(flat, fakes)
    module = graph_module(flat, CPU)
    inputs = [placeholder(s.source) for s in flat.inputs]
    nodes = [n for n in module.graph.nodes if n.op != "output"]
    names = [s.name for s in (*flat.weights, *flat.inputs)] + [n.name for n in flat.nodes]
    for node, name in zip(nodes, names):
        node.meta["val"] = values[name]
    bind_sizes_of_data(nodes, fakes)
    for node, wish in zip(nodes[len(flat.weights) :], inputs):
        node._rename(wish)
        node.target = node.name
    specs = [InputSpec(InputKind.BUFFER, TensorArgument(n.name), s.source, True) for n, s in zip(nodes, flat.weights)]
    specs += [InputSpec(InputKind.USER_INPUT, TensorArgument(n.name), None) for n in nodes[len(flat.weights) : len(flat.weights) + len(inputs)]]
    (output,) = (n for n in module.graph.nodes if n.op == "output")
    leaves = list(output.args[0])
    parts = iter(range(len(pytree.tree_leaves(leaves, is_leaf=lambda x: isinstance(x, torch.fx.Node)))))
    numbered = [[next(parts) for _ in leaf] if isinstance(leaf, (list, tuple)) else next(parts) for leaf in leaves]
    flat_nodes = [n for leaf in leaves for n in (leaf if isinstance(leaf, (list, tuple)) else [leaf])]
    shape = tree.build(without_literals(result), numbered, lambda name, rows: dict(rows))
    flat_nodes = [flat_nodes[i] for i in pytree.tree_leaves(shape)]  # states stand in the result in an order of their own
    output.args = (tuple(flat_nodes),)
    args = tuple(i for i, s in enumerate(flat.inputs) if s.source not in keywords)
    kwargs = {placeholder(s.source): i for i, s in enumerate(flat.inputs) if s.source in keywords}
    call = ModuleCallSignature(
        [],
        [],
        pytree.tree_structure((args, kwargs)),
        pytree.tree_structure(shape),
        [n.name for n in nodes[len(flat.weights) : len(flat.weights) + len(inputs)]],
    )
    module.graph.lint()
    module.recompile()
    with torch.device("meta"):
        state = {
            s.source: torch.empty(values[s.name].shape, dtype=values[s.name].dtype) if weights is None else weights[s.source] for s in flat.weights
        }
    return ExportedProgram(
        root=module,
        graph=module.graph,
        graph_signature=ExportGraphSignature(specs, [OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(n.name), None) for n in flat_nodes]),
        state_dict=state,
        range_constraints={
            **{fakes.dims[d].node.expr: ValueRanges(least, int_oo if most is None else most) for d, (least, most) in dims.items()},
            **{s: ValueRanges(0, int_oo) for s in _sizes_of_data(values.values())},
        },
        module_call_graph=[ModuleCallEntry("", call)],
        example_inputs=None,
        constants={},
    )


def _sizes_of_data(values: Iterable[Any]) -> set[Any]:
    """The symbols of sizes that are data (the number of true places of a mask that all members share)."""
    found: set[Any] = set()
    for value in values:
        for t in value if isinstance(value, (list, tuple)) else [value]:
            for size in (*t.shape, *t.stride()) if isinstance(t, torch.Tensor) else ():
                if isinstance(size, torch.SymInt):
                    found |= {s for s in size.node.expr.free_symbols if symbol_is_type(s, (SymT.UNBACKED_INT, SymT.UNBACKED_FLOAT))}
    return found


def placeholder(name: str) -> str:
    """An input's name as a parameter has it."""
    return name.replace(".", "_")


def without_literals(result: tree.Tree) -> tree.Tree:
    """The result's tree without literals: every leaf of a torch.export program is a tensor."""
    ((form, value),) = result.items()
    if form in ("tuple", "list"):
        return {form: [without_literals(t) for t in value if "const" not in t]}
    if form == "dict":
        return {form: [[k, without_literals(t)] for k, t in value if "const" not in t]}
    if form == "output":
        return {"dict": [[k, without_literals(t)] for k, t in value[1] if "const" not in t]}
    return result


def flat_weights(program: Program) -> Program:
    """Ragged weights as N weights of their own; the values that loops take apart are then lists of them."""
    slots, lists = [], {}
    for slot in program.weights:
        if slot.kind != "ragged":
            slots.append(slot)
            continue
        types = slot.type.split("|")
        parts = [replace(slot, name=f"{slot.name}_{i}", source=f"{slot.source}@{i}", kind="shared", type=t) for i, t in enumerate(types)]
        slots += parts
        lists[slot.name] = [Ref(p.name) for p in parts]
    if not lists:
        return program
    nodes = [replace(n, args=tuple(lists.get(a.name, a) if isinstance(a, Ref) else a for a in n.args)) for n in program.nodes]
    return replace(program, weights=tuple(slots), nodes=tuple(nodes))


def spread(program: Program) -> Program:
    """Shared outputs expanded to `[N, ...]`, as a caller sees them; a member's own program is left as it is."""
    if not program.members:
        return program
    nodes, outputs = list(program.nodes), []
    for k, output in enumerate(program.outputs):
        if output.kind != "shared" or not isinstance(output.value, Ref):
            outputs.append(output)
            continue
        nodes.append(Node(f"border_{k}", "aten.unsqueeze.default", (output.value, 0)))
        nodes.append(Node(f"border_{k}_stacked", "aten.repeat_interleave.self_int", (Ref(f"border_{k}"), program.members, 0)))
        outputs.append(Output(Ref(f"border_{k}_stacked"), "stacked"))
    return replace(program, nodes=tuple(nodes), outputs=tuple(outputs))
