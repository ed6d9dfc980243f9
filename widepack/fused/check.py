"""`validate=`: a fused module beside its members alone. Each program is compared when it is made: that of a mode, a pattern of inputs and a batch class.

1. Both comparisons of a build (verify.py, truth.py), at the batches of a build, where inputs are all shared or all one a member.
2. Gradients, of a program that has them: of a random weighted sum of all outputs with respect to every weight that trains, against each member's own, at the sample's sizes.

A program that draws (dropout) draws other numbers for all members than one after the other. So the wide program is compared with its random ops at rest (rested.py), and
the capture beside the members' own modules, both from one seed. One with a random op that cannot rest is not compared.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.utils._pytree as pytree

from widepack_artifacts import tree
from widepack_artifacts.program import Program

from ..verification import small_sizes
from ..verification import answers as verify
from ..errors import VerificationError
from ..capture.export import calm, clone
from .module import Fused
from .programs import CPU, Differentiable, Entry, Runner
from .skeleton import weights_of
from ..system.progress import Stages
from ..ir.at_rest import rested
from ..capture.results import known_forms
from ..spec.draws import draw_all
from ..spec.state import BUFFER, Carried
from ..verification.reference import Truth

BOUND = 1e-3  # of gradients in float32, as a part of their size; a wrong program is off by more than that
FINEST = torch.finfo(torch.float64).eps
ULPS = 1000  # of members in float64: a wrong program is off by more
Gradients = dict[str, torch.Tensor | None]
WAY_OUT = 'Please report it; strategy="loop" runs members one after the other, and validate=False leaves this out'


def check(fused: Fused, entry: Entry, runner: Runner) -> None:
    """Raises: VerificationError for answers or gradients that are not the members' own."""
    (program,) = entry.programs
    draws = entry.random and not fused.alone_rests  # the members alone draw too
    one, all_ = rested(program), rested(runner.program)
    if one is None or all_ is None:
        return
    if not any(runner.marks) or all(runner.marks):
        _answers(fused, entry, runner, one, all_, draws)
    if draws:
        _drawn(fused, entry, program, gradients=runner.gradients)
    if runner.gradients:
        _gradients(fused, entry, runner, one, draws)


class _Held:
    """The fused module's weights, as a comparison reads them from files."""

    def __init__(self, values: Mapping[str, torch.Tensor]) -> None:
        self.values = values

    def get(self, name: str) -> torch.Tensor:
        return self.values[name]


def _bind(fused: Fused, leaves: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The sample with other tensors."""
    it, call = iter(leaves), fused.sample()
    args, kwargs = pytree.tree_map(lambda v: next(it) if isinstance(v, torch.Tensor) else v, (call.args, call.kwargs))
    return args, kwargs


def settle(fused: Fused, entry: Entry) -> None:
    """Ask member 0 at small sizes, as a build does: which conditions of the export are none of its own, and where its program does not hold at a size of 1
    (`squeeze()`, a batch norm that trains, which refuses one row). What is found stands in the entry."""
    (program,) = entry.programs
    draws = entry.random and not fused.alone_rests
    one = rested(program)
    if one is None:
        return
    subject = _subject(fused, entry, one, draws)
    if draws:
        found = {
            d: why
            for d in entry.sizes
            if subject.fits({**entry.sizes, d: 1}) and (why := _form_at(fused, entry, subject, program, {**entry.sizes, d: 1}))
        }
        entry.settle((), found)
        return
    member = fused.member(0, CPU)
    subject = replace(subject, module=lambda i: copy.deepcopy(member))
    entry.settle(small_sizes.needless(subject, entry.bounds, [g.expr for g in entry.captured.guards]), {})
    for letter in entry.sizes:
        if why := small_sizes.way_at_one(replace(subject, fits=_fits(entry)), letter):
            entry.settle((), {letter: why})


def _form_at(fused: Fused, entry: Entry, subject: verify.Subject, program: Program, sizes: Mapping[str, int]) -> str:
    """How member 0 and its program, which draw, differ at these sizes in what can be compared: whether they answer, and in which shapes. In words; empty where they do not."""
    (inputs,) = subject.draw(sizes, 3, "shared", 1)
    failed = "the captured program"
    with torch.random.fork_rng(devices=[]):
        try:
            mine, _ = _by_program(fused, entry, program, 0, inputs[: entry.given], [])
            failed = "the member itself"
            own, _ = _by_module(fused, 0, inputs[: entry.given], [])
        except (RuntimeError, ValueError, IndexError, AssertionError) as e:
            return f"{failed} fails there: {type(e).__name__}: {(str(e).splitlines() or [''])[0][:200]}".rstrip(": ")
    return next((f"the member gives {list(b.shape)} there, its program {list(a.shape)}" for a, b in zip(mine, own) if a.shape != b.shape), "")


def _fits(entry: Entry) -> Callable[[Mapping[str, int]], bool]:
    return verify.fitting(entry.bounds, [g.expr for g in entry.captured.guards])


def _subject(fused: Fused, entry: Entry, one: Program, draws: bool) -> verify.Subject:
    """What a comparison asks. one: the member's program at rest. draws: the members alone do not rest."""
    weights = {n: v.detach().cpu() for n, v in fused.tensors_of(entry).items()}

    def initial(i: int, state: Carried) -> torch.Tensor | None:
        return fused.tensor_of(state.name).detach().cpu()[i] if state.how == BUFFER else None

    return verify.Subject(
        members=tuple(f"{i}" for i in range(len(fused))),
        programs=[one],
        signatures=entry.signatures,
        sources=entry.sources,
        outputs=[n for n, _ in entry.captured.outputs],
        sizes=entry.sizes,
        batch=entry.batch,
        weights=lambda i: {n: v[i] if entry.kinds[n] == "stacked" else v for n, v in weights.items()},
        module=None if draws else lambda i: fused.member(i, "cpu"),
        bind=lambda leaves: _bind(fused, leaves),
        fits=_fits(entry),
        numbers=tree.numbers(entry.captured.returned),
        states=entry.states,
        initial=initial,
    )


def _answers(fused: Fused, entry: Entry, runner: Runner, one: Program, all_: Program, draws: bool) -> None:
    """one, all_: the member's program and the wide one, at rest. draws: the members alone do not rest."""
    subject = _subject(fused, entry, one, draws)
    weights = {n: v.detach().cpu() for n, v in fused.tensors_of(entry).items()}
    pattern = "each" if any(runner.marks) else "shared"
    truth = Truth(entry, subject, _Held(weights), verify.calls(subject, [pattern]), Stages(None))  # type: ignore[arg-type]
    for pool in truth.pools:
        if pool.eps == FINEST:  # nothing is finer than float64: what its rounding costs is not known, only its order
            pool.own_max = max(pool.own_max, ULPS * pool.eps * pool.scale)
            pool.own_square = max(pool.own_square, (ULPS * pool.eps * pool.scale) ** 2 * pool.count)
    truth.hold(pattern, all_, runner.plan, None, WAY_OUT)


def _trained(fused: Fused, entry: Entry) -> list[str]:
    """The weights that gradients are taken of."""
    return [n for n in dict.fromkeys(s.source for s in entry.programs[0].weights) if n not in entry.constants and fused.tensor_of(n).requires_grad]


def _total(outputs: Sequence[torch.Tensor], i: int) -> torch.Tensor:
    """A weighted sum of member i's outputs, alike for whoever computes them."""
    g = torch.Generator().manual_seed(17 + i)
    random = [(y, torch.randn(y.shape, generator=g, dtype=torch.float64).to(y.dtype)) for y in outputs if y.is_floating_point()]
    parts = [(y * r).sum().double() for y, r in random if y.requires_grad]
    return torch.stack(parts).sum() if parts else torch.zeros(())


def _derived(total: torch.Tensor, weights: Mapping[str, torch.Tensor], names: Sequence[str]) -> Gradients:
    if not names or not total.requires_grad:
        return dict.fromkeys(names)
    return dict(zip(names, torch.autograd.grad(total, [weights[n] for n in names], allow_unused=True)))


def _by_module(fused: Fused, i: int, leaves: Sequence[torch.Tensor], names: Sequence[str]) -> tuple[list[torch.Tensor], Gradients]:
    """What member i's own module answers, and its gradients."""
    member = fused.member(i, "cpu")
    args, kwargs = _bind(fused, [clone(v) for v in leaves])
    with calm(), torch.enable_grad():
        outputs = [y for y in pytree.tree_leaves(known_forms(member(*args, **kwargs))) if isinstance(y, torch.Tensor)]
        return outputs, _derived(_total(outputs, i), weights_of(member), names)


def _by_program(
    fused: Fused, entry: Entry, program: Program, i: int, leaves: Sequence[torch.Tensor], names: Sequence[str]
) -> tuple[list[torch.Tensor], Gradients]:
    """The same of its program."""

    def own(name: str, value: torch.Tensor) -> torch.Tensor:
        value = value.detach().cpu()
        return (value[i] if entry.kinds[name] == "stacked" else value).clone().requires_grad_(name in names)

    weights = {n: own(n, v) for n, v in fused.tensors_of(entry).items()}
    buffers = [own(name, fused.tensor_of(name)) for _, _, name in entry.carried]
    carried = {o for _, o, _ in entry.carried}
    with torch.enable_grad():
        found = Differentiable(program, CPU)(weights, [*(clone(v) for v in leaves), *buffers])
        outputs = [y for k, y in enumerate(found) if k not in carried]
        return outputs, _derived(_total(outputs, i), weights, names)


def _drawn(fused: Fused, entry: Entry, program: Program, gradients: bool) -> None:
    """A program that draws beside the members' own modules, both from one seed. Raises: VerificationError."""
    names = _trained(fused, entry) if gradients else []
    for i in range(len(fused)):
        leaves = draw_all(entry.sources[: entry.given], entry.sizes, 3 + i)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(29 + i)
            mine, grads = _by_program(fused, entry, program, i, leaves, names)
            torch.manual_seed(29 + i)
            own, right = _by_module(fused, i, leaves, names)
        bound = _bound(own)
        for k, (a, b) in enumerate(zip(mine, own)):
            off, size = _off(a.detach(), b.detach())
            if off > bound * size:
                raise VerificationError(
                    f"output {entry.captured.outputs[k][0] or k} of member {i} is off by {off:.2e} at a size of {size:.2e} from its own module's, drawn from one seed. The "
                    f"members draw from another source than torch's generator (of Python or NumPy, which no export sees), or the capture is wrong. {WAY_OUT}"
                )
        _hold(i, grads, right, _bound([g for g in right.values() if g is not None]))


def _gradients(fused: Fused, entry: Entry, runner: Runner, one: Program, draws: bool) -> None:
    """Gradients of the wide program at rest against the members' own. one: the member's program at rest. draws: the members alone do not rest. Raises: VerificationError."""
    names = _trained(fused, entry)
    drawn = [draw_all(entry.sources[: entry.given], entry.sizes, 3 + (i if any(runner.marks) else 0)) for i in range(len(fused))]
    values = [torch.stack(v) if own else v[0] for v, own in zip(zip(*drawn), runner.marks)]
    weights = {n: v.detach().cpu().clone().requires_grad_(n in names) for n, v in fused.tensors_of(entry).items()}
    here = entry.on_cpu().runner(runner.marks, entry.sizes, gradients=True).program
    all_ = rested(here)
    assert all_ is not None  # as on the module's device
    buffers = [fused.tensor_of(name).detach().cpu().clone() for _, _, name in entry.carried]
    carried = {o for _, o, _ in entry.carried}
    with torch.enable_grad():
        found = Differentiable(all_, CPU)(weights, [*values, *buffers])
        kinds = [o.kind for o in all_.outputs]
        outputs = [[y if kind == "shared" else y[i] for k, (y, kind) in enumerate(zip(found, kinds)) if k not in carried] for i in range(len(fused))]
        grads = _derived(torch.stack([_total(o, i) for i, o in enumerate(outputs)]).sum(), weights, names)
    sums: Gradients = {}
    for i in range(len(fused)):
        leaves = [v if own or not any(runner.marks) else drawn[0][k] for k, (v, own) in enumerate(zip(drawn[i], runner.marks))]
        right = _by_program(fused, entry, one, i, leaves, names)[1] if draws else _by_module(fused, i, leaves, names)[1]
        for n, g in right.items():
            if entry.kinds[n] == "shared" and g is not None:
                before = sums.get(n)
                sums[n] = g if before is None else before + g
        own_names = [n for n in names if entry.kinds[n] == "stacked"]
        stacked = {n: None if (g := grads[n]) is None else g[i] for n in own_names}
        _hold(i, stacked, {n: right[n] for n in own_names}, _bound([g for g in right.values() if g is not None]))
    _hold(None, {n: grads[n] for n in sums}, sums, _bound([g for g in sums.values() if g is not None]))


def _bound(values: Sequence[torch.Tensor]) -> float:
    """How far values of these dtypes may be off, as a part of their size."""
    eps = max((torch.finfo(v.dtype).eps for v in values if v.is_floating_point()), default=0.0)
    return BOUND * max(math.sqrt(eps / torch.finfo(torch.float32).eps), 1e-6)


def _off(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float]:
    """How far two values are apart, and how large the second is; what is not finite in it is left out."""
    if not b.is_floating_point() or not b.numel():
        return 0.0, 0.0
    fine = torch.isfinite(b)
    return float((a - b).where(fine, 0).abs().max()), float(b.where(fine, 0).abs().max())


def _hold(i: int | None, wide: Gradients, own: Gradients, bound: float) -> None:
    """Raises: VerificationError where two gradients are not one within rounding. i: the member; None for what all share."""
    largest = max((_off(g, g)[1] for g in own.values() if g is not None), default=0.0)
    for name, right in own.items():
        mine = wide[name]
        zero = torch.zeros(())
        b = zero if right is None else right
        off, size = _off(zero if mine is None else mine, b)
        if right is None and mine is not None:
            off = float(mine.abs().max()) if mine.numel() else 0.0
        size = max(size, 0.01 * largest)
        if off > bound * size + torch.finfo(b.dtype).tiny:
            raise VerificationError(
                f"the gradient of {name} of {'all members' if i is None else f'member {i}'} is not its own: off by {off:.2e} at a size of {size:.2e} (bound {bound:.0e} of it). The "
                f"capture may have lost what stops a gradient, or the member computes one of its own (torch.autograd.Function). {WAY_OUT}"
            )
