"""Makes the wide program from a member program, the kinds of its values, and a plan.

The input is a functional member program with its kinds and one fake value for each node. The output is a wide
program of allowed ops. Every node names the member's node that it was made for. Every value is read. The
outputs have the member's shapes behind the member axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from widepack_artifacts.program import Kind, Node, Output, Program, Ref, Slot, refs, substitute

from ..errors import LoweringError
from ..ir.edit import sweep
from ..ir.fake_values import Shapes, slot_value
from ..ir.kinds import kinds, weights_only
from ..ir.tensor_type import ragged_type
from ..ir.values import Ragged, Shared, Stacked, Value
from ..planning.mask_plans import in_loop
from ..planning.plan import Plan
from .fusion import fuse_activations, join_chains
from .interpreter import ProgramWriter, held, run_node
from .loops import RegionPacker, lower_loop


@dataclass(frozen=True)
class Lowered:
    """A wide program.

    used: for each node of the member program the strategy that runs it.
    kinds: the kind of each value of the member program.
    values: for each node of the member program the name of its wide value.
    in_loops: for nodes inside loops the strategies that give them another form there.
    """

    program: Program
    used: dict[str, str]
    kinds: dict[str, Kind]
    values: dict[str, str]
    in_loops: dict[str, str]


def lower(
    members: Sequence[Program],
    signatures: Sequence[int],
    slots: Mapping[str, Kind],
    plan: Plan,
    sizes: Mapping[str, int],
    shapes: Shapes | None = None,
) -> Lowered:
    """Makes the wide program.

    Args:
        members: The member programs, one for each shape signature: one, unless a weight is Ragged.
        signatures: For each member its index into `members`.
        slots: The kinds of weights and inputs by value name.
        plan: The strategies.
        sizes: An example size of each named dim.
        shapes: The fake values of the first member, if they exist already.

    Raises:
        LoweringError: The message names the node, its op, kinds, shapes and source line.
    """
    lowering = _Lowering(members, signatures, slots, plan, shapes or Shapes(sizes))
    lowering.add_slots()
    lowering.run_nodes()
    return lowering.finish()


class _Lowering:
    """The stages of lowering one program: slots, nodes, outputs."""

    def __init__(
        self,
        members: Sequence[Program],
        signatures: Sequence[int],
        slots: Mapping[str, Kind],
        plan: Plan,
        shapes: Shapes,
    ) -> None:
        self.members, self.signatures, self.slots, self.plan = members, signatures, slots, plan
        self.first = members[0]
        self.kinds = kinds(self.first, slots)
        self.fakes, self.own = shapes.fakes, shapes.of(self.first)
        self.writer = ProgramWriter(len(signatures), plan.device, self.fakes)
        self.values: dict[str, Any] = {}
        self.used: dict[str, str] = {}
        self.in_loops: dict[str, str] = {}
        self.weights: list[Slot] = []
        self.inputs: list[Slot] = []

    def add_slots(self) -> None:
        """Adds the weights and inputs with their wide values."""
        for source, into in ((self.first.weights, self.weights), (self.first.inputs, self.inputs)):
            for slot in source:
                into.append(self._add_slot(slot))

    def _add_slot(self, slot: Slot) -> Slot:
        kind, count = self.slots[slot.name], len(self.signatures)
        types = (_slot(self.members[s], slot.name).type for s in self.signatures)
        wide = Slot(
            self.writer.name(slot.name),
            slot.source,
            kind,
            ragged_type(types) if kind == "ragged" else slot.type,
        )
        value = Value(Ref(wide.name), slot_value(self.fakes, wide, count))
        self.values[slot.name] = (
            Shared(value) if kind == "shared" else Stacked(value) if kind == "stacked" else Ragged(value)
        )
        return wide

    def run_nodes(self) -> None:
        """Runs all nodes: each loop region as one node, every other node for all members."""
        loops = {n: r.name for r in self.plan.regions if r.strategy == "loop" for n in r.nodes}
        started: set[str] = set()
        for node in _order(self.first, loops):
            if node.name in loops:
                if loops[node.name] not in started:
                    started.add(loops[node.name])
                    self._run_region(loops[node.name])
                self.used[node.name] = "loop"
            else:
                _refuse_other_literals(node, self.members)
                self.values[node.name], self.used[node.name] = run_node(
                    self.writer, node, self.values, self.plan.choices.get(node.name), self.own[node.name]
                )

    def _run_region(self, name: str) -> None:
        """Lowers a loop region. If all members have one program, its convolutions may be packed, and its
        attention may skip keys.
        """
        names = {n for r in self.plan.regions if r.name == name and r.strategy == "loop" for n in r.nodes}
        region = [n for n in self.first.nodes if n.name in names]
        packed: dict[str, Node] = {}
        if len(self.members) == 1:
            packer = RegionPacker(self.writer, self.values, weights_only(self.first), self.own)
            packed = packer.nodes(region, self.plan.choices)
            skipping = {n.name: in_loop(n, self.plan.choices, self.writer.device) for n in region}
            packed |= {name: node for name, node in skipping.items() if node is not None}
            self.in_loops |= {name: self.plan.choices[name].strategy for name in packed}
        lower_loop(
            self.writer,
            [packed.get(n.name, n) for n in region],
            self.members,
            self.signatures,
            self.values,
            name,
            set(packed),
            self.kinds,
        )

    def finish(self) -> Lowered:
        """Adds the outputs, fuses activations, and removes values that nothing reads."""
        outputs = tuple(_output(o, self.values) for o in self.first.outputs)
        self.fakes.check()
        program = Program(
            tuple(self.weights), tuple(self.inputs), tuple(self.writer.nodes), outputs, len(self.signatures)
        )
        program, joined = join_chains(program)
        program, moved = fuse_activations(program)
        moved |= joined
        names = {n: at for n, v in self.values.items() if (r := _name(v)) and (at := moved.get(r, r))}
        return Lowered(sweep(program), self.used, self.kinds, names, self.in_loops)


def _name(value: Any) -> str:
    """Returns the name of a wide value in the program; empty if it has none."""
    inner = held(value)[1] if isinstance(value, (Shared, Stacked, Ragged)) else None
    return inner.ref.name if isinstance(inner, Value) and inner.ref else ""


def _slot(program: Program, name: str) -> Slot:
    return next(s for s in (*program.weights, *program.inputs) if s.name == name)


def _output(output: Output, values: Mapping[str, Any]) -> Output:
    """Returns an output of the wide program."""
    value = substitute(output.value, values.__getitem__)
    if isinstance(value, (Shared, Stacked, Ragged)):
        kind, inner = held(value)
        return Output(inner.ref if isinstance(inner, Value) else inner, kind)
    return Output(value, "shared")


def _order(program: Program, loops: Mapping[str, str]) -> list[Node]:
    """Returns the nodes in an order in which each loop region is contiguous and comes after all that it
    reads.

    `loops` has the region's name of each node in a loop.
    """
    if not loops:
        return list(program.nodes)
    ordered, known = [], {s.name for s in (*program.weights, *program.inputs)}
    waiting = list(program.nodes)
    # first all nodes outside regions that can run, then the next region, until all nodes are placed
    while waiting:
        ready = [
            n for n in waiting if n.name not in loops and all(r in known for r in refs((n.args, n.kwargs)))
        ]
        if ready:
            known |= {n.name for n in ready}
        else:
            name = next((loops[n.name] for n in waiting if n.name in loops), None)
            ready = [n for n in waiting if loops.get(n.name) == name]
            known_after = known | {n.name for n in ready}
            if name is None or any(r not in known_after for n in ready for r in refs((n.args, n.kwargs))):
                raise LoweringError(
                    f"plan: region {name} and the rest of the program depend on each other; no value "
                    "may leave a region and enter it again"
                )
            known = known_after
        ordered += ready
        placed = {n.name for n in ready}
        waiting = [n for n in waiting if n.name not in placed]
    return ordered


def _refuse_other_literals(node: Node, members: Sequence[Program]) -> None:
    """Refuses a node that runs once for all members if members of other shapes have other literals in it.

    Raises: LoweringError.
    """
    for program in members[1:]:
        other = next(n for n in program.nodes if n.name == node.name)
        if repr((other.args, other.kwargs)) != repr((node.args, node.kwargs)):
            raise LoweringError(
                f"node {node.name} ({node.op}, {node.source}) has other numbers in members of other shapes, "
                f"and reads nothing whose shape differs: {list(node.args)} and {list(other.args)}; "
                "give all members one number there, or build with --strategy loop"
            )
