"""Tests that a reader checks every file before it uses the file's content."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stores import PROGRAM, build, content, manifest, refused

from widepack_artifacts import reader, strict_json
from widepack_artifacts.manifest import Manifest
from widepack_artifacts.reader import Reader, opened
from widepack_artifacts.writer import Writer


def reseal(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Changes the manifest and corrects its digest, as an attacker can."""
    data = json.loads((path / "manifest.json").read_bytes())
    edit(data)
    data["digest"] = strict_json.digest({k: v for k, v in data.items() if k != "digest"})
    (path / "manifest.json").write_text(json.dumps(data))


def program_of(found: Manifest) -> str:
    return found.entries["forward"].member[0]


def test_a_path_that_is_not_an_artifact(tmp_path: Path) -> None:
    refused(lambda: Reader(tmp_path / "none"), "none: it does not exist")
    refused(lambda: Reader(tmp_path), "without manifest.json", "widepack build")
    (tmp_path / "file").write_text("")
    refused(lambda: Reader(tmp_path / "file"), "an artifact is a folder, this is a file")


def test_expected_digest(path: Path, built: Manifest) -> None:
    refused(
        lambda: Reader(path, expect="sha256:" + "0" * 64), "expected the artifact sha256:000", built.digest
    )


def test_a_changed_manifest(path: Path, built: Manifest) -> None:
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace('"a.pt"', '"b.pt"'))
    refused(lambda: Reader(path), str(path), "its digest is", "changed or damaged")


def test_a_manifest_that_is_a_link(tmp_path: Path, path: Path, built: Manifest) -> None:
    (path / "manifest.json").rename(tmp_path / "elsewhere.json")
    (path / "manifest.json").symlink_to(tmp_path / "elsewhere.json")
    refused(lambda: Reader(path), "a link or special file")


@pytest.mark.skipif(sys.platform == "win32", reason="named pipes are a POSIX thing")
def test_a_manifest_that_is_a_pipe_does_not_block(path: Path, built: Manifest) -> None:
    (path / "manifest.json").unlink()
    os.mkfifo(path / "manifest.json")
    refused(lambda: Reader(path), "a link or special file")


def test_a_manifest_that_is_too_large(path: Path, built: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MAX_BYTES", 100)
    refused(lambda: Reader(path), "over 100 bytes")


@pytest.mark.parametrize("kind", ["program", "folder", "weights", "folder instead"])
def test_files_behind_links(tmp_path: Path, path: Path, built: Manifest, kind: str) -> None:
    name = program_of(built) if kind != "weights" else next(n for n in built.files if n.startswith("weights"))
    place = path / ("programs" if kind == "folder" else name)
    place.rename(tmp_path / "elsewhere")
    if kind == "folder instead":
        place.mkdir()
    else:
        place.symlink_to(tmp_path / "elsewhere")
    reader = Reader(path)
    refused(lambda: reader.path(name), "plain files only")
    refused(reader.check_sizes, "plain files only")
    if kind == "weights":
        refused(reader.weights_files, "plain files only")
    else:
        refused(lambda: reader.program(name), "plain files only")


@pytest.mark.parametrize(
    "name",
    ["../x", "/etc/passwd", "manifest.json", "", "programs", ".widepack.lock", "programs/../manifest.json"],
)
def test_only_files_of_the_manifest_are_opened(path: Path, built: Manifest, name: str) -> None:
    refused(lambda: Reader(path).path(name), "not in the manifest's list of files")
    refused(lambda: Reader(path).program(name), "not in the manifest's list of files")


def test_all_differences_in_one_error(path: Path, built: Manifest) -> None:
    weights = next(n for n in built.files if n.startswith("weights"))
    (path / weights).write_bytes(b"w" * 99)
    (path / program_of(built)).unlink()
    refused(Reader(path).check_sizes, "2 of 2 files", f"{weights}: 99 bytes, 100 were written", "incomplete")
    refused(Reader(path).check_hashes, "2 of 2 files", f"{weights}: 99 bytes, 100 were written", "incomplete")


def test_another_content_of_the_same_size(path: Path, built: Manifest) -> None:
    weights = next(n for n in built.files if n.startswith("weights"))
    (path / weights).write_bytes(b"v" * 100)
    program = path / program_of(built)
    program.write_bytes(program.read_bytes().replace(b"linear", b"matmul"))
    Reader(path).check_sizes()
    refused(Reader(path).check_hashes, "2 of 2 files", weights, "was written")
    refused(lambda: Reader(path).program(program_of(built)), "its content is not what was written")


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (
            lambda p: p["nodes"][0].update(op="aten.from_file.default"),
            ["aten.from_file.default", "not on the list"],
        ),
        (lambda p: p["nodes"][0].update(op="os.system"), ["os.system", "not on the list"]),
        (lambda p: p.update(format="widepack.program/9"), ["widepack.program/9"]),
        (lambda p: p["nodes"][0].update(args=[{"ref": "z"}]), ["'z'"]),
    ],
)
def test_a_program_that_does_not_match_the_manifest(
    path: Path, edit: Callable[[Any], object], words: list[str]
) -> None:
    data = PROGRAM.to_json()
    edit(data)
    with Writer(path) as writer:
        name = writer.file("programs/member.forward", "json", json.dumps(data).encode())
        writer.publish(manifest(name))
    refused(lambda: Reader(path).program(name), str(path / name), *words)


@pytest.mark.parametrize(
    "data",
    [b"", b"[" * 100_000, b'{"a":1,"a":2}', b"\x80\x02c__builtin__\neval\n.", b'{"a":' + b"9" * 5000 + b"}"],
)
def test_a_program_that_is_not_json(path: Path, data: bytes) -> None:
    with Writer(path) as writer:
        name = writer.file("programs/member.forward", "json", data)
        writer.publish(manifest(name))
    refused(lambda: Reader(path).program(name), str(path / name))


def test_sizes_that_would_fill_the_memory(path: Path, built: Manifest) -> None:
    name = program_of(built)
    reseal(path, lambda d: d["files"][name].update(bytes=2**40))
    refused(lambda: Reader(path).program(name), "1,099,511,627,776 bytes; the limit is")
    refused(Reader(path).check_sizes, "1,099,511,627,776 were written")


def test_a_file_that_grew(path: Path, built: Manifest) -> None:
    name = program_of(built)
    with (path / name).open("ab") as file:
        file.write(b" " * 10)
    refused(lambda: Reader(path).program(name), "which is the limit")


def test_a_reader_during_a_publication(path: Path) -> None:
    build(path)
    count = 0

    def use(reader: Reader) -> bytes:
        nonlocal count
        count += 1
        if count < 4:
            build(path, str(count), force=True, weights=bytes([count]) * 100)
        return reader.weights_files()[0].read_bytes()

    reader, found = opened(path, use)
    assert (count, found, reader.manifest.provenance) == (4, b"\x03" * 100, {"note": "3"})
    first = Reader(path)
    assert not first.replaced()
    refused(lambda: opened(path, lambda reader: reader.path("none")), "not in the manifest's list")
    refused(lambda: opened(path, use, "sha256:" + "0" * 64), "expected the artifact")

    def always(reader: Reader) -> None:
        nonlocal count
        count += 1
        build(path, str(count), force=True, weights=bytes([count]) * 100)
        reader.check_hashes()

    refused(lambda: opened(path, always), "replaced while it was opened")
    assert first.replaced() and count < 40
    shutil.rmtree(path)
    assert not first.replaced()


def test_preloaded_files_stay_readable(path: Path, built: Manifest) -> None:
    reader, other = Reader(path), Reader(path)
    reader.preload(built.entries["forward"].member)
    other.preload(built.entries["forward"].member, most=3)
    shutil.rmtree(path / "programs")
    assert reader.program(program_of(built)) == PROGRAM and reader.program(
        program_of(built)
    ) is reader.program(program_of(built))
    refused(lambda: other.program(program_of(built)), "incomplete, or was replaced")


@pytest.mark.skipif(sys.platform == "win32", reason="permissions are POSIX ones")
def test_read_only_media(path: Path, built: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def read_only(place: Any, flags: int, *more: Any, **kwargs: Any) -> int:
        if flags & (os.O_RDWR | os.O_WRONLY | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(place, flags, *more, **kwargs)

    before = content(path)
    monkeypatch.setattr(os, "open", read_only)
    Reader(path, built.digest).check_hashes()
    refused(lambda: build(path, force=True), "cannot write there: Read-only")
    assert content(path) == before
