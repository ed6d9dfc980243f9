"""A single file that appears whole or not at all: what is exported, extracted, or written as a report.

It is written under a name of its own beside its place, and appears there by one rename after it has reached the disk. A lock tells such a file from what a killed
process left, which goes when the next one is written into the same folder.
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

from widepack_artifacts.writer import hold, is_part

from ..errors import ArtifactExists, UsageError

_OURS = re.compile(r"\.widepack-[0-9a-f]{16}(\.[a-z0-9]+)?\Z")


def admit(path: Path, force: bool) -> None:
    """Refuse a place where no file may be written. Raises: UsageError; ArtifactExists where it is taken and `force` is not given."""
    if path.is_dir():
        raise UsageError(f"{path} is a folder; give the path of a file")
    if not path.parent.is_dir():
        raise UsageError(f"{path}: there is no folder {path.parent}")
    if is_part(path):
        raise UsageError(f"{path} is the name of a part of the artifact there, which would be lost; give another path")
    if not force and os.path.lexists(path):
        raise ArtifactExists(_taken(path))


def _taken(path: Path) -> str:
    return f"{path} exists; give another path, or force=True (--force) to replace it"


@contextlib.contextmanager
def temporary(path: Path, suffix: str = "") -> Iterator[Path]:
    """A new file beside `path`, that is gone afterwards; those that killed processes left go now. suffix: of its name."""
    for left in path.parent.iterdir():
        if _OURS.match(left.name):
            with contextlib.suppress(OSError), open(left, "rb") as file:
                hold(file.fileno())
                left.unlink()
    made = path.parent / f".widepack-{secrets.token_hex(8)}{suffix}"
    with open(made, "xb") as file:
        hold(file.fileno())
        try:
            yield made
        finally:
            made.unlink(missing_ok=True)


def publish(made: Path, path: Path, force: bool) -> None:
    """Give a temporary file its name. Raises: ArtifactExists; OSError."""
    with open(made, "rb+") as file:
        os.fsync(file.fileno())
    if force:
        os.replace(made, path)
    else:
        try:
            os.link(made, path)  # unlike a rename it never replaces a file that has come in between
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
def whole(path: Path, force: bool, suffix: str = "") -> Iterator[Path]:
    """A temporary file that gets the name `path` at the end, unless something is raised. Raises: as `admit` and `publish`."""
    admit(path, force)
    with temporary(path, suffix) as made:
        mode = stat.S_IMODE(made.stat().st_mode)
        yield made
        os.chmod(made, mode)  # some libraries write files that only their owner reads
        publish(made, path, force)


class Sink:
    """A file for writers of C++ that end the process where a write fails: it takes everything, and keeps the first error for `close`."""

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
        """Raises: OSError of the first write that failed."""
        self.flush()
        with contextlib.suppress(OSError):  # what is left in the buffer fails again
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
