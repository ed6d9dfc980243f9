"""Runs comparison (b): wide programs against the members' float64 answers; a bisect finds the first wrong
node.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from widepack_artifacts.program import Node, Program

from ..errors import VerificationError
from ..ir.cast import raise_value, raised
from ..ir.fake_values import CPU
from ..lowering.lower import Lowered
from ..runtime.executable import Executable
from ..runtime.graph_module import evaluate_node
from . import equivalent_runs
from .subject import AnsweredCalls, Subject, VerifiedCall, Weights
from .tolerance import ErrorStats, with_same_places


@dataclass(frozen=True)
class WideRun:
    """A wide program, and the calls of its pattern that it answers.

    Attributes:
        answered: The members' answers.
        program: The wide program.
        weights: Its weights by source name: `[N, ...]`, shared, or a list of N.
        pattern: The pattern of inputs.
        members: The numbers of the N members.
        anywhere: (call, member, output) whose NaN and inf may be at any place.
    """

    answered: AnsweredCalls
    program: Program
    weights: Weights
    pattern: str
    members: Sequence[int]
    anywhere: Container[tuple[int, int, int]] = ()

    def check(self, stats: Sequence[ErrorStats]) -> None:
        """Adds the errors of the answers to `stats`.

        stats: for each output, with the members' own errors; `wrong()` then tells whether an answer is out of
        bounds. Raises: VerificationError if the program fails.
        """
        found = self.answered.found
        for call, i, wide in self.answers():
            for k, output in enumerate(stats):
                own, truth = found[call].own[i][k], found[call].truth[i][k]
                self._add(output, (call, i, k), wide[k], own, truth)

    def check_again(self, stats: Sequence[ErrorStats]) -> None:
        """As `check`, after it found an answer out of bounds: with further evaluations of each member.

        It raises the members' own errors in `stats` to at most `equivalent_runs.MOST` times as much, and
        compares near-ties with the float64 answer that decides them as the wide program does
        (`equivalent_runs.py`).
        """
        found = self.answered.found
        evaluations: dict[tuple[int, int], equivalent_runs.Evaluations] = {}
        for number, call in enumerate(self.answered.calls):
            for i in self.members if call.pattern == self.pattern else ():
                before = found[call.after].own[i] if call.after is not None else ()
                one = equivalent_runs.evaluate(self.answered.subject, i, call, before, found[number])
                evaluations[number, i] = one
        bounds = [output.max_bound for output in stats]
        for k, output in enumerate(stats):
            rows = [(e, found[c].truth[i][k]) for (c, i), e in evaluations.items()]
            equivalent_runs.raise_errors(output, k, rows, bounds[k])
        for number, i, wide in self.answers():
            several = evaluations[number, i]
            for k, output in enumerate(stats):
                own, truth = found[number].own[i][k], found[number].truth[i][k]
                least = equivalent_runs.own_rms(several, k, own, truth, bounds[k])
                own, truth = equivalent_runs.nearest(wide[k], own, truth, several.of(k), bounds[k])
                self._add(output, (number, i, k), wide[k], own, truth, least)

    def _add(
        self,
        output: ErrorStats,
        place: tuple[int, int, int],
        wide: torch.Tensor,
        own: torch.Tensor,
        truth: torch.Tensor,
        least_own: float = 0.0,
    ) -> None:
        """Adds the error of one answer. place: its call, member and output."""
        if place in self.anywhere:
            wide, own = with_same_places(wide, own)
        member, call = self.answered.subject.members[place[1]], self.answered.calls[place[0]]
        output.add_wide(member, call.label, wide, own, truth, least_own)

    def answers(self) -> Iterator[tuple[int, int, list[torch.Tensor]]]:
        """Yields (number of the call, member, its outputs) for the calls of the pattern.

        Raises: VerificationError if the program fails.
        """
        subject, run = self.answered.subject, Executable(self.program, self.weights, CPU)
        left: list[list[Any]] = []  # for each call the answers that the next step takes its states from
        for number, call in enumerate(self.answered.calls):
            left.append([])
            if call.pattern != self.pattern:
                continue
            before = left[call.after] if call.after is not None else ()
            try:
                wide = run.run(*subject.with_states(call.stacked(self.members), before))
            except (RuntimeError, IndexError, ValueError) as e:
                raise VerificationError(
                    f"the wide program ({self.pattern}) fails at {call.label}, where every member answers: "
                    f"{type(e).__name__}: {' '.join(str(e).split())[:300]}. "
                    "Please report it, or build with --strategy loop"
                ) from e
            for s in subject.states:
                left[-1] = left[-1] or list(wide)
                if self.program.outputs[s.output].kind == "shared":
                    value = wide[s.output]
                    left[-1][s.output] = value.unsqueeze(0).expand(len(self.members), *value.shape)
            for at, i in enumerate(self.members):
                outputs = zip(self.program.outputs, wide)
                yield number, i, [part if o.kind == "shared" else part[at] for o, part in outputs]


def bisect(
    subject: Subject,
    simplified: Sequence[Program],
    lowered: Lowered,
    weights: Weights,
    call: VerifiedCall,
    members: Sequence[int],
) -> str:
    """Returns the first node of the member program whose wide value is wrong; "" if no comparable value is.

    simplified: the member programs that were lowered. members: the numbers of the wide program's members.
    """
    wide = values_of(lowered.program, weights, call.stacked(members))
    stats: dict[str, ErrorStats] = {}
    rows: dict[str, list[Any]] = {}
    for place, i in enumerate(members):
        program = simplified[subject.signatures[i]]
        own = values_of(program, subject.weights(i), call.inputs[i])
        truth = _float64_values(program, subject.weights(i), call.inputs[i])
        for node in program.nodes:
            name = lowered.values.get(node.name, "")
            if name in wide and isinstance(own[node.name], torch.Tensor):
                part = wide[name] if lowered.kinds[node.name] == "shared" else wide[name][place]
                exact = truth[node.name]
                stats.setdefault(node.name, ErrorStats(node.name)).add_own(own[node.name], exact)
                rows.setdefault(node.name, []).append((subject.members[i], part, own[node.name], exact))
    for node in simplified[0].nodes:
        for member, part, own_value, exact in rows.get(node.name, ()):
            stats[node.name].add_wide(member, call.label, part, own_value, exact)
        if node.name in stats and (wrong := stats[node.name].wrong()):
            strategy = lowered.used.get(node.name, "?")
            return f"first wrong node: {node.name} ({node.op}, strategy {strategy}{_from(node)}): {wrong}"
    return ""


def _float64_values(program: Program, weights: Weights, inputs: Sequence[Any]) -> dict[str, Any]:
    return values_of(
        raised(program), {k: raise_value(v) for k, v in weights.items()}, [raise_value(x) for x in inputs]
    )


def _from(node: Node) -> str:
    return f", from {node.source}" if node.source else ""


def bits_warning(program: Program) -> str:
    """Returns a sentence for the error of a program that reads whole numbers out of the bits of floats; else
    "".
    """
    node = next(
        (n for n in program.nodes if n.op == "aten.view.dtype" and n.out.startswith(("int", "uint"))), None
    )
    if node is None:
        return ""
    return (
        f". Integers are computed from the bits of floats ({node.name}{_from(node)}): they change if "
        "the last bit of a float is rounded differently, which may happen when N members run at once; "
        "return the floats, or compare and round them as floats"
    )


def values_of(program: Program, weights: Weights, inputs: Sequence[Any]) -> dict[str, Any]:
    """Runs a program node by node, and returns every value by name. weights: by source name."""
    given = [*(weights[s.source] for s in program.weights), *inputs]
    values = {s.name: v for s, v in zip((*program.weights, *program.inputs), given)}
    with torch.inference_mode():
        for node in program.nodes:
            values[node.name] = evaluate_node(node, values, program.members, CPU)
    return values
