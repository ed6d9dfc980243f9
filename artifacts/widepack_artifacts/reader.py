"""Opens an artifact and checks each file before its content is used. No torch is imported."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Container, Iterable
from pathlib import Path
from typing import Any, TypeVar

from . import strict_json
from .errors import ArtifactError, some
from .file_list import File
from .folder import CHUNK_BYTES, MANIFEST, checked_path, read_plain_file
from .manifest import MAX_BYTES, Manifest
from .program import Program

MOST_BYTES = 32 * 2**20
MOST_NODES = 100_000


class ProgramLimit:
    """Counts the programs of one artifact as they are read, and refuses what is beyond the limit.

    Python needs kilobytes and a good part of a millisecond for each node, however short it is in the file.

    Args:
        factor: How many times the usual amount is allowed.
    """

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self._bytes = self._nodes = 0

    def add_file(self, name: str, size: int) -> None:
        """Counts a file before it is read. Raises: ArtifactError."""
        self._bytes += size
        self._check(name, self._bytes, MOST_BYTES, "bytes of programs")

    def add_nodes(self, name: str, document: Any) -> None:
        """Counts the nodes of a document before a program is made of it. Raises: ArtifactError."""
        self._nodes += count_nodes(document)
        self._check(name, self._nodes, MOST_NODES, "nodes")

    def _check(self, name: str, found: int, usual: int, what: str) -> None:
        if found > usual * self.factor:
            raise ArtifactError(
                f"{name} brings the programs of this load to {found:,} {what}; a load may take "
                f"{usual * self.factor:,.0f}. If you trust its makers: load(limit={2 * found / usual:.1g}) "
                "allows this much, and limit=None allows anything"
            )


def count_nodes(document: Any) -> int:
    """Returns the nodes of a program's document, with those of its loops. Other documents have none."""
    count, programs = 0, [document]
    while programs:
        program = programs.pop()
        nodes = program.get("nodes") if isinstance(program, dict) else None
        if isinstance(nodes, list):
            count += len(nodes)
            programs += [n["body"] for n in nodes if isinstance(n, dict) and "body" in n]
    return count


MAX_PROGRAM_BYTES = 256 * 2**20
_MOST_NAMED = 20  # damaged files that an error names
_TRIES = 20  # to open an artifact that is replaced repeatedly; each retry needs another publishing

T = TypeVar("T")


class Reader:
    """Reads the files of an artifact.

    It reads and checks the manifest at once, and every other file when a method asks for it.

    Args:
        path: The folder.
        expect: The digest that the manifest must have, `sha256:<hex>`, if the caller knows it from a trusted
            source.
        extra: The ops of other libraries that programs may use. Default: all that this process has allowed.
        manifest: A manifest that its writer has not published yet. Default: the one in the folder.

    Attributes:
        limit: The limit of the programs that are read from now on; None for the limits of the format.

    Raises:
        ArtifactError: The folder is not an artifact, is damaged, or has another digest than `expect`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        expect: str | None = None,
        extra: Container[str] | None = None,
        manifest: Manifest | None = None,
    ) -> None:
        self.extra = extra
        self.root = checked_path(path)
        self.manifest = self._published() if manifest is None else manifest
        if expect is not None and expect != self.manifest.digest:
            raise ArtifactError(
                f"{self.root}: expected the artifact {expect}, this one is {self.manifest.digest}"
            )
        self.limit: ProgramLimit | None = None
        self._programs: dict[str, Program] = {}
        self._preloaded: dict[str, bytes] = {}

    def _published(self) -> Manifest:
        """Returns the manifest in the folder. Raises: ArtifactError."""
        if not self.root.is_dir():
            what = "an artifact is a folder, this is a file" if self.root.exists() else "it does not exist"
            raise ArtifactError(f"{self.root}: {what}")
        if not os.path.lexists(self.root / MANIFEST):
            empty = next(self.root.iterdir(), None) is None
            raise ArtifactError(
                f"{self.root}: a folder without {MANIFEST} is not an artifact; `widepack build ... -o "
                f"{self.root if empty else 'ens.wide'}` makes one"
            )
        data = read_plain_file(self.root / MANIFEST, MAX_BYTES)
        try:
            return Manifest.from_bytes(data)
        except ArtifactError as e:
            raise ArtifactError(f"{self.root}: {e}") from e

    def replaced(self) -> bool:
        """Returns whether another artifact was published at the path after this one was opened."""
        try:
            current = strict_json.parse(read_plain_file(self.root / MANIFEST, MAX_BYTES), "manifest")
        except ArtifactError:
            return False
        return isinstance(current, dict) and current.get("digest") != self.manifest.digest

    def preload(self, names: Iterable[str], most: int = 32 * 2**20) -> None:
        """Reads small files now, because a later publishing removes them.

        Args:
            names: The files.
            most: The number of bytes that may stay in memory. Files beyond it are read on demand.

        Raises:
            ArtifactError: A file is missing or damaged.
        """
        size = sum(map(len, self._preloaded.values()))
        for name in names:
            if name not in self._preloaded and size + self.manifest.files[name].bytes <= most:
                self._preloaded[name] = self.bytes(name)
                size += len(self._preloaded[name])

    def path(self, name: str) -> Path:
        """Returns the path of a listed file: a regular file inside the folder, reached without links.

        Raises:
            ArtifactError.
        """
        if name not in self.manifest.files:
            raise ArtifactError(f"{self.root}: {name[:80]!r} is not in the manifest's list of files")
        path = self.root
        parts = name.split("/")  # the manifest refuses "..", absolute names and empty parts
        for i, part in enumerate(parts):
            path = path / part
            try:
                mode = os.lstat(path).st_mode
            except OSError as e:
                raise ArtifactError(
                    f"{path}: {e.strerror}; the artifact is incomplete, or was replaced while it was opened: "
                    "open it again"
                ) from e
            if not (stat.S_ISREG(mode) if i == len(parts) - 1 else stat.S_ISDIR(mode)):
                raise ArtifactError(f"{path}: a link or special file; an artifact has plain files only")
        return path

    def check_sizes(self) -> None:
        """Refuses files that are missing or have another size. One error names all of them."""
        self._check(_size_problem)

    def check_hashes(self, names: Iterable[str] | None = None) -> None:
        """Refuses files whose content has another hash. One error names all of them.

        Args:
            names: The files to check. Default: all files.
        """
        self._check(lambda path, file: _size_problem(path, file) or _hash_problem(path, file), names)

    def _check(self, problem: Callable[[Path, File], str], names: Iterable[str] | None = None) -> None:
        problems: list[str] = []
        for name in self.manifest.files if names is None else names:
            file = self.manifest.files[name]
            try:
                words = problem(self.path(name), file)
                problems += [f"{name}: {words}"] if words else []
            except ArtifactError as e:
                problems.append(str(e))
            except OSError as e:  # the file was removed after `path` found it
                problems.append(f"{name}: {e.strerror or e}")
        if problems:
            rows = some(problems, _MOST_NAMED, "\n  ")
            raise ArtifactError(
                f"{self.root}: {len(problems)} of {len(self.manifest.files)} files are not what was "
                "written:\n"
                f"  {rows}"
            )

    def bytes(self, name: str) -> bytes:
        """Returns the content of a small file after checking its hash. Raises: ArtifactError."""
        if name in self._preloaded:
            return self._preloaded[name]
        path, file = self.path(name), self.manifest.files[name]
        if file.bytes > MAX_PROGRAM_BYTES:
            raise ArtifactError(f"{path}: {file.bytes:,} bytes; the limit is {MAX_PROGRAM_BYTES:,}")
        data = read_plain_file(path, file.bytes)
        if hashlib.sha256(data).hexdigest() != file.sha256:
            raise ArtifactError(
                f"{path}: its content is not what was written (SHA-256 {file.sha256[:16]}...); "
                "copy or build the artifact again"
            )
        return data

    def json(self, name: str) -> Any:
        """Returns the JSON document in a file after checking its hash. Raises: ArtifactError."""
        return strict_json.parse(self.bytes(name), f"{self.root / name}")

    def program(self, name: str) -> Program:
        """Returns a program after checking its hash and every node.

        It is read once. Raises: ArtifactError, also for a program beyond the limit.
        """
        if name not in self._programs:
            if self.limit is not None:
                self.limit.add_file(str(self.root / name), self.manifest.files[name].bytes)
            data = self.json(name)
            if self.limit is not None:
                self.limit.add_nodes(str(self.root / name), data)
            try:
                self._programs[name] = Program.from_json(data, self.extra)
            except ArtifactError as e:
                raise ArtifactError(f"{self.root / name}: {e}") from e
            self._preloaded.pop(name, None)
        return self._programs[name]

    def weights_files(self) -> list[Path]:
        """Returns the safetensors files of the weights, sorted by name."""
        return [
            self.path(n)
            for n in sorted(self.manifest.files)
            if n.startswith("weights-") and n.endswith(".safetensors")
        ]


def opened(
    path: str | os.PathLike[str],
    use: Callable[[Reader], T],
    expect: str | None = None,
    extra: Container[str] | None = None,
) -> tuple[Reader, T]:
    """Opens an artifact and reads from it; repeats both if another artifact is published in between.

    Args:
        path, expect, extra: As in `Reader`.
        use: Reads from the artifact.

    Returns:
        The reader, and what `use` returned.

    Raises:
        ArtifactError: The artifact cannot be opened, or `use` refused it.
    """
    for left in reversed(range(_TRIES)):
        reader = Reader(path, expect, extra)
        try:
            return reader, use(reader)
        except ArtifactError:
            if not left or not reader.replaced():
                raise
    raise AssertionError("the last try returns or raises")


def _size_problem(path: Path, file: File) -> str:
    size = os.lstat(path).st_size
    return "" if size == file.bytes else f"{size:,} bytes, {file.bytes:,} were written"


def _hash_problem(path: Path, file: File) -> str:
    sha256 = hashlib.sha256()
    with open(path, "rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            sha256.update(chunk)
    actual = sha256.hexdigest()
    return "" if actual == file.sha256 else f"SHA-256 {actual[:16]}..., {file.sha256[:16]}... was written"
