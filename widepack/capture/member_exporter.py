"""Exports one member with torch.export, as often as it takes.

An export that fails is repeated in another way, if the error shows which: below autograd, without
derivatives, with `int(x)` of a tensor as a number, or with branches on numbers of selected rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx, nn
from torch.distributions import Distribution
from torch.export import Dim
from torch.nn.utils.rnn import PackedSequence

from widepack_artifacts.literals import Literal

from ..ir.torch_internals import buffers_of, is_fake, parameters_of, submodules_of
from ..spec.entries import FORWARD, method_of
from .attributes import attributes_of
from .call import MemberCall, keywords_beyond
from .derivatives import DerivativesTaken, derivatives_watched, takes_derivatives, weights_fixed
from .explain import has_no_derivative, is_of_data
from .export import calm, export
from .export_events import ExportEvents, watched
from .patches.member_values import MemberValues, values_read
from .patches.numbers import Names, conversions, numbers_kept
from .patches.row_branches import rows_assumed
from .row_runs import same_without_rows
from .state import MEMBER, StatefulWrapper, StateRequests, assignments, known_answer
from .unseen_results import refuse_unseen


@dataclass(frozen=True, kw_only=True)
class ExportAttempt:
    """An export by torch.export, or the error that it raised.

    attributes: the module's plain attributes before the export. grad: whether derivatives are kept.
    derivatives: whether the export is below autograd. differentiated: the derivatives that forward took.
    wrapped: whether a `StatefulWrapper` was exported. assigned: buffers that the module replaced by other
    tensors. literals: what its code read from the member's own tensors.
    """

    module: nn.Module
    attributes: Mapping[str, str] | None
    grad: bool
    derivatives: bool
    differentiated: DerivativesTaken
    wrapped: bool
    assigned: set[str]
    seen: ExportEvents
    exported: torch.export.ExportedProgram | None
    error: Exception | None
    literals: tuple[Literal, ...] = ()

    @property
    def prefix(self) -> str:
        """The prefix of the names of weights in the export."""
        return MEMBER if self.wrapped else ""


@dataclass(frozen=True, kw_only=True)
class MemberExporter:
    """Exports fresh members of one kind with torch.export. wrap: the result needs a `StatefulWrapper`."""

    make: Callable[[], nn.Module]
    call: MemberCall
    entry: str
    requests: StateRequests
    wrap: bool
    gradients: bool
    dropout: bool

    def first(self, module: nn.Module) -> ExportAttempt:
        """Exports with all named dims dynamic.

        If forward takes derivatives, the export is repeated below autograd, also if it did not fail: it may
        have taken a derivative for a constant. If torch lacks a derivative, the export is repeated without
        derivatives. That is the second choice, because torch may then write several ops as one op that no
        program can have.
        """
        attempt = self.attempt(module, Dim.DYNAMIC, grad=True)
        if attempt.differentiated.taken or (attempt.error is not None and takes_derivatives(attempt.error)):
            return self.attempt(self.make(), Dim.DYNAMIC, grad=True, derivatives=True)
        if attempt.error is not None and has_no_derivative(attempt.error):
            # another module, because a failed export leaves marks on it
            return self.attempt(self.make(), Dim.DYNAMIC, grad=False)
        return attempt

    def attempt(self, module: nn.Module, dim: Any, *, grad: bool, derivatives: bool = False) -> ExportAttempt:
        """Exports a module; an error is returned, not raised.

        The export is repeated where `int(x)` of a tensor can be a number of the program, and where a branch
        asks whether there are rows.
        """
        kept: list[Names] = []
        first = attempt = self._once(module, dim, grad, derivatives, kept)
        lines: set[str] | None = None
        reads: bool | None = None  # whether the code reads values of the member's own tensors
        while attempt.error is not None and is_of_data(attempt.error):
            names = conversions(attempt.error)
            if names is not None and all(names is not n for n in kept):
                kept.append(names)
            elif reads is None and not any(map(is_fake, module.parameters())):
                reads = True
            elif lines is None and not self.requests.buffers and not self.requests.leaves:
                lines = set()
            else:
                break
            # another module, because a failed export leaves marks on it
            attempt = self._once(self.make(), dim, grad, derivatives, kept, lines, bool(reads))
            reads = bool(attempt.literals) if reads else reads
        if isinstance(attempt.error, TypeError):
            return first
        final = derivatives or not attempt.differentiated.taken  # else `first` exports once more
        if lines and attempt.exported is not None and final and not self._holds(attempt.exported, lines):
            return first
        return attempt

    def _holds(self, exported: torch.export.ExportedProgram, lines: set[str]) -> bool:
        """Whether a program that assumes rows at some lines holds without rows too."""
        member = self.make()
        method = member if self.entry == FORWARD else method_of(member, self.entry)
        with calm(), weights_fixed(member), torch.random.fork_rng(devices=[]):
            inputs = self.call.args, self.call.kwargs
            return same_without_rows(known_answer(method), exported.module(), lines, inputs)

    def _once(
        self,
        module: nn.Module,
        dim: Any,
        grad: bool,
        derivatives: bool,
        kept: Sequence[Names],
        lines: set[str] | None = None,
        reads: bool = False,
    ) -> ExportAttempt:
        """Exports a module once.

        kept: the modules where `int` and `float` of a tensor are replaced. lines: receives the lines that
        select rows, if branches on their number are followed. reads: whether values of the member's own
        tensors may be read.
        """
        buffers, leaves = self.requests.buffers, self.requests.leaves
        keywords = keywords_beyond(module, self.call, self.entry)
        wrapped = bool(
            self.entry != FORWARD
            or buffers
            or leaves
            or keywords
            or derivatives
            or self.wrap
            or _shadows_graph(module)
        )
        attributes = attributes_of(module)
        values = MemberValues(module, self.requests.buffers) if reads else None
        with (
            assignments(module) as assigned,
            watched() as seen,
            numbers_kept(kept),
            rows_assumed(lines) if lines is not None else nullcontext(),
            derivatives_watched() as taken,
        ):
            root = (
                StatefulWrapper(module, self.entry, buffers, leaves, keywords, derivatives)
                if wrapped
                else module
            )
            exported, error = None, None
            try:
                with values_read(values):
                    exported = export(
                        root,
                        self.call,
                        dim,
                        grad,
                        gradients=self.gradients,
                        dropout=self.dropout,
                        derivatives=derivatives,
                    )
                refuse_unseen(exported, module)
            except Exception as e:  # noqa: BLE001  # whatever torch raises is explained
                exported, error = None, e
        return ExportAttempt(
            module=module,
            attributes=attributes,
            grad=grad,
            derivatives=derivatives,
            differentiated=taken,
            wrapped=wrapped,
            assigned=assigned,
            seen=seen,
            exported=exported,
            error=error,
            literals=tuple(values.literals.values()) if values is not None else (),
        )


def has_dataclass(answer: Any) -> bool:
    """Whether a result has a dataclass, a distribution or a packed sequence, which torch.export does not know
    or make again, and `StatefulWrapper` converts.
    """
    leaves = pytree.tree_leaves(answer, is_leaf=lambda v: isinstance(v, PackedSequence))
    return any(is_dataclass(leaf) or isinstance(leaf, (Distribution, PackedSequence)) for leaf in leaves)


def _shadows_graph(module: nn.Module) -> bool:
    """Whether a submodule or weight has a name that `fx.GraphModule` uses itself, for example `code`."""
    names = (*parameters_of(module), *buffers_of(module), *submodules_of(module))
    return any(hasattr(fx.GraphModule, name) for name in names)
