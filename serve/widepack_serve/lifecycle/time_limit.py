"""Limits the time in which what a client sends must arrive, for REST and gRPC."""

from __future__ import annotations

import asyncio
import sys

from ..errors import TooSlow


class TimeLimit:
    """Raises TooSlow in a block that takes longer. It costs about a microsecond.

    Args:
        seconds: The limit.
        what: What must arrive, in messages.
    """

    def __init__(self, seconds: float, what: str) -> None:
        self._seconds, self._what = seconds, what
        self._expired = False

    def __enter__(self) -> None:
        self._task = asyncio.current_task()
        self._handle = asyncio.get_running_loop().call_later(self._seconds, self._expire)

    def _expire(self) -> None:
        self._expired = True
        if self._task is not None:
            self._task.cancel()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._handle.cancel()
        if self._expired and kind is asyncio.CancelledError:
            if self._task is not None and sys.version_info >= (3, 11):
                self._task.uncancel()
            raise TooSlow(f"the {self._what} did not arrive within {self._seconds:g} seconds")
