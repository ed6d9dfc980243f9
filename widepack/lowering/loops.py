"""Lowers a loop region to one node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from widepack_artifacts.program import Kind, Node, Output, Program, Ref, Slot, refs

from ..errors import LoweringError
from ..ir.fake_values import member_slice, replay
from ..ir.kinds import of_data
from ..ir.tensor_type import ragged_type
from ..ir.values import Ragged, Shared, Stacked, Value
from .interpreter import ProgramWriter


class _LoopReads:
    """The values that a loop reads, in order: the inputs of its body, the node's arguments, and their fake
    values.
    """

    def __init__(self) -> None:
        self.slots: list[Slot] = []
        self.args: list[Any] = []
        self.fakes: list[Any] = []

    def add(self, name: str, value: Any) -> None:
        """Adds a wide value."""
        kind: Kind = (
            "shared" if isinstance(value, Shared) else "stacked" if isinstance(value, Stacked) else "ragged"
        )
        inner = value.members if isinstance(value, Ragged) else value.value
        self.slots.append(Slot(name, name, kind, ""))
        self.args.append(inner.ref if isinstance(inner, Value) else inner)
        self.fakes.append(inner.fake if isinstance(inner, Value) else inner)

    def add_numbers(self, numbers: list[int]) -> Ref:
        """Adds N integers, one for each member, and returns the body's reference to the member's integer."""
        name = f"number_{len(self.slots)}"
        self.slots.append(Slot(name, "", "ragged", ragged_type("int" for _ in numbers)))
        self.args.append(numbers)
        self.fakes.append(numbers)
        return Ref(name)


def lower_loop(
    w: ProgramWriter,
    region: list[Node],
    members: Sequence[Program],
    signatures: Sequence[int],
    values: dict[str, Any],
    name: str,
    packed: set[str],
    found: Mapping[str, Kind],
) -> None:
    """Writes a region as one node, whose body runs once for each member. Its results are added to `values`.

    Args:
        w: The writer of the wide program.
        region: The nodes of the region.
        members: The member programs.
        signatures: For each member its index into `members`.
        values: The wide values by name.
        name: The name of the region.
        packed: The nodes of the region that `pack_region` has written for the body already.
        found: The kinds of all values.
    """
    reads = _LoopReads()
    inside = {n.name for n in region}
    for r in dict.fromkeys(r for n in region for r in refs((n.args, n.kwargs)) if r not in inside):
        reads.add(r, values[r])
    nodes = _body_nodes(region, members, signatures, packed, reads)
    outputs = _body_outputs(region, members, found)
    body = Program((), tuple(reads.slots), nodes, outputs, 0)
    member_values = {
        s.name: member_slice(w.fakes, fake, s.kind, 0) for s, fake in zip(reads.slots, reads.fakes)
    }
    inner = replay(body, w.fakes, member_values)
    results = [_result(w, inner[o.value.name], o.kind) for o in outputs]
    loop = w.add(
        Node(w.name(name), "loop", tuple(reads.args), {}, "", region[0].source, region[0].name, body), results
    )
    w.at = region[0]
    for i, o in enumerate(outputs):
        part = w.call("operator.getitem", loop, i)
        values[o.value.name] = Stacked(part) if o.kind == "stacked" else Ragged(part)


def _body_nodes(
    region: Sequence[Node],
    members: Sequence[Program],
    signatures: Sequence[int],
    packed: set[str],
    reads: _LoopReads,
) -> tuple[Node, ...]:
    """Returns the nodes of the body. Integers that differ between members become inputs of the body."""
    by_name = [{n.name: n for n in m.nodes} for m in members]
    return tuple(
        n
        if n.name in packed
        else replace(_merge(n, [by[n.name] for by in by_name], signatures, reads), out="", member=n.name)
        for n in region
    )


def _body_outputs(
    region: Sequence[Node], members: Sequence[Program], found: Mapping[str, Kind]
) -> tuple[Output, ...]:
    """Returns the outputs of the body: the values that nodes after the region, or the program's outputs,
    read.
    """
    inside, first = {n.name for n in region}, members[0]
    later = {r for n in first.nodes if n.name not in inside for r in refs((n.args, n.kwargs))}
    later |= {r for o in first.outputs for r in refs(o.value)}
    return tuple(
        Output(Ref(n.name), "stacked" if _equal_types(members, n.name, found) else "ragged")
        for n in region
        if n.name in later
    )


def _result(w: ProgramWriter, value: Any, kind: Kind) -> Any:
    """Returns the fake value of a loop's result."""
    if kind == "ragged" or not isinstance(value, torch.Tensor):
        return [value] * w.members
    with w.fakes.on():
        return torch.empty([w.members, *value.shape], dtype=value.dtype)


def _equal_types(members: Sequence[Program], name: str, found: Mapping[str, Kind]) -> bool:
    """Returns whether a value has one type in all members.

    A size that values decide may be the same in all members if no Ragged value decides it.
    """
    nodes = [next(n for n in m.nodes if n.name == name) for m in members]
    return len({n.out for n in nodes}) == 1 and not (found[name] == "ragged" and of_data(nodes[0]))


def _merge(node: Node, variants: Sequence[Node], signatures: Sequence[int], reads: _LoopReads) -> Node:
    """Returns one node for members whose nodes differ in integers: each of them becomes an input with N
    integers.
    """
    if all(v.args == node.args and v.kwargs == node.kwargs for v in variants):
        return node

    def walk(parts: list[Any]) -> Any:
        if all(p == parts[0] for p in parts):
            return parts[0]
        if all(isinstance(p, (list, tuple)) and len(p) == len(parts[0]) for p in parts):
            return [walk(list(p)) for p in zip(*parts)]
        if all(type(p) is int for p in parts):
            return reads.add_numbers([parts[s] for s in signatures])
        raise LoweringError(
            f"node {node.name} ({node.op}, {node.source}) differs between members of other shapes "
            f"in more than integers: {parts[0]!r} and {parts[1]!r}"
        )

    args = tuple(walk([v.args[i] for v in variants]) for i in range(len(node.args)))
    return replace(
        node, args=args, kwargs={k: walk([v.kwargs.get(k) for v in variants]) for k in node.kwargs}
    )
