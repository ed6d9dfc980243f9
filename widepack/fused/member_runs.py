"""Runs single members of a fused module, as modules and as programs, for comparisons."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import torch
import torch.utils._pytree as pytree
from torch import nn

from widepack_artifacts.program import Program

from ..capture.call import MemberCall
from ..capture.export import calm, clone
from ..capture.named_fields import known_forms
from ..ir.cast import raise_program
from ..verification.module_run import without_draws
from .gradients import Gradients, gradients_of, terms_of, weighted_sum
from .program_runs import DifferentiableProgram
from .programs import CPU, FusedEntry
from .skeleton import weights_of


class LiveMembers(Protocol):
    """What a comparison needs of a fused module."""

    def __len__(self) -> int: ...
    def member(self, i: int, device: torch.device | str | None = None) -> nn.Module: ...
    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...
    def sample(self) -> MemberCall: ...
    def tensor_of(self, name: str) -> torch.Tensor: ...
    def tensors_of(self, entry: FusedEntry) -> dict[str, torch.Tensor]: ...
    @property
    def drops_only_when_fused(self) -> bool: ...


def sample_with(fused: LiveMembers, leaves: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the sample's arguments with other tensors."""
    it, call = iter(leaves), fused.sample()
    args, kwargs = pytree.tree_map(
        lambda v: next(it) if isinstance(v, torch.Tensor) else v, (call.args, call.kwargs)
    )
    return args, kwargs


def run_module(
    fused: LiveMembers,
    i: int,
    leaves: Sequence[torch.Tensor],
    names: Sequence[str],
    *,
    exact: bool = False,
    terms: dict[str, float] | None = None,
    member: nn.Module | None = None,
) -> tuple[list[torch.Tensor], Gradients]:
    """Returns what member i's own module answers, and the gradients of these weights.

    exact: whether it runs in float64. terms: gets the sizes of the terms of biases' gradients
    (`gradients.py`). member: the module, if it was made already.
    """
    member = fused.member(i, CPU) if member is None else member
    if exact:
        member, leaves = member.double(), [v.double() if v.is_floating_point() else v for v in leaves]
    args, kwargs = sample_with(fused, [clone(v) for v in leaves])
    rests = without_draws if fused.drops_only_when_fused else nullcontext
    collecting = terms_of(member, names if terms is not None else ())
    with calm(), torch.enable_grad(), collecting as sizes:
        with rests():
            answer = known_forms(member(*args, **kwargs))
        outputs = [y for y in pytree.tree_leaves(answer) if isinstance(y, torch.Tensor)]
        total = weighted_sum(outputs, i)  # which draws its weights
        with rests():  # a checkpoint runs its part again
            gradients = gradients_of(total, weights_of(member), names)
    if terms is not None:
        terms.update(sizes)
    return outputs, gradients


def run_program(
    fused: LiveMembers,
    entry: FusedEntry,
    program: Program,
    i: int,
    leaves: Sequence[torch.Tensor],
    names: Sequence[str],
    *,
    exact: bool = False,
) -> tuple[list[torch.Tensor], Gradients]:
    """Returns what the member program answers with member i's weights, and the gradients of these weights.

    exact: whether it runs in float64.
    """
    program = raise_program(program) if exact else program

    def as_run(value: torch.Tensor) -> torch.Tensor:
        return value.double() if exact and value.is_floating_point() else value

    def copy_of(name: str, value: torch.Tensor) -> torch.Tensor:
        value = value.detach().cpu()
        own = value[i] if entry.kinds[name] == "stacked" else value
        return as_run(own.clone()).requires_grad_(name in names)

    weights = {n: copy_of(n, v) for n, v in fused.tensors_of(entry).items()}
    buffers = [copy_of(name, fused.tensor_of(name)) for _, _, name in entry.carried]
    carried = {o for _, o, _ in entry.carried}
    with torch.enable_grad():
        answer = DifferentiableProgram(program, CPU)(weights, [*(as_run(clone(v)) for v in leaves), *buffers])
        outputs = [y for k, y in enumerate(answer) if k not in carried]
        return outputs, gradients_of(weighted_sum(outputs, i), weights, names)
