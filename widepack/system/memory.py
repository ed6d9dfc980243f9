"""Returns freed memory to the system, and reads how much is available.

glibc keeps freed memory, and a build would take the memory of several members at once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # constants of malloc.h
LARGE = 2**20
USUAL = 32 * 2**20
"""The threshold that glibc reaches by itself when blocks of this size are freed."""


@cache
def _libc() -> Any:
    """The C library if it is glibc, else None."""
    try:
        library = ctypes.CDLL(None)
        return library if library.malloc_trim and library.mallopt else None
    except (OSError, AttributeError, TypeError):
        return None


def give_back() -> None:
    """Returns freed memory to the system if the C library can. Takes about a millisecond."""
    if _libc() is not None:
        _libc().malloc_trim(0)


@contextmanager
def returned_at_once() -> Iterator[None]:
    """In the block, memory of 1 MiB or more returns to the system as soon as it is freed, at the cost of new
    pages for each.

    Afterwards glibc keeps blocks of up to 32 MiB again, as in every process that has freed some.
    """
    libc = _libc()
    if libc is None:
        yield
        return
    libc.mallopt(_MMAP_THRESHOLD, LARGE)
    try:
        yield
    finally:
        libc.mallopt(_MMAP_THRESHOLD, USUAL)
        libc.mallopt(_TRIM_THRESHOLD, 2 * USUAL)
        give_back()


def available_bytes() -> int | None:
    """Returns the bytes of memory that a process can use without swapping; None if they are unknown."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            rows = dict(line.split(":", 1) for line in file)
        return 1024 * int(rows["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError, IndexError):
        return None
