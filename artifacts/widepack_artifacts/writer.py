"""Publishes an artifact completely or not at all. No torch is imported.

The steps of publishing:

0. The writer removes the files that a killed writer left, because they take space.
1. It writes every file under a temporary name in the same folder, flushes it to the disk, and renames it. The
   new name contains the hash of the content.
2. It writes `manifest.json` under a temporary name, flushes it, and renames it. This rename is the commit
   point.
3. It removes artifact files that the new manifest does not list.

Before step 2 the old artifact is complete, and after it the new one is. One writer at a time has the lock
`.widepack.lock`. Readers need no lock: if a file that their manifest lists is missing, they read the manifest
again and open the new artifact (`reader.opened`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from . import strict_json
from .errors import ArtifactError
from .file_copy import clone_blocks, copy_content, finish_file, write_at
from .file_list import File, file_name
from .folder import (
    ARTIFACT_FILE,
    LOCK,
    MANIFEST,
    PROGRAMS,
    TEMPORARY,
    ArtifactExists,
    check_plain,
    check_programs,
    checked_path,
    free_bytes,
    path_state,
    read_plain_file,
    sync_folder,
)
from .lock import take_lock
from .manifest import MAX_BYTES, Manifest
from .reader import Reader
from .stream import Stream

Change = tuple[int, Iterable[memoryview]]
"""The offset in a file at which bytes change, and the new bytes."""


class Writer:
    """Writes one artifact: `with Writer("ens.wide") as writer: ...; writer.publish(manifest)`.

    Leaving the block without `publish`, with an exception or without, removes the new files and leaves the
    old artifact.

    Args:
        path: The folder. It is made if it does not exist.
        force: Replace an artifact that exists at the path. Anything else at the path is never replaced.

    Raises:
        ArtifactExists: Something exists at the path that must not be replaced.
        ArtifactError: The system refuses to write.
    """

    def __init__(self, path: str | os.PathLike[str], force: bool = False) -> None:
        self.path = checked_path(path)
        self.force = force
        self.files: dict[str, File] = {}
        self._root = Path(os.path.realpath(path))
        self._new_folders: list[Path] = []  # outermost first
        self._new_files: list[Path] = []
        self._lock: int | None = None
        self._committing = ""  # the digest of the manifest that is being renamed

    def __enter__(self) -> Writer:
        self._check_path()
        try:
            try:
                self._make_folder(self._root)
            except OSError as e:
                raise self._error("make the folder", 0, e) from e
            self._lock = take_lock(self._root / LOCK, self.path)
            self._check_path()  # again: another writer may have published in between
            check_programs(self._root)
            self._remove_leftovers()
        except BaseException:
            self._abandon()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._committed():
            self._abandon()
        elif self._lock is not None:
            with contextlib.suppress(OSError):
                (self._root / LOCK).unlink()
            os.close(self._lock)
        self._lock = None

    def reserve(self, needed: int) -> None:
        """Refuses at once if the disk has less space than the bytes needed. Raises: ArtifactError."""
        try:
            free = free_bytes(self._root)
        except OSError as e:
            raise self._error("ask for space", needed, e) from e
        if needed > free:
            raise ArtifactError(
                f"{self.path}: {needed:,} bytes are to be written, {free:,} are free there; "
                "make room or give another path"
            )

    def file(self, stem: str, suffix: str, data: bytes) -> str:
        """Writes a file and returns its name in the artifact, `stem-<hash>.suffix`.

        The stem may begin with the folder `programs/`.
        """
        with self.stream(stem, suffix) as out:
            out.write(data)
        return out.name

    def keep(self, files: Mapping[str, File]) -> None:
        """Keeps files of the existing artifact unchanged: the new manifest lists them too."""
        self.files.update(files)

    def take(self, reader: Reader, names: Iterable[str]) -> None:
        """Takes files of an artifact into the new one.

        Files of the artifact at this path stay unchanged; files of another artifact are copied. Raises:
        ArtifactError if a file is damaged.
        """
        same_path = os.path.realpath(reader.root) == str(self._root)
        for name in names:
            if not same_path:
                rest, _, suffix = name.rpartition(".")
                copied, _ = self.revised(rest.rpartition("-")[0], suffix, reader.path(name))
                if self.files[copied] != reader.manifest.files[name]:
                    raise ArtifactError(
                        f"{reader.root / name}: its content is not what was written; "
                        "copy or build the artifact again"
                    )
            self.files[name] = reader.manifest.files[name]

    def place(self, name: str) -> Path:
        """Returns the path of a file that this writer wrote, to read it before it is published."""
        return self._root / name

    @contextlib.contextmanager
    def stream(self, stem: str, suffix: str) -> Iterator[Stream]:
        """Opens a file to write into. Its `.name` is set when the block ends without an exception."""
        with self._temporary(stem, suffix) as (temporary, file):
            out = Stream(file, lambda e: self._error(f"write {stem}", out.bytes, e))
            try:
                yield out
                try:
                    out.name = self._place(temporary, stem, suffix, out.bytes, out.finish)
                except OSError as e:
                    raise self._error(f"write {stem}", out.bytes, e) from e
            finally:
                with contextlib.suppress(OSError):
                    out.close()

    def revised(
        self,
        stem: str,
        suffix: str,
        source: Path,
        changes: Iterable[Change] = (),
        progress: Callable[[int, int], None] | None = None,
    ) -> tuple[str, str]:
        """Writes a changed copy of a file. The two files share blocks if the file system can do that.

        Args:
            stem, suffix: The name, as in `file`.
            source: The file to copy. It stays unchanged.
            changes: The offsets at which bytes change, and the new bytes.
            progress: Called with (bytes hashed, bytes in total).

        Returns:
            The name in the artifact, and how the bytes were copied: `reflink`, `kernel` or `copy`.
        """
        done = 0
        with self._temporary(stem, suffix, 0) as (temporary, file):
            try:
                with open(source, "rb", buffering=0) as old:
                    size = os.fstat(old.fileno()).st_size
                    if clone_blocks(old, file):
                        how = "reflink"
                    else:
                        self.reserve(size)
                        how = copy_content(old, file, size)
                for at, parts in changes:
                    for part in parts:
                        write_at(file, part, at)
                        at += part.nbytes
                        done += part.nbytes
                name = self._place(temporary, stem, suffix, size, lambda: finish_file(file, size, progress))
            except OSError as e:
                raise self._error(f"write {stem}", done, e) from e
        return name, how

    @contextlib.contextmanager
    def _temporary(self, stem: str, suffix: str, buffering: int = -1) -> Iterator[tuple[Path, BinaryIO]]:
        """Makes a temporary file in the folder of `stem`.

        It is removed at the end unless `_place` renamed it.
        """
        file_name(stem, suffix, "0" * 64)  # a bad stem is refused before anything is written
        temporary = (self._root / stem).parent / f"{TEMPORARY}{secrets.token_hex(8)}"
        self._new_files.append(temporary)
        try:
            self._make_folder(temporary.parent)
            # closed after hashing, because closing may fail with an error of its own
            file: Any = open(temporary, "x+b", buffering=buffering)  # noqa: SIM115
        except OSError as e:
            raise self._error(f"write {stem}", 0, e) from e
        try:
            yield temporary, file
        finally:
            with contextlib.suppress(OSError):
                file.close()
            with contextlib.suppress(OSError):
                temporary.unlink()  # it does not exist after a rename
            self._new_files.remove(temporary)

    def _place(self, temporary: Path, stem: str, suffix: str, size: int, finish: Callable[[], str]) -> str:
        """Renames a finished temporary file to the name that contains its hash.

        `finish` flushes and closes the file and returns its hash. Raises: OSError.
        """
        name = file_name(stem, suffix, sha256 := finish())
        place = self._root / name
        if not os.path.lexists(place):
            self._new_files.append(place)
        # An existing file of this name has these bytes or is damaged. In both cases a rename is safe for
        # processes
        # that have it open.
        os.replace(temporary, place)
        self.files[name] = File(size, sha256)
        return name

    def publish(self, manifest: Manifest) -> Manifest:
        """Publishes the written files with one rename of the manifest.

        Returns: the manifest with its files and digest. Raises: ArtifactError.
        """
        sealed = manifest.sealed(self.files)
        data = sealed.to_bytes()
        if len(data) > MAX_BYTES:
            raise ArtifactError(
                f"{self.path}: a manifest of {len(data):,} bytes; the format's limit is {MAX_BYTES:,}"
            )
        if Manifest.from_bytes(data).to_bytes() != data:  # a reader would refuse it
            raise ArtifactError(
                f"{self.path}: the manifest does not read back as it was written; please report it"
            )
        check_plain(self._root, sealed.files)
        try:
            self._commit(sealed, data)
        except OSError as e:
            raise self._error("publish", len(data), e) from e
        for folder in (self._root, *(new.parent for new in self._new_folders)):
            with contextlib.suppress(OSError):
                sync_folder(folder)
        self._remove_unlisted(sealed.files)
        return sealed

    def _commit(self, sealed: Manifest, data: bytes) -> None:
        """Flushes all folders, and writes the manifest under a temporary name and renames it.

        Raises: OSError.
        """
        temporary = self._root / f"{TEMPORARY}{secrets.token_hex(8)}"
        self._new_files.append(temporary)
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        for folder in {self._root, *((self._root / name).parent for name in sealed.files)}:
            sync_folder(folder)
        self._committing = sealed.digest
        os.replace(temporary, self._root / MANIFEST)

    def _check_path(self) -> None:
        """Refuses a path where something exists that must not be replaced, and a path inside an artifact."""
        state = path_state(self._root)
        if state == "artifact" and not self.force:
            raise ArtifactExists(
                f"{self.path} is an artifact already; give another path, "
                "or --force (force=True) to replace it"
            )
        if state == "other":
            what = (
                "a folder that contains other files than an artifact"
                if self._root.is_dir()
                else "not a folder"
            )
            raise ArtifactExists(f"{self.path} exists and is {what}; it is never replaced, give another path")
        for parent in self._root.parents:
            if os.path.lexists(parent / MANIFEST) and path_state(parent) == "artifact":
                raise ArtifactExists(
                    f"{self.path} lies in the artifact {parent}; the folder of an artifact contains its own "
                    "files only. "
                    "Give another path"
                )

    def _make_folder(self, folder: Path) -> None:
        """Makes a folder and its missing parents, and remembers them. Raises: OSError."""
        missing = [f for f in (folder, *folder.parents) if not os.path.lexists(f)]
        for part in reversed(missing):
            with contextlib.suppress(FileExistsError):
                part.mkdir()
                self._new_folders.append(part)

    def _error(self, action: str, count: int, e: OSError) -> ArtifactError:
        """Returns the error for an action that the system refused.

        `count` is the number of bytes of the current file.
        """
        total = sum(f.bytes for f in self.files.values()) + count
        written = f" after {total:,} bytes" if total else ""
        way_out = ""
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            with contextlib.suppress(OSError):
                way_out = (
                    f" ({free_bytes(self._root):,} bytes are free there); make room or give another path"
                )
        return ArtifactError(
            f"{self.path}: cannot {action}{written}: {e.strerror or e}{way_out}. "
            "Nothing was published, and what was there before is as it was"
        )

    def _committed(self) -> bool:
        """Returns whether the manifest on the disk is from this writer.

        It reads the disk, because an interrupt can come directly after the rename.
        """
        if not self._committing:
            return False
        try:
            manifest = strict_json.parse(read_plain_file(self._root / MANIFEST, MAX_BYTES), "manifest")
        except ArtifactError:
            return False
        return isinstance(manifest, dict) and manifest.get("digest") == self._committing

    def _abandon(self) -> None:
        """Removes what this writer made. It ignores errors, because the exception in progress says more."""
        for path in reversed(self._new_files):
            with contextlib.suppress(OSError):
                path.unlink()
        if self._lock is not None:  # then another writer may begin, so the files are removed first
            with contextlib.suppress(OSError):
                (self._root / LOCK).unlink()
        for folder in reversed(self._new_folders):
            with contextlib.suppress(OSError):
                folder.rmdir()
        if self._lock is not None:
            os.close(self._lock)
        self._new_files, self._new_folders, self._lock = [], [], None

    def _remove_leftovers(self) -> None:
        """Removes the files that a killed writer left.

        No reader needs a file that the manifest at the path does not list, except a reader that opened the
        artifact before.
        """
        listed: Any = {}
        if os.path.lexists(self._root / MANIFEST):
            with contextlib.suppress(ArtifactError):
                manifest = strict_json.parse(read_plain_file(self._root / MANIFEST, MAX_BYTES), "manifest")
                listed = manifest.get("files") if isinstance(manifest, dict) else None
            if not isinstance(listed, dict) or not listed:
                return  # a later format: the writer that replaces it removes its files
        self._remove_unlisted(listed)

    def _remove_unlisted(self, listed: Container[str]) -> None:
        """Removes files with artifact names that a manifest does not list. A failure costs only space."""
        for folder in (self._root, self._root / PROGRAMS):
            if folder.is_symlink() and folder != self._root:
                continue
            with contextlib.suppress(OSError):
                for path in sorted(folder.iterdir()):
                    if (
                        ARTIFACT_FILE.match(path.name)
                        and path.relative_to(self._root).as_posix() not in listed
                    ):
                        with contextlib.suppress(OSError):
                            path.unlink()
