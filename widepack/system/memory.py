"""Memory that was freed, given back: glibc keeps what tensors of a member took, and a build would hold several members' worth of it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # of malloc.h
LARGE = 2**20
USUAL = 32 * 2**20
"""What glibc's own threshold rises to, as blocks of that size are freed."""


@cache
def _libc() -> Any:
    """The C library, where it is glibc; else None."""
    try:
        library = ctypes.CDLL(None)
        return library if library.malloc_trim and library.mallopt else None
    except (OSError, AttributeError, TypeError):
        return None


def give_back() -> None:
    """Give freed memory back to the system, where the C library can; takes about a millisecond."""
    if _libc() is not None:
        _libc().malloc_trim(0)


@contextmanager
def returned_at_once() -> Iterator[None]:
    """Blocks from a MiB on are the system's own, and return to it when they are freed: a process then holds what lives, at the price of fresh pages for each.

    Afterwards blocks up to 32 MiB are kept again, as in every process that has freed some of them.
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
