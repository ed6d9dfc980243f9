"""`validate=`: a fused module beside its members alone. Each program is compared when it is made: that of a mode, a pattern of inputs and a batch class.

1. Both comparisons of a build (verify.py, truth.py), at the batches of a build, where inputs are all shared or all one a member.
2. Gradients, of a program that has them: of a random weighted sum of all outputs with respect to every weight that trains, against each member's own, at the sample's sizes.

Random programs (dropout) draw other numbers for all members than one after the other: they are not compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree

from widepack_artifacts import tree

from . import verify
from .errors import VerificationError
from .exporting import calm, clone
from .fused import Fused
from .fused_programs import Entry, Runner
from .hollow import weights_of
from .progress import Stages
from .results import known_forms
from .samples import draw_all
from .state import BUFFER, Carried
from .truth import Truth

BOUND = 1e-3  # of gradients in float32, as a part of their size; a wrong program is off by more than that
FINEST = torch.finfo(torch.float64).eps
ULPS = 1000  # of members in float64: a wrong program is off by more
WAY_OUT = 'Please report it; strategy="loop" runs members one after the other, and validate=False leaves this out'


def check(fused: Fused, entry: Entry, runner: Runner) -> None:
    """Raises: VerificationError for answers or gradients that are not the members' own."""
    if entry.random:
        return
    if not any(runner.marks) or all(runner.marks):
        _answers(fused, entry, runner)
    if runner.gradients:
        _gradients(fused, entry, runner)


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


def _answers(fused: Fused, entry: Entry, runner: Runner) -> None:
    weights = {n: v.detach().cpu() for n, v in fused.weights(entry).items()}

    def initial(i: int, state: Carried) -> torch.Tensor | None:
        return fused.weight(state.name).detach().cpu()[i] if state.how == BUFFER else None

    fits = verify.fitting(entry.bounds, [g.expr for g in entry.captured.guards])
    training = any(part.training for part in fused.modules())
    subject = verify.Subject(
        members=tuple(f"{i}" for i in range(len(fused))),
        programs=entry.programs,
        signatures=entry.signatures,
        sources=entry.sources,
        outputs=[n for n, _ in entry.captured.outputs],
        sizes=entry.sizes,
        batch=entry.batch,
        weights=lambda i: {n: v[i] if entry.kinds[n] == "stacked" else v for n, v in weights.items()},
        module=lambda i: fused.member(i, "cpu"),
        bind=lambda leaves: _bind(fused, leaves),
        # one row has no variance: a batch norm that trains refuses it
        fits=lambda sizes: fits(sizes) and not (training and entry.batch and sizes[entry.batch] < 2),
        numbers=tree.numbers(entry.captured.returned),
        states=entry.states,
        initial=initial,
    )
    pattern = "each" if any(runner.marks) else "shared"
    truth = Truth(entry, subject, _Held(weights), verify.calls(subject, [pattern]), Stages(None))  # type: ignore[arg-type]
    for pool in truth.pools:
        if pool.eps == FINEST:  # nothing is finer than float64: what its rounding costs is not known, only its order
            pool.own_max = max(pool.own_max, ULPS * pool.eps * pool.scale)
            pool.own_square = max(pool.own_square, (ULPS * pool.eps * pool.scale) ** 2 * pool.count)
    truth.hold(pattern, runner.program, runner.plan, None, WAY_OUT)


def _gradients(fused: Fused, entry: Entry, runner: Runner) -> None:
    names = [n for n in dict.fromkeys(s.source for s in entry.programs[0].weights) if n not in entry.constants and fused.weight(n).requires_grad]
    if not names:
        return

    def total(outputs: Sequence[torch.Tensor], i: int) -> torch.Tensor:
        """A weighted sum of member i's outputs, alike for whoever computes them."""
        g = torch.Generator().manual_seed(17 + i)
        random = [(y, torch.randn(y.shape, generator=g, dtype=torch.float64).to(y.dtype)) for y in outputs if y.is_floating_point()]
        parts = [(y * r).sum().double() for y, r in random if y.requires_grad]
        return torch.stack(parts).sum() if parts else torch.zeros(())

    drawn = [draw_all(entry.sources[: entry.given], entry.sizes, 3 + (i if any(runner.marks) else 0)) for i in range(len(fused))]
    values = [torch.stack(v) if own else v[0] for v, own in zip(zip(*drawn), runner.marks)]
    weights = {n: v.detach().cpu().requires_grad_(n in names) for n, v in fused.weights(entry).items()}
    here = entry.on_cpu().runner(runner.marks, entry.sizes, gradients=True)
    buffers = [fused.weight(name).detach().cpu().clone() for _, _, name in entry.carried]
    carried = {o for _, o, _ in entry.carried}
    with torch.enable_grad():
        found = here.run(weights, [*values, *buffers])
        kinds = [o.kind for o in here.program.outputs]
        outputs = [[y if kind == "shared" else y[i] for k, (y, kind) in enumerate(zip(found, kinds)) if k not in carried] for i in range(len(fused))]
        wide = torch.stack([total(o, i) for i, o in enumerate(outputs)]).sum()
        grads = (
            dict(zip(names, torch.autograd.grad(wide, [weights[n] for n in names], allow_unused=True)))
            if wide.requires_grad
            else dict.fromkeys(names)
        )
    eps = max(torch.finfo(weights[n].dtype).eps for n in names)
    bound = BOUND * max(math.sqrt(eps / torch.finfo(torch.float32).eps), 1e-6)
    sums: dict[str, torch.Tensor] = {}
    for i in range(len(fused)):
        member = fused.member(i, "cpu")
        leaves_of = [v if own or not any(runner.marks) else drawn[0][k] for k, (v, own) in enumerate(zip(drawn[i], runner.marks))]
        args, kwargs = _bind(fused, [clone(v) for v in leaves_of])
        with calm(), torch.enable_grad():
            leaves = [y for y in pytree.tree_leaves(known_forms(member(*args, **kwargs))) if isinstance(y, torch.Tensor)]
            alone = total(leaves, i)
            own = weights_of(member)
            mine = torch.autograd.grad(alone, [own[n] for n in names], allow_unused=True) if alone.requires_grad else [None] * len(names)
        scale = max((float(g.abs().max()) for g in mine if g is not None and g.numel()), default=0.0)
        for name, g in zip(names, mine):
            w = grads[name]
            if entry.kinds[name] == "shared":
                sums[name] = sums.get(name, torch.zeros_like(own[name])) + (g if g is not None else 0)
                continue
            _compare(name, i, w[i] if w is not None else None, g, bound, scale)
    for name, g in sums.items():
        _compare(name, None, grads[name], g, bound, float(g.abs().max()))


def _compare(name: str, i: int | None, wide: torch.Tensor | None, own: torch.Tensor | None, bound: float, scale: float) -> None:
    """Raises: VerificationError where two gradients are not one within rounding."""
    zero = torch.zeros(())
    a, b = (zero if g is None else g for g in (wide, own))
    if not bool(torch.isfinite(b).all()):
        return
    off = float((a - b).abs().max()) if b.numel() else 0.0
    size = max(float(b.abs().max()) if b.numel() else 0.0, 0.01 * scale)
    if not off <= bound * size + torch.finfo(b.dtype).tiny:
        who = "all members" if i is None else f"member {i}"
        raise VerificationError(
            f"the gradient of {name} of {who} is not its own: off by {off:.2e} at a size of {size:.2e} (bound {bound:.0e} of it). The capture may have lost what stops a "
            f"gradient, or the member computes one of its own (torch.autograd.Function). {WAY_OUT}"
        )
