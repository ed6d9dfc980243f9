"""Names the parts of an artifact's folder, and tells what exists at a path. No torch is imported."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
import sys
from collections.abc import Iterable
from pathlib import Path

from . import strict_json
from .errors import ArtifactError
from .format_version import FORMAT
from .manifest import MAX_BYTES

MANIFEST = "manifest.json"
PROGRAMS = "programs"
LOCK = ".widepack.lock"
TEMPORARY = ".tmp-"
# Names of files that a writer of artifacts makes, also temporary ones.
ARTIFACT_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@-]*-[0-9a-f]{16}\.[a-z0-9]+\Z|\.tmp-[0-9a-f]{16}\Z")
CHUNK_BYTES = 4 * 2**20


class ArtifactExists(ArtifactError):
    """An output path where something exists that must not be replaced.

    Example:
        >>> try:
        ...     widepack.build(["a.pt"], "ens.wide", model="net.py:make", inputs=["x=float32[B,64]"])
        ... except widepack.errors.ArtifactExists as e:
        ...     print(e)
    """

    exit_code = 2


def path_state(root: Path) -> str:
    """Returns what exists at a path: `nothing`, `artifact` or `other`.

    An empty folder, and a folder with only the files of a killed first build, are `nothing`.
    """
    if not os.path.lexists(root):
        return "nothing"
    if not root.is_dir():
        return "other"
    if os.path.lexists(root / MANIFEST):
        try:
            manifest = strict_json.parse(read_plain_file(root / MANIFEST, MAX_BYTES), "manifest")
        except ArtifactError:
            return "other"
        return "artifact" if isinstance(manifest, dict) and manifest.get("format") == FORMAT else "other"
    names = set(os.listdir(root))
    if MANIFEST in names:  # another writer published after the check above
        return path_state(root)
    if not names:
        return "nothing"
    # A killed first build leaves its lock and files with artifact names. Without the lock the names prove
    # nothing.
    programs = (
        set(os.listdir(root / PROGRAMS))
        if (root / PROGRAMS).is_dir() and not (root / PROGRAMS).is_symlink()
        else set()
    )
    only_artifact_files = all(ARTIFACT_FILE.match(n) for n in (names - {LOCK, PROGRAMS}) | programs)
    return "nothing" if only_artifact_files and LOCK in names else "other"


def read_plain_file(path: Path, limit: int) -> bytes:
    """Returns the content of a regular file of at most `limit` bytes.

    It follows no link and waits for no pipe.
    """
    flags = (
        os.O_RDONLY
        | getattr(os, "O_NOFOLLOW", 0)
        | getattr(os, "O_NONBLOCK", 0)
        | getattr(os, "O_BINARY", 0)
        | getattr(os, "O_CLOEXEC", 0)
    )
    try:
        handle = os.open(path, flags)
        with os.fdopen(handle, "rb") as file:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise ArtifactError(f"{path}: a link or special file; an artifact has plain files only")
            data = file.read(limit + 1)
    except OSError as e:
        if e.errno == errno.ELOOP:
            raise ArtifactError(f"{path}: a link or special file; an artifact has plain files only") from e
        raise ArtifactError(f"{path}: {e.strerror or e}") from e
    if len(data) > limit:
        raise ArtifactError(f"{path}: over {limit:,} bytes, which is the limit")
    return data


def checked_path(path: str | os.PathLike[str]) -> Path:
    """Returns the path.

    Raises: ArtifactError if it is not valid UTF-8, because safetensors cannot open it.
    """
    place = Path(path)
    try:
        os.fspath(place).encode()
    except UnicodeEncodeError:
        raise ArtifactError(
            f"{str(place)!r}: the path is not valid UTF-8, so safetensors cannot open files in it; "
            "rename the folder"
        ) from None
    return place


def check_programs(root: Path) -> None:
    """Checks that no link or file is in the place of the folder of programs.

    A writer would write through a link outside the artifact, and readers follow no link. Raises:
    ArtifactError.
    """
    programs = root / PROGRAMS
    if os.path.lexists(programs) and not stat.S_ISDIR(os.lstat(programs).st_mode):
        raise ArtifactError(
            f"{programs}: a link or a file, but an artifact has a folder there. Nothing was written; remove "
            "it, or give another path"
        )


def check_plain(root: Path, names: Iterable[str]) -> None:
    """Checks before publishing that readers will open the listed files: plain files, reached without links.

    Raises: ArtifactError.
    """
    check_programs(root)
    for name in names:
        try:
            mode = os.lstat(root / name).st_mode
        except OSError as e:
            raise ArtifactError(f"{root / name}: {e.strerror or e}; nothing was published") from e
        if not stat.S_ISREG(mode):
            raise ArtifactError(
                f"{root / name}: a link or special file; an artifact has plain files only. Nothing was "
                "published"
            )


def is_part(path: Path) -> bool:
    """Returns whether a path belongs to an existing artifact.

    True for a file of the artifact, and for a name that the next writer of the artifact would remove.
    """
    inside = path.parent.name == PROGRAMS and (path.parent.parent / MANIFEST).exists()
    beside = (path.parent / MANIFEST).exists() and (
        path.name in (MANIFEST, LOCK, PROGRAMS) or bool(ARTIFACT_FILE.match(path.name))
    )
    return inside or beside


def free_bytes(path: Path) -> int:
    """Returns the free bytes of the file system of a path. The path itself need not exist."""
    return shutil.disk_usage(next(p for p in (path, *path.parents) if p.exists())).free


def sync_folder(folder: Path) -> None:
    """Flushes the entries of a folder to the disk, if the system can."""
    if sys.platform == "win32":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        # some network file systems refuse it; they have written the entries already
        with contextlib.suppress(OSError):
            os.fsync(handle)
    finally:
        os.close(handle)
