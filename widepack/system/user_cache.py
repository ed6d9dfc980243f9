"""Remembers in the user's cache folder which probes and walks passed on this machine, and a note for each."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from pathlib import Path

import torch


def cache_folder() -> Path:
    """The folder: `$XDG_CACHE_HOME/widepack` or `~/.cache/widepack`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "widepack"


def cache_key(*parts: str) -> str:
    """A key for these parts and this version of torch."""
    return hashlib.sha256("\n".join([*parts, torch.__version__]).encode()).hexdigest()


def passed(key: str, what: str = "probes") -> bool:
    """Whether a check passed on this machine. what: the kind of check, which is the name of a folder."""
    with contextlib.suppress(OSError):
        return (cache_folder() / what / key).is_file()
    return False


def noted(key: str, what: str) -> str:
    """The note of a check that passed; empty if it has none, or did not pass."""
    with contextlib.suppress(OSError, ValueError):
        return (cache_folder() / what / key).read_text(encoding="ascii")
    return ""


def remember(key: str, what: str = "probes", note: str = "") -> None:
    """Remembers that a check passed.

    If the cache cannot be written, the check runs again in the next process.
    """
    with contextlib.suppress(OSError):
        folder = cache_folder() / what
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not note:
            (folder / key).touch()
            return
        aside = folder / f"{key}.{os.getpid()}-{threading.get_ident()}"
        aside.write_text(note, encoding="ascii")
        aside.replace(folder / key)
