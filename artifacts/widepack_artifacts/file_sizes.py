"""Counts the bytes of a file that are on the disk: a sparse file has holes."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from .errors import ArtifactError

_LEAST, _FOR_BYTE = 256 * 2**20, 16


def bytes_on_disk(path: Path) -> int:
    """Returns the bytes of a file without its holes. Holes do not raise the budget of a load."""
    status = path.stat()
    blocks = 512 * getattr(status, "st_blocks", 0)
    # Some file systems do not count blocks.
    if not blocks or blocks >= status.st_size or not hasattr(os, "SEEK_DATA"):
        return status.st_size
    with open(path, "rb", buffering=0) as file:
        return _data_bytes(file.fileno(), status.st_size)


def check_on_disk(path: Path, size: int, what: str) -> None:
    """Refuses to compute a value from a file that consists of holes.

    Args:
        path: The file.
        size: The bytes of the value.
        what: The value, in the message.

    Raises:
        ArtifactError: The value has more than 256 MiB and 16 bytes for each byte of the file on the disk.
    """
    if size <= _LEAST:
        return
    try:
        found = bytes_on_disk(path)
    except OSError:  # the file was replaced after it was mapped
        return
    if size > _LEAST + _FOR_BYTE * found:
        raise ArtifactError(
            f"{what} has {size:,} bytes, but its file has {found:,} on the disk and else holes; a copy "
            "without holes can be loaded (cp --sparse=never)"
        )


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
