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
        thread = threading.Thread(target=self._work, args=(function, found), name=self._name, daemon=True)
        self._running.add(thread)
        thread.start()
        try:
            return await asyncio.wrap_future(found)
        finally:
            del found  # an error holds this frame, and the future holds the error

    def _work(self, function: Callable[[], T], found: Future[T]) -> None:
        """Runs a function on this thread.

        No frame of an error holds the future, which holds the error: what the frames hold, such as the body
        of a request, is freed with the error, without the garbage collector.
        """
        try:
            result = function()
        except BaseException as e:  # noqa: BLE001  the caller gets it
            found.set_exception(e)
        else:
            found.set_result(result)
        finally:
            del found
            self._running.discard(threading.current_thread())
