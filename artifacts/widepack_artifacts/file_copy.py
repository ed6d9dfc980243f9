"""Copies a file: by sharing blocks if the file system can, else in the kernel, else in chunks.

No torch is imported.
"""

from __future__ import annotations

import errno
import hashlib
import os
import sys
from collections.abc import Callable
from typing import BinaryIO

from .folder import CHUNK_BYTES

if sys.platform != "win32":
    import fcntl

# linux/fs.h: the target shares the blocks of the source until one of the two files is written
_FICLONE = 0x40049409
_UNSUPPORTED = (
    errno.ENOSYS,
    errno.EXDEV,
    errno.EINVAL,
    errno.EOPNOTSUPP,
    errno.EBADF,
    errno.EPERM,
    errno.ETXTBSY,
)


def clone_blocks(source: BinaryIO, target: BinaryIO) -> bool:
    """Gives an empty file the blocks of another one. Returns False if the file system cannot share blocks."""
    if sys.platform != "linux":
        return False
    try:
        fcntl.ioctl(target.fileno(), _FICLONE, source.fileno())
    except OSError:
        return False
    return True


def copy_content(source: BinaryIO, target: BinaryIO, size: int) -> str:
    """Copies the content of a file into an empty one.

    Returns: `kernel` if the kernel copied it, else `copy`. Raises: OSError.
    """
    if sys.platform == "linux":
        done = 0
        try:
            while done < size and (
                count := os.copy_file_range(source.fileno(), target.fileno(), size - done, done, done)
            ):
                done += count
        except OSError as e:
            if e.errno not in _UNSUPPORTED:
                raise
        if done == size:
            return "kernel"
    source.seek(0)
    at = 0
    while chunk := source.read(CHUNK_BYTES):
        write_at(target, chunk, at)
        at += len(chunk)
    return "copy"


def write_at(file: BinaryIO, data: bytes | memoryview, at: int) -> None:
    """Writes all of the data at an offset of an unbuffered file. Raises: OSError."""
    view = memoryview(data)
    file.seek(at)
    while view.nbytes:
        view = view[file.write(view[:CHUNK_BYTES]) :]


def finish_file(file: BinaryIO, size: int, progress: Callable[[int, int], None] | None) -> str:
    """Flushes a file to the disk and closes it. Returns the SHA-256 of its content. Raises: OSError."""
    sha256 = hashlib.sha256()
    os.fsync(file.fileno())
    file.seek(0)
    while chunk := file.read(CHUNK_BYTES):
        sha256.update(chunk)
        if progress is not None:
            progress(file.tell(), size)
    file.close()
    return sha256.hexdigest()
