"""Identifies the file at a path, so that a later change of it is noticed without reading it. No torch is
imported.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from .errors import ArtifactError

_LEAST, _FOR_BYTE = 256 * 2**20, 16


def bytes_on_disk(path: Path) -> int:
    """Returns the bytes of a file without its holes. Holes do not raise the budget of a load."""
    status = path.stat()
    blocks = 512 * getattr(status, "st_blocks", 0)
    # Some file systems do not count blocks.
    if not blocks or blocks >= status.st_size or not hasattr(os, "SEEK_DATA"):
        return status.st_size
    with open(path, "rb", buffering=0) as file:
        return _data_bytes(file.fileno(), status.st_size)


def check_on_disk(path: Path, size: int, what: str) -> None:
    """Refuses to compute a value from a file that consists of holes.

    Args:
        path: The file.
        size: The bytes of the value.
        what: The value, in the message.

    Raises:
        ArtifactError: The value has more than 256 MiB and 16 bytes for each byte of the file on the disk.
    """
    if size <= _LEAST:
        return
    try:
        found = bytes_on_disk(path)
    except OSError:  # the file was replaced after it was mapped
        return
    if size > _LEAST + _FOR_BYTE * found:
        raise ArtifactError(
            f"{what} has {size:,} bytes, but its file has {found:,} on the disk and else holes; a copy "
            "without holes can be loaded (cp --sparse=never)"
        )


def _data_bytes(handle: int, size: int) -> int:
    """Returns the bytes of an open file that are not holes. The count of blocks is lower if a file system
    compresses.
    """
    total = at = 0
    with contextlib.suppress(OSError):  # ENXIO: the rest is a hole
        while at < size:
            begin = os.lseek(handle, at, os.SEEK_DATA)
            at = os.lseek(handle, begin, os.SEEK_HOLE)
            total += min(at, size) - begin
    return total


@dataclass(frozen=True)
class FileIdentity:
    """What the system tells about a file.

    A change of the content changes the size, `modified` or `changed`. The system alone writes `changed`, so
    restoring the time of modification does not hide a change. A change on the disk below the file system
    changes nothing here.

    Attributes:
        path: Where the file was.
        device, inode: The file itself, whatever its name.
        size: Its bytes.
        modified: The time of the last change of its content, in ns.
        changed: The time of the last change of its content, name, owner or mode, in ns.
    """

    path: Path
    device: int
    inode: int
    size: int
    modified: int
    changed: int

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> FileIdentity:
        """Identifies the file at a path. Raises: OSError."""
        s = os.stat(path)
        return cls(Path(path), s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns)

    @property
    def key(self) -> str:
        """All figures, without the path."""
        return f"{self.device} {self.inode} {self.size} {self.modified} {self.changed}"

    def check_same(self) -> None:
        """Checks that the path still has this file, with this content. Raises: ArtifactError."""
        try:
            now = FileIdentity.of(self.path)
        except OSError as e:
            raise ArtifactError(f"{self.path}: {e.strerror or e}") from e
        if (now.device, now.inode, now.size, now.modified) != (
            self.device,
            self.inode,
            self.size,
            self.modified,
        ):
            raise ArtifactError(
                f"{self.path}: the file was replaced or changed while it was opened; open the artifact again"
            )

    def check_content(self) -> None:
        """Checks that the file was not changed in place. It may have been removed or replaced since: a
        process that has it mapped keeps it.

        Raises: ArtifactError.
        """
        try:
            now = os.stat(self.path)
        except OSError:
            return
        if (now.st_dev, now.st_ino) != (self.device, self.inode):
            return
        if (now.st_size, now.st_mtime_ns) != (self.size, self.modified):
            raise ArtifactError(
                f"{self.path}: the file was changed in place after it was loaded: {self.size:,} bytes then, "
                f"{now.st_size:,} now.\n"
                "Publish with `widepack update` or `build --force`, which replace files and never change "
                "them, and load the artifact again."
            )
