"""Takes the lock that allows one writer of an artifact at a time."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
from pathlib import Path

from .errors import ArtifactError

_FLAGS = (
    os.O_RDWR
    | os.O_CREAT
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_NONBLOCK", 0)
)


def take_lock(place: Path, path: Path) -> int:
    """Takes the lock of writers and returns its file handle.

    Args:
        place: The lock's file.
        path: The artifact, for error messages.

    Raises:
        ArtifactError: Another writer has the lock, the file cannot be made, or it is a link or special file.
    """
    while True:
        try:
            handle = os.open(place, _FLAGS, 0o666)
        except OSError as e:
            if e.errno == errno.ELOOP:
                raise _not_plain(place) from e
            raise ArtifactError(f"{path}: cannot write there: {e.strerror or e}") from e
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            raise _not_plain(place)
        try:
            lock_handle(handle)
        except OSError as e:
            os.close(handle)
            raise ArtifactError(
                f"{path}: another process is writing this artifact; wait until it has ended"
            ) from e
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(handle), os.lstat(place)):
                return handle
        os.close(handle)  # the previous writer removed this file after we opened it


def _not_plain(place: Path) -> ArtifactError:
    """Returns the error for a lock that is a link or a special file."""
    return ArtifactError(f"{place}: a link or special file, which no writer follows; remove it")


if sys.platform == "win32":
    import msvcrt

    def lock_handle(handle: int) -> None:
        """Locks a file until it is closed. Raises: OSError if another process has the lock."""
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)

else:
    import fcntl

    def lock_handle(handle: int) -> None:
        """Locks a file until it is closed. Raises: OSError if another process has the lock."""
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            # a file system without locks: the user must start one writer at a time
            if e.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
                raise
