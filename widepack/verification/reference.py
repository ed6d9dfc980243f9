"""Computes the reference answers of an entry once, and runs comparison (b): wide programs against the
members' float64 answers. A bisect finds the first wrong node.

The record of the manifest and the tensors of the probe come from the same answers.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from widepack_artifacts.program import Node, Program

from ..errors import VerificationError
from ..ir.cast import raise_value, raised
from ..ir.fake_values import CPU
from ..lowering.lower import Lowered
from ..lowering.pattern_programs import LoweringEntry
from ..planning.plan import Plan
from ..runtime.executable import Executable
from ..runtime.graph_module import evaluate_node
from ..spec.entries import PATTERNS
from ..spec.state import BUFFER
from ..system.memory import give_back
from ..system.progress import Stages
from . import answers, equivalent_runs, probe
from .calls import shifted
from .parts import MemberPart, WeightsReader, all_weights, parts
from .record import NOT_FINITE, reference_text
from .subject import AnsweredCalls, CallCase, MemberAnswers, Subject, VerifiedCall, Weights
from .tolerance import ErrorStats, floating, with_same_places


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
        rounding = []
        for k, output in enumerate(stats):
            rows = [(e, found[c].truth[i][k]) for (c, i), e in evaluations.items()]
            rounding.append(equivalent_runs.raise_errors(output, k, rows, bounds[k]))
        for number, i, wide in self.answers():
            several = evaluations[number, i]
            for k, output in enumerate(stats):
                own, truth = found[number].own[i][k], found[number].truth[i][k]
                least = equivalent_runs.own_rms(several, k, own, truth, bounds[k])
                own, truth = equivalent_runs.nearest(wide[k], own, truth, several.of(k), bounds[k])
                self._add(output, (number, i, k), wide[k], own, truth, least)
        for output, error in zip(stats, rounding):
            output.doubt_rounding(error)

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


SMALL_BATCHES = (2, 1, 5)  # for a small call, the preferred first


@dataclass(frozen=True)
class ComparedOutputs:
    """What comparison (b) measured of a wide program.

    Attributes:
        stats: The errors of each output.
        at_once: How many members were compared at a time; None if all were.
    """

    stats: Sequence[ErrorStats]
    at_once: int | None


class ReferenceAnswers:
    """The members' answers to the calls of a verification, and what is checked against them.

    Args:
        entry: The entry whose programs are compared.
        subject: Its members.
        weights: Reads the members' weights.
        calls: The calls.
        stages: Reports each member that has answered.

    Attributes:
        own: The answers.
        shifted: The answers to calls whose inputs have an offset.

    Raises: VerificationError for a wrong capture, and for a member that fails where others answer.
    """

    def __init__(
        self,
        entry: LoweringEntry,
        subject: Subject,
        weights: WeightsReader,
        calls: Sequence[VerifiedCall],
        stages: Stages,
    ) -> None:
        self.entry, self.subject, self.weights = entry, subject, weights
        self.own = answers.collect(subject, calls, stages.step)
        if not self.own.float64:
            for output in self.own.stats:
                output.widen()
        some = shifted(subject, calls) if self.own.float64 else ()
        self.shifted = [answers.collect_shifted(subject, one) for one in some]

    def accept_float64(self, ulps: int) -> None:
        """Raises the own errors of outputs in float64 to a number of ulp of their rms."""
        for output in (s for answered in (self.own, *self.shifted) for s in answered.stats):
            output.accept_float64(ulps)

    def check(
        self,
        pattern: str,
        program: Program,
        plan: Plan,
        lowered: Lowered | None,
        way_out: str,
        members: Iterable[range] = (),
    ) -> ComparedOutputs:
        """Runs comparison (b) of a wide program.

        plan: what it was lowered by. lowered: the lowering, if it was made now. way_out: the end of the error
        message. members: the parts of the members that the program is for; none for all members. Raises:
        VerificationError, which names the first wrong node.
        """
        stats = [output.without_wide() for output in self.own.stats]
        programs = self.entry.of_pattern(pattern)
        divided = [
            part
            for some in tuple(members) or (range(self.entry.count),)
            for part in parts(programs.of_members(some), some, program, plan, lowered)
        ]
        for part in divided:
            weights = all_weights(part.program, self.weights, self.entry.count, part.members)
            give_back()
            self.subject.readahead(part.members)
            stats, wrong = self._compared(part, weights, pattern, self.own, stats)
            for some in self.shifted:
                if not wrong and some.calls:
                    own = [output.without_wide() for output in some.stats]
                    _, wrong = self._compared(part, weights, pattern, some, own)
            if wrong:
                doubt = next((output.doubt for output in stats if output.wrong()), "")
                raise VerificationError(
                    f"the wide program ({self.entry.entry}, {pattern}) {'may be' if doubt else 'is'} wrong: "
                    f"{wrong}. {doubt or self._where(part, pattern, weights)}. {way_out}"
                )
        return ComparedOutputs(stats, len(divided[0].members) if len(divided) > 1 else None)

    def _compared(
        self,
        part: MemberPart,
        weights: Weights,
        pattern: str,
        answered: AnsweredCalls,
        stats: list[ErrorStats],
    ) -> tuple[list[ErrorStats], str]:
        """Runs a wide program on calls.

        Returns: the errors with those of its answers added, and what is wrong.
        """
        before = [list(output.wide) for output in stats]
        anywhere = self._anywhere_in(answered.found)
        run = WideRun(answered, part.program, weights, pattern, part.members, anywhere)
        run.check(stats)
        wrong = _wrong(stats)
        # one evaluation of a member is a small sample of its own error; bits of floats have no error
        if wrong and not bits_warning(part.program):
            again = [output.with_wide(rows) for output, rows in zip(stats, before)]
            run.check_again(again)
            if not _wrong(again):
                return again, ""
            for output, evaluated in zip(stats, again):
                output.doubt = output.doubt or evaluated.doubt
        return stats, wrong

    def _where(self, part: MemberPart, pattern: str, weights: Weights) -> str:
        """Returns a sentence that names the first wrong node."""
        if part.lowered is None:
            return "Which of its nodes is off was not looked for"
        call = next(c for c in self.own.calls if c.pattern == pattern)
        simplified = self.entry.simple(pattern)
        known = self.subject.weights(part.members[0])
        if any(slot.source not in known for program in simplified for slot in program.weights):
            return "It computes with the factors of members, which a member alone does not have"
        node = bisect(self.subject, simplified, part.lowered, weights, call, part.members)
        return (node or "no single node exceeds its bound") + bits_warning(simplified[0])

    def record(self, capture: Mapping[str, Any], compared: Mapping[str, ComparedOutputs]) -> dict[str, Any]:
        """Returns the record for the manifest.

        capture: what it says of comparison (a). compared: comparison (b) by `record.program_key`.
        """
        in_parts = {key: one.at_once for key, one in compared.items() if one.at_once is not None}
        return {
            "calls": [f"{c.pattern} {c.label}" for c in self.own.calls],
            "truth": reference_text(self.own.float64),
            "nested_tensor_fast_path": "off",
            **capture,
            "wide": {key: [output.record() for output in one.stats] for key, one in compared.items()},
            **({NOT_FINITE: rows} if (rows := self.not_finite()) else {}),
            **({"parts": in_parts} if in_parts else {}),
            "torch": torch.__version__,
        }

    @cached_property
    def anywhere(self) -> frozenset[tuple[int, int]]:
        """(member, output) whose NaN and inf may be at other places than in the member's own answer.

        Other members answer the output with finite numbers. The member's weights are not finite, or are so
        large that its answers leave the dtype: in float64 they are finite.
        """
        rows = self._rows_not_finite()
        return frozenset((i, k) for i, k, _, _ in rows if i in self._broken or self._overflows(i, k))

    @cached_property
    def _broken(self) -> frozenset[int]:
        """Members with answers and weights that are not finite."""
        return frozenset(
            i
            for i in {i for i, _, _, _ in self._rows_not_finite()}
            if any(floating(w) and not torch.isfinite(w).all() for w in self.subject.arguments(i))
        )

    def _anywhere_in(self, found: Sequence[MemberAnswers]) -> frozenset[tuple[int, int, int]]:
        """Returns (call, member, output) of the answers whose NaN and inf may be at other places.

        Numbers of a member with finite weights leave the dtype in some calls only. Its answers to other calls
        are finite, and stay so. found: the members' answers, for each call.
        """
        return frozenset(
            (call, i, k)
            for call, answer in enumerate(found)
            for i, k in self.anywhere
            if i in self._broken or not bool(torch.isfinite(answer.own[i][k]).all())
        )

    def _overflows(self, i: int, k: int) -> bool:
        """Returns whether an answer of a member is not finite only because numbers leave its dtype.

        Another call must be finite, and show what the wide program computes of this member: otherwise NaN
        everywhere would pass.
        """
        pairs = [(a.own[i][k], a.truth[i][k]) for a in self.own.found]
        return (
            self.own.float64
            and all(bool(torch.isfinite(truth).all()) for _, truth in pairs)
            and any(bool(torch.isfinite(own).all()) for own, _ in pairs)
        )

    def not_finite(self) -> list[dict[str, Any]]:
        """Returns the members whose own answers have NaN or inf in an output that is finite for others.

        Each row has `member`, `output`, `numbers` (how many are not finite), `of` (how many there are), and
        `places`: `any` if they may be at other places in the wide program's answers, else `own`.
        """
        members, outputs = self.subject.members, self.subject.outputs
        return [
            {
                "member": members[i],
                "output": outputs[k] or str(k),
                "numbers": numbers,
                "of": of,
                "places": "any" if (i, k) in self.anywhere else "own",
            }
            for i, k, numbers, of in self._rows_not_finite()
        ]

    def _rows_not_finite(self) -> list[tuple[int, int, int, int]]:
        """Returns (member, output, numbers that are not finite, numbers) of each row of `not_finite`."""
        rows = []
        count = len(self.subject.members)
        for k in range(len(self.subject.outputs)):
            bad = [
                sum(int((~torch.isfinite(a.own[i][k])).sum()) for a in self.own.found) for i in range(count)
            ]
            # If all members have some, they are probably meant, like a mask of -inf.
            meant = all(bad)
            sizes = [sum(a.own[i][k].numel() for a in self.own.found) for i in range(count)]
            rows += [
                (i, k, n, of)
                for i, (n, of) in enumerate(zip(bad, sizes))
                if n and (not meant or self._overflows(i, k))
            ]
        return rows

    def small(self, pattern: str) -> VerifiedCall:
        """Returns the call at batch 2; if it is missing, at another small batch, or the first call."""
        order = [CallCase.of_sizes({self.entry.batch: n}) for n in SMALL_BATCHES]
        return min(
            (c for c in self.own.calls if c.pattern == pattern),
            key=lambda c: order.index(c.case) if c.case in order else len(order),
        )

    def probed(self, own: Sequence[VerifiedCall] = ()) -> dict[str, probe.Answers]:
        """Returns the calls of the probe by the prefix of their tensors.

        own: the calls to take, at most one for each pattern. Default: a small one.
        """
        buffers = {s.input for s in self.entry.states if s.how == BUFFER}
        found: dict[str, probe.Answers] = {}
        for pattern in PATTERNS:
            call = next((c for c in own if c.pattern == pattern), None) or self.small(pattern)
            inputs = [None if k in buffers else x for k, x in enumerate(call.stacked())]
            answer = next(answer for c, answer in zip(self.own.calls, self.own.found) if c is call)
            zero = [output.cancels for output in self.own.stats]
            truths = [list(map(_as_answered, *pair, zero)) for pair in zip(answer.own, answer.truth)]
            found[f"{probe.prefix(self.entry.entry)}{pattern}"] = inputs, truths
        return found


def _as_answered(own: torch.Tensor, truth: torch.Tensor, zero: bool) -> torch.Tensor:
    """Returns the float64 answer with infinities and NaN where the member's own answer leaves its dtype.

    zero: whether the answer is zero but for the rounding of float64, which is recorded as 0.
    """
    truth = torch.where(torch.isfinite(truth), 0, truth) if zero else truth
    if not floating(own) or own.shape != truth.shape or bool(torch.isfinite(own).all()):
        return truth
    return torch.where(torch.isfinite(own), truth, own.to(truth.dtype))


def _wrong(stats: Sequence[ErrorStats]) -> str:
    """Returns a description of the first answer out of bounds, or "" if all are right."""
    return next((words for output in stats if (words := output.wrong())), "")


def not_finite(records: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the `not_finite` rows of all entries' records, with the entry's name. records: by entry."""
    return [
        {"entry": entry, **row} for entry, record in records.items() for row in record.get(NOT_FINITE, [])
    ]
