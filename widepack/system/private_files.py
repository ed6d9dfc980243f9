"""Opens files and folders that no other user could have written.

A cache replaces a check, or contains native code. So its folder is resolved once, and then every folder on
the way to it is checked: none of them can be replaced afterwards by another user. Files are opened once, by a
name in this folder, and checked by their descriptor.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import BinaryIO

from ..errors import UsageError

_OPEN = (
    os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
)


def private_folder(path: Path) -> Path:
    """Returns a folder without links in its path, into which no other user can write.

    In the folders above it no other user can replace a part of the path: they belong to this user or root,
    and others may not write into them, unless only owners can rename their files there (`/tmp`).

    Raises:
        UsageError: Another user could have written into it, or can replace it.
        OSError: It does not exist.
    """
    found = Path(os.path.realpath(path, strict=True))
    for above in reversed(found.parents):
        status = os.lstat(above)
        _check_owner(above, status)
        if _others_write(status) and not status.st_mode & stat.S_ISVTX:
            raise _written(above, status, f"replace {found}")
    status = os.lstat(found)
    if not stat.S_ISDIR(status.st_mode):
        raise UsageError(f"{found}: this is no folder; choose another one")
    _check_private(found, status)
    return found


def make_private_folder(path: Path) -> Path:
    """Creates a folder with mode 0700, and those above it that are missing. Returns it as `private_folder`.

    Raises: UsageError; OSError.
    """
    for folder in reversed([path, *path.parents]):
        if not folder.exists():
            folder.mkdir(mode=0o700, exist_ok=True)
    return private_folder(path)


def read_private(path: Path, most: int | None = None) -> bytes:
    """Returns the content of a file of a private folder, which is opened once.

    most: the most bytes that are read. Raises: as `open_private`.
    """
    with open_private(path) as file:
        return file.read(-1 if most is None else most)


def open_private(path: Path) -> BinaryIO:
    """Opens a file of a private folder, for reading.

    Raises:
        UsageError: It is a link or a special file, or another user could have written it.
        OSError: It cannot be read.
    """
    status = os.lstat(path)
    if stat.S_ISREG(status.st_mode):
        file = open(os.open(path, _OPEN), "rb")  # noqa: SIM115  the caller closes it
        try:
            status = os.fstat(file.fileno())
            if stat.S_ISREG(status.st_mode):
                _check_private(path, status)
                return file
        except BaseException:
            file.close()
            raise
        file.close()
    raise UsageError(
        f"{path}: this is a link or a special file, but the cache has regular files only. Remove it."
    )


def _check_private(path: Path, status: os.stat_result) -> None:
    """Checks that a path belongs to this user or root, and that others may not write. Raises: UsageError."""
    _check_owner(path, status)
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise _written(path, status, "write here")


def _check_owner(path: Path, status: os.stat_result) -> None:
    """Checks that a path belongs to this user or root. Raises: UsageError."""
    if status.st_uid not in (os.geteuid(), 0):
        raise UsageError(
            f"{path}: the owner is user {status.st_uid}, but this process runs as user {os.geteuid()}.\n"
            "The cache has native code and notes that replace checks, so only this user or root may own it "
            "and the folders above it.\n"
            "Choose another folder with load(cache=...), WIDEPACK_CACHE or XDG_CACHE_HOME."
        )


def _written(path: Path, status: os.stat_result, what: str) -> UsageError:
    """Returns the error for a path that other users may write."""
    return UsageError(
        f"{path}: other users may {what} (mode {stat.S_IMODE(status.st_mode):04o}), and compiled "
        "programs are native code.\n"
        f"Run `chmod go-w {path}` if no other user wrote here, or choose another folder with "
        "load(cache=...), WIDEPACK_CACHE or XDG_CACHE_HOME."
    )


def _others_write(status: os.stat_result) -> bool:
    """Returns whether other users may write. A group that has this user alone has no other."""
    if status.st_mode & stat.S_IWOTH:
        return True
    return bool(status.st_mode & stat.S_IWGRP) and not _own_group(status.st_gid)


def _own_group(group: int) -> bool:
    """Returns whether a group is the private group of this user, as Debian and Fedora create it."""
    with contextlib.suppress(ImportError, KeyError):
        import grp
        import pwd

        user, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
        return (
            found.gr_name == user.pw_name and group == user.pw_gid and not set(found.gr_mem) - {user.pw_name}
        )
    return False
