"""Gives a program of one member the member's own inputs, and names that say nothing of where it is from.

Two programs of one body then are equal: a program whose members share an input, and one in which each member
has a row of it; programs for small and for large batches; programs of all members, and of some.

requires: a program of one member (`member_loops.py`). ensures: a program with the same outputs, that reads no
input, and no weight, in vain.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from widepack_artifacts.program import Node, Program, Ref, Slot, refs, substitute

from ..ir import ops
from ..ir.edit import free_name, sweep
from .flat import Flat, reading
from .member_loops import MemberLoops, border_source, is_divisible, of_members


def with_member_inputs(flat: Flat) -> Flat:
    """Replaces inputs that only loops read by inputs of one member. `Flat.takes` says which they are.

    An input that all members share stays if nodes before the loops compute with it: these run once.
    """
    if flat.loops is None:
        return flat
    program, loops = flat.program, flat.loops
    names = {s.name for s in (*program.weights, *program.inputs)} | {n.name for n in program.nodes}
    sources = {n.name: border_source(n) for n in program.nodes if n.name in loops.selects}
    slots, takes = list(program.inputs), list(range(len(program.inputs)))
    instead: dict[str, Any] = {}
    rows: dict[str, bool] = {}

    def add(number: int, row: bool) -> Ref:
        slot = program.inputs[number]
        name = free_name(f"{slot.name}__{'row' if row else 'whole'}", names)
        slots.append(replace(slot, name=name, kind="shared" if row else slot.kind))
        takes.append(number)
        rows[name] = row
        return Ref(name)

    for number, slot in enumerate(program.inputs):
        parts = [select for select, source in sources.items() if source == slot.name]
        if parts:
            instead.update(dict.fromkeys(parts, add(number, True)))
        if _in_loops_alone(program, loops, slot.name):
            instead[slot.name] = add(number, False)
    selects = loops.selects - instead.keys()
    nodes = tuple(n for n in program.nodes if n.name not in instead)
    program = reading(replace(program, inputs=tuple(slots), nodes=nodes), instead)
    loops = replace(loops, selects=selects, inputs=rows)
    return replace(flat, program=program, loops=loops, takes=tuple(takes))


_CHEAP = frozenset(
    f"aten.{name}.default" for name in ("sym_size", "sym_numel", "zeros", "ones", "full", "arange")
) | {"aten.sym_size.int"}


def _in_loops_alone(program: Program, loops: MemberLoops, name: str) -> bool:
    """Whether only nodes of members, and nodes that take no time, read an input: views, sizes, and constants
    of these sizes.
    """
    inside = of_members(program, loops)
    whole, used = {name}, False
    for node in program.nodes:
        if node.name in loops.selects or whole.isdisjoint(refs((node.args, node.kwargs))):
            continue
        if node.name in inside:
            used = True
            continue
        if not (node.op in ops.PYTHON or node.op in _CHEAP or ops.may_view(node.op)):
            return False
        whole.add(node.name)
    return used and whole.isdisjoint(r for o in program.outputs for r in refs(o.value))


def canonical(flat: Flat) -> Flat:
    """Names values by their order, and leaves out inputs and weights that nothing reads. A program whose
    members do not depend on each other is written for one member.
    """
    program, loops = sweep(flat.program), flat.loops
    read = {r for n in program.nodes for r in refs((n.args, n.kwargs))}
    read |= {r for o in program.outputs for r in refs(o.value)}
    weights = [i for i, s in enumerate(program.weights) if s.name in read]
    inputs = [i for i, s in enumerate(program.inputs) if s.name in read]
    names = {program.weights[i].name: f"w{k}" for k, i in enumerate(weights)}
    names |= {program.inputs[i].name: f"x{k}" for k, i in enumerate(inputs)}
    names |= {n.name: f"n{k}" for k, n in enumerate(program.nodes)}
    if loops is not None:
        if is_divisible(program, loops) and all(program.inputs[i].kind == "shared" for i in inputs):
            alone = [_of_one_member(n) if n.name in loops.joins else n for n in program.nodes]
            program = replace(program, nodes=tuple(alone), members=1)
        loops = replace(
            loops,
            selects=frozenset(names[s] for s in loops.selects if s in names),
            joins=frozenset(names[j] for j in loops.joins if j in names),
            weights={names[w]: parts for w, parts in loops.weights.items() if w in names},
            origins={names[w]: origin for w, origin in loops.origins.items() if w in names},
            inputs={names[x]: row for x, row in loops.inputs.items() if x in names},
        )
    return replace(
        flat,
        program=_renamed(program, names, weights, inputs),
        weights=[flat.weights[i] for i in weights],
        parts=tuple(flat.parts[i] for i in weights),
        takes=tuple(flat.takes[i] if flat.takes else i for i in inputs),
        loops=loops,
    )


def _of_one_member(join: Node) -> Node:
    return replace(join, args=(join.args[0][:1], *join.args[1:]))


def _renamed(program: Program, names: dict[str, str], weights: list[int], inputs: list[int]) -> Program:
    """The program with other names. weights, inputs: the numbers of those that stay."""

    def to(name: str) -> Ref:
        return Ref(names[name])

    def slot(s: Slot, type_: str) -> Slot:
        return replace(s, name=names[s.name], source="", type=type_)

    return replace(
        program,
        weights=tuple(slot(program.weights[i], "") for i in weights),
        inputs=tuple(slot(program.inputs[i], program.inputs[i].type) for i in inputs),
        nodes=tuple(
            Node(names[n.name], n.op, substitute(n.args, to), substitute(n.kwargs, to)) for n in program.nodes
        ),
        outputs=tuple(replace(o, value=substitute(o.value, to)) for o in program.outputs),
    )


def first_member(flat: Flat, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The inputs of the first member, from the inputs of a call."""
    assert flat.loops is not None
    rows = [flat.loops.inputs.get(s.name, False) for s in flat.program.inputs]
    return [inputs[number][0] if row else inputs[number] for number, row in zip(flat.takes, rows)]
