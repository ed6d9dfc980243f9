"""Counts the bytes of a file that are on the disk: a sparse file has holes."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def bytes_on_disk(path: Path) -> int:
    """Returns the bytes of a file without its holes. Holes do not raise the budget of a load."""
    status = path.stat()
    blocks = 512 * getattr(status, "st_blocks", 0)
    # Some file systems do not count blocks.
    if not blocks or blocks >= status.st_size or not hasattr(os, "SEEK_DATA"):
        return status.st_size
    with open(path, "rb", buffering=0) as file:
        return _data_bytes(file.fileno(), status.st_size)


def _data_bytes(handle: int, size: int) -> int:
    """Returns the bytes of an open file that are not holes. The count of blocks is lower if a file system
    compresses.
    """
    total = at = 0
    with contextlib.suppress(OSError):  # ENXIO: the rest is a hole
        while at < size:
            begin = os.lseek(handle, at, os.SEEK_DATA)
            at = os.lseek(handle, begin, os.SEEK_HOLE)
            total += min(at, size) - begin
    return total
