"""Runs one case of torch's test databases through widepack, and compares it with each member alone.

| outcome | meaning |
|---|---|
| `right` | outputs, and in train mode gradients and statistics, are those of each member alone |
| `wrong` | widepack answered, and a number, shape or dtype differs |
| `refused` | widepack raised one of its errors |
| `crash` | another exception, or the process ended |
| `apart` | not counted: the member fails alone, torch cannot export it, or its values are undefined |

The reference is the member in float64 where it runs in float64, and its own answer otherwise. The bound is
that of a build (docs/explanation/verification.md): rms error 2x the members' own + 1 ulp, largest error 4x
their own + 4 ulp. Samples are small, so that one evaluation may show no rounding error: before a case is
called wrong, the own error is taken over evaluations of inputs and weights that are nudged by some ulp.
Random results are compared in their mean and spread.
"""

from __future__ import annotations

import copy
import math
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.utils._pytree as pytree
from database_cases import AloneFails, Case, first_line, named, seed
from small_builds import QUICK
from torch import Tensor, nn

import widepack

NUDGES = 8
COPIES = 16
ULPS = 2
SEEDS = 6  # that are tried to find whether a member draws
DRAWS = 40  # calls of a random case
SIGMAS = 6.0


@dataclass
class Outcome:
    """How a case ended. why: the reason, in one line, unless it is right."""

    name: str
    why: str = ""


@dataclass
class Run:
    """What one member answers alone: its outputs, and the gradients and statistics by name."""

    result: Any
    tensors: dict[str, Tensor] = field(default_factory=dict)


class Differs(Exception):
    """An answer that is not the members' own."""


def outcome_of(make: Callable[[], Case], through: Callable[[Case], Through] | None = None) -> Outcome:
    """Makes a case, runs it through widepack and compares it. Exceptions are outcomes.

    Args:
        make: Makes the case.
        through: Makes what runs the members through widepack. Default: `Built` if `case.build` is set, else
            `FusedMembers`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            case = make()
            alone = run_alone(case)
        except AloneFails as e:
            return Outcome("apart", f"the member fails alone: {e}")
        try:
            return _checked(case, alone, through or _through)
        except Differs as e:
            return Outcome("wrong", str(e))
        except widepack.WidepackError as e:
            if failure := _export_failure(case):
                return Outcome("apart", f"torch.export refuses the member: {failure}")
            return Outcome("refused", f"{type(e).__name__}: {' '.join(str(e).split())}")
        except Exception as e:  # noqa: BLE001  # the outcome of a case is any exception
            if failure := _export_failure(case):
                return Outcome("apart", f"torch.export refuses the member: {failure}")
            return Outcome("crash", f"{type(e).__name__}: {first_line(e)}")


def _through(case: Case) -> Through:
    return Built(case) if case.build else FusedMembers(case)


def _checked(case: Case, alone: Sequence[Run], through: Callable[[Case], Through]) -> Outcome:
    run = through(case)
    if _random(case, alone):
        _compare_draws(case, alone, run)
        return Outcome("right")
    compare(case, alone, run.each(case.inputs, alone))
    if not case.gradients and any(isinstance(v, Tensor) for v in pytree.tree_leaves(case.inputs[0])):
        one = replace(case, inputs=[case.inputs[0]] * len(case.members))
        own = run_alone(one)
        compare(one, own, run.shared(case.inputs[0], own))
    return Outcome("right")


# ---------------------------------------------------------------- the members alone


def run_alone(case: Case, **change: Any) -> list[Run]:
    """Runs each member by itself. Raises AloneFails."""
    try:
        return [_run(m, x, case, i, **change) for i, (m, x) in enumerate(zip(case.members, case.inputs))]
    except Exception as e:
        raise AloneFails(f"{type(e).__name__}: {first_line(e)}") from e


def _run(
    member: nn.Module, inputs: Any, case: Case, i: int, other: Callable[[Tensor], Tensor] | None = None
) -> Run:
    """Runs a copy of one member. other: changes each of its tensors and inputs first."""
    member, inputs = copy.deepcopy(member), named(inputs)
    if other is not None:
        inputs = pytree.tree_map(lambda v: other(v) if isinstance(v, Tensor) else v, inputs)
        for tensor in (*member.parameters(), *member.buffers()):
            tensor.data = other(tensor.data)
    seed(7)
    if not case.gradients:
        with torch.no_grad():
            return Run(member(*inputs[0], **inputs[1]))
    leaves = [v for v in pytree.tree_leaves(inputs) if isinstance(v, Tensor) and differentiable(v)]
    for leaf in leaves:
        leaf.requires_grad_(True)
    result = member(*inputs[0], **inputs[1])
    found = Run(pytree.tree_map(lambda v: v.detach() if isinstance(v, Tensor) else v, result))
    total = _loss(case.process(result), i, other)
    if total is not None:
        total.backward()  # type: ignore[no-untyped-call]  # of torch
    named_leaves = {f"input {k}": v for k, v in enumerate(leaves)}
    for name, value in {**dict(member.named_parameters()), **named_leaves}.items():
        found.tensors[f"gradient of {name}"] = (
            torch.zeros_like(value) if value.grad is None else value.grad.detach()
        )
    found.tensors.update({f"buffer {n}": b.detach().clone() for n, b in member.named_buffers()})
    return found


def differentiable(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def _loss(result: Any, i: int, other: Callable[[Tensor], Tensor] | None = None) -> Tensor | None:
    """Returns a weighted sum of all differentiable outputs of member i, or None without any.

    other: changes the weights of the sum first.
    """
    total = None
    for k, leaf in enumerate(pytree.tree_leaves(result)):
        if isinstance(leaf, Tensor) and leaf.requires_grad and differentiable(leaf):
            value = torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf
            generator = torch.Generator().manual_seed(31 * i + k)
            weights = torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value.dtype)
            part = (value * (weights if other is None else other(weights).to(value.dtype))).sum()
            total = part if total is None else total + part.to(total.dtype)
    return total


def _random(case: Case, alone: Sequence[Run]) -> bool:
    """Returns whether member 0 answers differently with another seed of the generator."""
    for number in range(SEEDS):
        member, inputs = copy.deepcopy(case.members[0]), named(case.inputs[0])
        seed(8 + number)
        with torch.no_grad():
            again = member(*inputs[0], **inputs[1])
        pairs = zip(pytree.tree_leaves(alone[0].result), pytree.tree_leaves(again))
        if any(
            isinstance(a, Tensor)
            and (a.shape != b.shape or not torch.allclose(a, b, 1e-3, 1e-3, equal_nan=True))
            for a, b in pairs
        ):
            return True
    return False


def _export_failure(case: Case) -> str:
    """Returns how torch.export fails on member 0 alone, or ""."""
    args, kwargs = named(case.inputs[0])
    try:
        torch.export.export(copy.deepcopy(case.members[0]), args, kwargs, strict=False)
    except Exception as e:  # noqa: BLE001  # whatever torch raises
        return f"{type(e).__name__}: {first_line(e)}"
    return ""


# ---------------------------------------------------------------- through widepack


class Through(Protocol):
    """Runs the members of a case through widepack. own: the members' own runs, which have the structure."""

    def shared(self, inputs: Any, own: Sequence[Run]) -> list[Run]: ...

    def each(self, inputs: Sequence[Any], own: Sequence[Run]) -> list[Run]: ...


class FusedMembers:
    """The members of a case, fused. model: what runs them in place of `widepack.fuse`."""

    def __init__(self, case: Case, model: Any = None) -> None:
        self.case, self.seed = case, 7
        args, kwargs = named(case.inputs[0])
        if model is None:
            model = widepack.fuse(copy.deepcopy(case.members), args, sample_kwargs=kwargs)
        self.model = model

    def shared(self, inputs: Any, own: Sequence[Run]) -> list[Run]:
        args, kwargs = named(inputs)
        with torch.no_grad():
            return _parts(self.model(*args, **kwargs), own)

    def each(self, inputs: Sequence[Any], own: Sequence[Run]) -> list[Run]:
        args, kwargs = _stacked(inputs)
        self.seed += 1
        seed(self.seed)
        if not self.case.gradients:
            with torch.no_grad():
                return _parts(self.model.each(*args, **kwargs), own)
        leaves = [
            v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, Tensor) and differentiable(v)
        ]
        for leaf in leaves:
            leaf.requires_grad_(True)
        found = _parts(self.model.each(*args, **kwargs), own)
        losses = [_loss(self.case.process(row.result), i) for i, row in enumerate(found)]
        for row in found:
            row.result = pytree.tree_map(lambda v: v.detach() if isinstance(v, Tensor) else v, row.result)
        differentiated = [part for part in losses if part is not None]
        if differentiated:
            torch.stack(differentiated).sum().backward()  # type: ignore[no-untyped-call]  # of torch
        self._add("gradient of ", self._gradients(leaves), found)
        buffers = {
            n: self.model.tensor_of(n).detach().clone() for n, _ in self.case.members[0].named_buffers()
        }
        self._add("buffer ", buffers, found)
        return found

    def _gradients(self, leaves: Sequence[Tensor]) -> dict[str, Tensor]:
        tensors = {**dict(self.model.named_parameters()), **{f"input {k}": v for k, v in enumerate(leaves)}}
        return {n: torch.zeros_like(v) if v.grad is None else v.grad for n, v in tensors.items()}

    @staticmethod
    def _add(prefix: str, values: Mapping[str, Tensor], found: Sequence[Run]) -> None:
        for name, value in values.items():
            for row, own in zip(found, value):
                row.tensors[prefix + name] = own


class Built:
    """The members of a case, built and loaded."""

    def __init__(self, case: Case) -> None:
        args, kwargs = named(case.inputs[0])
        with tempfile.TemporaryDirectory() as folder:
            paths = [str(Path(folder) / f"{i}.pt") for i in range(len(case.members))]
            for path, member in zip(paths, case.members):
                torch.save(member.state_dict(), path)
            out = Path(folder) / "case.wide"
            widepack.build(
                paths,
                out,
                model=lambda: copy.deepcopy(case.members[0]),
                sample=args,
                sample_kwargs=kwargs,
                **QUICK,
            )
            self.model = widepack.load(out)

    def shared(self, inputs: Any, own: Sequence[Run]) -> list[Run]:
        args, kwargs = named(inputs)
        return _parts(self.model(*args, **kwargs), own)

    def each(self, inputs: Sequence[Any], own: Sequence[Run]) -> list[Run]:
        args, kwargs = _stacked(inputs)
        return _parts(self.model.each(*args, **kwargs), own)


def _stacked(inputs: Sequence[Any]) -> Any:
    """Returns the inputs of all members, each tensor stacked as `[N, ...]`."""
    flat = [pytree.tree_flatten(named(row)) for row in inputs]
    rows = [
        torch.stack(list(leaf)) if isinstance(leaf[0], Tensor) else leaf[0]
        for leaf in zip(*(leaves for leaves, _ in flat))
    ]
    return pytree.tree_unflatten(rows, flat[0][1])


def _parts(answer: Any, own: Sequence[Run]) -> list[Run]:
    """Returns each member's part of a wide answer."""
    return [Run(_part(answer, row.result, i, "output")) for i, row in enumerate(own)]


def _part(wide: Any, own: Any, i: int, where: str) -> Any:
    """Returns member i's part of a wide answer, which has the structure of the member's own."""
    if isinstance(own, Tensor):
        if not isinstance(wide, (Tensor, list)):
            raise Differs(f"{where} is a {type(wide).__name__}, the member's own is a tensor")
        part: Tensor = wide[i]
        return part
    if isinstance(own, Mapping):
        return {k: _part(wide[k], v, i, f"{where}[{k!r}]") for k, v in own.items()}
    if isinstance(own, (tuple, list)):
        if not isinstance(wide, (tuple, list)) or len(wide) != len(own):
            raise Differs(f"{where} is a {type(wide).__name__}, the member's own has {len(own)} parts")
        parts = [_part(w, o, i, f"{where}[{k}]") for k, (w, o) in enumerate(zip(wide, own))]
        return tuple(parts) if isinstance(own, tuple) else parts
    if wide != own and not (wide is None and own is None):
        if isinstance(wide, (Tensor, list)):
            return wide[i]
        raise Differs(f"{where} is {wide!r}, the member's own is {own!r}")
    return own


# ---------------------------------------------------------------- the comparison


def compare(case: Case, own: Sequence[Run], wide: Sequence[Run]) -> None:
    """Compares every tensor of all members. Raises Differs."""
    found, alone = [_tensors(case, r) for r in wide], [_tensors(case, r) for r in own]
    exact = _reference(case, alone)
    for name in alone[0]:
        rows = [(w[name], a[name]) for w, a in zip(found, alone)]
        for i, (w, a) in enumerate(rows):
            if w.shape != a.shape or w.dtype != a.dtype:
                raise Differs(
                    f"{name} of member {i} is {w.dtype}{list(w.shape)}, its own {a.dtype}{list(a.shape)}"
                )
    problem = _difference(found, alone, exact, [], case.ulps)
    if problem:
        nudged = [_tensors_of(case, k) for k in range(NUDGES)] + [_at_once(case)]
        problem = _difference(found, alone, exact, [n for n in nudged if n is not None], case.ulps)
    if problem:
        raise Differs(problem)


def _tensors(case: Case, run: Run) -> dict[str, Tensor]:
    """Returns the tensors of a run by name, as torch's tests compare them."""
    try:
        result = case.process(run.result)
    except Exception:  # noqa: BLE001  # some functions take an output with gradients only
        result = run.result
    leaves = [v for v in pytree.tree_leaves(result) if isinstance(v, Tensor)]
    named_leaves = {f"output {k}": v.detach().resolve_conj() for k, v in enumerate(leaves)}
    return {**named_leaves, **run.tensors}


def _reference(case: Case, alone: Sequence[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Returns the members' answers in float64, or their own where they do not run in float64."""
    try:
        runs = [_tensors(case, r) for r in run_alone(case, other=raised)]
    except AloneFails:
        return list(alone)
    same = all(set(a) == set(b) and all(a[n].shape == b[n].shape for n in a) for a, b in zip(alone, runs))
    return runs if same else list(alone)


def raised(value: Tensor) -> Tensor:
    """Returns a tensor in float64 or complex128."""
    return (
        value.to(torch.complex128 if value.is_complex() else torch.float64)
        if differentiable(value)
        else value
    )


def _tensors_of(case: Case, number: int) -> list[dict[str, Tensor]] | None:
    """Returns the members' own answers for numbers that are changed by at most `ULPS` ulp."""
    generator = torch.Generator().manual_seed(number)

    def nudged(value: Tensor) -> Tensor:
        if not differentiable(value) or value.layout != torch.strided:
            return value
        change = torch.rand(value.shape, generator=generator, dtype=torch.float32) * 2 - 1
        return value * (1 + ULPS * torch.finfo(value.dtype).eps * change)

    try:
        return [_tensors(case, r) for r in run_alone(case, other=nudged)]
    except AloneFails:
        return None


def _at_once(case: Case) -> list[dict[str, Tensor]] | None:
    """Returns the members' own answers from kernels of many numbers: of equal copies, evaluated by vmap."""
    try:
        return [_copies_of(case, i) for i in range(len(case.members))]
    except Exception:  # noqa: BLE001  # vmap does not know every op
        return None


def _copies_of(case: Case, i: int) -> dict[str, Tensor]:
    member, (args, kwargs) = copy.deepcopy(case.members[i]), case.inputs[i]
    state = {n: v.detach() for n, v in (*member.named_parameters(), *member.named_buffers())}
    leaves, spec = pytree.tree_flatten([state, list(args), kwargs])
    copies = [
        v.detach().expand(COPIES, *v.shape).clone().requires_grad_(case.gradients and differentiable(v))
        for v in leaves
    ]
    with torch.set_grad_enabled(case.gradients):
        call = partial(_called, member, spec)
        result = torch.func.vmap(call, randomness="same")(copies)
    rows = [pytree.tree_map(lambda v, k=k: v[k], result) for k in range(COPIES)]
    found = Run(pytree.tree_map(torch.detach, rows[0]))
    losses = [part for row in rows if (part := _loss(case.process(row), i)) is not None]
    if losses and case.gradients:
        torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]  # of torch
        names = [*state, *(f"input {k}" for k in range(len(copies) - len(state)))]
        for name, value in zip(names, copies):
            if value.grad is not None:
                found.tensors[f"gradient of {name}"] = value.grad[0]
    return _tensors(case, found)


def _called(member: nn.Module, spec: pytree.TreeSpec, values: list[Tensor]) -> Any:
    state, args, kwargs = pytree.tree_unflatten(values, spec)
    return torch.func.functional_call(member, state, tuple(args), kwargs)


Tensors = Sequence[Mapping[str, Tensor]]


def _difference(wide: Tensors, own: Tensors, exact: Tensors, nudged: Sequence[Tensors], ulps: float) -> str:
    """Returns how the first tensor differs that is out of bounds, or ""."""
    for name in own[0]:
        evaluations = [[row[name] for row in rows] for rows in nudged if all(name in row for row in rows)]
        problem = out_of_bounds(
            [row[name] for row in wide],
            [row[name] for row in own],
            [row[name] for row in exact],
            evaluations,
            ulps if _is_rounded_more(name, own[0][name].dtype) else 0.0,
        )
        if problem:
            return f"{name}: {problem}"
    return ""


def _is_rounded_more(name: str, dtype: torch.dtype) -> bool:
    """Returns whether `Case.ulps` is for a tensor: a weight's gradient, or any gradient in float64.

    In float64 the reference is no more exact than what is compared with it.
    """
    return name.startswith("gradient of ") and (
        not name.startswith("gradient of input ") or dtype == torch.float64
    )


def out_of_bounds(
    wide: Sequence[Tensor],
    own: Sequence[Tensor],
    exact: Sequence[Tensor],
    others: Sequence[Sequence[Tensor]] = (),
    ulps: float = 0.0,
) -> str:
    """Returns how the members' rows of one tensor are out of the bound, or "".

    Args:
        wide: The rows from widepack, one for each member.
        own: The rows of each member alone.
        exact: The same rows in float64.
        others: The members' rows of other evaluations, from which the members' own error is taken too.
        ulps: An error that is accepted beyond the bound, in ulp of the largest number.
    """
    if not differentiable(own[0]):
        for i, (w, a, e) in enumerate(zip(wide, own, exact)):
            right = (w == a) | (w == e.to(a.dtype))
            for rows in others:
                right |= w == rows[i]
            if not bool(right.all()):
                return f"{int((~right).sum())} of {right.numel()} values of member {i} differ"
        return ""
    eps = torch.finfo(own[0].dtype).eps
    wide_error: list[Any] = []
    own_error: list[list[Any]] = [[] for _ in range(1 + len(others))]
    truth: list[Any] = []
    for i, (w, a, e) in enumerate(zip(wide, own, exact)):
        finite = torch.isfinite(a)
        if not torch.equal(finite, torch.isfinite(w)) and not any(
            torch.equal(torch.isfinite(rows[i]), torch.isfinite(w)) for rows in others
        ):
            return f"NaN or inf of member {i} in other places than its own"
        fine = finite & torch.isfinite(e) & torch.isfinite(w)
        if not bool(((w == a) | (torch.isnan(w) & torch.isnan(a)) | torch.isfinite(w)).all()) and not others:
            return f"NaN or inf of member {i} are others than its own"
        target = e[fine].to(torch.complex128 if e.is_complex() else torch.float64)
        truth.append(target.abs())
        wide_error.append((w[fine].to(target.dtype) - target).abs())
        for k, rows in enumerate((own, *others)):
            error = (rows[i][fine].to(target.dtype) - target).abs()
            own_error[k].append(error[torch.isfinite(error)])
    ulp = eps * _rms(torch.cat(truth))
    rms = 2 * max(_rms(torch.cat(row)) for row in own_error) + ulp
    largest = 4 * max(_largest(torch.cat(row)) for row in own_error) + 4 * ulp
    accepted = ulps * eps * _largest(torch.cat(truth))
    rms, largest = max(rms, accepted), max(largest, accepted)
    for i, error in enumerate(wide_error):
        if not _rms(error) <= rms or not _largest(error) <= largest:
            return (
                f"member {i}: rms error {_rms(error):.1e} (bound {rms:.1e}), largest {_largest(error):.1e} "
                f"(bound {largest:.1e})"
            )
    return ""


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt()) if values.numel() else 0.0


def _largest(values: Tensor) -> float:
    return float(values.max()) if values.numel() else 0.0


def _compare_draws(case: Case, own: Sequence[Run], run: Through) -> None:
    """Compares mean and spread of random results over many calls. Raises Differs."""
    quiet = replace(case, gradients=False)
    if isinstance(run, FusedMembers):
        run.case = quiet
    wide = [run.each(case.inputs, own) for _ in range(DRAWS)]
    alone: list[list[Run]] = []
    for k in range(DRAWS):
        alone.append([])
        for member, inputs in zip(case.members, case.inputs):
            args, kwargs = named(inputs)
            seed(100 + k)
            with torch.no_grad():
                alone[-1].append(Run(copy.deepcopy(member)(*args, **kwargs)))
    for i in range(len(case.members)):
        ours, theirs = ([_tensors(quiet, rows[i]) for rows in runs] for runs in (wide, alone))
        for name in (n for n in theirs[0] if n.startswith("output")):
            a, b = [row[name] for row in ours], [row[name] for row in theirs]
            if a[0].dtype != b[0].dtype or a[0].dim() != b[0].dim():
                raise Differs(f"{name} of member {i} is {a[0].dtype} of {a[0].dim()} dims")
            if a[0].shape == b[0].shape:
                _same_distribution(torch.stack(a), torch.stack(b), f"{name} of member {i}")


def _same_distribution(ours: Tensor, theirs: Tensor, where: str) -> None:
    """Compares means of a bounded function of the values, and of its square. Raises Differs."""
    x, y = (torch.view_as_real(v) if v.is_complex() else v for v in (ours, theirs))
    x, y = (v.double().nan_to_num() / (1 + v.double().nan_to_num().abs()) for v in (x, y))
    for power in (1, 2):
        a, b = x.pow(power), y.pow(power)
        spread = math.sqrt(float(a.var() + b.var()) / max(a.numel(), 1)) if a.numel() > 1 else 0.0
        if abs(float(a.mean() - b.mean())) > SIGMAS * spread + 1e-6:
            raise Differs(
                f"{where}: mean {float(a.mean()):.3f} over {DRAWS} calls, its own {float(b.mean()):.3f}"
            )
