"""Makes the candidates of a search, for one batch and one pattern: it lowers plans, binds programs, and times
and checks them.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakValueDictionary

import torch

from widepack_artifacts import strict_json
from widepack_artifacts.program import Program

from ..backends.flat import nodes_unrolled
from ..backends.task import first_line
from ..errors import UsageError
from ..ir.kinds import kinds, weights_only
from ..kernels.decompose import for_compiler
from ..lowering.lower import Lowered
from ..lowering.pattern_programs import PatternPrograms
from ..planning.plan import LOOP, NodeChoice, Plan, for_size, scaled
from ..planning.request import StrategyRequest
from ..registry.registry import REGISTRY
from ..system.timing import LONG_S, clock_for, once, waited, warm
from .report import TIME_OVER

PREDICTED, COMPOSED = "predicted", "composed"
KEPT = (PREDICTED, LOOP)  # these are not released, however slow they are
SLOW = 4.0  # a candidate takes no part in the race if it takes this many times as long as the fastest so far
COMPILED = 600  # the most nodes that a search compiles: a compiler takes about a tenth of a second for each
COMPILER_S, NODE_S = 10.0, 0.1  # the seconds of a compilation, and of each node in it
ONNX_S, ONNX_NODE_S = 0.5, 0.01  # the same for writing an ONNX file,
ONNX_IMPORT_S = 2.5  # and the seconds in which its writer is imported
TRIES = 3  # timed calls of a candidate before the race
CALLS_A_ROUND = 5  # of a candidate in a race, with those that are not timed


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What a search measures: the programs of one pattern at one batch.

    programs: the member programs of the pattern. Searches that share them lower faster.
    sizes: the size of each dim, with the batch.
    device: the device.
    inputs: the inputs of a wide call at these sizes.
    lowered: the programs of plans that searches of other batches lowered, by plan.
    bound: the bound programs of candidates of all batches that were not released, by program, backend and
        number of workers.
    plain: no predicted packed convolutions, as in the artifact's plans.
    """

    programs: PatternPrograms
    sizes: Mapping[str, int]
    device: torch.device
    inputs: Sequence[torch.Tensor]
    lowered: dict[str, Lowered] = field(default_factory=dict)
    bound: MutableMapping[tuple[int, str, int], Any] = field(default_factory=WeakValueDictionary)
    plain: bool = False


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


def unique_candidates(candidates: Sequence[Candidate | None]) -> list[Candidate]:
    """Returns the candidates that exist, each once."""
    return list({id(c): c for c in candidates if c is not None}.values())


def with_choices(base: Plan, choices: Mapping[str, NodeChoice]) -> Plan:
    """Returns a plan with other strategies for some nodes."""
    return replace(base, choices={**base.choices, **choices})


class CandidatePool:
    """The candidates for one workload.

    Args:
        work: The workload.
        bind: Makes a wide program runnable on the backend that its plan names.
        right: Returns why the answers of a bound program are wrong, or "".
        slow: A candidate is released if it takes this many times as long as the fastest so far.
    """

    def __init__(
        self,
        work: Workload,
        bind: Callable[[Program, Plan], Any],
        right: Callable[[Any], str],
        slow: float = SLOW,
    ) -> None:
        self.slow = slow
        self.programs, self.sizes, self.inputs = work.programs, work.sizes, work.inputs
        self.device, self.plain = work.device, work.plain
        self._lowered, self._bound = work.lowered, work.bound
        self.clock = clock_for(work.device)
        self._bind, self.right = bind, right
        self.classes: tuple[int, int | None] = (1, None)  # the batch class that the plans serve
        self.scaled = scaled(work.sizes, work.programs.batch, work.programs.sizes) or 1
        self.first = work.programs.program
        self.kinds = kinds(self.first, work.programs.slots)
        self.early = weights_only(self.first)
        self.tuned = [
            n
            for n in self.first.nodes
            if self.kinds[n.name] == "stacked" and n.name not in self.early and n.op in REGISTRY
        ]
        self.dropped: dict[str, str] = {}
        self._right: set[str] = set()
        self._by_key: dict[str, Candidate] = {}
        self._fastest: Candidate | None = None
        self.making_s = 0.0  # seconds of lowering and binding, which searches of other batches profit from
        self._compile_s = math.inf

    def compile_within(self, seconds: float) -> None:
        """Sets the seconds that the next compilation may take. Longer ones are refused."""
        self._compile_s = seconds

    def whole(self, whole: str) -> list[Plan]:
        """Returns the predicted plans, smallest batch first, for `auto`, `wide` or `loop`."""
        return self.programs.plans(self.device.type, StrategyRequest(whole, plain=self.plain))

    def prediction(self) -> Plan:
        """Returns the predicted plan that serves this batch."""
        return for_size(self.whole("auto"), self.scaled, lambda p: p)

    @property
    def all(self) -> list[Candidate]:
        """All candidates."""
        return unique_candidates(list(self._by_key.values()))

    def candidate(self, name: str, plan: Plan, origin: str = "") -> Candidate | None:
        """Returns a plan as a bound candidate; None if it cannot run.

        If an earlier candidate runs the same program, it is returned. `origin` is as in `Candidate`.
        """
        plan = replace(plan, batch=self.classes, at=self.sizes.get(self.programs.batch, 0))
        strategies = sorted((n, c.strategy) for n, c in plan.choices.items())
        key = f"{plan.backend} {plan.workers} {sorted(plan.looped())} {strategies}"
        if key in self._by_key:
            return self._by_key[key]
        begin = time.perf_counter()
        try:
            if key not in self._lowered:
                self._lowered[key] = self.programs.lower(plan)
            lowered = self._lowered[key]
            program = lowered.program
            if plan.backend:
                program = for_compiler(program, plan.backend, self.device)
            same = f"{plan.backend} {plan.workers} {strict_json.digest(program.to_json())}"
            if same in self._by_key:  # the strategies that this plan names apply nowhere
                self._by_key[key] = self._by_key[same]
                return self._by_key[key]
            if self._key(lowered.program, plan) not in self._bound:
                _refuse_long_compilation(plan, program, self._compile_s)
            bound = self.bind(lowered.program, plan)
            bound.run(*self.inputs)
        except Exception as e:  # noqa: BLE001  # other runtimes fail with errors of their own; a plan that fails takes no part
            self.dropped[name] = f"{type(e).__name__}: {first_line(e)[:200]}"
            return None
        finally:
            self.making_s += time.perf_counter() - begin
        c = Candidate(name, plan, lowered.program, lowered.used, bound, origin)
        self._by_key[key] = self._by_key[same] = c
        self._time(c)
        return c

    def bind(self, program: Program, plan: Plan) -> Any:
        """Makes a program runnable, if no search of another batch has done it. Raises: as binding."""
        key = self._key(program, plan)
        if (kept := self._bound.get(key)) is not None:
            return kept
        self._bound[key] = bound = self._bind(program, plan)
        return bound

    @staticmethod
    def _key(program: Program, plan: Plan) -> tuple[int, str, int]:
        return id(program), plan.backend, plan.workers  # `lowered` keeps the program, and so its number

    def _time(self, c: Candidate) -> None:
        """Measures about how long a candidate takes, alternating with the fastest so far."""
        fastest = self._fastest if self._fastest is not None and self._fastest.bound is not None else c
        pair = self.call(c), self.call(fastest)
        tries = [[once(call, clock=self.clock) for call in pair]]
        while len(tries) < TRIES and sum(tries[0]) < LONG_S:
            tries.append([self._once_warm(call) for call in pair])
        c.seconds, least = (min(t) for t in zip(*tries))
        c.slower = c.seconds / least
        if c.slower <= 1:
            self._fastest = c

    def _once_warm(self, call: Callable[[], object]) -> float:
        """Returns the seconds of a call whose weights are in the caches, as in a race."""
        warm(call, long=LONG_S / 4)
        return once(call, clock=self.clock)

    def screened(self, c: Candidate | None) -> Candidate | None:
        """Returns a candidate unless it is much slower than another one. Then its memory is released."""
        if c is None or c.bound is None:
            return None
        if c.slower > self.slow and c.name not in KEPT:
            self.dropped[c.name] = f"{c.slower:.1f} times as slow as the fastest at that time"
            c.bound = None
            return None
        return c

    def named(self, name: str) -> Candidate | None:
        """Returns the predicted plan (`PREDICTED`) or the loop (`LOOP`), bound; None if it is wrong or
        fails.
        """
        if name in self.dropped:
            return None
        c = self.candidate(name, self.prediction() if name == PREDICTED else self.whole("loop")[0])
        return None if c is None or c.name in self.dropped else self.bound(c)

    def bound(self, c: Candidate) -> Candidate:
        """Binds a candidate again if it was released. Raises: what binding raises."""
        if c.bound is None:
            c.bound = self.bind(c.program, c.plan)
        return c

    def call(self, c: Candidate) -> Callable[[], object]:
        """Returns a call of a bound candidate, for timing."""
        run, inputs = c.bound.run, self.inputs
        return waited(lambda: run(*inputs), self.device)

    def is_right(self, c: Candidate) -> bool:
        """Returns whether the answers of a candidate are right, as it finds once. If not, it is dropped."""
        if c.name not in self._right:
            self._right.add(c.name)
            if words := self.right(c.bound):
                self.dropped[c.name] = words
        return c.name not in self.dropped

    def ready(self, *candidates: Candidate | None) -> list[Candidate]:
        """Returns the candidates that may race, each once."""
        return [
            c for c in unique_candidates(candidates) if c.bound is not None and c.name not in self.dropped
        ]

    def release_all_but(self, *candidates: Candidate | None) -> None:
        """Releases all other candidates, because packed weights are a copy in memory."""
        for c in self.all:
            if c not in candidates:
                c.bound = None


def affordable(candidates: Sequence[Candidate], round_s: float) -> list[Candidate]:
    """Returns the candidates whose round takes at most `round_s` seconds: the fastest of them.

    The predicted plan, the loop and the two fastest are always among them.
    """
    order = sorted(candidates, key=lambda c: (c.name not in KEPT, c.seconds))
    kept = sum(c.name in KEPT for c in order) + 2
    taken: list[Candidate] = []
    spent = 0.0
    for c in order:
        spent += CALLS_A_ROUND * c.seconds
        if len(taken) < kept or spent <= round_s:
            taken.append(c)
    return [c for c in candidates if c in taken]


def _refuse_long_compilation(plan: Plan, program: Program, seconds: float) -> None:
    """Refuses a program that a backend would compile for minutes or longer than `seconds`.

    Raises: UsageError.
    """
    if not plan.backend:
        return
    if plan.backend == "aot":
        if (nodes := nodes_unrolled(program)) > COMPILED:
            raise UsageError(
                f"{nodes} nodes with its loops unrolled, more than {COMPILED}: compilation would take long"
            )
        expected = COMPILER_S + NODE_S * nodes
    else:
        expected = ONNX_S + ONNX_NODE_S * program.node_count
        expected += 0 if "onnxscript" in sys.modules else ONNX_IMPORT_S
    if expected > seconds:
        raise UsageError(
            f"{TIME_OVER}: its compilation takes about {expected:.0f} s, and {seconds:.0f} s are left"
        )
