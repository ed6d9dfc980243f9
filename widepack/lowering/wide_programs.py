"""Makes the wide programs of a build: plans by rules of thumb, and each different program once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from widepack_artifacts.entry import Parameter
from widepack_artifacts.program import Kind, Program, refs
from widepack_artifacts.tree import Tree

from ..errors import CaptureError
from ..ir.fake_values import Shapes
from ..ir.kinds import weights_only
from ..planning.heuristics import plans
from ..planning.plan import NodeChoice, Plan
from ..planning.request import StrategyRequest
from ..registry.registry import REGISTRY
from ..spec.draws import InputSource
from ..spec.entries import PATTERNS
from ..spec.state import CarriedState
from .lower import Lowered, lower


class LoweringEntry(Protocol):
    """An entry that can be lowered and written: of a build (`building.job`), or of an existing artifact
    (`revision`).

    entry: the name.
    count: N.
    signatures: for each member its index into the member programs.
    sizes: the size of each dim in the example.
    batch: the dim that batch classes are made of, or "".
    bounds: the least and the largest size of each dim.
    signature, result: the parameters of the call, and the form of the result.
    slots: the kinds of weights and inputs by value name, for a pattern.
    simple: the member programs, simplified for a pattern.
    """

    @property
    def entry(self) -> str: ...
    @property
    def count(self) -> int: ...
    @property
    def signatures(self) -> Sequence[int]: ...
    @property
    def sizes(self) -> Mapping[str, int]: ...
    @property
    def batch(self) -> str: ...
    @property
    def bounds(self) -> Mapping[str, tuple[int, int | None]]: ...
    @property
    def signature(self) -> Sequence[Parameter]: ...
    @property
    def result(self) -> Tree: ...
    @property
    def sources(self) -> Sequence[InputSource]: ...
    @property
    def states(self) -> Sequence[CarriedState]: ...
    @property
    def shapes(self) -> Sequence[Shapes]: ...
    def slots(self, pattern: str) -> dict[str, Kind]: ...
    def simple(self, pattern: str) -> list[Program]: ...


@dataclass(frozen=True)
class LoweredProgram:
    """A wide program and the plan that it was lowered by.

    `uses` has the plans that this program serves: one for each device and batch class.
    """

    pattern: str
    plan: Plan
    lowered: Lowered
    uses: list[Plan]


def make_wide_programs(
    job: LoweringEntry, request: StrategyRequest, targets: Sequence[str]
) -> list[LoweredProgram]:
    """Makes the plans by rules of thumb of each target and pattern, and each different wide program once."""
    by_strategies: dict[str, LoweredProgram] = {}
    for pattern in PATTERNS:
        slots = job.slots(pattern)
        programs = job.simple(pattern)
        for device in targets:
            for plan in plans(programs[0], slots, job.count, job.sizes, job.batch, device, pattern, request):
                strategies = sorted((n, c.strategy) for n, c in plan.choices.items())
                key = f"{pattern} {sorted(plan.looped())} {strategies}"
                if key not in by_strategies:
                    lowered = lower(programs, job.signatures, slots, plan, job.sizes, job.shapes[0])
                    by_strategies[key] = LoweredProgram(pattern, plan, lowered, [])
                wide = by_strategies[key]
                wide.uses.append(filled_plan(plan, wide.lowered, programs[0]))
    wides = list(by_strategies.values())
    _refuse_ragged_states(job, wides)
    return wides


def _refuse_ragged_states(job: LoweringEntry, wides: Sequence[LoweredProgram]) -> None:
    """Refuses a state whose shape differs between members. Raises: CaptureError."""
    for wide in wides:
        for state in job.states:
            if wide.lowered.program.outputs[state.output].kind == "ragged":
                raise CaptureError(
                    f"state {state.name} is made of values whose shapes differ between the members; "
                    "a state has one shape in all members"
                )


def same_programs(some: Sequence[LoweredProgram], others: Sequence[LoweredProgram]) -> bool:
    """Returns whether two lowerings have the same wide programs."""
    return [(w.pattern, w.lowered.program) for w in some] == [(w.pattern, w.lowered.program) for w in others]


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
            known = REGISTRY[node.op].strategies if node.op in REGISTRY else {}
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


def wide_only(job: LoweringEntry, wides: Sequence[LoweredProgram], pattern: str) -> Program:
    """Returns the program of a pattern whose only loops are for Ragged values. torch.export programs are made
    of it.
    """
    programs, slots, request = job.simple(pattern), job.slots(pattern), StrategyRequest("wide")
    (plan,) = plans(programs[0], slots, job.count, job.sizes, job.batch, "cpu", pattern, request)
    for wide in wides:
        if wide.pattern == pattern and any(
            p.looped() == plan.looped() and not has_requests(p) for p in wide.uses
        ):
            return wide.lowered.program
    return lower(programs, job.signatures, slots, plan, job.sizes, job.shapes[0]).program


def has_requests(plan: Plan) -> bool:
    """Returns whether the user named strategies of ops in a plan."""
    return any(c.requested for c in plan.choices.values())
