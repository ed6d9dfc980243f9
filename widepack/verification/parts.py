"""A wide program compared part by part of its members, where what it derives from their weights would take many times a member's memory.

A part is the same member programs lowered by the same plan for fewer members, each node by the same strategy; together the parts hold every member to its own answers.
The program for all members is held to the probe by the first load, as on every machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from widepack_artifacts.program import Program, refs

from ..ir import ops
from ..runtime.kernel_count import is_view
from ..lowering.lower import Lowered, lower
from ..planning.plan import Plan
from ..ir.fake_values import Fakes, replay
from ..runtime.graph_module import split
from ..lowering.wide_programs import Entry

MOST_BYTES = 192 * 2**20
"""What derived weights may take, if two members' do not take more."""


@dataclass(frozen=True)
class Part:
    """members: numbers of the members that it is for. lowered: what the program was made of; None where that is not known."""

    members: range
    program: Program
    lowered: Lowered | None


def parts(entry: Entry, pattern: str, program: Program, plan: Plan | None, own: Lowered | None = None) -> list[Part]:
    """The parts that a wide program is compared in: itself alone, where it can be, or where nothing tells how it was made.

    plan: what it was lowered by. own: what lowering gave, where it was lowered just now.
    """
    count = entry.count
    whole = [Part(range(count), program, own)]
    needed = derived(program, entry.sizes)
    size = max(2, MOST_BYTES * count // max(needed, 1))
    if size >= count or plan is None:
        return whole
    own = own or lowered(entry, pattern, plan, entry.signatures)
    if own.program != program:
        return whole
    starts = [*range(0, count - size, size), count - size]  # the last one overlaps, so that all have one size
    made: dict[tuple[int, ...], Lowered] = {}
    found = []
    for start in starts:
        members = range(start, start + size)
        if (key := tuple(entry.signatures[i] for i in members)) not in made:
            made[key] = lowered(entry, pattern, plan, key)
        found.append(Part(members, made[key].program, made[key]))
    # A strategy that asks for the number of members may choose otherwise for fewer: then only the program itself tells.
    return found if all(low.used == own.used for low in made.values()) else whole


def lowered(entry: Entry, pattern: str, plan: Plan, signatures: Sequence[int]) -> Lowered:
    """A plan's program for members of these shapes. signatures: their indices into the member programs."""
    return lower(entry.simple(pattern), signatures, entry.slots(pattern), plan, entry.sizes, entry.shapes[0])


def derived(program: Program, sizes: Mapping[str, int]) -> int:
    """What the values take that a wide program's prologue makes of weights, in bytes: the most at one time."""
    prologue = split(program).prologue
    values = replay(prologue, Fakes(sizes, static=True))
    base = {s.name: s.name for s in prologue.weights}
    taken: dict[str, int] = {}
    last: dict[str, int] = {}
    for at, node in enumerate(prologue.nodes):
        read = [base[r] for r in refs((node.args, node.kwargs))]
        last.update(dict.fromkeys(read, at))
        viewed = node.body is None and read and (node.op.startswith("operator.") or is_view(ops.resolve(node.op)))
        base[node.name] = read[0] if viewed else node.name
        taken[node.name] = 0 if viewed else _bytes(values[node.name])
        last.setdefault(base[node.name], at)
    last.update({base[r]: len(prologue.nodes) for o in prologue.outputs for r in refs(o.value)})
    most = now = 0
    for at, node in enumerate(prologue.nodes):
        now += taken[node.name]
        most = max(most, now)
        now -= sum(taken.get(name, 0) for name in {base[node.name], *(base[r] for r in refs((node.args, node.kwargs)))} if last[name] == at)
    return most


def _bytes(value: Any) -> int:
    if isinstance(value, (list, tuple)):
        return sum(map(_bytes, value))
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0
