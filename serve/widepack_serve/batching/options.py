"""Defines how batches are made, and who is told of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from .job import Part


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """How batches are made.

    Attributes:
        max_batch: The most rows of a batch.
        max_queue: The most rows that wait.
        max_queue_bytes: The most bytes of tensors that wait.
        max_answer: The most bytes of the outputs of a call; None for any number.
        max_delay: Seconds for which a batch that is not full waits for more calls.
        inline: Seconds of a batch up to which it runs on the thread of the event loop; 0 for never.
        threads: Threads inside an op; None leaves torch's number.
    """

    max_batch: int = 64
    max_queue: int = 1024
    max_queue_bytes: int = 1 << 28
    max_answer: int | None = None
    max_delay: float = 0.0
    inline: float = 0.5e-3
    threads: int | None = None


class Observer(Protocol):
    """Is told what a batcher does. Methods are called on any thread."""

    def ran(self, parts: list[Part], seconds: float, padding: int) -> None:
        """A batch ran, in `seconds`. padding: how many rows it computed that are of no request."""

    def rejected(self, reason: str) -> None:
        """A call was refused or dropped: `queue_full`, `draining`, `deadline`, `disconnected`."""
