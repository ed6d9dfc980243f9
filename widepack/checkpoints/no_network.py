"""Refuses connections while a model is made, so that no library downloads anything."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_CONNECTS = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto")
_thread = threading.local()
_installing = threading.Lock()
_installed: list[str] = []


class ConnectionRefused(RuntimeError):
    """Raised in place of a connection. place: the host, as far as it is known."""

    def __init__(self, place: str) -> None:
        super().__init__(f"connects to {place}")
        self.place = place


@contextmanager
def no_network() -> Iterator[None]:
    """In the block, every connection of this thread raises ConnectionRefused.

    An audit hook of Python sees the connections, so libraries cannot go around it by their own settings.
    It is installed once; Python cannot remove it.
    """
    with _installing:
        if not _installed:
            sys.addaudithook(_refuse)
            _installed.append("hook")
    before = getattr(_thread, "refuses", False)
    _thread.refuses = True
    try:
        yield
    finally:
        _thread.refuses = before


def _refuse(event: str, args: tuple[object, ...]) -> None:
    if event in _CONNECTS and getattr(_thread, "refuses", False):
        place = args[0] if event in ("socket.getaddrinfo", "socket.gethostbyname") else args[1]
        if isinstance(place, (str, bytes)) and event in ("socket.connect", "socket.sendto"):
            return  # a socket of this machine
        raise ConnectionRefused(str(place[0] if isinstance(place, tuple) and place else place)[:100])
