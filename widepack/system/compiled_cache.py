"""The folder of compiled programs: native code that this machine made, so nobody else may be able to write into it.

    <folder>/<key>/record.json, ...      one compiled program: whole, or not there
    <folder>/<key>.lock                  held by whoever compiles it

1. The folder is `cache=` of `load`, else `WIDEPACK_CACHE`, else `$XDG_CACHE_HOME/widepack/aot` or `~/.cache/widepack/aot`; it is made with mode 0700.
2. It is refused where it, or what is read in it, belongs to somebody else than this user or root, or others may write into it: who can write there can run
   code here.
3. An entry is written under another name and renamed, under a lock. `record.json` holds size and SHA-256 of its other files; an entry that does not agree
   with its record counts as absent.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..errors import UsageError

RECORD = "record.json"
_MOST_BYTES = 64 * 2**20  # of a record


def default_folder() -> Path:
    """Where compiled programs are kept where nothing else is said."""
    named = os.environ.get("WIDEPACK_CACHE")
    return Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "widepack" / "aot"


def private(path: Path, folder: bool = False) -> None:
    """Refuse what somebody else could have written, and files that are links. Raises: UsageError; OSError where there is nothing."""
    found = os.stat(path) if folder else os.lstat(path)
    if not folder and not stat.S_ISREG(found.st_mode):
        raise UsageError(f"{path}: a link or special file; the cache has plain files only. Remove it")
    if found.st_uid not in (os.geteuid(), 0):
        raise UsageError(
            f"{path}: belongs to user {found.st_uid}, and this process runs as {os.geteuid()}; compiled programs are native code, and are taken from this user or "
            "root alone. Give another folder: load(cache=...), or WIDEPACK_CACHE"
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UsageError(
            f"{path}: others may write into it (mode {stat.S_IMODE(found.st_mode):04o}), and compiled programs are native code: `chmod go-w {path}` if nobody else "
            "did, or give another folder: load(cache=...), or WIDEPACK_CACHE"
        )


class CompiledCache:
    """Compiled programs by key. folder: it need not be there yet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find(self, key: str) -> tuple[Path, dict[str, Any]] | None:
        """An entry's folder and record, if it is there and whole. Raises: UsageError where others could have written it."""
        place = self.folder / key
        try:
            private(self.folder, folder=True)
            private(place, folder=True)
            private(place / RECORD)
            with open(place / RECORD, "rb") as file:
                record = json.loads(file.read(_MOST_BYTES))
            files = record["files"]
            for name, (size, digest) in files.items():
                if os.sep in name:
                    return None
                private(place / name)
                data = (place / name).read_bytes()
                if len(data) != size or hashlib.sha256(data).hexdigest() != digest:
                    return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        return place, record

    def make(self, key: str, compile_into: Callable[[Path], dict[str, Any]]) -> tuple[Path, dict[str, Any]]:
        """An entry that is there, or made now: one process at a time makes it.

        compile_into: writes the entry's files into an empty folder and gives its record. Raises: UsageError where the folder cannot be used; what compiling raises.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            private(self.folder, folder=True)
            with self._lock(key):
                return self.find(key) or self._made(key, compile_into)
        except OSError as e:
            raise UsageError(
                f"{self.folder}: the cache of compiled programs cannot be written ({e.strerror or e}); give another folder: load(cache=...), -o, or WIDEPACK_CACHE"
            ) from e

    def _made(self, key: str, compile_into: Callable[[Path], dict[str, Any]]) -> tuple[Path, dict[str, Any]]:
        self._sweep()
        temporary = self.folder / f".tmp-{secrets.token_hex(8)}"
        temporary.mkdir(mode=0o755)
        try:
            record = compile_into(temporary)
            files = {}
            for path in sorted(temporary.iterdir()):
                data = path.read_bytes()
                files[path.name] = [len(data), hashlib.sha256(data).hexdigest()]
                path.chmod(0o644)
                _flush(path)
            record = {**record, "files": files}
            (temporary / RECORD).write_text(json.dumps(record, indent=1), encoding="utf-8")
            (temporary / RECORD).chmod(0o644)
            _flush(temporary / RECORD)
            temporary.chmod(0o755)
            place = self.folder / key
            if os.path.lexists(place):  # what is there is damaged: `find` did not take it
                os.replace(place, gone := self.folder / f".tmp-{secrets.token_hex(8)}")
                shutil.rmtree(gone, ignore_errors=True)
            os.replace(temporary, place)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return place, record

    @contextlib.contextmanager
    def _lock(self, key: str) -> Iterator[None]:
        handle = os.open(self.folder / f"{key}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    def _sweep(self) -> None:
        """Remove what a killed compiler left: folders of ours that nobody has touched for a day."""
        for path in self.folder.glob(".tmp-*"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > 86400:
                    shutil.rmtree(path, ignore_errors=True)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
