"""Defines the candidates of a search, and its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from widepack_artifacts.program import Program

from ..planning.plan import NodeChoice, Plan


@dataclass
class Candidate:
    """A plan with its wide program.

    name: the name in the race.
    plan, program: the plan and the wide program.
    used: the strategy of each node of the member program.
    bound: the runnable program; None after it was released.
    origin: for a plan that runs on another backend than `eager`, the name of the same plan on `eager`.
    seconds: about how long a call takes.
    slower: the time of a call relative to the fastest candidate at that time.
    """

    name: str
    plan: Plan
    program: Program
    used: Mapping[str, str]
    bound: Any
    origin: str = ""
    seconds: float = 0.0
    slower: float = 1.0

    @property
    def backend(self) -> str:
        """The backend that runs the plan."""
        return self.plan.backend or "eager"


@dataclass
class SearchResult:
    """The result of a search.

    best: the fastest candidate. on_eager: the fastest candidate on the backend `eager`. times_ms: the median
    milliseconds of every candidate in its last race. against_rules, against_loop: how many times as long the
    plan by rules of thumb and the loop take; None if they did not run. dropped: for each candidate that took
    no part, the reason. changes: the changes of the refinement that the best plan has.
    """

    best: Candidate
    on_eager: Candidate
    times_ms: dict[str, float]
    against_rules: float | None
    against_loop: float | None
    dropped: dict[str, str] = field(default_factory=dict)
    changes: list[str] = field(default_factory=list)


def unique_candidates(candidates: Sequence[Candidate | None]) -> list[Candidate]:
    """Returns the candidates that exist, each once."""
    return list({id(c): c for c in candidates if c is not None}.values())


def with_choices(base: Plan, choices: Mapping[str, NodeChoice]) -> Plan:
    """Returns a plan with other strategies for some nodes."""
    return replace(base, choices={**base.choices, **choices})
