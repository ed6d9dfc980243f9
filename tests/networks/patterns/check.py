"""Builds a pattern, loads it, and compares every member with its module alone in float64."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from default_dtype import double_by_default
from support import Bound, double, leaves, run, stack
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from networks.patterns.case import QUICK, Case, N
from networks.patterns.inputs_and_outputs import Answer
from widepack import BuildReport, build, load
from widepack.inference.model import WideModel
from widepack_artifacts.reader import Reader


def member(case: Case, seed: int) -> nn.Module:
    """Returns a module that looks trained: its weights, norms and statistics differ from other members'."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        module = case.make().eval()
        for p in module.parameters():
            p.add_(0.1 * torch.randn_like(p))
        for name, b in module.named_buffers():
            if name.endswith("running_var"):
                b.copy_(torch.rand_like(b) + 0.5)
            elif name.endswith("running_mean"):
                b.copy_(torch.randn_like(b))
    return module


def exact(case: Case, seed: int) -> nn.Module:
    """Returns the member in float64 and complex128."""
    return member(case, seed)._apply(
        lambda t: t.to(torch.complex128) if t.is_complex() else t.double() if t.is_floating_point() else t
    )


def build_case(case: Case, folder: Path, nan_member: int | None = None) -> tuple[WideModel, BuildReport]:
    """Builds and loads the case. nan_member: the member whose floating-point weights are all NaN."""
    paths = []
    for i in range(N):
        state = member(case, i).state_dict()
        if i == nan_member:
            state = {
                k: torch.full_like(v, float("nan")) if v.is_floating_point() or v.is_complex() else v
                for k, v in state.items()
            }
        paths.append(folder / f"m{i}.pt")
        torch.save(state, paths[-1])
    how: dict[str, Any] = {"inputs": case.inputs}
    if case.sample is not None:
        how = {"sample_kwargs": case.sample(case.example, 0), "dynamic": dict(case.dynamic)}
    report = build(paths, folder / "e.wide", model=case.make, **how, **QUICK)
    return load(folder / "e.wide", verify="off", warmup=False), report


def once_a_member(ens: WideModel, folder: Path) -> set[str]:
    """Returns the ops of the nodes that run once for each member, in any preset."""
    entry = ens.manifest.entries["forward"]
    ops = {n.name: n.op for n in Reader(folder / "e.wide").program(entry.member[0]).nodes}
    found = set()
    for pattern in ("shared", "each"):
        for plan in ens.plans(pattern):
            found |= {ops[n] for n in plan.looped()} | {
                ops.get(n, n) for n, c in plan.choices.items() if c.strategy == "sequential"
            }
    return found


def truth_of(module: nn.Module, given: Mapping[str, Any]) -> Any:
    """Returns the member's answer in float64, including tensors that its code makes or casts to float."""
    with pytest.MonkeyPatch.context() as patch, double_by_default():
        for name in ("float", "half", "bfloat16"):
            patch.setattr(Tensor, name, Tensor.double)
        to = Tensor.to
        patch.setattr(
            Tensor,
            "to",
            lambda x, *args, **kwargs: to(
                x, *(_double(a) for a in args), **{k: _double(v) for k, v in kwargs.items()}
            ),
        )
        return run(module, (), raised(given))


def _double(value: Any) -> Any:
    """Returns float64 for a floating-point dtype, and any other value unchanged."""
    return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value


def raised(value: Any) -> Any:
    return tree_map(
        lambda x: x.to(torch.complex128) if isinstance(x, Tensor) and x.is_complex() else double(x), value
    )


def flat(x: Tensor) -> Tensor:
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def parts(result: Any) -> list[Tensor]:
    """Returns the tensors of a result in order, including those in output classes."""
    return [
        x.detach()
        for x in leaves(
            [v for v in vars(result).values() if v is not None] if isinstance(result, Answer) else result
        )
    ]


def check_case(case: Case, folder: Path, once: set[str]) -> None:
    """Builds a case and compares it with every member alone. once: the ops that run once for each member."""
    ens, _ = build_case(case, folder)
    alone_ops = once_a_member(ens, folder)
    assert alone_ops == once, alone_ops
    compare(case, ens)


def compare(case: Case, ens: WideModel) -> None:
    """Compares a loaded case with every member alone, at several sizes and in both presets."""
    alone, doubles = [member(case, i) for i in range(N)], [exact(case, i) for i in range(N)]
    found: dict[tuple[int, int], list[tuple[Tensor, Tensor, Tensor]]] = {}
    sizes = case.calls()
    for k in itertools.count():
        if k >= len(sizes) and all(sum(m.numel() for _, m, _ in rows) * N >= 64 for rows in found.values()):
            break
        calls_of_members = [case.draw(sizes[k % len(sizes)], 10 * k + i) for i in range(N)]
        each = {
            n: stack([o[n] for o in calls_of_members])
            if any(isinstance(x, Tensor) for x in tree_leaves(calls_of_members[0][n]))
            else calls_of_members[0][n]
            for n in calls_of_members[0]
        }
        for answer, given in (
            (ens(**calls_of_members[0]), [calls_of_members[0]] * N),
            (ens.each(**each), calls_of_members),
        ):
            for i in range(N):
                answer_alone, truth = run(alone[i], (), given[i]), truth_of(doubles[i], given[i])
                for j, (w, m, t) in enumerate(
                    zip(parts(answer), parts(answer_alone), parts(truth), strict=True)
                ):
                    assert w[i].shape == m.shape
                    if m.is_floating_point() or m.is_complex():
                        found.setdefault((j, i), []).append((flat(w[i]), flat(m), flat(t)))
                    else:
                        assert torch.equal(w[i], m)
                        assert w.dtype == m.dtype
    for j in {j for j, _ in found}:
        bound = Bound()
        for i in range(N):  # the errors of a member are collected over its calls
            bound.add(*(torch.cat([x.flatten() for x in column]) for column in zip(*found[j, i])))
        bound.check()
