"""Computes the kind of every value of a member program: which values are equal for all members.

1. The kind of a weight comes from the checkpoints, that of an input from the pattern.
2. A value that depends on sizes alone is Shared (`SIZES`): all Stacked members have one shape.
3. A node that reads a Ragged value is Ragged. So is a node whose size or number depends on values that differ
   by member: `y[mask]`, `nonzero`, `.item()`.
4. A node that reads a Stacked value is Stacked. So is a node that draws random numbers: one draw for each
   member.
5. Every other value is Shared, and is computed once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping

from widepack_artifacts.program import Kind, Node, Program, refs

from . import ops
from .ops import full_names

SIZES = full_names(
    "sym_size.int sym_numel zeros_like ones_like empty_like full_like new_zeros new_ones new_full new_empty "
    "fill.Scalar"
)
NUMBER = "aten._local_scalar_dense.default"
_BY_SECOND = full_names("index.Tensor masked_select repeat_interleave.self_Tensor")
_DATA = re.compile(r"[\[,(*+-]z?uf?\d+\b")


def slot_kinds(program: Program, weight: Callable[[str], Kind], stacked: Container[int]) -> dict[str, Kind]:
    """Returns the kind of every weight and every input of a member program, by value name.

    weight: returns the kind of a weight, by its source. stacked: the numbers of the inputs that have one
    value for each member.
    """
    slots = {s.name: weight(s.source) for s in program.weights}
    return slots | {s.name: "stacked" if i in stacked else "shared" for i, s in enumerate(program.inputs)}


def kinds(program: Program, slots: Mapping[str, Kind], *, values: bool = True) -> dict[str, Kind]:
    """The kind of every value.

    slots: the kinds of weights and inputs, by name. values: apply rule 3 to sizes that depend on values.
    """
    found: dict[str, Kind] = {s.name: slots[s.name] for s in (*program.weights, *program.inputs)}
    for node in program.nodes:
        read = {found[r] for r in refs((node.args, node.kwargs))}
        if "ragged" in read or (values and any(found[r] == "stacked" for r in _determining(node))):
            found[node.name] = "ragged"
        elif node.op in SIZES:
            numbers = {found[r] for r in refs((node.args[1:], node.kwargs))}
            found[node.name] = "stacked" if "stacked" in numbers else "shared"
        elif "stacked" in read or not ops.pure(node.op, node.args, node.kwargs):
            found[node.name] = "stacked"
        else:
            found[node.name] = "shared"
    return found


def of_data(node: Node) -> bool:
    """Whether only values determine the node's result if it is a number, or its size.

    Exports name these u0, u1, ...; floats zf0.
    """
    return node.op == NUMBER or bool(_DATA.search(node.out))


def _determining(node: Node) -> set[str]:
    """The values that determine a node's number or the size of its result; the size may still be equal for
    all members.
    """
    if not of_data(node) or not ops.of_values(node.op):
        return set()
    by_second = node.op in _BY_SECOND and len(node.args) > 1
    return set(refs(node.args[1] if by_second else (node.args, node.kwargs)))


def weights_only(program: Program) -> set[str]:
    """The values that depend on weights and literals alone: the weight prologue."""
    found = {s.name for s in program.weights}
    for node in program.nodes:
        early = node.body is None and found.issuperset(refs((node.args, node.kwargs)))
        if early and ops.pure(node.op, node.args, node.kwargs):
            found.add(node.name)
    return found


def reaches(program: Program, start: set[str]) -> set[str]:
    """All values that depend on one of `start`, sizes included."""
    found = set(start)
    for node in program.nodes:
        if not found.isdisjoint(refs((node.args, node.kwargs))):
            found.add(node.name)
    return found
