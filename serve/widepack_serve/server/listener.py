"""Closes a listening socket without losing a connection that a client has opened."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import socket
import struct
import time

_SO_ATTACH_FILTER = 26
_REFUSE_SYN = (
    (0x30, 0, 0, 13),  # load the byte with the flags of the TCP header
    (0x45, 0, 1, 0x02),  # if it opens a connection (SYN),
    (0x06, 0, 0, 0),  # drop the packet,
    (0x06, 0, 0, 0xFFFFFFFF),  # else keep it
)
"""A program of the kernel's packet filter."""
_HANDSHAKE_S = 0.2
"""For how long handshakes that have begun may take."""


async def last_connections(listener: socket.socket) -> list[socket.socket]:
    """Closes a listening socket, and returns the connections that nobody has accepted.

    The kernel resets connections that wait when the socket is closed, also if the client has sent a request
    already. So first no new ones are let in: a client that tries gets no answer, tries again after a second,
    and is refused then.

    Args:
        listener: The socket.
    """
    found = []
    with listener:
        _let_nobody_in(listener)
        listener.setblocking(False)
        limit = time.monotonic() + _HANDSHAKE_S
        while True:
            last = time.monotonic() >= limit
            with contextlib.suppress(OSError):  # BlockingIOError: no connection waits
                while True:
                    found.append(listener.accept()[0])
            if last:
                return found
            await asyncio.sleep(0.01)


def _let_nobody_in(listener: socket.socket) -> None:
    """Drops packets that open connections. Where the kernel has no filter, they go on to be let in."""
    program = b"".join(struct.pack("HBBI", *step) for step in _REFUSE_SYN)
    steps = ctypes.create_string_buffer(program, len(program))
    pointer = struct.pack("HP", len(_REFUSE_SYN), ctypes.addressof(steps))
    with contextlib.suppress(OSError):
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, pointer)
