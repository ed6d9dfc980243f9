"""The part of one of several processes in the swaps of all (`swap_coordinator.py`)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import signal
import threading
from collections.abc import Callable
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any

from ..errors import Busy, Conflict, Failed, RequestError
from ..lifecycle.service import Service
from ..lifecycle.swaps import SwapOrder, SwapResult
from .swap_coordinator import SHUTS_DOWN, Message, error_message, received, send

log = logging.getLogger("widepack.serve")
_ERRORS = {e.status: e for e in (Conflict, Busy, Failed)}


class SwapParticipant:
    """Takes part in the swaps of all processes.

    If the coordinator ends without a word, this process ends as after SIGTERM.

    Args:
        service: Of this process. Its swaps ask the coordinator from now on.
        connection: To the coordinator.
    """

    def __init__(self, service: Service, connection: Connection) -> None:
        self._service, self._connection = service, connection
        self._sending = threading.Lock()
        self._verdicts: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._answers: dict[int, asyncio.Future[Message]] = {}
        self._count = 0
        self._gone: Message | None = None
        service.swap_in_all = self._ask

    def start(self) -> None:
        """Begins to read what the coordinator sends. It is called on the event loop."""
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._read, args=(loop,), name="widepack-swaps", daemon=True).start()

    def _send(self, **message: Any) -> None:
        with self._sending:
            send(self._connection, **message)

    async def _ask(self, order: SwapOrder) -> SwapResult:
        """Replaces a member in all processes. Raises: RequestError."""
        self._count += 1
        number, answer = self._count, asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            self._send(ask=asdict(order), number=number)
            found: Message = self._gone or await answer
        finally:
            del self._answers[number]
        if "error" in found:
            raise _ERRORS[found["status"]](found["error"])
        return SwapResult(**found)

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        """Reads messages until the coordinator ends."""
        run: Callable[..., object] = loop.call_soon_threadsafe
        with contextlib.suppress(RuntimeError):  # the loop is closed
            while (message := received(self._connection)) is not None and "close" not in message:
                if "swap" in message:
                    asyncio.run_coroutine_threadsafe(self._swap(SwapOrder(**message["swap"])), loop)
                elif "answer" in message:
                    run(self._answer, message["number"], message["answer"])
                else:
                    self._verdicts.put(message)
            gone = error_message(Busy(SHUTS_DOWN))
            self._verdicts.put({"stop": gone})
            run(self._close, gone)
            if message is None:
                os.kill(os.getpid(), signal.SIGTERM)

    def _answer(self, number: int, found: Message) -> None:
        if (answer := self._answers.get(number)) is not None and not answer.done():
            answer.set_result(found)

    def _close(self, gone: Message) -> None:
        """Ends the requests for swaps, also later ones. gone: the error that they get."""
        self._gone = gone
        for number in self._answers:
            self._answer(number, gone)

    async def _swap(self, order: SwapOrder) -> None:
        """Replaces a member here, as far as all processes agree."""
        try:
            ended = asdict(await self._service.swap_here(order, self._agree))
        except RequestError as e:
            ended = error_message(e)
        except Exception:
            log.exception("a swap failed")
            ended = error_message(Failed("the server failed; its log has the reason"))
        self._send(ended=ended)

    def _agree(self) -> None:
        """Waits until all processes agree. Raises: Conflict if one does not."""
        self._send(agrees=True)
        verdict = self._verdicts.get()
        if "stop" in verdict:
            raise Conflict(verdict["stop"]["error"])
