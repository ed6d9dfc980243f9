"""Remembers in the user's cache folder which probes and walks passed on this machine, and a note for each.

A note replaces a check, so only notes count that no other user could have written (`private_files.py`).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from pathlib import Path

import torch

from ..errors import UsageError
from .private_files import make_private_folder, private_folder, read_private

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
    with contextlib.suppress(OSError, ValueError, UsageError):
        return read_private(private_folder(cache_folder() / what) / key, _MOST_BYTES).decode("ascii")
    return None


def remember(key: str, what: str = "probes", note: str = "") -> None:
    """Remembers that a check passed.

    If the cache cannot be written, or other users may write into it, the check runs again in the next
    process.
    """
    with contextlib.suppress(OSError, UsageError):
        folder = make_private_folder(cache_folder() / what)
        aside = folder / f"{key}.{os.getpid()}-{threading.get_ident()}"
        handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(handle, "wb") as file:
            file.write(note.encode("ascii"))
        aside.replace(folder / key)
