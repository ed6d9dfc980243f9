"""Divides a wide program into parts of its members, if its derived weights are too large to be in memory at
once.

A part is the same member programs, lowered by the same plan for fewer members, with the same strategy for
each node. Together the parts compare every member with its own answers. The program for all members is
checked against the probe at the first load, as on every machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from widepack_artifacts.program import Program, refs
from widepack_artifacts.weight_table import member_tensor

from ..ir import ops
from ..ir.encoding import iter_arguments
from ..ir.fake_values import Fakes, replay
from ..lowering.lower import Lowered, lower
from ..lowering.lowering_entry import EntryOfPart, LoweringEntry
from ..planning.plan import Plan
from ..runtime.kernel_count import is_view
from ..runtime.prologue import split

MOST_BYTES = 192 * 2**20
"""How many bytes derived weights may take. A part has at least two members, even if they take more."""


@dataclass(frozen=True)
class MemberPart:
    """A wide program for some members.

    Attributes:
        members: The numbers of the members.
        program: The program for them.
        lowered: The lowering that made the program; None if it is not known.
    """

    members: range
    program: Program
    lowered: Lowered | None


class WeightsReader(Protocol):
    """Reads tensors by name. A Ragged weight `w` of member i is the tensor `w@i`."""

    def get(self, name: str) -> torch.Tensor: ...


def parts(
    entry: LoweringEntry, pattern: str, program: Program, plan: Plan | None, lowering: Lowered | None = None
) -> list[MemberPart]:
    """Returns the parts in which a wide program is compared.

    It is the program itself if it is small enough, or if it is not known how it was made.

    plan: what it was lowered by. lowering: its lowering, if it was made now.
    """
    count = entry.count
    whole = [MemberPart(range(count), program, lowering)]
    try:
        size = max(2, MOST_BYTES * count // max(derived(program, entry.sizes), 1))
    except (DynamicOutputShapeException, DataDependentOutputException):  # values of weights decide sizes
        return whole
    if size >= count or plan is None:
        return whole
    lowering = lowering or lowered(entry, pattern, plan, entry.signatures)
    if lowering.program != program:
        return whole
    starts = [*range(0, count - size, size), count - size]  # the last part overlaps, so all have one size
    by_signatures: dict[tuple[int, ...], Lowered] = {}
    found = []
    for start in starts:
        members = range(start, start + size)
        if (key := tuple(entry.signatures[i] for i in members)) not in by_signatures:
            by_signatures[key] = lowered(entry, pattern, plan, key)
        found.append(MemberPart(members, by_signatures[key].program, by_signatures[key]))
    # A strategy that depends on the number of members may differ for fewer. Then only the program itself is
    # compared.
    return found if all(low.used == lowering.used for low in by_signatures.values()) else whole


def parts_of(
    entry: LoweringEntry,
    pattern: str,
    program: Program,
    plan: Plan | None,
    lowering: Lowered | None,
    members: range,
) -> list[MemberPart]:
    """Returns the parts in which a wide program for some members is compared. members: their numbers."""
    return [
        replace(part, members=range(members.start + part.members.start, members.start + part.members.stop))
        for part in parts(EntryOfPart(entry, members), pattern, program, plan, lowering)
    ]


def lowered(entry: LoweringEntry, pattern: str, plan: Plan, signatures: Sequence[int]) -> Lowered:
    """Lowers a plan for other members. signatures: for each member the number of its member program."""
    return lower(entry.simple(pattern), signatures, entry.slots(pattern), plan, entry.sizes, entry.shapes[0])


def derived(program: Program, sizes: Mapping[str, int]) -> int:
    """Returns how many bytes the derived weights of a wide program take: the most at one time."""
    prologue = split(program).prologue
    values = replay(prologue, Fakes(sizes, static=True))
    base = {s.name: s.name for s in prologue.weights}  # value -> the value whose memory it is a view of
    size: dict[str, int] = {}
    last_read: dict[str, int] = {}
    for at, node in enumerate(prologue.nodes):
        read = [base[r] for r in refs((node.args, node.kwargs))]
        last_read.update(dict.fromkeys(read, at))
        view = (
            node.body is None and read and (node.op.startswith("operator.") or is_view(ops.resolve(node.op)))
        )
        base[node.name] = read[0] if view else node.name
        size[node.name] = 0 if view else _bytes(values[node.name])
        last_read.setdefault(base[node.name], at)
    last_read.update({base[r]: len(prologue.nodes) for o in prologue.outputs for r in refs(o.value)})
    most = now = 0
    for at, node in enumerate(prologue.nodes):
        now += size[node.name]
        most = max(most, now)
        touched = {base[node.name], *(base[r] for r in refs((node.args, node.kwargs)))}
        now -= sum(size.get(name, 0) for name in touched if last_read[name] == at)
    return most


def _bytes(value: Any) -> int:
    return sum(v.numel() * v.element_size() for v in iter_arguments(value) if isinstance(v, torch.Tensor))


def all_weights(
    program: Program, weights: WeightsReader, members: int, part: range | None = None
) -> dict[str, Any]:
    """Returns the weights of a wide program by source name. Those of a file are mapped.

    members: N. part: the numbers of the members that the program is for; default all.
    """
    chosen = part if part is not None else range(members)
    found: dict[str, Any] = {}
    for s in program.weights:
        if s.kind == "ragged":
            found[s.source] = [weights.get(member_tensor(s.source, i)) for i in chosen]
        else:
            whole = weights.get(s.source)
            found[s.source] = whole[chosen.start : chosen.stop] if s.kind == "stacked" else whole
    return found
