"""Compares gradients of a wide program with the members' modules, and explains a wrong one: what a member's
forward does to gradients that a capture does not contain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from widepack_artifacts.errors import some
from widepack_artifacts.program import Program

from ..errors import VerificationError
from ..ir.cast import raise_program
from ..ir.random_ops import without_randomness
from ..system.memory import bytes_lacking
from .gradients import (
    WAY_OUT,
    ExactGradients,
    Gradients,
    compare_gradients,
    error_above,
    gradients_of,
    relative_bound,
    weighted_sum,
    whose,
)
from .member_runs import LiveMemberRuns
from .programs import CPU, DifferentiableProgram, Runner

DRAWS = 3  # how often gradients that a near-tie may have changed are compared again


def check_gradients(runs: LiveMemberRuns, runner: Runner) -> None:
    """Compares the gradients of a wide program, with its random ops at rest, with the members' own.

    Nothing is compared if a member has no gradients, because torch has no derivative of one of its ops. If
    the members' modules draw, the member program at rest gives the expected gradients.

    Raises:
        VerificationError: A gradient differs.
    """
    if not _has_gradients(runs):
        return
    near_ties = _near_ties(runs, runner, 3)
    for number in range(1, DRAWS + 1):  # other inputs have no near-ties at the same places
        if near_ties:
            near_ties &= _near_ties(runs, runner, 3 + 1000 * number)
    if near_ties:
        i, name = min(near_ties, key=lambda found: (-1 if found[0] is None else found[0], found[1]))
        raise VerificationError(
            f"the gradient of {name} of {whose(i)} differs from its module's for {DRAWS + 1} drawn inputs in "
            f"the dtype of the weights, and is equal to it in float64. {WAY_OUT}"
        )


def _near_ties(runs: LiveMemberRuns, runner: Runner, seed: int) -> set[tuple[int | None, str]]:
    """Returns the member and the name of each gradient that a near-tie may have changed.

    Raises:
        VerificationError: A gradient differs for another reason.
    """
    entry, count, names, each = runs.entry, len(runs.fused), runs.trained, any(runner.stacked)
    drawn = [runs.inputs(seed + (i if each else 0)) for i in range(count)]
    grads = _wide_gradients(runs, runner, drawn)
    exact_grads = cache(lambda: unless_refused(partial(_wide_gradients, runs, runner, drawn, exact=True)))
    sums: Gradients = {}  # of the shared weights, over all members
    found: set[tuple[int | None, str]] = set()
    why: Callable[[], str] | None = None
    all_exact: list[Callable[[], Gradients]] = []
    own_names = [n for n in names if entry.kinds[n] == "stacked"]
    for i in range(count):
        leaves = [
            v if own or not each else drawn[0][k] for k, (v, own) in enumerate(zip(drawn[i], runner.stacked))
        ]
        expected = _own_gradients(runs, i, leaves)
        for n, g in expected.items():
            if entry.kinds[n] == "shared" and g is not None:
                before = sums.get(n)
                sums[n] = g if before is None else before + g
        stacked = {n: None if (g := grads[n]) is None else g[i] for n in own_names}
        terms: dict[str, float] = {}
        own_exact = cache(partial(_exact_gradients, runs, i, leaves, terms))
        all_exact.append(own_exact)
        if not runs.draws:
            why = partial(way_out, runs, runs.resting, i, leaves, names)
        own = {n: expected[n] for n in own_names}
        exact = ExactGradients(i, own_exact, exact_grads, terms)
        found |= {(i, name) for name in compare_gradients(i, stacked, own, expected, exact, why)}
    exact = ExactGradients(None, partial(_summed, all_exact, list(sums)), exact_grads)
    shared = compare_gradients(None, {n: grads[n] for n in sums}, sums, sums, exact, why)
    return found | {(None, name) for name in shared}


def _own_gradients(runs: LiveMemberRuns, i: int, leaves: Sequence[Tensor]) -> Gradients:
    """Returns member i's own gradients.

    Raises:
        VerificationError: A parameter that the program does not read has a gradient in the module.
    """
    names = runs.trained
    if runs.draws:
        return runs.run_program(runs.resting, i, leaves, names)[1]
    unread = [n for n, p in runs.fused.named_parameters() if p.requires_grad and n not in names]
    _, gradients = runs.run_module(i, leaves, [*names, *unread])
    found = [n for n in unread if (g := gradients.pop(n)) is not None and bool(g.ne(0).any())]
    if found:
        raise VerificationError(
            f"the captured program does not read {some(found)}, and in member {i} itself "
            f"{'it has a gradient' if len(found) == 1 else 'they have gradients'}: {WAY_OUT}"
        )
    return gradients


def _summed(members: Sequence[Callable[[], Gradients]], names: Sequence[str]) -> Gradients:
    """Returns the sums of the members' gradients of shared weights."""
    found: Gradients = {}
    for gradients in members:
        for name in names:
            own, before = gradients().get(name), found.get(name)
            found[name] = before if own is None else own if before is None else before + own
    return found


def _wide_gradients(
    runs: LiveMemberRuns, runner: Runner, drawn: Sequence[Sequence[Tensor]], exact: bool = False
) -> Gradients:
    """Returns the gradients of the wide program at rest, on the CPU. `drawn`: the inputs of each member.

    exact: computes them in float64.
    """
    entry, names = runs.entry, runs.trained
    if entry.device == CPU:
        own = runner  # of its batch class, also where the sample is of another
    else:
        own = entry.on_cpu().runner(runner.stacked, entry.sizes, gradients=True)
    program = without_randomness(own.program)
    assert program is not None  # as on the module's device
    program = raise_program(program) if exact else program
    as_run = _in_float64 if exact else torch.Tensor.clone
    values = [as_run(torch.stack(v) if each else v[0]) for v, each in zip(zip(*drawn), runner.stacked)]
    weights = {n: as_run(v).requires_grad_(n in names) for n, v in runs.weights.items()}
    buffers = [as_run(runs.fused.tensor_of(name).detach().cpu()) for _, _, name in entry.carried]
    carried = {o for _, o, _ in entry.carried}
    with torch.enable_grad():
        results = DifferentiableProgram(program, CPU)(weights, [*values, *buffers])
        kinds = [o.kind for o in program.outputs]
        totals = []
        for i in range(len(runs.fused)):
            outputs = [
                y if kind == "shared" else y[i]
                for k, (y, kind) in enumerate(zip(results, kinds))
                if k not in carried
            ]
            totals.append(weighted_sum(outputs, i))
        return gradients_of(torch.stack(totals).sum(), weights, names)


def _in_float64(value: torch.Tensor) -> torch.Tensor:
    """Returns a copy in float64; of whole numbers and complex ones in their own dtype."""
    return value.clone().double() if value.is_floating_point() else value.clone()


def unless_refused(compute: Callable[[], Gradients]) -> Gradients:
    """Returns computed gradients; none if float64 is refused.

    Raises:
        VerificationError: The memory does not suffice.
    """
    try:
        return compute()
    except (RuntimeError, TypeError, ValueError) as e:
        if bytes_lacking(e):
            raise VerificationError(
                "gradients differ, and their values in float64, which tell whether by more than rounding, do "
                f"not fit in memory: {str(e).splitlines()[0][:200]}. Fuse fewer members at a time, give a "
                "smaller sample, or leave the comparison out: widepack.fuse(..., validate=False)"
            ) from e
        return {}


def _exact_gradients(
    runs: LiveMemberRuns, i: int, leaves: Sequence[Tensor], terms: dict[str, float]
) -> Gradients:
    """Returns the gradients of member i in float64; none if it does not run in float64.

    They are those of its own module; of its program at rest, if the module draws. terms: gets the sizes of
    the terms of biases' gradients.
    """

    def compute() -> Gradients:
        if runs.draws:
            return runs.run_program(runs.resting, i, leaves, runs.trained, exact=True)[1]
        return runs.run_module(i, leaves, runs.trained, exact=True, terms=terms)[1]

    with torch.random.fork_rng(devices=[]):
        return unless_refused(compute)


def _has_gradients(runs: LiveMemberRuns) -> bool:
    """Returns whether the module of member 0 computes gradients of the weights."""
    try:
        with torch.random.fork_rng(devices=[]):
            runs.run_module(0, runs.inputs(3), runs.trained)
    except RuntimeError as e:
        return "derivative" not in str(e) and "not differentiable" not in str(e)
    return True


_FUNCTION = (
    "the backward of {}, a torch.autograd.Function: write it in ops of torch, for example "
    "x + (x.round() - x).detach() for a gradient that passes a rounding"
)
_HOOK = (
    "a hook of gradients ({}): change the gradients after backward, or write a * x + ((1 - a) * x).detach()"
)
_DETACH = "{} in place: write y = y.detach()"
_CALLS = {
    "register_hook": _HOOK,
    "register_post_accumulate_grad_hook": _HOOK,
    "detach_": _DETACH,
}


class _Calls(TorchFunctionMode):
    """Records which methods of `_CALLS` are called."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, str] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _CALLS:
            self.found[name] = _CALLS[name].format(name)
        return func(*args, **(kwargs or {}))


def way_out(
    runs: LiveMemberRuns, program: Program, i: int, leaves: Sequence[Tensor], names: Sequence[str]
) -> str:
    """Returns what to do about a gradient of member i that differs from its module's.

    Args:
        runs: The members.
        program: The captured program.
        i: The member.
        leaves: The inputs.
        names: The weights whose gradients are computed.
    """
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            with _Calls() as calls:
                outputs, own = runs.run_module(i, leaves, names)
            torch.manual_seed(0)
            _, captured = runs.run_program(program, i, leaves, names)
    except (RuntimeError, ValueError, IndexError, TypeError):
        return WAY_OUT
    if _agree(captured, own):
        return WAY_OUT
    found = [*_functions(outputs), *calls.found.values()]
    same = 'strategy="loop" gives the same gradient, because the captured program has it'
    skip = "validate=False skips this check and trains with the derivatives of forward's ops"
    if found:
        return f"A capture does not contain {'; nor '.join(found)}. {same}; {skip}"
    return f"The capture may have lost a detach or no_grad. Please report it; {same}; {skip}"


def _agree(captured: Gradients, own: Gradients) -> bool:
    """Returns whether the gradients of the captured program are the module's, up to rounding."""
    bound = relative_bound([g for g in own.values() if g is not None])
    for name, expected in own.items():
        computed = captured.get(name)
        if computed is None or expected is None:
            if computed is not expected:
                return False
        elif error_above(computed, expected, bound) is not None:
            return False
    return True


def _functions(outputs: Sequence[Tensor]) -> list[str]:
    """Returns in words the classes with a backward in Python that made these values, each once."""
    found: dict[str, None] = {}
    left, seen = [y.grad_fn for y in outputs], set()
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        left += [before for before, _ in node.next_functions]
        of_class = getattr(type(node), "_forward_cls", None)
        if of_class is None:
            continue
        module = str(of_class.__module__)
        if not module.startswith("torch."):
            found[_FUNCTION.format(of_class.__name__)] = None
        elif module.startswith("torch.nn.modules._functions") and "Hook" in of_class.__name__:
            found[_HOOK.format("register_full_backward_hook")] = None
    return list(found)
