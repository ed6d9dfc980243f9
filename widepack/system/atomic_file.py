"""Writes a single file that appears complete or not at all: an export, an extracted weight, a report.

The file is written under a temporary name in the same folder, and gets its name by one rename after it has
reached the disk. A lock on it tells it from a file that a killed process left; those are removed when the
next file is written.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from widepack_artifacts.folder import is_part
from widepack_artifacts.lock import lock_handle

from ..errors import ArtifactExists, UsageError

_OURS = re.compile(r"\.widepack-[0-9a-f]{16}(\.[a-z0-9]+)?\Z")


def admit(path: Path, force: bool) -> None:
    """Checks that a file may be written at a path.

    Raises: UsageError; ArtifactExists if it exists and `force` is false.
    """
    if path.is_dir():
        raise UsageError(f"{path}: this is a folder; give the path of a file")
    if not path.parent.is_dir():
        raise UsageError(f"{path}: the folder {path.parent} does not exist")
    if is_part(path):
        raise UsageError(
            f"{path}: this is a part of the artifact in this folder, which would be lost; give another path"
        )
    if not force and os.path.lexists(path):
        raise ArtifactExists(_taken(path))


def _taken(path: Path) -> str:
    return f"{path} exists; give another path, or force=True (--force) to replace it"


@contextlib.contextmanager
def temporary(path: Path, suffix: str = "") -> Iterator[Path]:
    """A new file in the folder of `path`.

    It is removed at the end; files that killed processes left are removed now.
    """
    for left in path.parent.iterdir():
        if _OURS.match(left.name):
            with contextlib.suppress(OSError):
                _remove_left(left)
    made = path.parent / f".widepack-{secrets.token_hex(8)}{suffix}"
    with open(made, "xb") as file:
        lock_handle(file.fileno())
        try:
            yield made
        finally:
            made.unlink(missing_ok=True)


def _remove_left(path: Path) -> None:
    """Removes a file that no process has locked. Raises: OSError, also for a link or a special file."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    try:
        if stat.S_ISREG(os.fstat(handle).st_mode):
            lock_handle(handle)
            path.unlink()
    finally:
        os.close(handle)


def publish(made: Path, path: Path, force: bool) -> None:
    """Gives a temporary file its name. Raises: ArtifactExists; OSError."""
    with open(made, "rb+") as file:
        os.fsync(file.fileno())
    if force:
        os.replace(made, path)
    else:
        try:
            os.link(made, path)  # unlike a rename, a link never replaces a file that appeared in the meantime
        except FileExistsError:
            raise ArtifactExists(_taken(path)) from None
        except OSError:  # a file system without hard links
            os.replace(made, path)
    handle = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Gives an error of the system in a block that writes a file the name of the file, if it has none.

    path: as the user gave it. Raises: OSError.
    """
    try:
        yield
    except OSError as e:
        if e.filename is not None and not _OURS.match(os.path.basename(os.fsdecode(e.filename))):
            raise
        why = os.strerror(e.errno) if e.errno else e.strerror or str(e)
        raise OSError(e.errno, why, str(path)) from e


@contextlib.contextmanager
def whole(path: Path, force: bool, suffix: str = "") -> Iterator[Path]:
    """A temporary file that gets the name `path` at the end, unless the block raises.

    The block writes it under `naming`. Raises: as `admit` and `publish`.
    """
    admit(path, force)
    with temporary(path, suffix) as made:
        mode = stat.S_IMODE(made.stat().st_mode)
        yield made
        with naming(path):
            os.chmod(made, mode)  # some libraries write files that only their owner reads
            publish(made, path, force)


class Sink:
    """A file for C++ writers, which end the process when a write fails.

    `write` never fails; `close` raises the first error.
    """

    def __init__(self, path: Path) -> None:
        self._file: IO[bytes] = open(path, "wb")  # noqa: SIM115  # closed by `close`
        self._error: OSError | None = None

    def write(self, data: Any) -> int:
        if self._error is None:
            try:
                self._file.write(data)
            except OSError as e:
                self._error = e
        return memoryview(data).nbytes

    def flush(self) -> None:
        if self._error is None:
            try:
                self._file.flush()
            except OSError as e:
                self._error = e

    def close(self) -> None:
        """Closes the file. Raises: the OSError of the first write that failed."""
        self.flush()
        with contextlib.suppress(OSError):  # the rest of the buffer fails again
            self._file.close()
        if self._error is not None:
            raise self._error

    def __enter__(self) -> Sink:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is None:
            self.close()
        else:
            with contextlib.suppress(OSError):
                self._file.close()
            if self._error is not None:
                raise self._error from error
