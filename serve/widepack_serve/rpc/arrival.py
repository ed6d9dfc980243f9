"""Lets messages of gRPC arrive in turn, and counts those that arrive slowly.

gRPC tells when a message is complete, not how many bytes of it have arrived. So a message that is not
complete after a moment counts as the largest one until it is. gRPC takes no more than the first bytes of a
message before it is read: a client that sends several large ones at once waits with them.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Callable, Hashable

from ..errors import Busy
from ..lifecycle.receiving import PartialBody

QUICK_S = 0.05
"""Seconds in which a message may arrive without being counted. Meanwhile all messages together have as many
bytes as the network carries.
"""
_TURN_S = 0.2
"""Seconds after which a message that has not arrived lets the next one of its client begin."""
_MOST_WAIT_S = 5.0
"""The most seconds that a message waits for its turn."""
_SHORT = 8_000_000
_PACE = 100e6
"""gRPC copies a message on the thread of the event loop, a millisecond for each MB, and nobody is served
meanwhile. So the next message of a client waits after one of more than `_SHORT` bytes: as long as the bytes
beyond it take at this many in a second.
"""


class Turns:
    """One message of each client arrives at a time, as long as it arrives quickly.

    Args:
        rejected: Is called for each message that is refused.
    """

    def __init__(self, rejected: Callable[[], None]) -> None:
        self._rejected = rejected
        self._waiting: dict[Hashable, deque[asyncio.Future[None]]] = {}

    async def take(self, client: Hashable) -> None:
        """Waits for the turn of a client's message. Raises: Busy if it waited too long."""
        if client not in self._waiting:
            self._waiting[client] = deque()
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[client].append(turn)
        try:
            await asyncio.wait([turn], timeout=_MOST_WAIT_S)
        except asyncio.CancelledError:
            if turn.done():
                self.give(client)
            raise
        finally:
            if not turn.done():
                self._waiting[client].remove(turn)
        if not turn.done():
            self._rejected()
            raise Busy(
                f"this client sends several messages, which are read in turn, and {_MOST_WAIT_S:g} seconds "
                f"were not enough for those before this one; send messages of up to {_SHORT // 10**6} MB, "
                "or fewer at once"
            )

    def give(self, client: Hashable) -> None:
        """Gives the turn to the next message of a client."""
        waiting = self._waiting[client]
        if waiting:
            waiting.popleft().set_result(None)
        else:
            del self._waiting[client]


class Arrival:
    """A message that arrives in a block. It waits for its turn, and counts from some time after that.

    Args:
        turns: Of all messages.
        client: Who sends it.
        held: What counts its bytes.
        most: How many they may be.

    Attributes:
        bytes: How many it has. The block sets it.

    Raises:
        Busy: It waited too long, or too many messages arrive slowly. The block is ended.
    """

    def __init__(self, turns: Turns, client: Hashable, held: PartialBody, most: int) -> None:
        self._turns, self._client = turns, client
        self._held, self._most = held, most
        self._refused = False
        self.bytes = 0

    async def __aenter__(self) -> Arrival:
        await self._turns.take(self._client)
        self._has_turn = True
        self._task = asyncio.current_task()
        loop = asyncio.get_running_loop()
        self._handles = loop.call_later(QUICK_S, self._count), loop.call_later(_TURN_S, self._give)
        return self

    def _give(self) -> None:
        """Lets the next message of the client begin."""
        if self._has_turn:
            self._has_turn = False
            self._turns.give(self._client)

    def _count(self) -> None:
        try:
            self._held.add(self._most)
        except Busy:
            self._refused = True
            if self._task is not None:
                self._task.cancel()

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for handle in self._handles:
            handle.cancel()
        self._held.clear()
        if self.bytes > _SHORT:
            asyncio.get_running_loop().call_later((self.bytes - _SHORT) / _PACE, self._give)
        else:
            self._give()
        if self._refused and kind is asyncio.CancelledError:
            if self._task is not None and sys.version_info >= (3, 11):
                self._task.uncancel()
            raise Busy(
                f"a message that takes over {1000 * QUICK_S:g} ms to arrive counts as {self._most} bytes "
                "(--max-body), and all that arrive together are over the limit (--max-receiving); try again"
            )
