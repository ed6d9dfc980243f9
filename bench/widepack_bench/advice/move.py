"""Defines a move: something that a user can do with an artifact to make its calls faster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import BenchError
from .subject import AdvisedArtifact


class NotPossible(BenchError):
    """A move cannot be tried, for the reason in the message."""


@dataclass(frozen=True, kw_only=True)
class Opened:
    """What a move leads to.

    call: the call that is timed. answers: makes answers in the form of the members' ones. seconds: predicted
    for a call, where the move had no prediction before. threads: torch's threads of the call; 0 for those of
    now. other_dtype: whether answers are in another dtype than those of now.
    """

    call: Callable[[], object]
    answers: Callable[[], Any]
    seconds: float | None = None
    threads: int = 0
    other_dtype: bool = False

    @contextmanager
    def within(self) -> Iterator[None]:
        """Sets the threads in the block."""
        before = torch.get_num_threads()
        if self.threads:
            torch.set_num_threads(self.threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)


@dataclass(frozen=True, kw_only=True)
class Move:
    """One thing to do.

    name: short. how: the command, or the call, as a user writes it. predict: returns the seconds of a call
    without doing anything that takes long; None where that cannot be known before. open: does it. artifact:
    the name of the artifact that `open` writes into the folder of the subject; empty for a move that writes
    none. environment: variables of a process, for a move that only sets these. measures_machine: whether
    `predict` takes as long as the measurement of the machine, for another number of threads.
    """

    name: str
    how: str
    predict: Callable[[AdvisedArtifact], float | None]
    open: Callable[[AdvisedArtifact], Opened] | None = None
    artifact: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    measures_machine: bool = False


def opened(subject: AdvisedArtifact, entry: Any, seconds: float | None = None) -> Opened:
    """Returns an entry that was loaded in another way, as a move leads to it."""
    call = subject.call(entry)
    return Opened(call=call, answers=call, seconds=seconds)
