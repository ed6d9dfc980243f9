"""Defines the list of files of a manifest, and the form of their names. No torch is imported."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .fields import manifest_error, read_count, read_object, read_sha256

_FILE_NAME = re.compile(r"(?:programs/)?[A-Za-z0-9_][A-Za-z0-9_.@-]*-([0-9a-f]{16})\.[a-z0-9]+\Z")


@dataclass(frozen=True, slots=True)
class File:
    """The size of a file in bytes, and the SHA-256 of its content in hexadecimal digits."""

    bytes: int
    sha256: str

    def to_json(self) -> dict[str, Any]:
        return {"bytes": self.bytes, "sha256": self.sha256}

    @classmethod
    def from_json(cls, data: Any, where: str = "a file") -> File:
        d = read_object(data, where, ("bytes", "sha256"))
        return cls(read_count(d["bytes"], f"{where}: bytes"), read_sha256(d["sha256"], where))


def file_name(stem: str, suffix: str, sha256: str) -> str:
    """Returns the name of a file from the hash of its content.

    An example is `programs/member.forward-0123456789abcdef.json`. Raises: ArtifactError if the stem has other
    characters than the format allows.
    """
    name = f"{stem}-{sha256[:16]}.{suffix}"
    if not _FILE_NAME.match(name):
        raise manifest_error(
            f"files: {name[:80]!r} is not a valid file name: it may have letters, digits and _ . @ -, "
            "and may be in the folder programs"
        )
    return name


def check_file_name(name: str, file: File) -> None:
    """Refuses a name of another form, or one that does not contain the start of the file's SHA-256."""
    match = _FILE_NAME.match(name)
    if not match or len(name) > 200 or ".." in name:
        raise manifest_error(
            f"files: {name[:80]!r} is not a valid file name; "
            "files of an artifact are named [programs/]stem-<16 hex digits>.suffix"
        )
    if match[1] != file.sha256[:16]:
        raise manifest_error(
            f"files: the name {name} must contain {file.sha256[:16]}, the start of the file's SHA-256"
        )


def read_file_name(value: Any, files: Mapping[str, File], where: str) -> str:
    """Reads the name of a file that the manifest lists."""
    if not isinstance(value, str) or value not in files:
        raise manifest_error(f"{where}: {str(value)[:80]!r} is not in the list of files")
    return value


ONNX = "onnx"


def graph_stem(content: str) -> str:
    """The name of the file of an ONNX graph without its hash. content: the digest of the program."""
    return f"programs/{ONNX}.{content[:32]}"


def graph_files(files: Iterable[str]) -> list[str]:
    """The files of ONNX graphs in an artifact's list of files."""
    return [n for n in files if n.startswith(f"programs/{ONNX}.") and n.endswith(f".{ONNX}")]


def graph_file(files: Iterable[str], content: str) -> str:
    """The file of a program's ONNX graph in an artifact's list of files; empty if it has none."""
    begin = f"{graph_stem(content)}-"
    return next((n for n in sorted(graph_files(files)) if n.startswith(begin)), "")
