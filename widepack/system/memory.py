"""Keeps freed memory in the process or returns it to the system, and reads how much is available.

glibc returns the end of its memory to the system when more than some MB of it are free, and requests it again
page by page. An op of all members frees some MB at every call, so that pages take a third of the time of
programs with large values. A loaded model and a fused module keep up to `KEPT` bytes. A build returns large
blocks at once, because it would otherwise take the memory of several members.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from .control_groups import OWN, ROOT, groups

_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # constants of malloc.h
_MADV_PAGEOUT = 21  # of mman.h, in Linux from 5.4 on
LARGE = 2**20
USUAL = 32 * 2**20
"""The threshold that glibc reaches by itself when blocks of this size are freed."""

KEPT = 2**30
"""The freed bytes at the end of a process's memory that stay there, after `keep_freed`."""
SWITCH = "WIDEPACK_KEEP_MEMORY"
"""The environment variable that switches `keep_freed` off: 0."""
_OF_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")


@cache
def _libc() -> Any:
    """The C library if it is glibc, else None."""
    try:
        library = ctypes.CDLL(None)
        return library if library.malloc_trim and library.mallopt else None
    except (OSError, AttributeError, TypeError):
        return None


def give_back() -> None:
    """Returns freed memory to the system if the C library can. Takes about a millisecond for each 15 MB."""
    if _libc() is not None:
        _libc().malloc_trim(0)


def release_pages(parts: Iterable[tuple[int, int]]) -> None:
    """Takes the pages of mapped files out of memory, where the system can. They are read again when they are
    needed. Pages that were written to stay.

    parts: the address and the bytes of each mapped part.
    """
    if _libc() is None:
        return
    page = os.sysconf("SC_PAGE_SIZE")
    for at, size in parts:
        begin = at // page * page
        _libc().madvise(ctypes.c_void_p(begin), ctypes.c_size_t(at + size - begin), _MADV_PAGEOUT)


@cache
def keep_freed() -> bool:
    """Keeps up to 1 GiB of freed memory in this process from now on, if the C library is glibc.

    It changes nothing where the user has set glibc's own variables (`MALLOC_TRIM_THRESHOLD_`, ...,
    `GLIBC_TUNABLES`), or has set WIDEPACK_KEEP_MEMORY to 0. Returns whether memory is kept.
    """
    set_by_user = any(name in os.environ for name in _OF_USER) or "malloc" in os.environ.get(
        "GLIBC_TUNABLES", ""
    )
    if _libc() is None or set_by_user or os.environ.get(SWITCH, "1") == "0":
        return False
    _libc().mallopt(_MMAP_THRESHOLD, USUAL)
    _libc().mallopt(_TRIM_THRESHOLD, KEPT)
    return True


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
        if keep_freed.cache_info().currsize:  # a model is loaded in this process
            keep_freed.cache_clear()
            keep_freed()
        give_back()


def bytes_lacking(error: Exception) -> str:
    """Returns what torch tried to allocate, such as `8 bytes`; "" for an error of another cause."""
    found = re.search(r"ried to allocate ([\w.]+ \w+)", str(error))
    return found[1] if found else ""


def available_bytes() -> int | None:
    """Returns the bytes of memory that this process can use without swapping; None if they are unknown.

    The limits of its control groups count, as a container or a batch system sets them.
    """
    known = [free for free in (_of_machine(), of_control_groups()) if free is not None]
    return min(known, default=None)


def _of_machine() -> int | None:
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            rows = dict(line.split(":", 1) for line in file)
        return 1024 * int(rows["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError, IndexError):
        return None


def of_control_groups(root: Path = ROOT, own: Path = OWN) -> int | None:
    """Returns the bytes that the control groups of this process still allow; None without a limit.

    root, own: as `control_groups.groups` takes them.
    """
    free = (_free_in(folder, *_FILES[version]) for folder, version in groups("memory", root, own))
    return min((n for n in free if n is not None), default=None)


_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}
"""The names of the limit, of what is used, and of the files that can be dropped, by version."""
_NO_LIMIT = 2**60
"""Version 1 has a number of this size in place of no limit."""


def _free_in(group: Path, limit: str, used: str, cached: str) -> int | None:
    """Returns the bytes that a control group still allows. Files that it can drop count as free."""
    try:
        most = int((group / limit).read_text(encoding="ascii"))  # or `max`
        rows = dict(r.split(" ", 1) for r in (group / "memory.stat").read_text(encoding="ascii").splitlines())
        free = most - int((group / used).read_text(encoding="ascii")) + int(rows.get(cached, 0))
    except (OSError, ValueError):
        return None
    return max(0, free) if most < _NO_LIMIT else None
