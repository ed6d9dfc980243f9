"""Prepares a wide program for compilers: tensors only, loops written out, every weight dense.

requires: the main part of a wide program and the values of its weights. ensures: the same answers, from a
program without loops, without lists of weights, and without nodes that nothing reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from widepack_artifacts.program import Node, Program, Ref, Slot, substitute

from ..errors import UsageError
from ..ir.edit import sweep
from ..runtime.unroll import unroll
from .member_loops import FlatOutput, MemberLoops, one_member

MOST_NODES = 6000
"""The most nodes of a program with its loops written out.

A compiler takes a hundredth of a second or more for each.
"""
MOST_REPEATED = 60_000
"""The most nodes of a program whose loops are written once and repeated in a session, which takes a tenth of
a millisecond for each.
"""


@dataclass(frozen=True)
class Flat:
    """A program for compilers.

    program: each of its outputs is one tensor. weights: one tensor for each of its weights. shape: where each
    output of the wide program is among these outputs. parts: for each weight the number of the wide program's
    weight, and which part of that it is, -1 for all of it. loops: how the program is repeated for each
    member, if it is written for one; its weights are the first member's then. takes: for each input the
    number of the wide program's input; empty if the inputs are the same.
    """

    program: Program
    weights: list[torch.Tensor]
    shape: tuple[Any, ...]
    parts: tuple[tuple[int, int], ...]
    loops: MemberLoops | None = None
    takes: tuple[int, ...] = ()

    def outputs(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """The outputs of the wide program, from the outputs of this one."""
        return [filled(s, tensors) for s in self.shape]

    def weight(self, number: int, member: int = -1) -> torch.Tensor:
        """A weight of the program; a member's part of it, if the program is written for one member."""
        if member < 0 or self.loops is None:
            return self.weights[number]
        return self.loops.weights[self.program.weights[number].name][member]


def filled(shape: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """One output of the wide program. shape: where it is among the tensors."""
    # without a generic walk: this runs in every call
    if isinstance(shape, FlatOutput):
        return tensors[shape.number]
    return [filled(s, tensors) for s in shape] if isinstance(shape, (list, tuple)) else shape


def flatten_loops(program: Program, values: Sequence[Any], backend: str, name: str) -> Flat:
    """Prepares a program as `flatten` does, but with each loop's body once where all members' are equal.

    Raises: UsageError for a program that has too many nodes for all members.
    """
    made = None
    if any(n.body for n in program.nodes):
        made = one_member(program, dict(zip((s.name for s in program.weights), values)))
    if made is None:
        return flatten(program, values, backend, name)
    flat, loops, shape = made
    _limit(len(flat.nodes), MOST_NODES, "for one member", backend, name)
    _limit(nodes_unrolled(program), MOST_REPEATED, f"for {loops.members} members", backend, name)
    numbers = {s.name: i for i, s in enumerate(program.weights)}
    weights, parts = [], []
    for slot in flat.weights:
        of_members = slot.name in loops.weights
        number = numbers[loops.origins.get(slot.name, slot.name)]
        weights.append(loops.weights[slot.name][0] if of_members else dense(values[number]))
        parts.append((number, 0 if of_members else -1))
    return Flat(flat, weights, tuple(shape), tuple(parts), loops)


def flatten(program: Program, values: Sequence[Any], backend: str, name: str) -> Flat:
    """Prepares a program. values: of its weights. name: the program in error messages.

    Raises: UsageError for a program that has too many nodes with its loops written out.
    """
    written = f"with its loops written out for {program.members} members"
    _limit(nodes_unrolled(program), MOST_NODES, written, backend, name)
    over_tensors, values_of, parts = _over_tensors(program, values)
    whole = sweep(unroll(over_tensors))
    leaves: dict[str, int] = {}
    shape = tuple(
        substitute(o.value, lambda n: FlatOutput(leaves.setdefault(n, len(leaves)))) for o in whole.outputs
    )
    outputs = tuple(replace(whole.outputs[0], value=Ref(n), kind="stacked") for n in leaves)
    return Flat(
        replace(whole, outputs=outputs),
        [dense(values_of[s.name]) for s in whole.weights],
        shape,
        tuple(parts[s.name] for s in whole.weights),
    )


def _limit(nodes: int, most: int, counted: str, backend: str, name: str) -> None:
    """Refuses a program of too many nodes. counted: which nodes these are. Raises: UsageError."""
    if nodes > most:
        raise UsageError(
            f"{name}: the program has {nodes:,} nodes {counted}, and backend {backend!r} takes at most "
            f"{most:,}: compilation would take too long.\n"
            "Load with backend='eager', or with strategies='wide' so that less runs in loops."
        )


def _over_tensors(
    program: Program, values: Sequence[Any]
) -> tuple[Program, dict[str, torch.Tensor], dict[str, tuple[int, int]]]:
    """Replaces each list of tensors among a program's weights by single weights.

    Returns the program, and for each of its weights the value, and the place as in `Flat.parts`.
    """
    slots: list[Slot] = []
    tensors: dict[str, torch.Tensor] = {}
    places: dict[str, tuple[int, int]] = {}
    instead: dict[str, Any] = {}  # what the readers of a weight that is no tensor read

    def add(slot: Slot, value: torch.Tensor, place: tuple[int, int]) -> Ref:
        slots.append(slot)
        tensors[slot.name], places[slot.name] = value, place
        return Ref(slot.name)

    for number, (slot, value) in enumerate(zip(program.weights, values)):
        if isinstance(value, torch.Tensor):
            add(slot, value, (number, -1))
        elif isinstance(value, (list, tuple)):
            instead[slot.name] = [
                add(member_slot(slot, i), part, (number, i)) if isinstance(part, torch.Tensor) else part
                for i, part in enumerate(value)
            ]
        else:
            instead[slot.name] = value  # a number that the prologue computed
    return with_weights(program, slots, instead), tensors, places


def member_slot(slot: Slot, member: int, type_: str = "") -> Slot:
    """Returns the weight of one member of a weight that is a list."""
    source = f"{slot.source}@{member}" if slot.source else ""  # the name in the weights file
    return replace(slot, name=f"{slot.name}__{member}", source=source, kind="shared", type=type_)


def with_weights(program: Program, slots: Sequence[Slot], instead: Mapping[str, Any]) -> Program:
    """Returns the program over other weights. instead: what is read in the place of those that are gone."""

    return replace(reading(program, instead), weights=tuple(slots))


def reading(program: Program, instead: Mapping[str, Any]) -> Program:
    """Returns the program whose nodes and outputs read other values. instead: what is read, by the name that
    it replaces.
    """
    if not instead:
        return program

    def to(name: str) -> Any:
        return instead.get(name, Ref(name))

    nodes = tuple(
        replace(n, args=substitute(n.args, to), kwargs=substitute(n.kwargs, to)) for n in program.nodes
    )
    outputs = tuple(replace(o, value=substitute(o.value, to)) for o in program.outputs)
    return replace(program, nodes=nodes, outputs=outputs)


def nodes_unrolled(program: Program) -> int:
    """The number of nodes that a program has with its loops written out."""
    return sum(program.members * len(n.body.nodes) if n.body else 1 for n in program.nodes)


def dense(weight: torch.Tensor) -> torch.Tensor:
    """The weight itself if its elements fill its memory, in any order; else a contiguous copy."""
    order = sorted((stride, size) for stride, size in zip(weight.stride(), weight.shape) if size != 1)
    expected = 1
    for stride, size in order:
        if stride != expected:
            return weight.contiguous().resolve_conj().resolve_neg()
        expected *= size
    return weight.resolve_conj().resolve_neg()


def in_order(flat: Flat) -> Flat:
    """The program with each weight in the order of its memory, as DLPack needs it, and a permute after it.

    A transposed view of a mapped weight so stays a view of the file.
    """
    slots: list[Slot] = []
    nodes: list[Node] = []
    weights: list[torch.Tensor] = []
    parts = dict(flat.loops.weights) if flat.loops else {}
    for slot, weight in zip(flat.program.weights, flat.weights):
        if weight.is_contiguous():
            slots.append(slot)
            weights.append(weight)
            continue
        strides = list(weight.stride())
        order = sorted(range(weight.dim()), key=lambda d: (-strides[d], -weight.shape[d], d))
        slots.append(replace(slot, name=f"{slot.name}__in_order", source="", type=""))
        weights.append(weight.permute(order).contiguous())
        if slot.name in parts:
            parts[slots[-1].name] = [p.permute(order).contiguous() for p in parts.pop(slot.name)]
        nodes.append(
            Node(
                slot.name,
                "aten.permute.default",
                (Ref(slots[-1].name), [order.index(d) for d in range(len(order))]),
            )
        )
    return replace(
        flat,
        program=replace(flat.program, weights=tuple(slots), nodes=(*nodes, *flat.program.nodes)),
        weights=weights,
        loops=replace(flat.loops, weights=parts) if flat.loops else None,
    )
