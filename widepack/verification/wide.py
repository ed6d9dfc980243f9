"""Runs comparison (b): wide programs against the members' float64 answers; a bisect finds the first wrong
node.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import Any

import torch

from widepack_artifacts.program import Node, Program, substitute

from ..errors import VerificationError
from ..ir import ops
from ..ir.cast import raise_value, raised
from ..ir.encoding import decode
from ..ir.fake_values import CPU
from ..lowering.lower import Lowered
from ..runtime.executable import Executable
from ..runtime.graph_module import Loop
from . import equivalent_runs
from .subject import MemberAnswers, Subject, VerifiedCall, Weights
from .tolerance import ErrorStats, with_same_places


def check_wide(
    subject: Subject,
    program: Program,
    weights: Weights,
    pattern: str,
    calls: Sequence[VerifiedCall],
    found: Sequence[MemberAnswers],
    stats: Sequence[ErrorStats],
    members: Sequence[int],
    anywhere: Container[tuple[int, int, int]] = (),
) -> None:
    """Runs one wide program on the calls of its pattern, and adds the errors of its answers to `stats`.

    weights: by source name: `[N, ...]`, shared, or a list of N. found: the members' answers, for each call.
    stats: for each output, with the members' own errors; `wrong()` then tells whether an answer is out of
    bounds. members: the numbers of the N members. anywhere: (call, member, output) whose NaN and inf may
    be at any place. Raises: VerificationError if the program fails.
    """
    for call, i, wide in wide_answers(subject, program, weights, pattern, calls, members):
        for k, output in enumerate(stats):
            own, truth = found[call].own[i][k], found[call].truth[i][k]
            if (call, i, k) in anywhere:
                wide[k], own = with_same_places(wide[k], own)
            output.add_wide(subject.members[i], calls[call].label, wide[k], own, truth)


def check_again(
    subject: Subject,
    program: Program,
    weights: Weights,
    pattern: str,
    calls: Sequence[VerifiedCall],
    found: Sequence[MemberAnswers],
    stats: Sequence[ErrorStats],
    members: Sequence[int],
    anywhere: Container[tuple[int, int, int]] = (),
) -> None:
    """As `check_wide`, after it found an answer out of bounds: with further evaluations of each member.

    It raises the members' own errors in `stats` to at most `equivalent_runs.MOST` times as much, and compares
    near-ties with the float64 answer that decides them as the wide program does (`equivalent_runs.py`).
    """
    evaluations = {
        (c, i): e for c, i, e in equivalent_runs.evaluations_of(subject, pattern, calls, found, members)
    }
    bounds = [output.max_bound for output in stats]
    for k, output in enumerate(stats):
        rows = [(e, found[c].truth[i][k]) for (c, i), e in evaluations.items()]
        equivalent_runs.raise_errors(output, k, rows, bounds[k])
    for call, i, wide in wide_answers(subject, program, weights, pattern, calls, members):
        several = evaluations[call, i]
        for k, output in enumerate(stats):
            own, truth = found[call].own[i][k], found[call].truth[i][k]
            least = equivalent_runs.own_rms(several, k, own, truth, bounds[k])
            own, truth = equivalent_runs.nearest(wide[k], own, truth, several.of(k), bounds[k])
            if (call, i, k) in anywhere:
                wide[k], own = with_same_places(wide[k], own)
            output.add_wide(subject.members[i], calls[call].label, wide[k], own, truth, least)


def wide_answers(
    subject: Subject,
    program: Program,
    weights: Weights,
    pattern: str,
    calls: Sequence[VerifiedCall],
    members: Sequence[int],
) -> Iterator[tuple[int, int, list[torch.Tensor]]]:
    """Yields (number of the call, member, its outputs) of a wide program on the calls of its pattern.

    Raises: VerificationError if the program fails.
    """
    run = Executable(program, weights, CPU)
    left: list[list[Any]] = []  # for each call the answers that the next step takes its states from
    for number, call in enumerate(calls):
        left.append([])
        if call.pattern != pattern:
            continue
        before = left[call.after] if call.after is not None else ()
        try:
            wide = run.run(*subject.with_states(call.stacked(members), before))
        except (RuntimeError, IndexError, ValueError) as e:
            raise VerificationError(
                f"the wide program ({pattern}) fails at {call.label}, where every member answers: "
                f"{type(e).__name__}: {' '.join(str(e).split())[:300]}. "
                "Please report it, or build with --strategy loop"
            ) from e
        for s in subject.states:
            left[-1] = left[-1] or list(wide)
            if program.outputs[s.output].kind == "shared":
                value = wide[s.output]
                left[-1][s.output] = value.unsqueeze(0).expand(len(members), *value.shape)
        for at, i in enumerate(members):
            outputs = zip(program.outputs, wide)
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
        raised(program),
        {k: raise_value(v) for k, v in weights.items()},
        [raise_value(x) for x in inputs],
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
    """Runs a program node by node, and returns every value by name."""
    values: dict[str, Any] = {s.name: weights[s.source] for s in program.weights}
    values.update({s.name: x for s, x in zip(program.inputs, inputs)})
    with torch.inference_mode():
        for node in program.nodes:
            args = decode(substitute(node.args, values.__getitem__), CPU)
            if node.body is not None:
                values[node.name] = Loop(node.body, program.members, CPU)(*args)
            else:
                kwargs = decode(substitute(node.kwargs, values.__getitem__), CPU)
                values[node.name] = ops.function(node.op)(*args, **kwargs)
    return values
