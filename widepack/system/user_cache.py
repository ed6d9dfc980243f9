"""Remembers in the user's cache folder which probes and walks passed on this machine, and a note for each.

A note replaces a check, so only notes count that no other user could have written: the folder and the file
belong to this user, are no links, and other users may not write into them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import torch

_MOST_BYTES = 4096  # of a note


def cache_folder() -> Path:
    """The folder: `$XDG_CACHE_HOME/widepack` or `~/.cache/widepack`.

    For a user without a home folder, as in some containers, it is a path that cannot exist: nothing is read
    or stored then.
    """
    named = os.environ.get("XDG_CACHE_HOME")
    if named:
        return Path(named) / "widepack"
    try:
        return Path.home() / ".cache" / "widepack"
    except RuntimeError:
        return Path(os.devnull) / "widepack"


def cache_key(*parts: str) -> str:
    """A key for these parts and this version of torch."""
    return hashlib.sha256("\n".join([*parts, torch.__version__]).encode()).hexdigest()


def passed(key: str, what: str = "probes") -> bool:
    """Whether a check passed on this machine. what: the kind of check, which is the name of a folder."""
    return _read(key, what) is not None


def noted(key: str, what: str) -> str:
    """The note of a check that passed; empty if it has none, or did not pass."""
    return _read(key, what) or ""


def _read(key: str, what: str) -> str | None:
    """Returns the content of a note; None if there is no note, or another user could have written it."""
    folder = cache_folder() / what
    with contextlib.suppress(OSError, ValueError):
        if not _own(os.lstat(folder), stat.S_ISDIR):
            return None
        handle = os.open(folder / key, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(handle, "rb") as file:
            if _own(os.fstat(handle), stat.S_ISREG):
                return file.read(_MOST_BYTES).decode("ascii")
    return None


def _own(status: os.stat_result, kind: Callable[[int], bool]) -> bool:
    """Returns whether a file or folder is of this user, and no other user may write into it."""
    others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return kind(status.st_mode) and status.st_uid == os.geteuid() and not others


def remember(key: str, what: str = "probes", note: str = "") -> None:
    """Remembers that a check passed.

    If the cache cannot be written, or other users may write into it, the check runs again in the next
    process.
    """
    with contextlib.suppress(OSError):
        folder = cache_folder() / what
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not _own(os.lstat(folder), stat.S_ISDIR):
            return
        aside = folder / f"{key}.{os.getpid()}-{threading.get_ident()}"
        handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(handle, "wb") as file:
            file.write(note.encode("ascii"))
        aside.replace(folder / key)
