"""Defines calls of an entry that are checked and have not passed the gate: for models over several devices
or processes, which run one of them on each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import WidepackError
from ..reduction.stream import StreamedSums
from .answer_stream import AnswerStream
from .entry import WideEntry
from .output import build_answer
from .part_reduction import FIGURES, PartReduction, Sums


class PreparedCall:
    """A checked call of the members that are here.

    Args:
        entry: The entry.
        values: The tensors of the call, as `WideEntry.flat` returns them.
        per_member: For each whether it has one value for each member.

    Raises:
        InputError: The call does not match the entry.
    """

    def __init__(self, entry: WideEntry, values: Sequence[Tensor], per_member: Sequence[bool]) -> None:
        self.entry, self.values, self.per_member = entry, values, per_member
        self.program = entry.bound(values, per_member)

    def run(self) -> Any:
        """Runs the program, inside the gate. Returns: its outputs."""
        return self.program.run(*self.values)

    def leaves(self, found: Sequence[Any]) -> list[Any]:
        """Returns each output as `[n, ...]`, or as a list of n tensors if the members' shapes differ."""
        members = len(self.entry)
        return [
            v.expand(members, *v.shape) if o.kind == "shared" else list(v) if k in self.program.lists else v
            for k, (v, o) in enumerate(zip(found, self.program.program.outputs))
        ]

    @property
    def shared(self) -> frozenset[int]:
        """The numbers of the outputs that are the same for all members."""
        return frozenset(k for k, o in enumerate(self.program.program.outputs) if o.kind == "shared")

    def explained(self, error: Exception) -> WidepackError:
        """Returns the error of a call that an op refused. No swap may wait for this call meanwhile."""
        return self.entry.explained(self.program, self.values, self.per_member, error)


class PreparedReduction(PreparedCall):
    """A checked call whose answers are summed up. The sums are computed while members run, where they run
    one after the other.
    """

    def __init__(
        self,
        entry: WideEntry,
        values: Sequence[Tensor],
        per_member: Sequence[bool],
        reduction: PartReduction,
    ) -> None:
        super().__init__(entry, values, per_member)
        self.reduction = reduction
        self._stream: AnswerStream | None = None
        streamed = reduction.streamed and not entry.entry.state
        if streamed and not reduction.shares(torch.empty(0), len(entry)):
            streamed = False  # no member that is here counts, and the sums need the form of an answer
        looped = self.program.looped if streamed else None
        if looped is not None:
            leaves = entry.entry.outputs
            self._stream = AnswerStream(reduction, leaves, len(entry), self.program, looped)

    def run(self) -> Any:
        return super().run() if self._stream is None else self._stream.run(*self.values)

    def sums(self, found: Any) -> Sums:
        """Returns the sums. found: what `run` returned. Raises: InputError, UsageError."""
        leaves, answer = self.entry.entry.outputs, None
        if self._stream is not None:
            answer = self._stream.sums()
            if isinstance(answer, StreamedSums):
                return {FIGURES: answer}
        else:
            outputs = self.program.program.outputs
            answer = build_answer(found, outputs, len(self.entry), self.entry.entry.result)
        return self.reduction.of_answer(answer, leaves)
