"""Stores compiled programs in a folder.

They are native code, so no other user may be able to write into it.

    <folder>/<key>/record.json, ...      one compiled program: complete, or absent
    <folder>/<key>.lock                  locked by the process that compiles it
    <folder>/notes/<key>                 the backend that was measured to be faster for a program

1. The folder is `cache=` of `load`, else `WIDEPACK_CACHE`, else `$XDG_CACHE_HOME/widepack/aot` or
   `~/.cache/widepack/aot`. It is created with mode 0700.
2. The folder is refused if it, a folder above it, or a file that is read in it belongs to a user other than
   this one or root, or if other users may write there (`private_files.py`): a user who can write there,
   or put another folder in its place, can run code in this process. The path is resolved before these
   checks, and the resolved path is used after them.
3. An entry is written under another name and renamed, under a lock. `record.json` has the size, the SHA-256
   and the time of the last change of the entry's other files, and the SHA-256 of the record itself. An entry
   that does not match counts as absent. A file of more than `LARGE` bytes that has its size and time is not
   read again: it is mapped, and few of its pages are needed.
4. Nothing removes an entry. The whole folder may be removed when no process loads from it; what is needed is
   made again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import UsageError
from .private_files import make_private_folder, open_private, private_folder, read_private
from .user_cache import cache_folder

RECORD = "record.json"
NOTES = "notes"
_MOST_BYTES = 64 * 2**20  # of a record
LARGE = 16 * 2**20


def default_folder() -> Path:
    """The folder of compiled programs if the caller names none."""
    named = os.environ.get("WIDEPACK_CACHE")
    return Path(named) if named else cache_folder() / "aot"


class CompiledCache:
    """Compiled programs by key. folder: is created when a program is stored."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find(self, key: str) -> tuple[Path, dict[str, Any]] | None:
        """The folder and the record of a complete entry; None if it is absent.

        Raises: UsageError if other users could have written it.
        """
        try:
            place = private_folder(self.folder) / key
            if place.is_symlink():
                raise UsageError(f"{place}: this is a link, but the cache has folders only. Remove it.")
            place = private_folder(place)
            stored = json.loads(read_private(place / RECORD, _MOST_BYTES))
            record, files = stored["record"], stored["record"]["files"]
            if stored["sha256"] != _digest(record):
                return None
            for name, (size, digest, changed) in files.items():
                if os.sep in name or not _is(place / name, size, digest, changed):
                    return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None
        return place, record

    def make(self, key: str, compile_into: Callable[[Path], dict[str, Any]]) -> tuple[Path, dict[str, Any]]:
        """Returns an entry, and compiles it if it is absent. One process at a time compiles it.

        compile_into: writes the entry's files into an empty folder and returns its record.
        Raises: UsageError if the folder cannot be used; and whatever `compile_into` raises.
        """
        with self._writing():
            self.folder = make_private_folder(self.folder)
            with self._lock(key):
                return self.find(key) or self._made(key, compile_into)

    def remake(self, key: str, record: dict[str, Any]) -> None:
        """Writes an entry that is a record alone, in the place of one that is there. Raises: UsageError."""
        with self._writing():
            self.folder = make_private_folder(self.folder)
            with self._lock(key):
                self._made(key, lambda _: record)

    def note(self, key: str) -> str:
        """Returns the note of a key; "" if there is none.

        Raises: UsageError if other users could have written it.
        """
        try:
            place = private_folder(self.folder / NOTES) / key
            return read_private(place, _MOST_BYTES).decode("ascii").strip()
        except (OSError, ValueError):
            return ""

    def write_note(self, key: str, text: str) -> None:
        """Writes the note of a key, or removes it if the text is empty. Raises: UsageError."""
        with self._writing():
            place = make_private_folder(self.folder / NOTES) / key
            if not text:
                place.unlink(missing_ok=True)
                return
            temporary = place.with_name(f".tmp-{secrets.token_hex(8)}")
            temporary.write_text(text, encoding="ascii")
            temporary.chmod(0o644)
            os.replace(temporary, place)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Turns errors of the file system into UsageError."""
        try:
            yield
        except OSError as e:
            raise UsageError(
                f"{self.folder}: the cache of compiled programs cannot be written ({e.strerror or e}).\n"
                "Choose another folder with load(cache=...), -o or WIDEPACK_CACHE."
            ) from e

    def _made(self, key: str, compile_into: Callable[[Path], dict[str, Any]]) -> tuple[Path, dict[str, Any]]:
        self._sweep()
        temporary = self.folder / f".tmp-{secrets.token_hex(8)}"
        temporary.mkdir(mode=0o755)
        try:
            record = compile_into(temporary)
            files = {}
            for path in sorted(temporary.iterdir()):
                path.chmod(0o644)
                _flush(path)
                with path.open("rb") as file:
                    digest = _digest_of(file)
                status = path.stat()
                files[path.name] = [status.st_size, digest, status.st_mtime_ns]
            record = {**record, "files": files}
            stored = {"sha256": _digest(record), "record": record}
            (temporary / RECORD).write_text(json.dumps(stored, indent=1), encoding="utf-8")
            (temporary / RECORD).chmod(0o644)
            _flush(temporary / RECORD)
            temporary.chmod(0o755)
            place = self.folder / key
            if os.path.lexists(place):  # a damaged entry: `find` did not return it
                os.replace(place, gone := self.folder / f".tmp-{secrets.token_hex(8)}")
                shutil.rmtree(gone, ignore_errors=True)
            os.replace(temporary, place)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return place, record

    @contextlib.contextmanager
    def _lock(self, key: str) -> Iterator[None]:
        handle = os.open(
            self.folder / f"{key}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    def _sweep(self) -> None:
        """Removes folders that a killed compiler left: temporary ones that were not changed for a day."""
        for path in self.folder.glob(".tmp-*"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > 86400:
                    shutil.rmtree(path, ignore_errors=True)


def _is(path: Path, size: int, digest: str, changed: int) -> bool:
    """Whether a file is the one that was stored. Raises: UsageError, OSError."""
    with open_private(path) as file:
        status = os.fstat(file.fileno())
        if status.st_size != size:
            return False
        if size > LARGE and status.st_mtime_ns == changed:
            return True
        return _digest_of(file) == digest


def _digest_of(file: BinaryIO) -> str:
    found = hashlib.sha256()
    while data := file.read(2**20):
        found.update(data)
    return found.hexdigest()


def _digest(record: Any) -> str:
    """The SHA-256 of a record."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
