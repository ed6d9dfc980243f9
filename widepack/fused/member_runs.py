"""Runs single members of a fused module, as modules and as programs, for comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from widepack_artifacts import tree
from widepack_artifacts.program import Program

from ..capture.export import calm, clone
from ..capture.named_fields import known_forms
from ..ir.cast import raise_program
from ..spec.draws import draw_all
from ..spec.state import BUFFER, CarriedState
from ..verification.module_run import without_draws
from ..verification.subject import Subject, fitting, with_accepted_inputs
from .gradients import Gradients, gradients_of, terms_of, weighted_sum
from .members import FusedMembers
from .programs import CPU, DifferentiableProgram, FusedEntry
from .skeleton import weights_of

FLOAT64_ULPS = 1000
"""The error of float64 members that is accepted. A wrong program is off by more."""


@dataclass(frozen=True)
class LiveMemberRuns:
    """Runs the members of a fused module one by one, on the CPU.

    Attributes:
        fused: The fused module.
        entry: The entry of its program.
        resting: The captured program, without its random ops.
        draws: Whether the members' modules draw random numbers.
    """

    fused: FusedMembers
    entry: FusedEntry
    resting: Program
    draws: bool

    @cached_property
    def weights(self) -> dict[str, torch.Tensor]:
        """The weights of all members by name."""
        return {n: v.detach().cpu() for n, v in self.fused.tensors_of(self.entry).items()}

    @cached_property
    def subject(self) -> Subject:
        """The subject of a comparison: the program at rest, and the members' modules unless they draw."""
        entry = self.entry

        def initial(i: int, state: CarriedState) -> torch.Tensor | None:
            return self.fused.tensor_of(state.name).detach().cpu()[i] if state.how == BUFFER else None

        subject = Subject(
            members=tuple(f"{i}" for i in range(len(self.fused))),
            programs=[self.resting],
            signatures=entry.signatures,
            sources=entry.sources,
            outputs=entry.output_names,
            sizes=entry.sizes,
            batch=entry.batch,
            weights=lambda i: {n: self._of_member(n, v, i) for n, v in self.weights.items()},
            module=None if self.draws else lambda i: self.fused.member(i, CPU),
            bind=self._sample_with,
            fits=fitting(entry.bounds, entry.conditions),
            numbers=tree.numbers(entry.returned),
            states=entry.states,
            rests=self.fused.drops_only_when_fused,
            initial=initial,
            float64_ulps=FLOAT64_ULPS,
        )
        return with_accepted_inputs(subject)

    def inputs(self, seed: int) -> list[torch.Tensor]:
        """Returns drawn inputs of one member, at the sample's sizes."""
        sources = self.subject.sources[: self.entry.input_count]
        return draw_all(sources, self.entry.sizes, seed)

    @property
    def trained(self) -> list[str]:
        """The weights whose gradients are computed."""
        return [
            n
            for n in dict.fromkeys(s.source for s in self.entry.programs[0].weights)
            if n not in self.entry.constants and self.fused.tensor_of(n).requires_grad
        ]

    def _of_member(self, name: str, value: torch.Tensor, i: int) -> torch.Tensor:
        return value[i] if self.entry.kinds[name] == "stacked" else value

    def _sample_with(self, leaves: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the sample's arguments with other tensors."""
        it, call = iter(leaves), self.fused.sample()
        args, kwargs = pytree.tree_map(
            lambda v: next(it) if isinstance(v, torch.Tensor) else v, (call.args, call.kwargs)
        )
        return args, kwargs

    def run_module(
        self,
        i: int,
        leaves: Sequence[torch.Tensor],
        names: Sequence[str] = (),
        *,
        exact: bool = False,
        terms: dict[str, float] | None = None,
        member: nn.Module | None = None,
    ) -> tuple[list[torch.Tensor], Gradients]:
        """Returns the outputs of member i's own module, and the gradients of these weights.

        exact: whether it runs in float64. terms: gets the sizes of the terms of biases' gradients
        (`gradients.py`). member: the module, if it was made already.
        """
        member = self.fused.member(i, CPU) if member is None else member
        if exact:
            member, leaves = member.double(), [v.double() if v.is_floating_point() else v for v in leaves]
        args, kwargs = self._sample_with([clone(v) for v in leaves])
        rests = without_draws if self.fused.drops_only_when_fused else nullcontext
        collecting = terms_of(member, names if terms is not None else ())
        with calm(), torch.enable_grad(), collecting as sizes:
            with rests():
                output = known_forms(member(*args, **kwargs))
            outputs = [y for y in pytree.tree_leaves(output) if isinstance(y, torch.Tensor)]
            total = weighted_sum(outputs, i)  # which draws its weights
            with rests():  # a checkpoint runs its part again
                gradients = gradients_of(total, weights_of(member), names)
        if terms is not None:
            terms.update(sizes)
        return outputs, gradients

    def run_program(
        self,
        program: Program,
        i: int,
        leaves: Sequence[torch.Tensor],
        names: Sequence[str] = (),
        *,
        exact: bool = False,
    ) -> tuple[list[torch.Tensor], Gradients]:
        """Returns the outputs of a program with member i's weights, and the gradients of these weights.

        exact: whether it runs in float64.
        """
        program = raise_program(program) if exact else program

        def as_run(value: torch.Tensor) -> torch.Tensor:
            return value.double() if exact and value.is_floating_point() else value

        def copy_of(name: str, value: torch.Tensor) -> torch.Tensor:
            own = self._of_member(name, value.detach().cpu(), i)
            return as_run(own.clone()).requires_grad_(name in names)

        weights = {n: copy_of(n, v) for n, v in self.weights.items()}
        buffers = [copy_of(name, self.fused.tensor_of(name)) for _, _, name in self.entry.carried]
        carried = {o for _, o, _ in self.entry.carried}
        with torch.enable_grad():
            results = DifferentiableProgram(program, CPU)(
                weights, [*(as_run(clone(v)) for v in leaves), *buffers]
            )
            outputs = [y for k, y in enumerate(results) if k not in carried]
            return outputs, gradients_of(weighted_sum(outputs, i), weights, names)
