"""Evaluates members again after a first comparison failed, before an answer is called wrong.

One evaluation of a member is a small sample of its rounding error. So the member's own program runs again, on
numbers in contiguous memory:

| evaluation | what it changes |
|---|---|
| oneDNN off | the kernels of convolutions and linear layers |
| the batch in two halves | the blocks of sums; only if rows are independent in float64 |
| weights and inputs moved by one ulp | what the first layers round, which later ones may amplify |

1. The own error is the largest of these evaluations, and at most `MOST` times the one that was measured
   first. The factors of the bound do not change. The rms error does not count where a few numbers are far
   larger than all others, as among answers of `exp`: it is the error of one number, a single sample.
2. Where rounding decides a near-tie otherwise than float64 (the nearest code of a quantiser, the winner of a
   topk), a wide answer is right if it is within the bound of the answer with the other decision
   (`other_decisions`). That answer is computed in float64, and only decisions with a margin below the bound
   of the compared numbers differ in it.

A comparison, a rounding to whole numbers or an argmax decides. Where a number is as close to the other side
as its rounding error, both decisions are right: a near-tie. The member's program runs in float64, and at each
decision the numbers that are compared are moved by the bound of their own rounding error:

    margin = 4x the largest error of these numbers in the member's own dtype + 4 ulp of their rms

The own errors are those of the member with the decisions of float64, so an earlier near-tie is no error. Only
a decision whose margin in float64 is smaller can change. Where it does not, the answer stays that of float64.
Numbers that the member computes without an error have no margin, so nothing is decided otherwise.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from widepack_artifacts.program import Node, Program, substitute

from ..ir import ops
from ..ir.cast import raise_value, raised
from ..ir.encoding import decode
from ..ir.fake_values import CPU
from ..kernels.exact_norms import as_torch_computes
from ..runtime.graph_module import Loop
from ..runtime.walk import last_uses
from .rounding import moved_by_an_ulp
from .subject import MemberAnswers, Subject, VerifiedCall
from .tolerance import ErrorStats, RootMeanSquare, few_count, floating, measure, root_mean_square

DRAWS = 16  # of the directions in which numbers are moved
_JUMPS = frozenset(
    ("ceil", "fake_quantize_per_channel_affine", "fake_quantize_per_tensor_affine", "floor", "floor_divide")
) | {"fmod", "frac", "grid_sampler_2d", "grid_sampler_3d", "heaviside", "remainder", "round", "sgn"}
_JUMPS |= {"sign", "special_round", "trunc"}
"""Ops whose floating answers jump. Ops with whole numbers or truth values among their answers are found by
these.
"""
_ROUNDED_QUOTIENTS = ("aten.div.Tensor_mode", "aten.div.Scalar_mode")
_Step = Callable[[Node, Callable[..., Any], list[Any]], Any]
"""Gets a node, what computes it (of operands that a function changes, if one is given), and its operands:
positional ones, and a dict of the others. Returns the node's value.
"""


def other_decisions(program: Program, weights: Sequence[Any], inputs: Sequence[Tensor]) -> list[list[Any]]:
    """Returns float64 answers of a member, in each of which near-ties are decided in another way.

    Args:
        program: The member program.
        weights: Its weights, in the order in which the program takes them.
        inputs: The inputs of a call.

    Returns:
        For each draw the outputs; nothing if the program decides nothing.
    """
    with torch.inference_mode():
        margins = _margins(program, weights, inputs)
        if not any(margins.values()):
            return []
        exact = raised(program)
        given = [raise_value(v) for v in (*weights, *inputs)]
        return [_with_other_decisions(exact, given, margins, seed) for seed in range(DRAWS)]


def _margins(program: Program, weights: Sequence[Any], inputs: Sequence[Tensor]) -> dict[str, float]:
    """Returns the margin of each node that decides, by its name."""
    decided: dict[str, Any] = {}
    operands: dict[str, list[Any]] = {}

    def note(node: Node, compute: Callable[[], Any], given: list[Any]) -> Any:
        value = compute()
        if _decides(node, value, given):
            decided[node.name], operands[node.name] = value, given
        return value

    _run_nodes(raised(program), [raise_value(v) for v in (*weights, *inputs)], note)
    margins: dict[str, float] = {}

    def as_decided(node: Node, compute: Callable[[], Any], given: list[Any]) -> Any:
        value = compute()
        if node.name not in decided:
            return value
        margins[node.name] = max(map(_margin, _floats(given), _floats(operands.pop(node.name))), default=0.0)
        return pytree.tree_map(
            lambda own, truth: truth.to(own.dtype) if isinstance(own, Tensor) else own,
            value,
            decided.pop(node.name),
        )

    with as_torch_computes():
        _run_nodes(program, [*weights, *inputs], as_decided)
    return margins


def _margin(own: Tensor, truth: Tensor) -> float:
    """Returns the bound of the rounding error of numbers that are compared; 0 if they have none."""
    if own.shape != truth.shape or own.numel() == 0:
        return 0.0
    finite = torch.isfinite(own) & torch.isfinite(truth)
    if not bool(finite.any()):
        return 0.0
    own, truth = own[finite], truth[finite]
    largest = float((own.to(truth.dtype) - truth).abs().max())
    eps = torch.finfo(own.dtype).eps
    return 4 * largest + 4 * eps * root_mean_square(truth) if largest else 0.0


def _with_other_decisions(
    program: Program, given: Sequence[Any], margins: Mapping[str, float], seed: int
) -> list[Any]:
    """Returns the outputs with the operands of each decision moved by their margin, up or down."""
    generator = torch.Generator().manual_seed(seed)

    def moved(node: Node, compute: Callable[..., Any], operands: list[Any]) -> Any:
        value = compute()
        margin = margins.get(node.name, 0.0)
        if not margin:
            return value

        def move(x: Any) -> Any:
            if not (isinstance(x, Tensor) and x.is_floating_point()):
                return x
            sign = torch.randint(2, x.shape, generator=generator, dtype=torch.int8)
            return x + margin * (2 * sign - 1).to(x.dtype)

        return pytree.tree_map(lambda a, b: _jump(a, b, 2 * margin), value, compute(move))

    return _run_nodes(program, given, moved)


def _jump(value: Any, other: Any, margin: float) -> Any:
    """Returns another decision where there is one. A floating number that only moved stays as it was."""
    if not isinstance(value, Tensor) or value.shape != other.shape or not value.is_floating_point():
        return other
    return torch.where((value - other).abs() <= margin, value, other)


def _decides(node: Node, value: Any, operands: Sequence[Any]) -> bool:
    """Returns whether a node turns floating numbers into something that does not change with them alone."""
    found = [v for v in pytree.tree_leaves(value) if isinstance(v, Tensor)]
    if node.body is not None or not _floats(operands) or node.op.endswith("view.dtype"):
        return False
    whole = any(not v.is_floating_point() and not v.is_complex() for v in found)
    name = node.op.split(".")[1] if "." in node.op else node.op
    return whole or name in _JUMPS or node.op in _ROUNDED_QUOTIENTS


def _floats(values: Any) -> list[Tensor]:
    return [v for v in pytree.tree_leaves(values) if isinstance(v, Tensor) and v.is_floating_point()]


def _run_nodes(program: Program, given: Sequence[Any], step: _Step) -> list[Any]:
    """Runs a program node by node, and returns its outputs.

    given: the weights, then the inputs. step: returns the value of each node.
    """
    slots = [*program.weights, *program.inputs]
    values: dict[str, Any] = {s.name: v for s, v in zip(slots, given)}
    for node, ended in zip(program.nodes, last_uses(program)):
        operands = list(decode(substitute((node.args, node.kwargs), values.__getitem__), CPU))
        function: Any = ops.function(node.op) if node.body is None else Loop(node.body, program.members, CPU)

        def compute(
            change: Callable[[Any], Any] | None = None, function: Any = function, operands: Any = operands
        ) -> Any:
            args, kwargs = operands if change is None else pytree.tree_map(change, operands)
            return function(*args, **kwargs)

        values[node.name] = step(node, compute, operands)
        for name in ended:
            values.pop(name, None)
    return [decode(substitute(o.value, values.__getitem__), CPU) for o in program.outputs]


MOST = 2.0
"""How many times the member's own error of the first evaluation its error may count, at most."""

Run = Callable[[Sequence[torch.Tensor]], list[Any]]


@dataclass
class Evaluations:
    """The outputs of further evaluations of one member in one call.

    Attributes:
        equal: Those in the member's dtype, of numbers that are equal up to one ulp: for each evaluation its
            outputs.
        decided: Those in float64 with near-ties that are decided otherwise.
    """

    equal: list[list[torch.Tensor]] = field(default_factory=list)
    decided: list[list[torch.Tensor]] = field(default_factory=list)

    def of(self, output: int) -> list[torch.Tensor]:
        """Returns the answers with other decisions for an output."""
        return [answers[output] for answers in self.decided]


def evaluate(
    subject: Subject, i: int, call: VerifiedCall, before: Sequence[Any], answers: MemberAnswers
) -> Evaluations:
    """Evaluates member i again. Ways that fail are left out.

    before: the outputs of the call that this one follows. answers: the call's answers, for its shapes.
    """
    weights, inputs = subject.arguments(i), subject.with_states(call.inputs[i], before)
    own, found = answers.own[i], Evaluations()

    def run(inputs: Sequence[torch.Tensor]) -> list[Any]:
        with as_torch_computes():
            return list(subject.run(i)(*weights, *inputs))

    ways: list[tuple[list[list[torch.Tensor]], Callable[[], list[list[Any]]]]] = [
        (found.equal, lambda: [_without_onednn(run, inputs)]),
        (found.equal, lambda: [list(moved_by_an_ulp(subject, i)(inputs))]),
        (found.decided, lambda: other_decisions(subject.program(i), weights, inputs)),
    ]
    if _halves_are_equal(subject, i, weights, inputs, answers):
        ways.append((found.equal, lambda: [_in_halves(run, inputs)]))
    for into, way in ways:
        try:
            with torch.inference_mode():
                several = way()
        except (RuntimeError, IndexError, ValueError):
            continue
        for outputs in several:
            if all(isinstance(a, torch.Tensor) and a.shape == o.shape for a, o in zip(outputs, own)):
                into.append(outputs)
    return found


def raise_errors(
    stats: ErrorStats, output: int, rows: Sequence[tuple[Evaluations, torch.Tensor]], bound: float
) -> float:
    """Raises the members' own errors of an output to those of the equal evaluations, within `MOST`.

    Returns the largest error of an equal evaluation.

    rows: for each member and call its evaluations and its float64 answer. bound: where members decide
    near-ties, a number that is further off was decided otherwise, and does not count.
    """
    bound, largest = bound if any(e.decided for e, _ in rows) else math.inf, 0.0
    most_rms, most = MOST * stats.own_rms, MOST * stats.own_max
    for number in range(max((len(e.equal) for e, _ in rows), default=0)):
        errors = RootMeanSquare()
        for evaluations, truth in rows:
            if number < len(evaluations.equal):
                errors.add(_errors(evaluations.equal[number][output], truth, bound))
        stats.raise_own(min(errors.value, most_rms), min(errors.largest, most))
        largest = max(largest, errors.largest)
    return largest


def own_rms(
    evaluations: Evaluations, output: int, own: torch.Tensor, truth: torch.Tensor, bound: float
) -> float:
    """Returns the largest rms error of one member's equal evaluations in one call, within `MOST`.

    own: the answer of the first evaluation. Where a few numbers are far larger than all others, the result is
    infinite: the largest error alone counts.
    """
    if few_count(truth):
        return math.inf
    found = [_errors(answers[output], truth, bound) for answers in evaluations.equal]
    largest = max(map(root_mean_square, found), default=0.0)
    return min(largest, MOST * measure("", "", own, own, truth).own)


def nearest(
    wide: torch.Tensor, own: torch.Tensor, truth: torch.Tensor, others: Sequence[torch.Tensor], bound: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the own and the float64 answer that a wide answer is compared with.

    Where an answer with other decisions is further than `bound` from float64 and the wide answer is nearer to
    it, it replaces them. Whole numbers are replaced where the wide answer equals one of these answers.
    """
    if wide.shape != own.shape or wide.dtype != own.dtype:
        return own, truth
    if not floating(own):
        for other in (*others, *([truth] if truth.shape == own.shape else [])):
            own = torch.where(wide == other.to(own.dtype), other.to(own.dtype), own)
        return own, truth
    if truth.shape != own.shape:
        return own, truth
    found, best = wide.to(truth.dtype), truth
    for other in others:
        value = other.to(truth.dtype)
        nearer = ((value - truth).abs() > bound) & ((found - value).abs() < (found - best).abs())
        own, best = torch.where(nearer, other.to(own.dtype), own), torch.where(nearer, value, best)
    return own, best


def _errors(answer: torch.Tensor, truth: torch.Tensor, bound: float) -> torch.Tensor:
    """Returns the errors of the numbers that are finite and within the bound."""
    if not floating(answer) or answer.shape != truth.shape:
        return torch.zeros(0, dtype=torch.float64)
    error = (answer.to(truth.dtype) - truth).abs()
    return error[error <= bound]


def _without_onednn(run: Run, inputs: Sequence[torch.Tensor]) -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of settings of Intel GPUs
        with torch.backends.mkldnn.flags(enabled=False):
            return run(inputs)


def _in_halves(run: Run, inputs: Sequence[torch.Tensor]) -> list[Any]:
    half = inputs[0].shape[0] // 2
    parts = [run([x[:half] for x in inputs]), run([x[half:] for x in inputs])]
    return [torch.cat(pair) for pair in zip(*parts)]


def _halves_are_equal(
    subject: Subject, i: int, weights: Sequence[Any], inputs: Sequence[torch.Tensor], answers: MemberAnswers
) -> bool:
    """Returns whether the batch is axis 0 of all inputs and outputs, and its rows are independent."""
    rows = {x.shape[0] if x.dim() else 0 for x in (*inputs, *answers.own[i])}
    if len(rows) != 1 or min(rows) < 2:
        return False

    exact = subject.float64_function(i, weights)
    try:
        whole, halves = exact(inputs), _in_halves(exact, inputs)
    except (RuntimeError, IndexError, ValueError):
        return False
    return all(
        a.shape == b.shape and torch.allclose(a, b, rtol=1e-9, atol=1e-12, equal_nan=True)
        for a, b in zip(whole, halves)
    )
