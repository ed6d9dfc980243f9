"""Tests writers that are killed, that run at the same time, or that get an error from the system."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from paths import ROOT
from stores import build, content, manifest, refused, revise

from widepack_artifacts import reader, writer
from widepack_artifacts.errors import ArtifactError
from widepack_artifacts.folder import ArtifactExists
from widepack_artifacts.reader import Reader
from widepack_artifacts.writer import Writer

KILLED = """
import os, sys
from widepack_artifacts.writer import Writer
with Writer(sys.argv[1], force=True) as writer:
    writer.file("weights", "safetensors", b"other")
    with writer.stream("programs/x", "json") as out:
        out.write(b"half")
        out._file.flush()
        os._exit(9)
"""


@pytest.mark.parametrize("there", [False, True])
def test_a_killed_writer_leaves_the_old_artifact_and_is_cleaned_up(path: Path, there: bool) -> None:
    if there:
        build(path)
    assert subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False).returncode == 9
    if there:
        Reader(path).check_hashes()
    assert any(".tmp-" in name for name in content(path)), "the killed writer left nothing to clean up"
    written = build(path, "again", force=there)
    assert set(content(path)) == {*written.files, "manifest.json"}
    Reader(path).check_hashes()


def test_files_of_other_programs_are_kept(path: Path) -> None:
    build(path)
    (path / "README.md").write_text("ours")
    (path / "backup").mkdir()
    (path / "backup" / "weights-0123456789abcdef.safetensors").write_text("ours")
    build(path, "again", force=True, weights=b"v")
    assert {"README.md", "backup/weights-0123456789abcdef.safetensors"} <= set(content(path))


def test_one_writer_at_a_time(path: Path) -> None:
    with Writer(path) as first:
        refused(lambda: build(path), "another process is writing")
        first.publish(manifest(first.file("programs/member.forward", "json", b"{}")))
    refused(lambda: build(path), "is an artifact already", kind=ArtifactExists)


def test_many_writers_leave_one_complete_artifact(path: Path) -> None:
    notes: list[str] = []

    def work(i: int) -> None:
        try:
            build(path, str(i), force=True, weights=bytes([i]) * 1000)
            notes.append(str(i))
        except ArtifactError as e:
            assert "another process" in str(e) or "cannot" in str(e)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    Reader(path).check_hashes()
    assert Reader(path).manifest.provenance["note"] in notes
    assert set(content(path)) == {*Reader(path).manifest.files, "manifest.json"}


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, ["No space left", "bytes are free", "make room"]),
        (errno.EROFS, ["Read-only"]),
        (errno.EACCES, ["Permission denied"]),
    ],
)
@pytest.mark.parametrize("call", ["fsync", "replace", "mkdir"])
@pytest.mark.parametrize("there", [False, True])
def test_errors_of_the_system_are_explained(
    path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int, words: list[str], there: bool
) -> None:
    if there:
        build(path)
        if call == "mkdir":
            shutil.rmtree(path / "programs")  # so that mkdir is called again
    before = content(path.parent)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.mkdir" if call == "mkdir" else f"os.{call}", refuse)
        refused(
            lambda: build(path, force=True, weights=b"v" * 1000),
            "ens.wide: cannot",
            "Nothing was published",
            *words,
        )
    assert content(path.parent) == before


LIMITED = """
import resource, signal, sys
from widepack_artifacts.errors import ArtifactError
from widepack_artifacts.writer import Writer
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    with Writer(sys.argv[1], force=True) as writer:
        with writer.stream("weights", "safetensors") as out:
            for _ in range(100):
                out.write(bytes(10_000))
except ArtifactError as e:
    print(e)
    sys.exit(3)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="the limit is a POSIX one")
def test_a_real_limit_on_the_size_of_files(path: Path) -> None:
    build(path)
    before = content(path)
    run = subprocess.run(
        [sys.executable, "-c", LIMITED, str(path)], check=False, capture_output=True, text=True
    )
    assert run.returncode == 3, run.stderr
    assert "cannot write weights after" in run.stdout and "File too large" in run.stdout
    assert content(path) == before


def test_too_little_space_is_reported_before_writing(path: Path) -> None:
    with Writer(path) as writer:
        writer.reserve(1)
        refused(lambda: writer.reserve(2**62), "4,611,686,018,427,387,904 bytes are to be written", "free")


def test_a_path_without_permission(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    tmp_path.chmod(0o500)
    refused(lambda: build(tmp_path / "ens.wide"), "Permission denied")


class Failing:
    """Makes system call number `fatal` fail with "no space left on device"."""

    def __init__(self, patch: pytest.MonkeyPatch, fatal: int) -> None:
        self.count, self.fatal, self.failed = 0, fatal, False
        for name in ("replace", "fsync", "mkdir", "copy_file_range"):
            patch.setattr(os, name, self.wrapped(getattr(os, name)))
        for module in (reader, writer):
            patch.setattr(module, "open", self.opened, raising=False)

    def wrapped(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            if self.count == self.fatal:
                self.failed = True
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return call(*args, **kwargs)

        return counted

    def opened(self, path: Any, mode: str = "r", **more: Any) -> Any:
        file = (self.wrapped(open) if "x" in mode else open)(path, mode, **more)
        if "x" not in mode:
            return file
        fake = MagicMock(wraps=file)
        fake.write, fake.flush = self.wrapped(file.write), self.wrapped(file.flush)
        fake.__enter__.return_value, fake.__exit__.side_effect = fake, lambda *_: file.close()
        return fake


@pytest.mark.parametrize("there", [False, True])
def test_out_of_space_at_every_write(path: Path, monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    if there:
        build(path)
    before = content(path.parent)
    for fatal in itertools.count(1):
        with monkeypatch.context() as patch:
            failing = Failing(patch, fatal)
            try:
                if there:
                    revise(path)
                else:
                    build(path)
            except ArtifactError as e:
                assert failing.failed and "No space left" in str(e) and "Nothing was published" in str(e)
        if not failing.failed:
            break
        if (path / "manifest.json").exists() and Reader(path).manifest.provenance["note"] == (
            "revised" if there else ""
        ):
            break  # only the flush of the folder failed, after the rename: the artifact is published
        assert content(path.parent) == before
        assert path.exists() == there
    assert fatal > 12
    Reader(path).check_hashes()


KILLED_AT = """
import os, shutil, signal, sys
sys.path[:0] = sys.argv[2:]
from pathlib import Path
from stores import build, content, revise
from widepack_artifacts.reader import Reader
from widepack_artifacts.errors import ArtifactError
path = Path(sys.argv[1])
EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.listdir", "os.scandir"}
for there in (False, True):
    for fatal in range(1, 1000):
        shutil.rmtree(path, ignore_errors=True)
        old = build(path) if there else None
        child = os.fork()
        if child == 0:
            count = 0
            def hook(event, args):
                global count
                paths = [os.fspath(a) for a in args[:2] if isinstance(a, (str, os.PathLike))]
                if event in EVENTS and any(str(p).startswith(str(path)) for p in paths):
                    count += 1
                    if count == fatal:
                        os.kill(os.getpid(), signal.SIGKILL)
            sys.addaudithook(hook)
            revise(path) if there else build(path, "new")
            os._exit(0)
        killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
        if (path / "manifest.json").exists():
            reader = Reader(path)
            reader.check_hashes()
            assert reader.manifest.provenance["note"] in (("", "revised") if there else ("new",))
            assert killed or reader.manifest.provenance["note"] in ("revised", "new")
        else:
            assert not there and killed
        manifest = build(path, "next", force=True)
        files = {*manifest.files, "manifest.json"}
        assert set(content(path)) == files, set(content(path)) ^ files
        if not killed:
            break
    print(fatal)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
def test_killed_at_every_step(path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            KILLED_AT,
            str(path),
            str(ROOT / "tests" / "helpers"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert all(int(steps) > 15 for steps in done.stdout.split()) and len(done.stdout.split()) == 2


def test_files_of_a_killed_writer_are_removed_before_the_next_writes(path: Path) -> None:
    written = build(path)
    assert subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False).returncode == 9
    assert set(content(path)) > {*written.files, "manifest.json"}
    with Writer(path, force=True):
        assert set(content(path)) == {*written.files, "manifest.json", ".widepack.lock"}
