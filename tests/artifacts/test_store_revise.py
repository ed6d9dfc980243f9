"""Tests edited copies of files, and files that are taken from another artifact."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest
from stores import build, content, refused, revise

from widepack_artifacts.reader import Reader
from widepack_artifacts.writer import Writer


def test_a_revised_file(path: Path) -> None:
    before = build(path)
    seen: list[tuple[int, int]] = []
    (old,) = Reader(path).weights_files()
    written = revise(path)
    (new,) = Reader(path).weights_files()
    assert new.read_bytes() == b"wwXY" + b"w" * 86 + b"Z" + b"w" * 9 and new != old
    Reader(path).check_hashes()
    assert set(content(path)) == {*written.files, "manifest.json"} and written.entries == before.entries
    with Writer(path.with_name("o.wide")) as writer:
        name, _ = writer.revised(
            "weights", "safetensors", new, progress=lambda done, total: seen.append((done, total))
        )
        assert (name, seen) == (new.name, [(100, 100)])
        writer.take(Reader(path), ["programs/" + n.partition("/")[2] for n in written.files if "member" in n])
        writer.publish(written)
    Reader(path.with_name("o.wide")).check_hashes()


@pytest.mark.parametrize("way", ["copy_file_range", "none"])
def test_files_are_copied_where_the_system_cannot_copy(
    path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    def half(source: int, target: int, count: int, at: int, to: int) -> int:
        if at:
            raise OSError(errno.EXDEV, "not across devices")
        return os.pwrite(target, os.pread(source, min(count, 7), at), to)

    def refuse(*_: Any) -> int:
        raise OSError(errno.ENOSYS, "not here")

    build(path)
    monkeypatch.setattr(fcntl, "ioctl", refuse)
    monkeypatch.setattr(os, "copy_file_range", half if way == "copy_file_range" else refuse)
    revise(path)
    Reader(path).check_hashes()
    assert Reader(path).weights_files()[0].read_bytes().startswith(b"wwXYww")


def test_copied_files_are_checked_against_their_hash(path: Path) -> None:
    written = build(path)
    name = next(n for n in written.files if n.startswith("weights"))
    (path / name).write_bytes(b"v" * 100)
    with Writer(path.with_name("o.wide")) as writer:
        refused(lambda: writer.take(Reader(path), [name]), name, "not what was written")
    assert not path.with_name("o.wide").exists()
