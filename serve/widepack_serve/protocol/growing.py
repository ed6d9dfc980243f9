"""Joins pieces of a body, of a request or of an answer, in memory of its own.

A `bytearray` that grows is copied again and again, which keeps the interpreter lock, and leaves as many bytes
in the memory of the allocator. Pages of the system's memory are moved, not copied, and the system gets them
back when the body is freed. Where the system cannot move pages, a `bytearray` grows.
"""

from __future__ import annotations

import mmap

from .work import Work

Body = bytes | bytearray | mmap.mmap
"""The bytes of a body: small ones, and large ones in memory of their own."""
SMALL = 1 << 16
"""The most bytes of a body that is read at once, on the thread of the event loop."""
_MOVES_PAGES = hasattr(mmap, "MADV_NOHUGEPAGE")  # Linux: a mapping can grow there
_FIRST = 1 << 20
_WINDOW = 1 << 20
"""How many bytes are searched at a time."""


class Growing:
    """Bytes that grow.

    Attributes:
        size: How many they are.
    """

    def __init__(self) -> None:
        self.size = 0
        self._memory: bytearray | mmap.mmap = bytearray()

    def append(self, piece: bytes | bytearray) -> None:
        """Adds bytes."""
        end = self.size + len(piece)
        if isinstance(self._memory, bytearray) and _MOVES_PAGES and end > SMALL:
            self._memory = _mapping(max(end, _FIRST), self._memory)
        elif not isinstance(self._memory, bytearray) and end > len(self._memory):
            self._memory.resize(max(end, 2 * len(self._memory)))
        self._memory[self.size : end] = piece
        self.size = end

    def whole(self) -> Body:
        """Returns all bytes. Nothing can be added afterwards."""
        if self.size <= SMALL:
            return bytes(self._memory[: self.size])
        if not isinstance(self._memory, bytearray):
            self._memory.resize(self.size)
        return self._memory


def _mapping(size: int, start: bytearray) -> mmap.mmap:
    """Returns memory of its own that begins with some bytes."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)  # else a body of a few bytes may take 2 MB
    memory[: len(start)] = start
    return memory


def place_of(byte: bytes, body: Body, start: int, end: int, work: Work) -> int:
    """Returns where a byte is first in a part of a body; -1 if it is not there. `find` over all of a large
    body would keep the interpreter lock.

    work: is told of each step.
    """
    for at in range(start, end, _WINDOW):
        found = body[at : min(at + _WINDOW, end)].find(byte)
        if found >= 0:
            return at + found
        work.step()
    return -1
