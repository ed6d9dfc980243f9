"""Compares gradients of a wide program with the members' modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch

from widepack_artifacts.program import Program

from ..errors import VerificationError
from ..ir.cast import raise_program
from ..ir.random_ops import without_randomness
from ..spec.draws import InputSource, draw_all
from .gradient_causes import way_out
from .gradient_differences import WAY_OUT, ExactGradients, compare_gradients
from .gradients import Gradients, gradients_of, weighted_sum
from .member_runs import LiveMembers, run_module, run_program
from .program_runs import DifferentiableProgram
from .programs import CPU, FusedEntry, Runner

ALL = -1  # the number that stands for all members
DRAWS = 3  # how often gradients that a near-tie may have changed are compared again


def check_gradients(
    fused: LiveMembers,
    entry: FusedEntry,
    runner: Runner,
    resting: Program,
    sources: Sequence[InputSource],
    draws: bool,
) -> None:
    """Compares the gradients of a wide program, with its random ops at rest, with the members' own.

    Nothing is compared if a member has no gradients, because torch has no derivative of one of its ops.

    Args:
        fused: The fused module.
        entry: The entry of the program.
        runner: What runs the program.
        resting: The member program at rest.
        sources: How the inputs are drawn.
        draws: Whether the members' modules draw. Then the member program at rest gives the expected
            gradients.

    Raises:
        VerificationError: A gradient differs.
    """
    names = trained(fused, entry)
    if not _has_gradients(fused, draw_all(sources, entry.sizes, 3), names):
        return
    unread = [n for n, p in fused.named_parameters() if p.requires_grad and n not in names]
    run = _GradientCheck(fused, entry, runner, resting, sources, draws, names, unread)
    near_ties = _near_ties(run, 3)
    for number in range(1, DRAWS + 1):  # other inputs have no near-ties at the same places
        if near_ties:
            near_ties &= _near_ties(run, 3 + 1000 * number)
    if near_ties:
        i, name = min(near_ties)
        whose = "all members" if i == ALL else f"member {i}"
        raise VerificationError(
            f"the gradient of {name} of {whose} differs from its module's for {DRAWS + 1} drawn inputs in "
            f"the dtype of the weights, and is equal to it in float64. {WAY_OUT}"
        )


@dataclass(frozen=True)
class _GradientCheck:
    """The arguments of `check_gradients`, and the names of what it compares.

    names: the weights whose gradients are computed. unread: parameters that train and that the program does
    not read, which must have no gradient.
    """

    fused: LiveMembers
    entry: FusedEntry
    runner: Runner
    resting: Program
    sources: Sequence[InputSource]
    draws: bool
    names: Sequence[str]
    unread: Sequence[str]


def _near_ties(run: _GradientCheck, seed: int) -> set[tuple[int, str]]:
    """Returns the member and the name of each gradient that a near-tie may have changed.

    Raises:
        VerificationError: A gradient differs for another reason.
    """
    fused, entry, runner, names = run.fused, run.entry, run.runner, run.names
    each = any(runner.stacked)
    drawn = [draw_all(run.sources, entry.sizes, seed + (i if each else 0)) for i in range(len(fused))]
    grads = _wide_gradients(fused, entry, runner, drawn, names)
    exact_grads = cache(lambda: _exact_wide_gradients(fused, entry, runner, drawn, names))
    sums: Gradients = {}  # of the shared weights, over all members
    found: set[tuple[int, str]] = set()
    why: Callable[[], str] | None = None
    all_exact: list[Callable[[], Gradients]] = []
    own_names = [n for n in names if entry.kinds[n] == "stacked"]
    for i in range(len(fused)):
        leaves = [
            v if own or not each else drawn[0][k] for k, (v, own) in enumerate(zip(drawn[i], runner.stacked))
        ]
        if run.draws:
            _, expected = run_program(fused, entry, run.resting, i, leaves, names)
        else:
            _, expected = run_module(fused, i, leaves, [*names, *run.unread])
            _refuse_unread(i, {n: expected.pop(n) for n in run.unread})
        for n, g in expected.items():
            if entry.kinds[n] == "shared" and g is not None:
                before = sums.get(n)
                sums[n] = g if before is None else before + g
        stacked = {n: None if (g := grads[n]) is None else g[i] for n in own_names}
        terms: dict[str, float] = {}
        own_exact = cache(partial(_exact_gradients, run, i, leaves, terms))
        all_exact.append(own_exact)
        exact = ExactGradients(i, own_exact, exact_grads, terms)
        if not run.draws:
            why = partial(way_out, fused, entry, run.resting, i, leaves, names)
        own = {n: expected[n] for n in own_names}
        near_ties = compare_gradients(i, stacked, own, expected, exact, why)
        found |= {(i, name) for name in near_ties}
    exact = ExactGradients(None, partial(_summed, all_exact, list(sums)), exact_grads)
    near_ties = compare_gradients(None, {n: grads[n] for n in sums}, sums, sums, exact, why)
    return found | {(ALL, name) for name in near_ties}


def _summed(members: Sequence[Callable[[], Gradients]], names: Sequence[str]) -> Gradients:
    """Returns the sums of the members' gradients of shared weights."""
    found: Gradients = {}
    for gradients in members:
        for name in names:
            own, before = gradients().get(name), found.get(name)
            found[name] = before if own is None else own if before is None else before + own
    return found


def _refuse_unread(i: int, gradients: Gradients) -> None:
    """Raises VerificationError for a parameter that the program does not read, and that has a gradient."""
    found = [n for n, g in gradients.items() if g is not None and bool(g.ne(0).any())]
    if found:
        raise VerificationError(
            f"the captured program does not read {', '.join(found[:5])}, and in member {i} itself "
            f"{'it has a gradient' if len(found) == 1 else 'they have gradients'}: {WAY_OUT}"
        )


def _wide_gradients(
    fused: LiveMembers,
    entry: FusedEntry,
    runner: Runner,
    drawn: Sequence[Sequence[torch.Tensor]],
    names: Sequence[str],
    exact: bool = False,
) -> Gradients:
    """Returns the gradients of the wide program at rest, on the CPU. `drawn`: the inputs of each member.

    exact: computes them in float64.
    """
    if entry.device == CPU:
        own = runner  # of its batch class, also where the sample is of another
    else:
        own = entry.on_cpu().runner(runner.stacked, entry.sizes, gradients=True)
    program = without_randomness(own.program)
    assert program is not None  # as on the module's device
    program = raise_program(program) if exact else program
    as_run = _in_float64 if exact else torch.Tensor.clone
    values = [as_run(torch.stack(v) if each else v[0]) for v, each in zip(zip(*drawn), runner.stacked)]
    weights = {
        n: as_run(v.detach().cpu()).requires_grad_(n in names) for n, v in fused.tensors_of(entry).items()
    }
    buffers = [as_run(fused.tensor_of(name).detach().cpu()) for _, _, name in entry.carried]
    carried = {o for _, o, _ in entry.carried}
    with torch.enable_grad():
        answer = DifferentiableProgram(program, CPU)(weights, [*values, *buffers])
        kinds = [o.kind for o in program.outputs]
        totals = []
        for i in range(len(fused)):
            outputs = [
                y if kind == "shared" else y[i]
                for k, (y, kind) in enumerate(zip(answer, kinds))
                if k not in carried
            ]
            totals.append(weighted_sum(outputs, i))
        return gradients_of(torch.stack(totals).sum(), weights, names)


def _in_float64(value: torch.Tensor) -> torch.Tensor:
    """Returns a copy in float64; of whole numbers and complex ones in their own dtype."""
    return value.clone().double() if value.is_floating_point() else value.clone()


def _exact_wide_gradients(
    fused: LiveMembers,
    entry: FusedEntry,
    runner: Runner,
    drawn: Sequence[Sequence[torch.Tensor]],
    names: Sequence[str],
) -> Gradients:
    """Returns the gradients of the wide program in float64; none if it does not run in float64."""
    try:
        return _wide_gradients(fused, entry, runner, drawn, names, exact=True)
    except (RuntimeError, TypeError, ValueError):
        return {}


def _has_gradients(fused: LiveMembers, leaves: Sequence[torch.Tensor], names: Sequence[str]) -> bool:
    """Returns whether the module of member 0 computes gradients of the weights."""
    try:
        with torch.random.fork_rng(devices=[]):
            run_module(fused, 0, leaves, names)
    except RuntimeError as e:
        return "derivative" not in str(e) and "not differentiable" not in str(e)
    return True


def trained(fused: LiveMembers, entry: FusedEntry) -> list[str]:
    """Returns the weights whose gradients are computed."""
    return [
        n
        for n in dict.fromkeys(s.source for s in entry.programs[0].weights)
        if n not in entry.constants and fused.tensor_of(n).requires_grad
    ]


def _exact_gradients(
    run: _GradientCheck, i: int, leaves: Sequence[torch.Tensor], terms: dict[str, float]
) -> Gradients:
    """Returns the gradients of member i in float64; none if it does not run in float64.

    They are those of its own module; of its program at rest, if the module draws. terms: gets the sizes of
    the terms of biases' gradients.
    """
    try:
        with torch.random.fork_rng(devices=[]):
            if run.draws:
                return run_program(run.fused, run.entry, run.resting, i, leaves, run.names, exact=True)[1]
            return run_module(run.fused, i, leaves, run.names, exact=True, terms=terms)[1]
    except (RuntimeError, TypeError, ValueError):
        return {}
