"""Counts a message of gRPC that arrives slowly.

gRPC tells when a message is complete, not how many bytes of it have arrived. So a message that is not
complete after a moment counts as the largest one until it is.
"""

from __future__ import annotations

import asyncio
import sys

from ..errors import Busy
from ..lifecycle.receiving import PartialBody

QUICK_S = 0.05
"""Seconds in which a message may arrive without being counted. Meanwhile all messages together have as many
bytes as the network carries.
"""


class Arrival:
    """Counts the message that is read in a block, from some time after its start to its end.

    Args:
        held: What counts its bytes.
        most: How many they may be.

    Raises:
        Busy: Too many messages arrive slowly. The block is ended.
    """

    def __init__(self, held: PartialBody, most: int) -> None:
        self._held, self._most = held, most
        self._refused = False

    def __enter__(self) -> None:
        self._task = asyncio.current_task()
        self._handle = asyncio.get_running_loop().call_later(QUICK_S, self._count)

    def _count(self) -> None:
        try:
            self._held.add(self._most)
        except Busy:
            self._refused = True
            if self._task is not None:
                self._task.cancel()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._handle.cancel()
        self._held.clear()
        if self._refused and kind is asyncio.CancelledError:
            if self._task is not None and sys.version_info >= (3, 11):
                self._task.uncancel()
            raise Busy(
                f"a message that takes over {1000 * QUICK_S:g} ms to arrive counts as {self._most} bytes "
                "(--max-body), and all that arrive together are over the limit (--max-receiving); try again"
            )
