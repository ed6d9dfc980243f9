"""Lowering: member program + kinds + plan -> wide program.

requires: a member program, functional, its kinds, one fake value for each of its nodes. ensures: a wide program of allowed ops, every node with the member's
node that it was made for; no value that nothing reads; outputs of the member's shapes behind the member axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from widepack_artifacts.program import Kind, Node, Output, Program, Ref, Slot, refs, substitute

from .activation_fusion import fuse_activations
from ..errors import LoweringError
from ..ir.edit import sweep
from .interpreter import ProgramWriter, run_node
from ..ir.kinds import kinds, of_data, weights_only
from .packed_loops import pack_region
from ..planning.plan import Plan
from ..ir.fake_values import Shapes, member_slice, replay, slot_value
from ..ir.values import Ragged, Shared, Stacked, Value


@dataclass(frozen=True)
class Lowered:
    """program: the wide program. used: the strategy of each node of the member program. kinds: of each value. values: each node's value name."""

    program: Program
    used: dict[str, str]
    kinds: dict[str, Kind]
    values: dict[str, str]


def lower(
    members: Sequence[Program],
    signatures: Sequence[int],
    slots: Mapping[str, Kind],
    plan: Plan,
    sizes: Mapping[str, int],
    shapes: Shapes | None = None,
) -> Lowered:
    """Write the wide program.

    members: the member programs, one for each shape signature (one unless a weight is Ragged); signatures: each member's index into them.
    slots: kinds of weights and inputs by value name. sizes: an example size of each named dim. shapes: fakes of the first member's values, where some are there.
    Raises: LoweringError with node, op, kinds, shapes and source line.
    """
    first, count = members[0], len(signatures)
    found = kinds(first, slots)
    shapes = shapes or Shapes(sizes)
    fakes, own = shapes.fakes, shapes.of(first)
    w = ProgramWriter(count, plan.device, fakes)
    values: dict[str, Any] = {}
    weights: list[Slot] = []
    inputs: list[Slot] = []
    for slot, into in [(s, weights) for s in first.weights] + [(s, inputs) for s in first.inputs]:
        kind = slots[slot.name]
        type_ = "|".join(_slot(members[signatures[i]], slot.name).type for i in range(count)) if kind == "ragged" else slot.type
        made = Slot(w.name(slot.name), slot.source, kind, type_)
        held = Value(Ref(made.name), slot_value(fakes, made, count))
        values[slot.name] = Shared(held) if kind == "shared" else Stacked(held) if kind == "stacked" else Ragged(held)
        into.append(made)
    loops = {n: r.name for r in plan.regions if r.strategy == "loop" for n in r.nodes}
    regions = {r.name: [n for n in first.nodes if n.name in set(r.nodes)] for r in plan.regions if r.strategy == "loop"}
    used: dict[str, str] = {}
    early = weights_only(first)
    for node in _order(first, loops):
        if node.name in loops:
            region = regions.pop(loops[node.name], None)
            if region is not None:
                packed = pack_region(w, region, values, plan.choices, early, own) if len(members) == 1 else {}
                _loop(w, [packed.get(n.name, n) for n in region], members, signatures, first, values, loops[node.name], set(packed), found)
            used[node.name] = "loop"
        else:
            _refuse_others(node, members)
            values[node.name], used[node.name] = run_node(w, node, values, plan.choices.get(node.name), own[node.name])
    outputs = []
    for i, o in enumerate(first.outputs):
        outputs.append(_output(w, o, values, i))
    fakes.check()
    program = Program(tuple(weights), tuple(inputs), tuple(w.nodes), tuple(outputs), count)
    program, moved = fuse_activations(program)
    names = {n: at for n, v in values.items() if (r := _name(v)) and (at := moved.get(r, r))}
    return Lowered(sweep(program), used, found, names)


def _name(value: Any) -> str:
    inner = value.members if isinstance(value, Ragged) else value.value if isinstance(value, (Shared, Stacked)) else None
    return inner.ref.name if isinstance(inner, Value) and inner.ref else ""


def _slot(program: Program, name: str) -> Slot:
    return next(s for s in (*program.weights, *program.inputs) if s.name == name)


def _output(w: ProgramWriter, output: Output, values: Mapping[str, Any], i: int) -> Output:
    value = substitute(output.value, values.__getitem__)
    if isinstance(value, (Shared, Stacked, Ragged)):
        kind: Kind = "shared" if isinstance(value, Shared) else "stacked" if isinstance(value, Stacked) else "ragged"
        inner = value.members if isinstance(value, Ragged) else value.value
        return Output(inner.ref if isinstance(inner, Value) else inner, kind)
    return Output(value, "shared")


def _order(program: Program, loops: Mapping[str, str]) -> list[Node]:
    """The nodes with every loop region moved behind all that it reads: nothing outside a region reads it but what comes after it anyway."""
    if not loops:
        return list(program.nodes)
    outside, made = [], {s.name for s in (*program.weights, *program.inputs)}
    waiting = list(program.nodes)
    # nodes of no region as soon as they can run, then the regions, until all are placed
    while waiting:
        ready = [n for n in waiting if n.name not in loops and all(r in made for r in refs((n.args, n.kwargs)))]
        if ready:
            for n in ready:
                made.add(n.name)
        else:
            name = next((loops[n.name] for n in waiting if n.name in loops), None)
            ready = [n for n in waiting if loops.get(n.name) == name]
            inside = made | {n.name for n in ready}
            if name is None or any(r not in inside for n in ready for r in refs((n.args, n.kwargs))):
                raise LoweringError(
                    f"plan: region {name} and the rest of the program wait for each other; a region must not be left and entered again"
                )
            made = inside
        outside += ready
        gone = {n.name for n in ready}
        waiting = [n for n in waiting if n.name not in gone]
    return outside


class _Reads:
    """What a loop reads, in order: its body's inputs, the arguments of the node, and their fake values."""

    def __init__(self) -> None:
        self.slots: list[Slot] = []
        self.args: list[Any] = []
        self.held: list[Any] = []

    def value(self, name: str, value: Any) -> None:
        kind: Kind = "shared" if isinstance(value, Shared) else "stacked" if isinstance(value, Stacked) else "ragged"
        inner = value.members if isinstance(value, Ragged) else value.value
        self.slots.append(Slot(name, name, kind, ""))
        self.args.append(inner.ref if isinstance(inner, Value) else inner)
        self.held.append(inner.held if isinstance(inner, Value) else inner)

    def numbers(self, found: list[int]) -> Ref:
        """N integers, one a member."""
        name = f"number_{len(self.slots)}"
        self.slots.append(Slot(name, "", "ragged", "|".join("int" for _ in found)))
        self.args.append(found)
        self.held.append(found)
        return Ref(name)


def _loop(
    w: ProgramWriter,
    region: list[Node],
    members: Sequence[Program],
    signatures: Sequence[int],
    first: Program,
    values: dict[str, Any],
    name: str,
    packed: set[str],
    found: Mapping[str, Kind],
) -> None:
    """A region as ONE node: its body once, its inputs bound to the values before it, its results Stacked or Ragged. packed: nodes that are written for the body already."""
    inside = {n.name for n in region}
    by_name = [{n.name: n for n in m.nodes} for m in members]
    later = {r for n in first.nodes if n.name not in inside for r in refs((n.args, n.kwargs))} | {r for o in first.outputs for r in refs(o.value)}
    reads = _Reads()
    for r in dict.fromkeys(r for n in region for r in refs((n.args, n.kwargs)) if r not in inside):
        reads.value(r, values[r])
    nodes = [n if n.name in packed else replace(_merge(n, [by[n.name] for by in by_name], signatures, reads), out="", member=n.name) for n in region]
    outputs = [Output(Ref(n.name), "stacked" if _equal_types(members, n.name, found) else "ragged") for n in region if n.name in later]
    body = Program((), tuple(reads.slots), tuple(nodes), tuple(outputs), 0)
    one = {s.name: member_slice(w.fakes, held, s.kind, 0) for s, held in zip(reads.slots, reads.held)}
    inner = replay(body, w.fakes, one)
    made = [_result(w, inner[o.value.name], o.kind) for o in outputs]
    loop = w.add(Node(w.name(name), "loop", tuple(reads.args), {}, "", region[0].source, region[0].name, body), made)
    w.at = region[0]
    for i, o in enumerate(outputs):
        part = w.call("operator.getitem", loop, i)
        values[o.value.name] = Stacked(part) if o.kind == "stacked" else Ragged(part)


def _result(w: ProgramWriter, value: Any, kind: Kind) -> Any:
    """The fake value of a loop's result."""
    if kind == "ragged" or not isinstance(value, torch.Tensor):
        return [value] * w.members
    with w.fakes.on():
        return torch.empty([w.members, *value.shape], dtype=value.dtype)


def _refuse_others(node: Node, members: Sequence[Program]) -> None:
    """Refuse a node that runs once for all members, where those of another shape have another literal in it. Raises: LoweringError."""
    for program in members[1:]:
        other = next(n for n in program.nodes if n.name == node.name)
        if repr((other.args, other.kwargs)) != repr((node.args, node.kwargs)):
            raise LoweringError(
                f"node {node.name} ({node.op}, {node.source}) has other numbers in members of other shapes, and reads nothing whose shape differs: "
                f"{list(node.args)} and {list(other.args)}; give all members one number there, or build with --strategy loop"
            )


def _equal_types(members: Sequence[Program], name: str, found: Mapping[str, Kind]) -> bool:
    """Whether a value has one type in all members; a size that is data may be one for all of them, where nothing of theirs tells it."""
    made = [next(n for n in m.nodes if n.name == name) for m in members]
    return len({n.out for n in made}) == 1 and not (found[name] == "ragged" and of_data(made[0]))


def _merge(node: Node, variants: Sequence[Node], signatures: Sequence[int], reads: _Reads) -> Node:
    """One node for members whose graphs differ in integer literals: each literal that differs becomes an input with N integers."""
    if all(v.args == node.args and v.kwargs == node.kwargs for v in variants):
        return node

    def walk(parts: list[Any]) -> Any:
        if all(p == parts[0] for p in parts):
            return parts[0]
        if all(isinstance(p, (list, tuple)) and len(p) == len(parts[0]) for p in parts):
            return [walk(list(p)) for p in zip(*parts)]
        if all(type(p) is int for p in parts):
            return reads.numbers([parts[s] for s in signatures])
        raise LoweringError(
            f"node {node.name} ({node.op}, {node.source}) differs between members of other shapes in more than integers: {parts[0]!r} and {parts[1]!r}"
        )

    args = tuple(walk([v.args[i] for v in variants]) for i in range(len(node.args)))
    return replace(node, args=args, kwargs={k: walk([v.kwargs.get(k) for v in variants]) for k in node.kwargs})
