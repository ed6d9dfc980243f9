"""Writes a wide program as a torch.export program, for readers without widepack: weightless, loops written
out, ATen ops.

widepack itself never opens a `.pt2` file that it did not write: loading one can run code.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._export.serde import serialize
from torch.export import ExportedProgram
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.symbol import SymT, symbol_is_type
from torch.utils._sympy.value_ranges import ValueRanges

from widepack_artifacts import tree
from widepack_artifacts.program import Node, Output, Program, Ref, Slot

from ..ir.encoding import iter_arguments
from ..ir.fake_values import CPU, Fakes, replay
from ..ir.tensor_type import member_types
from ..kernels.decompose import decompose
from ..runtime.unroll import unroll
from .exported_graph import assemble, exported_graph, size_bounds
from .flat import member_slot, with_weights


def export_program(
    program: Program,
    fakes: Fakes,
    dims: Mapping[str, tuple[int, int | None]],
    result: tree.Tree,
    keywords: frozenset[str],
) -> bytes:
    """A wide program as the bytes of a weightless `.pt2` file. Arguments: as `exported_program`."""
    file = io.BytesIO()
    save_program(exported_program(program, fakes, dims, result, keywords), file)
    return file.getvalue()


def save_program(exported: ExportedProgram, file: Any) -> None:
    """Writes a `.pt2` file. file: an object with `write`."""
    # torch makes a canonical form of a deep copy and drops it: two thirds of the time of a save
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
    """A wide program, or a member program, as a torch.export program.

    Args:
        program: The program. Its weights keep their names in the weights file, `name@i` if Ragged.
        fakes: The size symbols in which its values get their shapes.
        dims: The bounds of each dim.
        result: The structure of a member's result. Its leaves become `[N, ...]`, or lists of N where Ragged.
        keywords: The inputs that are passed by keyword.
        weights: The weights by name; None for a weightless program.
    """
    flat = spread(decompose(unroll(flat_weights(program))))
    values = replay(flat, fakes)
    graph = exported_graph(flat, values, fakes, CPU, [placeholder(s.source) for s in flat.inputs])
    outputs, shape = _outputs_in_order(graph.output, result)
    graph.output.args = (tuple(outputs),)
    args = tuple(i for i, s in enumerate(flat.inputs) if s.source not in keywords)
    kwargs = {placeholder(s.source): i for i, s in enumerate(flat.inputs) if s.source in keywords}
    constraints = {
        **size_bounds(fakes, dims),
        **{s: ValueRanges(0, int_oo) for s in _sizes_of_data(values.values())},
    }
    names, state = [s.source for s in flat.weights], _state(flat, values, weights)
    return assemble(graph, names, state, outputs, (args, kwargs), shape, constraints)


def _outputs_in_order(output: fx.Node, result: tree.Tree) -> tuple[list[fx.Node], Any]:
    """The output nodes in the order of the result's structure, and that structure over their numbers."""
    leaves: Any = list(output.args[0])  # type: ignore[arg-type]
    nodes: list[fx.Node] = list(iter_arguments(leaves))
    numbers = iter(range(len(nodes)))
    numbered = [
        [next(numbers) for _ in leaf] if isinstance(leaf, (list, tuple)) else next(numbers) for leaf in leaves
    ]
    shape = tree.build(without_literals(result), numbered, lambda name, rows: dict(rows))
    return [nodes[i] for i in pytree.tree_leaves(shape)], shape  # states have their own order in the result


def _state(
    flat: Program, values: Mapping[str, Any], weights: Mapping[str, torch.Tensor] | None
) -> dict[str, torch.Tensor]:
    """The weights by name, on the meta device for a weightless program."""
    if weights is not None:
        return {s.source: weights[s.source] for s in flat.weights}
    with torch.device("meta"):
        return {s.source: torch.empty(values[s.name].shape, dtype=values[s.name].dtype) for s in flat.weights}


def _sizes_of_data(values: Iterable[Any]) -> set[Any]:
    """The symbols of sizes that only values determine: the number of true places of a mask that all members
    share.
    """
    tensors = (v for v in iter_arguments(list(values)) if isinstance(v, torch.Tensor))
    sizes = (s for t in tensors for s in (*t.shape, *t.stride()) if isinstance(s, torch.SymInt))
    data = (SymT.UNBACKED_INT, SymT.UNBACKED_FLOAT)
    return {symbol for s in sizes for symbol in s.node.expr.free_symbols if symbol_is_type(symbol, data)}


def placeholder(name: str) -> str:
    """The name of an input as a parameter of Python."""
    return name.replace(".", "_")


def without_literals(result: tree.Tree) -> tree.Tree:
    """The structure of a result without literals: every leaf of a torch.export program is a tensor."""
    ((form, value),) = result.items()
    if form in ("tuple", "list"):
        return {form: [without_literals(t) for t in value if "const" not in t]}
    if form == "dict":
        return {form: [[k, without_literals(t)] for k, t in value if "const" not in t]}
    if form == "output":
        return {"dict": [[k, without_literals(t)] for k, t in value[1] if "const" not in t]}
    return result


def flat_weights(program: Program) -> Program:
    """The program with each Ragged weight replaced by N weights, which loops read as a list."""
    slots: list[Slot] = []
    lists: dict[str, list[Ref]] = {}
    for slot in program.weights:
        if slot.kind != "ragged":
            slots.append(slot)
            continue
        parts = [member_slot(slot, i, type_) for i, type_ in enumerate(member_types(slot.type))]
        slots += parts
        lists[slot.name] = [Ref(p.name) for p in parts]
    return with_weights(program, slots, lists)


def spread(program: Program) -> Program:
    """The program with Shared outputs expanded to `[N, ...]`, as callers see them.

    A member program stays as it is.
    """
    if not program.members:
        return program
    nodes, outputs = list(program.nodes), []
    for k, output in enumerate(program.outputs):
        if output.kind != "shared" or not isinstance(output.value, Ref):
            outputs.append(output)
            continue
        border, stacked = f"border_{k}", f"border_{k}_stacked"
        repeated = (Ref(border), program.members, 0)
        nodes.append(Node(border, "aten.unsqueeze.default", (output.value, 0)))
        nodes.append(Node(stacked, "aten.repeat_interleave.self_int", repeated))
        outputs.append(Output(Ref(stacked), "stacked"))
    return replace(program, nodes=tuple(nodes), outputs=tuple(outputs))
