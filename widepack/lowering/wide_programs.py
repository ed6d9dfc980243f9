"""The wide programs of a build: plans by rules of thumb for every target and pattern, and each different program once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from widepack_artifacts.manifest import Parameter
from widepack_artifacts.program import Kind, Program, refs
from widepack_artifacts.tree import Tree

from ..spec.entries import PATTERNS
from ..errors import CaptureError
from ..ir.kinds import weights_only
from .lower import Lowered, lower
from ..planning.plan import Choice as PlanChoice
from ..planning.plan import Plan
from ..registry.registry import REGISTRY, Choice
from ..ir.fake_values import Shapes
from ..planning.heuristics import plans
from ..spec.draws import Source
from ..spec.state import Carried


class Entry(Protocol):
    """What lowering and writing have to know of an entry, of a build (`job.Job`) or of an artifact that is there (`standing.Standing`).

    entry: its name. count: how many members. signatures: each member's index into the programs. sizes: each dim's in the example. batch: the dim that batch classes are
    made of, or "". bounds: each dim's least and most size. signature, result: how it is called, and the form of the answer. slots: kinds of weights and inputs by
    value name. simple: the member programs simplified for a pattern.
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
    def sources(self) -> Sequence[Source]: ...
    @property
    def states(self) -> Sequence[Carried]: ...
    @property
    def shapes(self) -> Sequence[Shapes]: ...
    def slots(self, pattern: str) -> dict[str, Kind]: ...
    def simple(self, pattern: str) -> list[Program]: ...


@dataclass(frozen=True)
class Wide:
    """One wide program, the plan that it was lowered by, and all that it is for: (device, pattern, batch class, plan)."""

    pattern: str
    plan: Plan
    lowered: Lowered
    uses: list[Plan]


def make_wides(job: Entry, asked: Choice, targets: Sequence[str]) -> list[Wide]:
    """Plans by rules of thumb for every target and pattern, and the wide program of each different one."""
    made: dict[str, Wide] = {}
    for pattern in PATTERNS:
        slots = job.slots(pattern)
        programs = job.simple(pattern)
        for device in targets:
            for plan in plans(programs[0], slots, job.count, job.sizes, job.batch, device, pattern, asked):
                key = f"{pattern} {sorted(plan.looped())} {sorted((n, c.strategy) for n, c in plan.choices.items())}"
                if key not in made:
                    made[key] = Wide(pattern, plan, lower(programs, job.signatures, slots, plan, job.sizes, job.shapes[0]), [])
                made[key].uses.append(filled_plan(plan, made[key].lowered, programs[0]))
    for wide in made.values():
        for state in job.states:
            if wide.lowered.program.outputs[state.output].kind == "ragged":
                raise CaptureError(
                    f"state {state.name} is made of values whose shapes differ between the members; a state has one shape in all members"
                )
    return list(made.values())


def same_programs(some: Sequence[Wide], others: Sequence[Wide]) -> bool:
    """Whether two makings came to the same wide programs."""
    return [(w.pattern, w.lowered.program) for w in some] == [(w.pattern, w.lowered.program) for w in others]


_WHY = {"once": "all that it reads is the same for all members", "part": "one of several results", "sequential": "no strategy of the op applies"}


def filled_plan(plan: Plan, lowered: Lowered, program: Program) -> Plan:
    """The plan with the strategy of every node that it did not name itself, and why."""
    choices = dict(plan.choices)
    for node in program.nodes:
        used = lowered.used[node.name]
        named = choices.get(node.name)
        if used != "loop" and (named is None or named.strategy != used):  # one that is named applies nowhere here
            known = REGISTRY[node.op].strategies if node.op in REGISTRY else {}
            choices[node.name] = PlanChoice(used, known[used].note if used in known else _WHY.get(used, ""))
    return replace(plan, choices=choices)


def wide_share(program: Program, found: Mapping[str, Kind], used: Mapping[str, str]) -> float:
    """Of the nodes that read a Stacked weight (or one made of such) and run at every call, the part in a strategy other than sequential and loop."""
    early = weights_only(program)
    reading = [n.name for n in program.nodes if n.name not in early and any(r in early and found[r] == "stacked" for r in refs((n.args, n.kwargs)))]
    return sum(used[n] not in ("sequential", "loop") for n in reading) / len(reading) if reading else 1.0


def wide_only(job: Entry, wides: Sequence[Wide], pattern: str) -> Program:
    """The program of a pattern without loops but for Ragged values: what torch.export programs are made of."""
    programs = job.simple(pattern)
    (plan,) = plans(programs[0], job.slots(pattern), job.count, job.sizes, job.batch, "cpu", pattern, Choice("wide"))
    for wide in wides:
        if wide.pattern == pattern and any(p.looped() == plan.looped() and not asked_for(p) for p in wide.uses):
            return wide.lowered.program
    return lower(programs, job.signatures, job.slots(pattern), plan, job.sizes, job.shapes[0]).program


def asked_for(plan: Plan) -> bool:
    """Whether the user named strategies of ops in it."""
    return any(c.because == "asked for" for c in plan.choices.values())
