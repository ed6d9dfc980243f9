"""The folder of an artifact: `Writer` publishes it whole or not at all, `Reader` believes nothing it finds there. No torch is imported.

Order of publishing:

0. what a killed writer has left is removed, so that it takes no space from this one;
1. every file is written under a temporary name beside its place, flushed to the disk, and renamed to a name that carries its content's hash;
2. `manifest.json` is written under a temporary name, flushed, and renamed: this rename is the commit point;
3. files of ours that the new manifest does not name are removed.

Until 2 the old artifact is whole, and from 2 on the new one is. One writer at a time holds `.widepack.lock`; readers need no lock: where files are gone that a
manifest names, they look whether it is still the manifest, and open the new one (`opened`).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import shutil
import stat
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, TypeVar

from . import strict_json
from .errors import ArtifactError
from .manifest import FORMAT, MAX_BYTES, File, Manifest, file_name
from .program import Program

MANIFEST = "manifest.json"
PROGRAMS = "programs"
LOCK = ".widepack.lock"
MAX_PROGRAM_BYTES = 256 * 2**20
_TEMPORARY = ".tmp-"
_OURS = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@-]*-[0-9a-f]{16}\.[a-z0-9]+\Z|\.tmp-[0-9a-f]{16}\Z")
_CHUNK = 4 * 2**20
_LARGE = 2**20
_SAID = 20  # damaged files that an error names
_TRIES = 20  # of opening an artifact that is replaced again and again; each of them needs a publishing of its own
_FICLONE = 0x40049409  # of linux/fs.h: the target gets the blocks of the source, which are copied when one of the two is written
_NOT_HERE = (errno.ENOSYS, errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.EBADF, errno.EPERM, errno.ETXTBSY)

T = TypeVar("T")
Change = tuple[int, Iterable[memoryview]]
"""Where in a file other bytes go, and which."""


class ArtifactExists(ArtifactError):
    """An output path that is taken."""

    exit_code = 2


class Stream:
    """A file being written: hashed on the way, named by its content when it is closed.

    name: relative to the artifact, empty until closed. bytes: written so far.
    """

    def __init__(self, file: BinaryIO, refused: Callable[[OSError], ArtifactError]) -> None:
        self.name = ""
        self.bytes = 0
        self._file = file
        self._refused = refused
        self._hash = hashlib.sha256()
        self._hashing: ThreadPoolExecutor | None = None

    def write(self, data: bytes | bytearray | memoryview) -> int:
        view = memoryview(data)
        view = view.cast("B") if view.nbytes else view
        try:
            for start in range(0, view.nbytes, _CHUNK):
                part = view[start : start + _CHUNK]
                if part.nbytes < _LARGE:
                    self._hash.update(part)
                    self._file.write(part)
                else:  # both at once: neither holds the interpreter's lock
                    self._hashing = self._hashing or ThreadPoolExecutor(1)
                    hashed = self._hashing.submit(self._hash.update, part)
                    try:
                        self._file.write(part)
                    finally:
                        hashed.result()
                self.bytes += part.nbytes
        except OSError as e:
            raise self._refused(e) from e
        return view.nbytes

    def tell(self) -> int:
        return self.bytes

    def flush(self) -> None:
        """Nothing waits here: closing the stream flushes it to the disk."""

    def seekable(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def finish(self) -> str:
        """Flush to the disk and close. Gives the SHA-256. Raises: OSError."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self.close()
        return self._hash.hexdigest()

    def close(self) -> None:
        """Let go of file and thread. Raises: OSError."""
        if self._hashing is not None:
            self._hashing.shutdown()
        self._file.close()


class Writer:
    """Writes one artifact: `with Writer("ens.wide") as writer: ...; writer.publish(manifest)`.

    path: the folder; it is made if it is not there. force: replace an artifact that is there; whatever else stands at the path is never replaced.
    Leaving the block without `publish`, by an exception or not, removes what was written and leaves what was there before.
    Raises: ArtifactExists for a path that is taken; ArtifactError where the system refuses to write.
    """

    def __init__(self, path: str | os.PathLike[str], force: bool = False) -> None:
        self.path = _named(path)
        self.force = force
        self.files: dict[str, File] = {}
        self._root = Path(os.path.realpath(path))
        self._made: list[Path] = []  # folders, outermost first
        self._new: list[Path] = []  # files that were not there before
        self._lock: int | None = None
        self._committing = ""  # the digest of the manifest that is being renamed

    def __enter__(self) -> Writer:
        self._admit()
        try:
            try:
                self._make_folder(self._root)
            except OSError as e:
                raise self._refused("make the folder", 0, e) from e
            self._lock = _lock(self._root / LOCK, self.path)
            self._admit()  # again: another writer may have been quicker
            self._clear()
        except BaseException:
            self._abandon()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not self._committed():
            self._abandon()
        elif self._lock is not None:
            with contextlib.suppress(OSError):
                (self._root / LOCK).unlink()
            os.close(self._lock)
        self._lock = None

    def reserve(self, needed: int) -> None:
        """Refuse at once what the disk cannot hold. needed: bytes. Raises: ArtifactError."""
        try:
            free = _free(self._root)
        except OSError as e:
            raise self._refused("ask for space", needed, e) from e
        if needed > free:
            raise ArtifactError(f"{self.path}: {needed:,} bytes are to be written, {free:,} are free there; make room or give another path")

    def file(self, stem: str, suffix: str, data: bytes) -> str:
        """Write a file and give its name in the artifact, `stem-<hash>.suffix`. stem may stand in the folder `programs/`."""
        with self.stream(stem, suffix) as out:
            out.write(data)
        return out.name

    def keep(self, files: Mapping[str, File]) -> None:
        """Files of the artifact that is there which the new manifest names too: they are left as they are."""
        self.files.update(files)

    def take(self, reader: Reader, names: Iterable[str]) -> None:
        """Files of an artifact that the new manifest names too: left as they are where it is the one at this path, else copied. Raises: ArtifactError for one that is damaged."""
        here = os.path.realpath(reader.root) == str(self._root)
        for name in names:
            if not here:
                rest, _, suffix = name.rpartition(".")
                made, _ = self.revised(rest.rpartition("-")[0], suffix, reader.path(name))
                if self.files[made] != reader.manifest.files[name]:
                    raise ArtifactError(f"{reader.root / name}: its content is not what was written; copy or build the artifact again")
            self.files[name] = reader.manifest.files[name]

    def place(self, name: str) -> Path:
        """Where a file that was written stands, for reading it back before it is published."""
        return self._root / name

    @contextlib.contextmanager
    def stream(self, stem: str, suffix: str) -> Iterator[Stream]:
        """A file object to write into; its `.name` is set when the block ends without an exception."""
        with self._temporary(stem, suffix) as (temporary, file):
            out = Stream(file, lambda e: self._refused(f"write {stem}", out.bytes, e))
            try:
                yield out
                try:
                    out.name = self._place(temporary, stem, suffix, out.bytes, out.finish)
                except OSError as e:
                    raise self._refused(f"write {stem}", out.bytes, e) from e
            finally:
                with contextlib.suppress(OSError):
                    out.close()

    def revised(
        self, stem: str, suffix: str, source: Path, changes: Iterable[Change] = (), progress: Callable[[int, int], None] | None = None
    ) -> tuple[str, str]:
        """Write a file that is another but for some bytes: blocks are shared with it where the file system can do that, and the changes written in place.

        source: the file, which is left as it is. changes: where other bytes go, and which. progress: called with (bytes hashed, bytes in all).
        Returns: the name in the artifact; `reflink`, `kernel` or `copy`, the way in which the bytes came over.
        """
        done = 0
        with self._temporary(stem, suffix, 0) as (temporary, file):
            try:
                with open(source, "rb", buffering=0) as old:
                    size = os.fstat(old.fileno()).st_size
                    if _clone(old, file):
                        how = "reflink"
                    else:
                        self.reserve(size)
                        how = _copy(old, file, size)
                for at, parts in changes:
                    for part in parts:
                        _write_at(file, part, at)
                        at += part.nbytes
                        done += part.nbytes
                name = self._place(temporary, stem, suffix, size, lambda: _finish(file, size, progress))
            except OSError as e:
                raise self._refused(f"write {stem}", done, e) from e
        return name, how

    @contextlib.contextmanager
    def _temporary(self, stem: str, suffix: str, buffering: int = -1) -> Iterator[tuple[Path, BinaryIO]]:
        """A new file beside the place of `stem`, which is gone at the end unless it was placed. buffering: as `open` takes it."""
        file_name(stem, suffix, "0" * 64)  # a bad stem is refused before anything is written
        temporary = (self._root / stem).parent / f"{_TEMPORARY}{secrets.token_hex(8)}"
        self._new.append(temporary)
        try:
            self._make_folder(temporary.parent)
            file: Any = open(temporary, "x+b", buffering=buffering)  # noqa: SIM115  closed when it is hashed, which may fail in its own words
        except OSError as e:
            raise self._refused(f"write {stem}", 0, e) from e
        try:
            yield temporary, file
        finally:
            with contextlib.suppress(OSError):
                file.close()
            with contextlib.suppress(OSError):
                temporary.unlink()  # not there where all went well
            self._new.remove(temporary)

    def _place(self, temporary: Path, stem: str, suffix: str, size: int, finish: Callable[[], str]) -> str:
        """Give a file that is written its name. finish: flushes and closes it, and gives its hash. Raises: OSError."""
        name = file_name(stem, suffix, sha256 := finish())
        place = self._root / name
        if not os.path.lexists(place):
            self._new.append(place)
        # A file of this name that is there already has these bytes, or is damaged. Either way a rename harms nobody who has it open.
        os.replace(temporary, place)
        self.files[name] = File(size, sha256)
        return name

    def publish(self, manifest: Manifest) -> Manifest:
        """Make the written files the artifact, by one rename. Gives the manifest with files and digest. Raises: ArtifactError."""
        sealed = manifest.sealed(self.files)
        data = sealed.to_bytes()
        if len(data) > MAX_BYTES:
            raise ArtifactError(f"{self.path}: a manifest of {len(data):,} bytes; the format's limit is {MAX_BYTES:,}")
        if Manifest.from_bytes(data).to_bytes() != data:  # what no reader would take is not published
            raise ArtifactError(f"{self.path}: the manifest does not read back as it was written; please report it")
        temporary = self._root / f"{_TEMPORARY}{secrets.token_hex(8)}"
        self._new.append(temporary)
        try:
            with open(temporary, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            for folder in {self._root, *((self._root / name).parent for name in sealed.files)}:
                _sync_folder(folder)
            self._committing = sealed.digest
            os.replace(temporary, self._root / MANIFEST)
        except OSError as e:
            raise self._refused("publish", len(data), e) from e
        for folder in (self._root, *(made.parent for made in self._made)):
            with contextlib.suppress(OSError):
                _sync_folder(folder)
        self._sweep(sealed.files)
        return sealed

    def _admit(self) -> None:
        """Refuse a path that holds what must not be replaced."""
        state = _state(self._root)
        if state == "artifact" and not self.force:
            raise ArtifactExists(f"{self.path} is an artifact already; give another path, or --force (force=True) to replace it")
        if state == "other":
            what = "a folder that holds something else than an artifact" if self._root.is_dir() else "no folder"
            raise ArtifactExists(f"{self.path} exists and is {what}; it is never replaced, give another path")
        if (around := next((p for p in self._root.parents if os.path.lexists(p / MANIFEST) and _state(p) == "artifact"), None)) is not None:
            raise ArtifactExists(f"{self.path} lies in the artifact {around}, whose folder holds its own files alone; give another path")

    def _make_folder(self, folder: Path) -> None:
        missing = [f for f in (folder, *folder.parents) if not os.path.lexists(f)]
        for part in reversed(missing):
            with contextlib.suppress(FileExistsError):
                part.mkdir()
                self._made.append(part)

    def _refused(self, action: str, count: int, e: OSError) -> ArtifactError:
        """What the system refused, as one paragraph. count: bytes of the file at work."""
        total = sum(f.bytes for f in self.files.values()) + count
        written = f" after {total:,} bytes" if total else ""
        out = ""
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            with contextlib.suppress(OSError):
                out = f" ({_free(self._root):,} bytes are free there); make room or give another path"
        return ArtifactError(
            f"{self.path}: cannot {action}{written}: {e.strerror or e}{out}. Nothing was published, and what was there before is as it was"
        )

    def _committed(self) -> bool:
        """Whether the manifest on the disk is ours: asked of the disk, since an interrupt can come right after the rename."""
        if not self._committing:
            return False
        try:
            found = strict_json.parse(_read(self._root / MANIFEST, MAX_BYTES), "manifest")
        except ArtifactError:
            return False
        return isinstance(found, dict) and found.get("digest") == self._committing

    def _abandon(self) -> None:
        """Remove what this writer made. Errors are passed over: the exception on its way says more."""
        for path in reversed(self._new):
            with contextlib.suppress(OSError):
                path.unlink()
        if self._lock is not None:  # from here on another writer may begin, so the files went first
            with contextlib.suppress(OSError):
                (self._root / LOCK).unlink()
        for folder in reversed(self._made):
            with contextlib.suppress(OSError):
                folder.rmdir()
        if self._lock is not None:
            os.close(self._lock)
        self._new, self._made, self._lock = [], [], None

    def _clear(self) -> None:
        """Remove what a killed writer has left. No reader needs a file that the manifest at the path does not name, but one that is just opening the artifact before it."""
        named: Any = {}
        if os.path.lexists(self._root / MANIFEST):
            with contextlib.suppress(ArtifactError):
                found = strict_json.parse(_read(self._root / MANIFEST, MAX_BYTES), "manifest")
                named = found.get("files") if isinstance(found, dict) else None
            if not isinstance(named, dict) or not named:
                return  # of a later format: whoever replaces it removes its files then
        self._sweep(named)

    def _sweep(self, named: Container[str]) -> None:
        """Remove files with names of ours that a manifest does not name, as an earlier build or a killed one left them. A failure costs only space."""
        for folder in (self._root, self._root / PROGRAMS):
            with contextlib.suppress(OSError):
                for path in sorted(folder.iterdir()) if not folder.is_symlink() or folder == self._root else ():
                    if _OURS.match(path.name) and path.relative_to(self._root).as_posix() not in named:
                        with contextlib.suppress(OSError):
                            path.unlink()


class Reader:
    """Opens an artifact: reads and checks the manifest at once, every other file when it is asked for.

    expect: the digest that the manifest must have, `sha256:<hex>`, where the caller knows it from elsewhere. extra: the ops of others that programs may ask for; None for all
    that this process has allowed. Raises: ArtifactError for what is no artifact, damaged, or not what is expected.
    """

    def __init__(self, path: str | os.PathLike[str], expect: str | None = None, extra: Container[str] | None = None) -> None:
        self.extra = extra
        self.root = _named(path)
        if not self.root.is_dir():
            raise ArtifactError(f"{self.root}: {'an artifact is a folder, this is a file' if self.root.exists() else 'there is nothing'}")
        if not os.path.lexists(self.root / MANIFEST):
            raise ArtifactError(f"{self.root}: a folder without {MANIFEST} is no artifact; `widepack build ... -o {self.root}` makes one")
        data = _read(self.root / MANIFEST, MAX_BYTES)
        try:
            self.manifest = Manifest.from_bytes(data)
        except ArtifactError as e:
            raise ArtifactError(f"{self.root}: {e}") from e
        if expect is not None and expect != self.manifest.digest:
            raise ArtifactError(f"{self.root}: expected the artifact {expect}, this one is {self.manifest.digest}")
        self._programs: dict[str, Program] = {}
        self._held: dict[str, bytes] = {}

    def replaced(self) -> bool:
        """Whether another artifact was published at the path since this one was opened."""
        try:
            found = strict_json.parse(_read(self.root / MANIFEST, MAX_BYTES), "manifest")
        except ArtifactError:
            return False
        return isinstance(found, dict) and found.get("digest") != self.manifest.digest

    def hold(self, names: Iterable[str], most: int = 32 * 2**20) -> None:
        """Read these small files now, so that they are there also when the artifact is replaced. most: bytes that may be kept; the rest is read when it is asked for.

        Raises: ArtifactError.
        """
        kept = sum(map(len, self._held.values()))
        for name in names:
            if name not in self._held and kept + self.manifest.files[name].bytes <= most:
                self._held[name] = self.bytes(name)
                kept += len(self._held[name])

    def path(self, name: str) -> Path:
        """Where a file of the manifest is: a plain file inside the folder, through no links. Raises: ArtifactError."""
        if name not in self.manifest.files:
            raise ArtifactError(f"{self.root}: {name[:80]!r} is not in the manifest's list of files")
        path = self.root
        parts = name.split("/")  # manifest.py lets no "..", absolute or empty part through
        for i, part in enumerate(parts):
            path = path / part
            try:
                mode = os.lstat(path).st_mode
            except OSError as e:
                raise ArtifactError(f"{path}: {e.strerror}; the artifact is incomplete, or was replaced while it was opened: open it again") from e
            if not (stat.S_ISREG(mode) if i == len(parts) - 1 else stat.S_ISDIR(mode)):
                raise ArtifactError(f"{path}: a link or special file; an artifact has plain files only")
        return path

    def check_sizes(self) -> None:
        """Refuse files that are missing or of another size; all of them in one error."""
        self._check(_size_problem)

    def check_hashes(self, names: Iterable[str] | None = None) -> None:
        """Refuse files whose content has another hash; all of them in one error. names: which files; without it everything is read."""
        self._check(lambda path, file: _size_problem(path, file) or _hash_problem(path, file), names)

    def _check(self, problem: Callable[[Path, File], str], names: Iterable[str] | None = None) -> None:
        found: list[str] = []
        for name in self.manifest.files if names is None else names:
            file = self.manifest.files[name]
            try:
                said = problem(self.path(name), file)
                found += [f"{name}: {said}"] if said else []
            except ArtifactError as e:
                found.append(str(e))
            except OSError as e:  # it has gone since it was found
                found.append(f"{name}: {e.strerror or e}")
        if found:
            more = [f"and {len(found) - _SAID} more"] if len(found) > _SAID else []
            said = "\n  ".join([*found[:_SAID], *more])
            raise ArtifactError(f"{self.root}: {len(found)} of {len(self.manifest.files)} files are not what was written:\n  {said}")

    def bytes(self, name: str) -> bytes:
        """The content of a small file, its hash checked. Raises: ArtifactError."""
        if name in self._held:
            return self._held[name]
        path, file = self.path(name), self.manifest.files[name]
        if file.bytes > MAX_PROGRAM_BYTES:
            raise ArtifactError(f"{path}: {file.bytes:,} bytes; at most {MAX_PROGRAM_BYTES:,} are read at once")
        data = _read(path, file.bytes)
        if hashlib.sha256(data).hexdigest() != file.sha256:
            raise ArtifactError(f"{path}: its content is not what was written (SHA-256 {file.sha256[:16]}...); copy or build the artifact again")
        return data

    def json(self, name: str) -> Any:
        """The JSON document in a file, its hash checked. Raises: ArtifactError."""
        return strict_json.parse(self.bytes(name), f"{self.root / name}")

    def program(self, name: str) -> Program:
        """A program, its hash and every node checked; read once. Raises: ArtifactError."""
        if name not in self._programs:
            data = self.json(name)
            try:
                self._programs[name] = Program.from_json(data, self.extra)
            except ArtifactError as e:
                raise ArtifactError(f"{self.root / name}: {e}") from e
            self._held.pop(name, None)
        return self._programs[name]

    def weights_files(self) -> list[Path]:
        """The safetensors files that hold the weights, sorted by name."""
        return [self.path(n) for n in sorted(self.manifest.files) if n.startswith("weights-") and n.endswith(".safetensors")]


def opened(
    path: str | os.PathLike[str], use: Callable[[Reader], T], expect: str | None = None, extra: Container[str] | None = None
) -> tuple[Reader, T]:
    """An artifact, and what `use` reads of it; both again where another one is published in between. expect, extra: as `Reader` takes them. Raises: ArtifactError."""
    for left in reversed(range(_TRIES)):
        reader = Reader(path, expect, extra)
        try:
            return reader, use(reader)
        except ArtifactError:
            if not left or not reader.replaced():
                raise
    raise AssertionError("the last try returns or raises")


def _state(root: Path) -> str:
    """What stands at a path: `nothing` (or an empty folder, or what a killed first build left), `artifact`, or `other`."""
    if not os.path.lexists(root):
        return "nothing"
    if not root.is_dir():
        return "other"
    if os.path.lexists(root / MANIFEST):
        try:
            found = strict_json.parse(_read(root / MANIFEST, MAX_BYTES), "manifest")
        except ArtifactError:
            return "other"
        return "artifact" if isinstance(found, dict) and found.get("format") == FORMAT else "other"
    left = set(os.listdir(root))
    if MANIFEST in left:  # another writer has published just now
        return _state(root)
    if not left:
        return "nothing"
    # A killed first build leaves its lock and files with names of ours. Without the lock such names prove nothing.
    inside = set(os.listdir(root / PROGRAMS)) if (root / PROGRAMS).is_dir() and not (root / PROGRAMS).is_symlink() else set()
    ours = all(_OURS.match(n) for n in (left - {LOCK, PROGRAMS}) | inside)
    return "nothing" if ours and LOCK in left else "other"


def _read(path: Path, limit: int) -> bytes:
    """A plain file's content of at most `limit` bytes; a link is not followed, a pipe not waited for."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
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
        raise ArtifactError(f"{path}: over {limit:,} bytes, which is more than it may have")
    return data


def _size_problem(path: Path, file: File) -> str:
    size = os.lstat(path).st_size
    return "" if size == file.bytes else f"{size:,} bytes, {file.bytes:,} were written"


def _hash_problem(path: Path, file: File) -> str:
    found = hashlib.sha256()
    with open(path, "rb") as stream:
        while chunk := stream.read(_CHUNK):
            found.update(chunk)
    return "" if found.hexdigest() == file.sha256 else f"SHA-256 {found.hexdigest()[:16]}..., {file.sha256[:16]}... was written"


def _clone(source: BinaryIO, target: BinaryIO) -> bool:
    """Give an empty file the blocks of another, where the file system shares blocks."""
    if sys.platform != "linux":
        return False
    try:
        fcntl.ioctl(target.fileno(), _FICLONE, source.fileno())
    except OSError:
        return False
    return True


def _copy(source: BinaryIO, target: BinaryIO, size: int) -> str:
    """The content of a file into an empty one: `kernel` where the system copies by itself, else `copy`. Raises: OSError."""
    if sys.platform == "linux":
        done = 0
        try:
            while done < size and (count := os.copy_file_range(source.fileno(), target.fileno(), size - done, done, done)):
                done += count
        except OSError as e:
            if e.errno not in _NOT_HERE:
                raise
        if done == size:
            return "kernel"
    source.seek(0)
    at = 0
    while chunk := source.read(_CHUNK):
        _write_at(target, chunk, at)
        at += len(chunk)
    return "copy"


def _write_at(file: BinaryIO, data: bytes | memoryview, at: int) -> None:
    """All of the data at a place of an unbuffered file. Raises: OSError."""
    view = memoryview(data)
    file.seek(at)
    while view.nbytes:
        view = view[file.write(view[:_CHUNK]) :]


def _finish(file: BinaryIO, size: int, progress: Callable[[int, int], None] | None) -> str:
    """Flush a file to the disk and close it. Gives the SHA-256 of what is in it. Raises: OSError."""
    found = hashlib.sha256()
    os.fsync(file.fileno())
    file.seek(0)
    while chunk := file.read(_CHUNK):
        found.update(chunk)
        if progress is not None:
            progress(file.tell(), size)
    file.close()
    return found.hexdigest()


def _named(path: str | os.PathLike[str]) -> Path:
    """Raises: ArtifactError for a path that is no text, since safetensors opens none."""
    place = Path(path)
    try:
        os.fspath(place).encode()
    except UnicodeEncodeError:
        raise ArtifactError(f"{str(place)!r}: the path is not valid UTF-8, and safetensors opens no such file; rename the folder") from None
    return place


def is_part(path: Path) -> bool:
    """Whether a path is the place of a file of an artifact that is there, or has a name that the next writer of the artifact would clear."""
    inside = path.parent.name == PROGRAMS and (path.parent.parent / MANIFEST).exists()
    beside = (path.parent / MANIFEST).exists() and (path.name in (MANIFEST, LOCK, PROGRAMS) or bool(_OURS.match(path.name)))
    return inside or beside


def _free(path: Path) -> int:
    """Bytes free where a path is, or will be."""
    return shutil.disk_usage(next(p for p in (path, *path.parents) if p.exists())).free


def _sync_folder(folder: Path) -> None:
    """Flush a folder's entries to the disk, where the system can."""
    if sys.platform == "win32":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems refuse it, and have then written through
            os.fsync(handle)
    finally:
        os.close(handle)


def _lock(place: Path, path: Path) -> int:
    """Take the writers' lock. Raises: ArtifactError where another writer holds it, or the file cannot be made."""
    while True:
        try:
            handle = os.open(place, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
        except OSError as e:
            raise ArtifactError(f"{path}: cannot write there: {e.strerror or e}") from e
        try:
            hold(handle)
        except OSError as e:
            os.close(handle)
            raise ArtifactError(f"{path}: another process is writing this artifact; wait until it has ended") from e
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(handle), os.stat(place)):
                return handle
        os.close(handle)  # the holder before us has removed the file that we waited for


if sys.platform == "win32":
    import msvcrt

    def hold(handle: int) -> None:
        """Lock a file until it is closed. Raises: OSError where another process holds it."""
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)

else:
    import fcntl

    def hold(handle: int) -> None:
        """Lock a file until it is closed. Raises: OSError where another process holds it."""
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            if e.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):  # a file system without locks: one writer is the user's care
                raise
