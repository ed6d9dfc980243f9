"""Reads large requests and writes large answers on threads. The event loop serves others meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from ..protocol.work import Work
from .threads import Threads

T = TypeVar("T")
_AT_ONCE = 2
"""How many functions run at once. They hold the interpreter lock for most of their time."""


class Desk:
    """Runs a few functions at once, each on a thread."""

    def __init__(self) -> None:
        self._threads = Threads("widepack-bodies")
        self._free = asyncio.Semaphore(_AT_ONCE)

    async def run(self, work: Work, function: Callable[[], T]) -> T:
        """Runs a function and returns its result.

        Args:
            work: What the function tells of its steps. If the caller is cancelled, the function ends at its
                next step.
            function: The function.

        Raises: what the function raises.
        """
        async with self._free:
            try:
                return await self._threads.run(function)
            except asyncio.CancelledError:
                work.abandoned = True
                raise
