"""Divides a wide program into parts of its members, if its derived weights are too large to be in memory at
once.

A part is the same member programs, lowered by the same plan for fewer members, with the same strategy for
each node. Together the parts compare every member with its own answers. The program for all members is
checked against the probe at the first load, as on every machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from widepack_artifacts.manifest_weights import member_tensor
from widepack_artifacts.program import Program

from ..ir import ops
from ..ir.encoding import iter_arguments
from ..ir.fake_values import Fakes, replay
from ..lowering.lower import Lowered
from ..lowering.pattern_programs import PatternPrograms
from ..planning.plan import Plan
from ..runtime.kernel_count import is_view
from ..runtime.prologue import split
from ..runtime.walk import LiveMemory, WalkedValue, last_uses

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
    of: PatternPrograms, members: range, program: Program, plan: Plan | None, lowering: Lowered | None = None
) -> list[MemberPart]:
    """Returns the parts in which a wide program is compared.

    It is the program itself if it is small enough, or if it is not known how it was made.

    of: the member programs, for the members of the program. members: their numbers. plan: what it was lowered
    by. lowering: its lowering, if it was made now.
    """
    count, first = of.count, members.start
    whole = [MemberPart(members, program, lowering)]
    try:
        size = max(2, int(MOST_BYTES * count // max(derived(program, of.sizes), 1)))
    except (DynamicOutputShapeException, DataDependentOutputException):  # values of weights decide sizes
        return whole
    if size >= count or plan is None:
        return whole
    lowering = lowering or of.lower(plan)
    if lowering.program != program:
        return whole
    starts = [*range(0, count - size, size), count - size]  # the last part overlaps, so all have one size
    by_signatures: dict[tuple[int, ...], Lowered] = {}
    found = []
    for start in starts:
        if (key := tuple(of.signatures[start : start + size])) not in by_signatures:
            by_signatures[key] = replace(of, signatures=key).lower(plan)
        some = range(first + start, first + start + size)
        found.append(MemberPart(some, by_signatures[key].program, by_signatures[key]))
    # A strategy that depends on the number of members may differ for fewer. Then only the program itself is
    # compared.
    return found if all(low.used == lowering.used for low in by_signatures.values()) else whole


def derived(program: Program, sizes: Mapping[str, int]) -> float:
    """Returns how many bytes the derived weights of a wide program take: the most at one time."""
    prologue = split(program).prologue
    values = replay(prologue, Fakes(sizes, static=True))
    live, most = LiveMemory(0), 0.0
    for node, ended in zip(prologue.nodes, last_uses(prologue)):
        views = node.body is None and (node.op.startswith("operator.") or is_view(ops.resolve(node.op)))
        tensors = [v for v in iter_arguments(values[node.name]) if isinstance(v, torch.Tensor)]
        live.add(node, WalkedValue(None, 0 if views else sum(t.nbytes for t in tensors), views=views))
        most = max(most, live.total)
        for name in ended:
            live.end(name)
    return most


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
