"""Runs functions on threads that do not delay the end of the server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class Threads:
    """Runs functions, each on a thread of its own.

    Neither the end of the event loop nor that of the process waits for them, as they do for the threads of
    `asyncio.to_thread`.

    Args:
        name: Of the threads.
    """

    def __init__(self, name: str = "widepack-reload") -> None:
        self._name = name
        self._running: set[threading.Thread] = set()

    @property
    def running(self) -> bool:
        """Whether a function still runs."""
        return any(t.is_alive() for t in list(self._running))

    async def run(self, function: Callable[[], T]) -> T:
        """Runs a function and returns its result. If the caller is cancelled, the function goes on, and its
        result is dropped.

        Raises: what the function raises.
        """
        found: Future[T] = Future()
        found.set_running_or_notify_cancel()

        def work() -> None:
            try:
                found.set_result(function())
            except BaseException as e:  # noqa: BLE001  the caller gets it
                found.set_exception(e)
            finally:
                self._running.discard(thread)

        thread = threading.Thread(target=work, name=self._name, daemon=True)
        self._running.add(thread)
        thread.start()
        return await asyncio.wrap_future(found)
