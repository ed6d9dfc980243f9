"""Writes a program with loops as a program whose loop bodies are there once, for one member.

`aten.select.int(x, 0, 0)` reads the first member's part of a value, and `aten.stack(results)` joins members'
results, of which each is the first member's. So the program has the shapes of the whole one. Whoever runs it
repeats what depends on one member's part, once for each member (`onnx_repeat.py`).

An input that only loops read becomes an input of one member. So one body serves calls in which all members
have the same input, and calls in which each has its own (`member_inputs.py`).

requires: a program with loops whose members' weights have equal shapes, without a loop inside a loop, and
without ops in loops that write or draw random numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from widepack_artifacts.program import Kind, Node, Output, Program, Ref, Slot, refs, substitute

from ..ir import ops
from ..ir.edit import free_name, sweep


@dataclass(frozen=True)
class MemberLoops:
    """How a program of one member becomes a program of all.

    members: the number of members. selects, joins: the names of the nodes that read a member's part, and of
    those that join members' results. weights: each member's part of a weight, by the part's name. origins:
    the weight that each is a part of. outputs: for each output the member whose value it is; -1 for a value
    of all members. inputs: for each input of one member whether it is a row of the call's input, by name; if
    not, it is all of it.
    """

    members: int
    selects: frozenset[str]
    joins: frozenset[str]
    weights: Mapping[str, Sequence[torch.Tensor]]
    origins: Mapping[str, str]
    outputs: tuple[int, ...]
    inputs: Mapping[str, bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FlatOutput:
    """In the place of a tensor in the outputs of a wide program: the number of a flat program's output."""

    number: int


class _Unfit(Exception):
    """The program has a loop whose body cannot be written once."""


def one_member(program: Program, weights: Mapping[str, Any]) -> tuple[Program, MemberLoops, list[Any]] | None:
    """Writes each loop's body once.

    Args:
        program: A wide program with loops.
        weights: The value of each weight, a tensor or a list of N, by name.

    Returns:
        The program, its loops, and the wide program's outputs with a `FlatOutput` for each tensor. None if
        the bodies differ between members.
    """
    work = _OneMember(program, weights)
    try:
        for node in program.nodes:
            work.add(node)
        return work.finished()
    except _Unfit:
        return None


class _OneMember:
    """nodes: the new program so far. of_member: the first member's value of each list of N values, by the
    list's name. parts: for each weight that loops read, the name and the tensors of the members' parts.
    """

    def __init__(self, program: Program, weights: Mapping[str, Any]) -> None:
        self.program, self.given = program, weights
        self.nodes: list[Node] = []
        self.slots = {s.name: s for s in program.weights if isinstance(weights[s.name], torch.Tensor)}
        self.parts: dict[str, tuple[str, list[torch.Tensor]]] = {}
        self.of_member: dict[str, tuple[Ref, Kind]] = {}
        self.results: dict[str, list[tuple[Ref, Kind]]] = {}
        self.selects: dict[str, Ref] = {}
        self.joins: dict[str, Ref] = {}
        self._names = {s.name for s in (*program.weights, *program.inputs)} | {n.name for n in program.nodes}

    def add(self, node: Node) -> None:
        """Adds a node of the wide program."""
        if node.body is not None:
            self._loop(node, node.body)
        elif (
            node.op == "operator.getitem"
            and isinstance(node.args[0], Ref)
            and node.args[0].name in self.results
        ):
            self.of_member[node.name] = self.results[node.args[0].name][node.args[1]]
        else:
            args, kwargs = (substitute(a, self._outside) for a in (node.args, node.kwargs))
            self.nodes.append(replace(node, args=args, kwargs=kwargs))

    def _outside(self, name: str) -> Ref:
        """What a node outside of loops reads for a value."""
        if name in self.of_member:
            value, kind = self.of_member[name]
            if kind != "stacked":
                raise _Unfit
            return self._join(value)
        if name in self.results or (name in self.given and name not in self.slots):
            raise _Unfit
        return Ref(name)

    def _join(self, value: Ref) -> Ref:
        if value.name not in self.joins:
            name = free_name(f"{value.name}__joined", self._names)
            self.joins[value.name] = Ref(name)
            self.nodes.append(Node(name, "aten.stack.default", ([value] * self.program.members,)))
        return self.joins[value.name]

    def _loop(self, node: Node, body: Program) -> None:
        at = {s.name: self._argument(a, s.kind) for s, a in zip(body.inputs, node.args)}
        for inner in body.nodes:
            if inner.body is not None or not ops.pure(inner.op, inner.args, inner.kwargs):
                raise _Unfit
            name = free_name(f"{node.name}__{inner.name}", self._names)
            args, kwargs = (substitute(a, at.__getitem__) for a in (inner.args, inner.kwargs))
            self.nodes.append(replace(inner, name=name, args=args, kwargs=kwargs))
            at[inner.name] = Ref(name)
        values = [(substitute(o.value, at.__getitem__), o.kind) for o in body.outputs]
        if not all(isinstance(v, Ref) for v, _ in values):
            raise _Unfit
        self.results[node.name] = values

    def _argument(self, arg: Any, kind: str) -> Any:
        """The first member's part of an argument."""
        if kind == "shared":
            return substitute(arg, self._outside)
        if not isinstance(arg, Ref):
            return self._equal(arg)
        if arg.name in self.of_member:
            return self.of_member[arg.name][0]
        if arg.name in self.given:
            return self._weight(arg.name)
        if kind == "ragged":
            raise _Unfit
        if arg.name not in self.selects:
            name = free_name(f"{arg.name}__member", self._names)
            self.selects[arg.name] = Ref(name)
            self.nodes.append(Node(name, "aten.select.int", (arg, 0, 0)))
        return self.selects[arg.name]

    def _equal(self, values: Any) -> Any:
        """The value that all members have."""
        if [*refs(values)] or any(v != values[0] or type(v) is not type(values[0]) for v in values):
            raise _Unfit
        return values[0]

    def _weight(self, name: str) -> Any:
        """The first member's part of a weight."""
        parts = list(self.given[name])
        if not isinstance(parts[0], torch.Tensor):
            return self._equal(parts)
        parts = [p.resolve_conj().resolve_neg() for p in parts]
        first = parts[0]
        if any((p.shape, p.dtype, p.stride()) != (first.shape, first.dtype, first.stride()) for p in parts):
            raise _Unfit
        if name not in self.parts:
            self.parts[name] = free_name(f"{name}__part", self._names), parts
        return Ref(self.parts[name][0])

    def finished(self) -> tuple[Program, MemberLoops, list[Any]]:
        """The program, its loops, and the outputs' leaves."""
        leaves: dict[tuple[str, int], int] = {}

        def leaf(name: str, member: int = -1) -> FlatOutput:
            return FlatOutput(leaves.setdefault((name, member), len(leaves)))

        def read(name: str) -> Any:
            if name in self.of_member and self.of_member[name][1] == "ragged":
                value = self.of_member[name][0].name
                return [leaf(value, i) for i in range(self.program.members)]
            return leaf(self._outside(name).name)

        shape = [substitute(o.value, read) for o in self.program.outputs]
        sources = {s.name: s.source for s in self.program.weights}
        slots = [*self.slots.values()]
        slots += [Slot(part, sources[n], "shared", "") for n, (part, _) in self.parts.items()]
        outputs = tuple(Output(Ref(name), "stacked") for name, _ in leaves)
        program = replace(self.program, weights=tuple(slots), nodes=tuple(self.nodes), outputs=outputs)
        parts = dict(self.parts.values())
        selects, joins = (frozenset(r.name for r in d.values()) for d in (self.selects, self.joins))
        origins = {part: n for n, (part, _) in self.parts.items()}
        loops = MemberLoops(self.program.members, selects, joins, parts, origins, tuple(i for _, i in leaves))
        return sweep(program), loops, shape


def cut(program: Program, loops: MemberLoops) -> Program:
    """Cuts a program of one member at its loops' borders.

    The nodes that select and join become inputs, behind the others. What they read is an output, too, if it
    is no input.
    """
    borders = [n for n in program.nodes if n.name in loops.selects | loops.joins]
    inputs = (*program.inputs, *(Slot(n.name, n.name, "shared", "") for n in borders))
    nodes = tuple(n for n in program.nodes if n.name not in loops.selects | loops.joins)
    read = [*(r for o in program.outputs for r in refs(o.value)), *(border_source(n) for n in borders)]
    names = dict.fromkeys(r for r in read if all(r != s.name for s in inputs))
    outputs = tuple(Output(Ref(name), "stacked") for name in names)
    return replace(program, inputs=inputs, nodes=nodes, outputs=outputs)


def border_source(node: Node) -> str:
    """The value that a node selects from, or that it joins."""
    return next(refs(node.args))


def of_members(program: Program, loops: MemberLoops) -> set[str]:
    """The values of a program of one member that each member has on its own."""
    found = {*loops.selects, *loops.weights, *loops.inputs}
    for node in program.nodes:
        if node.name not in loops.joins and not found.isdisjoint(refs((node.args, node.kwargs))):
            found.add(node.name)
    return found


def is_divisible(program: Program, loops: MemberLoops) -> bool:
    """Whether some members of a program can run without the others: loops read parts of inputs alone, and
    what they return of all members are outputs.
    """
    read = {r for n in program.nodes for r in refs((n.args, n.kwargs))}
    return not loops.selects and not read & loops.joins
