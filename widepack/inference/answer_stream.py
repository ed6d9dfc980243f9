"""Reduces the answers of a loop over members while the loop runs."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from widepack_artifacts.entry import OutputLeaf

from ..reduction.stream import Stream, StreamedSums
from .bound_program import BoundProgram
from .reduced_answer import Reduction

LARGE = 4 * 2**20
"""Bytes of all answers from which on they are added one after the other. Fewer are kept until the last."""


class AnswerStream:
    """A call whose answers are reduced while members run one after the other.

    Args:
        reduction: What is requested.
        leaves: The outputs in the manifest.
        members: N.
        program: The program; its answer is the result of a loop.
        result: The loop and the number of its result.
    """

    def __init__(
        self,
        reduction: Reduction,
        leaves: Sequence[OutputLeaf],
        members: int,
        program: BoundProgram,
        result: tuple[str, int],
    ) -> None:
        self._reduction, self._leaves, self._members = reduction, leaves, members
        self._program, self._result = program, result
        self._lock = threading.Lock()
        self._kept: dict[int, torch.Tensor] = {}
        self._stream: Stream | None = None

    def run(self, *values: Any) -> None:
        """Runs the members. values: the inputs of the program."""
        self._program.executable.stream(self._result, self._take, *values)

    def _take(self, member: int, answer: torch.Tensor) -> None:
        with self._lock:
            if self._stream is None and answer.nbytes * self._members < LARGE:
                self._kept[member] = answer
                return
            if self._stream is None:
                self._stream = self._reduction.stream(answer, self._leaves, self._members)
        self._stream.take(member, answer)

    def figures(self) -> dict[str, Any]:
        """Returns the figures by their names. Raises: InputError, UsageError."""
        if self._stream is not None:
            return self._reduction.ordered(self._stream.figures())
        answers = torch.stack([self._kept[i] for i in range(self._members)])
        return self._reduction.apply(answers, self._leaves, one_shape=False)

    def sums(self) -> StreamedSums | Tensor:
        """Returns what is summed up, or all answers `[N, ...]` if they are few and were kept."""
        if self._stream is not None:
            return self._stream.sums
        return torch.stack([self._kept[i] for i in range(self._members)])
