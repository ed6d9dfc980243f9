"""Makes the wide programs of a build: predicted plans, and each different program once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from widepack_artifacts.program import Kind, Program, refs

from ..errors import CaptureError
from ..ir.kinds import weights_only
from ..planning.plan import NodeChoice, Plan
from ..planning.request import StrategyRequest
from ..registry.registry import strategies_of
from ..spec.entries import PATTERNS
from .lower import Lowered
from .pattern_programs import LoweringEntry, PatternPrograms


@dataclass(frozen=True)
class LoweredProgram:
    """A wide program and the plan that it was lowered by.

    `uses` has the plans that this program serves: one for each device and batch class. `members` has the
    parts of the members that it serves; it is empty if the program is for all members.
    """

    pattern: str
    plan: Plan
    lowered: Lowered
    uses: list[Plan]
    members: list[range] = field(default_factory=list)


def make_wide_programs(
    entry: LoweringEntry, request: StrategyRequest, targets: Sequence[str], parts: Iterable[range] = ()
) -> list[LoweredProgram]:
    """Makes the predicted plans of each target and pattern, and each different wide program once.

    parts: the parts of the members that have programs of their own. Those of all members come first.
    """
    every = [entry.of_pattern(pattern) for pattern in PATTERNS]
    made = _programs_of(every, request, targets)
    by_signatures: dict[tuple[int, ...], list[LoweredProgram]] = {}
    for part in parts:
        key = tuple(every[0].signatures[i] for i in part)
        if key not in by_signatures:
            by_signatures[key] = _programs_of([p.of_members(part) for p in every], request, targets)
        for wide in by_signatures[key]:
            wide.members.append(part)
    made += [wide for wides in by_signatures.values() for wide in wides]
    _refuse_ragged_states(entry, made)
    return made


def _programs_of(
    patterns: Iterable[PatternPrograms], request: StrategyRequest, targets: Sequence[str]
) -> list[LoweredProgram]:
    """Makes the programs of each pattern."""
    by_strategies: dict[str, LoweredProgram] = {}
    for of in patterns:
        for plan in (plan for device in targets for plan in of.plans(device, request)):
            strategies = sorted((n, c.strategy) for n, c in plan.choices.items() if not c.first)
            key = f"{of.pattern} {sorted(plan.looped())} {strategies}"
            if key not in by_strategies:
                by_strategies[key] = LoweredProgram(of.pattern, plan, of.lower(plan), [])
            wide = by_strategies[key]
            wide.uses.append(filled_plan(plan, wide.lowered, of.program))
    return list(by_strategies.values())


def _refuse_ragged_states(entry: LoweringEntry, wides: Sequence[LoweredProgram]) -> None:
    """Refuses a state whose shape differs between members. Raises: CaptureError."""
    for wide in wides:
        for state in entry.states:
            if wide.lowered.program.outputs[state.output].kind == "ragged":
                raise CaptureError(
                    f"state {state.name} is made of values whose shapes differ between the members; "
                    "a state has one shape in all members"
                )


def same_programs(some: Sequence[LoweredProgram], others: Sequence[LoweredProgram]) -> bool:
    """Returns whether two lowerings have the same wide programs."""
    return [(w.pattern, w.members, w.lowered.program) for w in some] == [
        (w.pattern, w.members, w.lowered.program) for w in others
    ]


_REASONS = {
    "once": "all that it reads is the same for all members",
    "part": "one of several results",
    "sequential": "no strategy of the op applies",
}


def filled_plan(plan: Plan, lowered: Lowered, program: Program) -> Plan:
    """Returns the plan with the strategy of every node, also of those that the plan left open, and the
    reason.
    """
    choices = dict(plan.choices)
    for node in program.nodes:
        used = lowered.used[node.name]
        choice = choices.get(node.name)
        # a choice with another strategy did not apply here
        if used != "loop" and (choice is None or choice.strategy != used):
            known = strategies_of(node.op)
            why = known[used].note if used in known else _REASONS.get(used, "")
            choices[node.name] = NodeChoice(used, why)
    return replace(plan, choices=choices)


def wide_share(program: Program, found: Mapping[str, Kind], used: Mapping[str, str]) -> float:
    """Returns the part of the nodes that run in wide strategies, not in `sequential` and `loop`.

    It counts the nodes that run at every call and read a Stacked weight, or a value computed from Stacked
    weights.
    """
    early = weights_only(program)
    reading = [
        n.name
        for n in program.nodes
        if n.name not in early and any(r in early and found[r] == "stacked" for r in refs((n.args, n.kwargs)))
    ]
    return sum(used[n] not in ("sequential", "loop") for n in reading) / len(reading) if reading else 1.0


def wide_only(entry: LoweringEntry, wides: Sequence[LoweredProgram], pattern: str) -> Program:
    """Returns the program of a pattern whose only loops are for Ragged values. torch.export programs are made
    of it.
    """
    programs = entry.of_pattern(pattern)
    (plan,) = programs.plans("cpu", StrategyRequest("wide"))
    for wide in wides:
        if (
            wide.pattern == pattern
            and not wide.members
            and any(p.looped() == plan.looped() and not _has_requests(p) for p in wide.uses)
        ):
            return wide.lowered.program
    return programs.lower(plan).program


def _has_requests(plan: Plan) -> bool:
    """Returns whether the user named strategies of ops in a plan."""
    return any(c.requested for c in plan.choices.values())
