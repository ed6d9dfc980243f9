"""Tests which files of a cache are read: those that no other user could have written or replaced."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from widepack.errors import UsageError
from widepack.system import atomic_file, user_cache
from widepack.system.compiled_cache import CompiledCache
from widepack.system.private_files import make_private_folder, private_folder, read_private

ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")


def test_missing_folders_are_created_for_this_user_alone(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        made = make_private_folder(tmp_path / "a" / "b" / "c")
    finally:
        os.umask(before)
    assert made == tmp_path / "a" / "b" / "c"
    assert {p.stat().st_mode & 0o777 for p in (made, made.parent, made.parent.parent)} == {0o700}
    with pytest.raises(FileNotFoundError):
        private_folder(tmp_path / "none")
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="no folder"):
        private_folder(tmp_path / "file")


@pytest.mark.parametrize("place", ["a", "a/b", "a/b/c"])
def test_a_folder_above_that_others_may_write(place: str, tmp_path: Path) -> None:
    folder = make_private_folder(tmp_path / "a" / "b" / "c")
    (tmp_path / place).chmod(0o777)
    with pytest.raises(UsageError, match=r"other users may .* \(mode 0777\)"):
        private_folder(folder)
    (tmp_path / place).chmod(0o1777)  # as /tmp: only owners rename their files
    if folder == tmp_path / place:
        with pytest.raises(UsageError, match="other users may write here"):
            private_folder(folder)
    else:
        assert private_folder(folder) == folder


@ROOT
@pytest.mark.parametrize("place", ["a", "a/b", "a/b/c", "a/b/c/file"])
def test_another_owner(place: str, tmp_path: Path) -> None:
    folder = make_private_folder(tmp_path / "a" / "b" / "c")
    (folder / "file").write_text("x")
    os.chown(tmp_path / place, 12345, -1)
    with pytest.raises(UsageError, match="the owner is user 12345"):
        read_private(private_folder(folder) / "file")


def test_links_in_the_path_are_followed_once(tmp_path: Path) -> None:
    folder = make_private_folder(tmp_path / "real" / "cache")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert private_folder(tmp_path / "link" / "cache") == folder
    os.chmod(tmp_path / "real", 0o777)
    with pytest.raises(UsageError, match="other users may replace"):
        private_folder(tmp_path / "link" / "cache")


def test_links_and_pipes_instead_of_files(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert read_private(tmp_path / "file") == b"x" and read_private(tmp_path / "file", 0) == b""
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe", ""):
        with pytest.raises(UsageError, match="regular files only"):
            read_private(tmp_path / name)
    os.mkfifo(tmp_path / f".widepack-{'0' * 16}")  # as a file that a killed process left
    with atomic_file.temporary(tmp_path / "out"):
        pass


@ROOT
def test_a_folder_that_another_user_exchanges_meanwhile(tmp_path: Path) -> None:
    """The parent belongs to another user, who switches a link between two folders. None is ever read."""
    public = tmp_path / "public"
    public.mkdir()
    public.chmod(0o777)
    CompiledCache(tmp_path / "own").make("key", lambda folder: {"of": "own"})
    theirs = CompiledCache(tmp_path / "theirs")
    theirs.make("key", lambda folder: {"of": "theirs"})
    for path in [tmp_path / "theirs", *(tmp_path / "theirs").rglob("*")]:
        os.chown(path, 12345, -1)
    stop = threading.Event()

    def exchange() -> None:
        for number in range(10**9):
            if stop.is_set():
                return
            (public / "new").symlink_to(tmp_path / ("own", "theirs")[number % 2])
            os.replace(public / "new", public / "cache")

    thread = threading.Thread(target=exchange)
    thread.start()
    read = []
    try:
        for _ in range(500):
            try:
                found = CompiledCache(public / "cache").find("key")
            except UsageError:
                continue
            read.append(found[1]["of"] if found else "")
    finally:
        stop.set()
        thread.join()
    assert "theirs" not in read  # own is read by its resolved path, which nobody else can change


def test_notes_behind_a_folder_that_others_may_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "shared" / "mine"))
    user_cache.remember("key", note="note")
    assert user_cache.noted("key", "probes") == "note"
    (tmp_path / "shared").chmod(0o777)
    assert not user_cache.passed("key")
    user_cache.remember("other")
    (tmp_path / "shared").chmod(0o755)
    assert user_cache.passed("key") and not user_cache.passed("other")
