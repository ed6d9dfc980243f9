"""Holds the simplified member programs of an entry for one pattern: plans and wide programs are made of them.

| class | what it is |
|---|---|
| `LoweringEntry` | an entry that can be lowered and written, in all patterns |
| `PatternPrograms` | its programs in one pattern, for all members or some of them |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from widepack_artifacts.entry import Parameter
from widepack_artifacts.program import Kind, Program
from widepack_artifacts.tree import Tree

from ..ir.fake_values import Shapes
from ..planning.heuristics import plans
from ..planning.plan import Plan, for_size, scaled
from ..planning.request import StrategyRequest
from ..simplify.factored_weights import FactorNames
from ..simplify.pipeline import MemberPrograms
from ..spec.draws import InputSource
from .lower import Lowered, lower


@dataclass(frozen=True)
class PatternPrograms:
    """The simplified member programs of one pattern, with what plans and lowering need to know of them.

    programs: one for each shape signature. signatures: for each member the index of its program. slots: the
    kinds of weights and inputs by value name. sizes: the size of each dim in the example. batch: the dim that
    batch classes are made of, or "". shapes: the fake values of each program. Programs that share them are
    lowered faster.
    """

    programs: Sequence[Program]
    signatures: Sequence[int]
    slots: Mapping[str, Kind]
    sizes: Mapping[str, int]
    batch: str
    pattern: str
    shapes: Sequence[Shapes]

    @property
    def program(self) -> Program:
        """The program of the first member."""
        return self.programs[0]

    @property
    def count(self) -> int:
        """The number of members."""
        return len(self.signatures)

    def plans(self, device: str, request: StrategyRequest) -> list[Plan]:
        """Returns the predicted plans, one for each batch class, smallest batch first.

        device: the kind of device. Raises: UsageError for a strategy that is unknown.
        """
        return plans(
            self.program, self.slots, self.count, self.sizes, self.batch, device, self.pattern, request
        )

    def plan(
        self, device: str, strategies: str | Sequence[str] = "auto", sizes: Mapping[str, int] | None = None
    ) -> Plan:
        """Returns the predicted plan that serves a call.

        strategies: as `widepack build --strategy` takes them. sizes: of the call; default the example's.
        """
        request = StrategyRequest.parse(strategies)
        return self.serving(self.plans(device, request), sizes or self.sizes)

    def serving(self, found: Sequence[Plan], sizes: Mapping[str, int]) -> Plan:
        """Returns the plan, among those of all batch classes, that serves a call of these sizes."""
        return for_size(found, scaled(sizes, self.batch, self.sizes), lambda p: p)

    def lower(self, plan: Plan) -> Lowered:
        """Returns the wide program of a plan. Raises: LoweringError."""
        return lower(self.programs, self.signatures, self.slots, plan, self.sizes, self.shapes[0])

    def of_members(self, members: Iterable[int]) -> PatternPrograms:
        """Returns the programs of some members. The kinds of weights are those of all, as in the artifact."""
        signatures = [self.signatures[i] for i in members]
        used = sorted(set(signatures))
        return replace(
            self,
            programs=[self.programs[s] for s in used],
            signatures=[used.index(s) for s in signatures],
            shapes=[self.shapes[s] for s in used],
        )


class LoweringEntry(MemberPrograms):
    """An entry that can be lowered and written: of a build, of an existing artifact, or of a fused module.

    entry: its name. batch, sizes: as in `PatternPrograms`. bounds: the least and the largest size of each
    dim. signature, result: the parameters of the call, and the form of the result. sources: the inputs.
    """

    entry: str
    batch: str
    sizes: Mapping[str, int]
    bounds: Mapping[str, tuple[int, int | None]]
    signature: Sequence[Parameter]
    result: Tree
    sources: Sequence[InputSource]

    def of_pattern(self, pattern: str) -> PatternPrograms:
        """Returns the programs of all members, simplified for a pattern."""
        simple, slots = self.simple(pattern), self.slots(pattern)
        return PatternPrograms(simple, self.signatures, slots, self.sizes, self.batch, pattern, self.shapes)


def simplified(
    programs: Sequence[Program],
    signatures: Sequence[int],
    weights: Mapping[str, Kind],
    stacked: Sequence[bool],
    sizes: Mapping[str, int],
    batch: str,
    pattern: str,
    simplify: bool = True,
    factors: Mapping[str, FactorNames] | None = None,
) -> PatternPrograms:
    """Returns the programs of some members, simplified for a pattern of inputs, or as they were captured.

    Args:
        programs: The member programs.
        signatures: For each member its index into the programs.
        weights: The kinds of stored weights by name.
        stacked: For each input whether it has one value for each member.
        sizes: An example size of each dim.
        batch: The dim that batch classes are made of, or "".
        pattern: The pattern of inputs.
        simplify: False takes the programs as they were captured.
        factors: The weights that are stored as factors, by name.
    """
    used = sorted(set(signatures))
    places = [used.index(s) for s in signatures]
    members = MemberPrograms([programs[s] for s in used], weights.__getitem__, (), sizes, places, factors)
    slots = members.slots_for([i for i, own in enumerate(stacked) if own])
    found = members.folded(slots) if simplify else members.stored
    return PatternPrograms(found, places, slots, sizes, batch, pattern, members.shapes)
