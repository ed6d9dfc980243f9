"""Tests that a writer publishes an artifact completely or not at all."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stores import PROGRAM, build, content, manifest, refused

from widepack_artifacts.errors import ArtifactError
from widepack_artifacts.folder import ArtifactExists
from widepack_artifacts.reader import Reader
from widepack_artifacts.writer import Writer


class Stop(Exception):
    """An exception that a test raises during a build."""


def test_writes_and_reads(path: Path) -> None:
    written = build(path)
    reader = Reader(path, expect=written.digest)
    assert reader.manifest == written
    reader.check_sizes()
    reader.check_hashes()
    (name,) = (n for n in written.files if n.startswith("programs/"))
    assert reader.program(name) == PROGRAM and reader.program(name) is reader.program(name)
    assert reader.json(name) == PROGRAM.to_json()
    assert [f.read_bytes() for f in reader.weights_files()] == [b"w" * 100]
    assert set(content(path)) == {*written.files, "manifest.json"}, "a lock or a temporary file is left"


def test_names_carry_the_hash_of_the_content(path: Path) -> None:
    for name, file in build(path).files.items():
        data = (path / name).read_bytes()
        assert (hashlib.sha256(data).hexdigest(), len(data)) == (file.sha256, file.bytes)
        assert file.sha256[:16] in name


@given(parts=st.lists(st.binary(max_size=50), max_size=8))
def test_a_stream_is_the_sum_of_its_parts(
    tmp_path_factory: pytest.TempPathFactory, parts: list[bytes]
) -> None:
    with Writer(tmp_path_factory.mktemp("streams") / "ens.wide") as writer:
        with writer.stream("weights", "safetensors") as out:
            assert out.name == ""
            for part in parts:
                assert out.write(memoryview(part)) == len(part)
            assert out.tell() == out.bytes == len(b"".join(parts))
        assert out.name == f"weights-{hashlib.sha256(b''.join(parts)).hexdigest()[:16]}.safetensors"
        assert writer.place(out.name).read_bytes() == b"".join(parts)


def test_an_artifact_is_replaced_only_with_force(path: Path) -> None:
    build(path)
    before = content(path)
    refused(
        lambda: build(path), "ens.wide is an artifact already", "--force (force=True)", kind=ArtifactExists
    )
    assert ArtifactExists.exit_code == 2
    assert content(path) == before
    after = build(path, force=True, weights=b"v")
    assert set(content(path)) == {*after.files, "manifest.json"}, "old weights are left"
    assert Reader(path).manifest == after


def test_a_second_write_of_equal_content_changes_nothing(path: Path) -> None:
    build(path)
    before = content(path)
    build(path, force=True)
    assert content(path) == before


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize(
    "kind", ["file", "folder", "other manifest", "broken manifest", "names like ours", "dangling link"]
)
def test_a_path_that_is_not_an_artifact_is_never_replaced(
    tmp_path: Path, path: Path, kind: str, force: bool
) -> None:
    if kind == "file":
        path.write_text("notes")
    elif kind == "dangling link":
        path.symlink_to(path.with_name("loop"))
        path.with_name("loop").symlink_to(path)
    else:
        path.mkdir()
        name = {"folder": "notes.txt", "names like ours": "weights-0123456789abcdef.safetensors"}.get(
            kind, "manifest.json"
        )
        (path / name).write_text(
            '{"name": "a web page"}' if kind == "other manifest" else '{"format": "widepack.artifact"'
        )
    before = content(tmp_path)
    refused(lambda: build(path, force=force), "ens.wide", "never replaced", kind=ArtifactExists)
    assert content(tmp_path) == before


def test_an_empty_folder_stays_empty_without_publication(path: Path) -> None:
    path.mkdir()
    with Writer(path) as writer:
        writer.file("programs/x", "json", b"1")
    assert path.is_dir() and not list(path.iterdir())
    build(path)


def test_parent_folders_are_created_and_removed(tmp_path: Path) -> None:
    deep = tmp_path / "a" / "b" / "ens.wide"
    with pytest.raises(Stop), Writer(deep) as writer:
        writer.file("programs/x", "json", b"1")
        raise Stop
    assert not list(tmp_path.iterdir())
    build(deep)
    Reader(deep).check_hashes()


def test_a_link_to_an_artifact_stays_a_link(tmp_path: Path, path: Path) -> None:
    build(tmp_path / "real")
    path.symlink_to(tmp_path / "real")
    refused(lambda: build(path), "is an artifact already", kind=ArtifactExists)
    after = build(path, force=True, weights=b"v")
    assert path.is_symlink() and Reader(tmp_path / "real").manifest == after


@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt, MemoryError, OSError])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("there", [False, True])
def test_an_exception_before_publishing_leaves_the_old_artifact(
    path: Path, error: type[BaseException], inside: bool, there: bool
) -> None:
    if there:
        build(path)
    before = content(path.parent)
    with pytest.raises(error), Writer(path, force=True) as writer:
        writer.file("weights", "safetensors", b"w" * 100)  # the same content as in the old artifact
        writer.file("weights", "safetensors", b"other")
        with writer.stream("programs/x", "json") as out:
            out.write(b"half")
            if inside:
                raise error
        raise error
    assert content(path.parent) == before
    assert path.exists() == there
    if there:
        Reader(path).check_hashes()


def test_leaving_without_publishing_leaves_the_old_artifact(path: Path) -> None:
    build(path)
    before = content(path)
    with Writer(path, force=True) as writer:
        writer.file("weights", "safetensors", b"other")
    assert content(path) == before


def test_an_exception_after_publishing_leaves_the_new_one(path: Path) -> None:
    build(path)
    with pytest.raises(Stop), Writer(path, force=True) as writer:
        written = writer.publish(manifest(writer.file("programs/member.forward", "json", b"{}"), "new"))
        raise Stop
    assert Reader(path).manifest == written
    assert set(content(path)) == {*written.files, "manifest.json"}


def test_an_interrupt_right_after_the_rename_leaves_the_new_one(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(path)
    rename = os.replace

    def interrupted(source: Any, to: Any) -> None:
        rename(source, to)
        if Path(to).name == "manifest.json":
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        build(path, "new", force=True, weights=b"v")
    Reader(path).check_hashes()
    assert Reader(path).manifest.provenance == {"note": "new"}


def test_a_manifest_that_no_reader_accepts_is_not_published(path: Path) -> None:
    build(path)
    before = content(path)
    with pytest.raises(ArtifactError, match="not in the list of files"), Writer(path, force=True) as writer:
        writer.publish(manifest("programs/none.json"))
    assert content(path) == before


@pytest.mark.parametrize("stem", ["../x", "/x", "a/b", "", "x y", "programs/../x", ".x"])
def test_names_outside_the_folder_are_not_written(path: Path, stem: str) -> None:
    with Writer(path) as writer:
        refused(lambda: writer.file(stem, "json", b""), "is not a valid file name")
        assert set(content(path)) == {".widepack.lock"}
