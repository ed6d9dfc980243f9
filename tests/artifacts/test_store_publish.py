"""The folder of an artifact: whole or not there, whatever happens in between, and nothing believed that stands in it."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from widepack_artifacts import writer as store
from widepack_artifacts import strict_json
from widepack_artifacts.errors import ArtifactError
from widepack_artifacts.manifest import Dim, Entry, Input, Manifest, Member, OutputLeaf, Parameter
from widepack_artifacts.program import Node, Output, Program, Ref, Slot
from widepack_artifacts.writer import ArtifactExists, Reader, Writer

PROGRAM = Program(
    weights=(Slot("w", "fc.weight", "shared", "float32[4,4]"),),
    inputs=(Slot("x", "x", "shared", "float32[B,4]"),),
    nodes=(Node("y", "aten.linear.default", (Ref("x"), Ref("w"))),),
    outputs=(Output(Ref("y"), "shared"),),
)


def manifest(member: str, note: str = "") -> Manifest:
    entry = Entry(
        inputs=(Input("x", "float32[B,4]"),),
        signature=[Parameter("x", "positional", {"leaf": 0})],
        outputs=(OutputLeaf("", "float32[B,4]", "stacked"),),
        result={"leaf": 0},
        dims={"B": Dim(1)},
        guards=(),
        fixed=[],
        member=[member],
        signatures=[0],
        wide=(),
    )
    return Manifest(members=(Member("a", "a.pt", "0" * 64, 1),), weights=(), entries={"forward": entry}, provenance={"note": note})


def build(path: Path, note: str = "", force: bool = False, weights: bytes = b"w" * 100) -> Manifest:
    with Writer(path, force) as writer:
        writer.file("weights", "safetensors", weights)
        program = writer.file("programs/member.forward", "json", strict_json.canonical(PROGRAM.to_json()))
        return writer.publish(manifest(program, note))


def content(path: Path) -> dict[str, bytes]:
    return {p.relative_to(path).as_posix(): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def refused(call: Callable[[], object], *words: str, kind: type[ArtifactError] = ArtifactError) -> None:
    with pytest.raises(kind) as caught:
        call()
    for word in words:
        assert word in str(caught.value), f"{word!r} is missing from: {caught.value}"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ens.wide"


class Stop(Exception):
    """What a test throws into a build."""


def test_writes_and_reads(path: Path) -> None:
    made = build(path)
    reader = Reader(path, expect=made.digest)
    assert reader.manifest == made
    reader.check_sizes()
    reader.check_hashes()
    (name,) = (n for n in made.files if n.startswith("programs/"))
    assert reader.program(name) == PROGRAM and reader.program(name) is reader.program(name)
    assert reader.json(name) == PROGRAM.to_json()
    assert [f.read_bytes() for f in reader.weights_files()] == [b"w" * 100]
    assert set(content(path)) == {*made.files, "manifest.json"}, "neither a lock nor a temporary file stays"


def test_names_carry_the_hash_of_the_content(path: Path) -> None:
    for name, file in build(path).files.items():
        data = (path / name).read_bytes()
        assert (hashlib.sha256(data).hexdigest(), len(data)) == (file.sha256, file.bytes)
        assert file.sha256[:16] in name


@given(parts=st.lists(st.binary(max_size=50), max_size=8))
def test_a_stream_is_the_sum_of_its_parts(tmp_path_factory: pytest.TempPathFactory, parts: list[bytes]) -> None:
    with Writer(tmp_path_factory.mktemp("streams") / "ens.wide") as writer:
        with writer.stream("weights", "safetensors") as out:
            assert out.name == ""
            for part in parts:
                assert out.write(memoryview(part)) == len(part)
            assert out.tell() == out.bytes == len(b"".join(parts))
        assert out.name == f"weights-{hashlib.sha256(b''.join(parts)).hexdigest()[:16]}.safetensors"
        assert writer.place(out.name).read_bytes() == b"".join(parts)


def test_an_artifact_is_replaced_only_when_asked(path: Path) -> None:
    build(path)
    before = content(path)
    refused(lambda: build(path), "ens.wide is an artifact already", "--force (force=True)", kind=ArtifactExists)
    assert ArtifactExists.exit_code == 2
    assert content(path) == before
    after = build(path, force=True, weights=b"v")
    assert set(content(path)) == {*after.files, "manifest.json"}, "the old weights are gone"
    assert Reader(path).manifest == after


def test_the_same_again_changes_nothing(path: Path) -> None:
    build(path)
    before = content(path)
    build(path, force=True)
    assert content(path) == before


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("kind", ["file", "folder", "other manifest", "broken manifest", "names like ours", "dangling link"])
def test_what_is_no_artifact_is_never_replaced(tmp_path: Path, path: Path, kind: str, force: bool) -> None:
    if kind == "file":
        path.write_text("notes")
    elif kind == "dangling link":
        path.symlink_to(path.with_name("loop"))
        path.with_name("loop").symlink_to(path)
    else:
        path.mkdir()
        name = {"folder": "notes.txt", "names like ours": "weights-0123456789abcdef.safetensors"}.get(kind, "manifest.json")
        (path / name).write_text('{"name": "a web page"}' if kind == "other manifest" else '{"format": "widepack.artifact"')
    before = content(tmp_path)
    refused(lambda: build(path, force=force), "ens.wide", "never replaced", kind=ArtifactExists)
    assert content(tmp_path) == before


def test_an_empty_folder_is_taken_and_given_back_empty(path: Path) -> None:
    path.mkdir()
    with Writer(path) as writer:
        writer.file("programs/x", "json", b"1")
    assert path.is_dir() and not list(path.iterdir())
    build(path)


def test_folders_on_the_way_are_made_and_removed(tmp_path: Path) -> None:
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
def test_an_exception_before_publishing_leaves_what_was(path: Path, error: type[BaseException], inside: bool, there: bool) -> None:
    if there:
        build(path)
    before = content(path.parent)
    with pytest.raises(error), Writer(path, force=True) as writer:
        writer.file("weights", "safetensors", b"w" * 100)  # the same content as the old one's
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


def test_leaving_without_publishing_leaves_what_was(path: Path) -> None:
    build(path)
    before = content(path)
    with Writer(path, force=True) as writer:
        writer.file("weights", "safetensors", b"other")
    assert content(path) == before


def test_an_exception_after_publishing_leaves_the_new_one(path: Path) -> None:
    build(path)
    with pytest.raises(Stop), Writer(path, force=True) as writer:
        made = writer.publish(manifest(writer.file("programs/member.forward", "json", b"{}"), "new"))
        raise Stop
    assert Reader(path).manifest == made
    assert set(content(path)) == {*made.files, "manifest.json"}


def test_an_interrupt_right_after_the_rename_leaves_the_new_one(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_manifest_that_no_reader_takes_is_not_published(path: Path) -> None:
    build(path)
    before = content(path)
    with pytest.raises(ArtifactError, match="not in the list of files"), Writer(path, force=True) as writer:
        writer.publish(manifest("programs/none.json"))
    assert content(path) == before


@pytest.mark.parametrize("stem", ["../x", "/x", "a/b", "", "x y", "programs/../x", ".x"])
def test_names_that_lead_elsewhere_are_not_written(path: Path, stem: str) -> None:
    with Writer(path) as writer:
        refused(lambda: writer.file(stem, "json", b""), "is no name of a file")
        assert set(content(path)) == {".widepack.lock"}


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
def test_a_killed_writer_leaves_the_old_one_whole_and_is_cleaned_up_after(path: Path, there: bool) -> None:
    if there:
        build(path)
    assert subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False).returncode == 9
    if there:
        Reader(path).check_hashes()
    assert any(".tmp-" in name for name in content(path)), "the test should leave something to clean up"
    made = build(path, "again", force=there)
    assert set(content(path)) == {*made.files, "manifest.json"}
    Reader(path).check_hashes()


def test_files_of_others_stay(path: Path) -> None:
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


def test_many_writers_leave_one_whole_artifact(path: Path) -> None:
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
    [(errno.ENOSPC, ["No space left", "bytes are free", "make room"]), (errno.EROFS, ["Read-only"]), (errno.EACCES, ["Permission denied"])],
)
@pytest.mark.parametrize("call", ["fsync", "replace", "mkdir"])
@pytest.mark.parametrize("there", [False, True])
def test_what_the_system_refuses_comes_in_words(
    path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int, words: list[str], there: bool
) -> None:
    if there:
        build(path)
        if call == "mkdir":
            shutil.rmtree(path / "programs")  # so that it is made again
    before = content(path.parent)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.mkdir" if call == "mkdir" else f"os.{call}", refuse)
        refused(lambda: build(path, force=True, weights=b"v" * 1000), "ens.wide: cannot", "Nothing was published", *words)
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
    run = subprocess.run([sys.executable, "-c", LIMITED, str(path)], check=False, capture_output=True, text=True)
    assert run.returncode == 3, run.stderr
    assert "cannot write weights after" in run.stdout and "File too large" in run.stdout
    assert content(path) == before


def test_too_little_space_is_told_at_once(path: Path) -> None:
    with Writer(path) as writer:
        writer.reserve(1)
        refused(lambda: writer.reserve(2**62), "4,611,686,018,427,387,904 bytes are to be written", "free")


def test_a_path_without_permission(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    tmp_path.chmod(0o500)
    refused(lambda: build(tmp_path / "ens.wide"), "Permission denied")


# The reader against what it may find.


def reseal(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest and give it a digest that fits: what an attacker can do."""
    data = json.loads((path / "manifest.json").read_bytes())
    edit(data)
    data["digest"] = strict_json.digest({k: v for k, v in data.items() if k != "digest"})
    (path / "manifest.json").write_text(json.dumps(data))


@pytest.fixture
def made(path: Path) -> Manifest:
    return build(path)


def program_of(found: Manifest) -> str:
    return found.entries["forward"].member[0]


def test_what_is_no_artifact(tmp_path: Path) -> None:
    refused(lambda: Reader(tmp_path / "none"), "none: there is nothing")
    refused(lambda: Reader(tmp_path), "without manifest.json", "widepack build")
    (tmp_path / "file").write_text("")
    refused(lambda: Reader(tmp_path / "file"), "an artifact is a folder, this is a file")


def test_expected_digest(path: Path, made: Manifest) -> None:
    refused(lambda: Reader(path, expect="sha256:" + "0" * 64), "expected the artifact sha256:000", made.digest)


def test_a_changed_manifest(path: Path, made: Manifest) -> None:
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace('"a.pt"', '"b.pt"'))
    refused(lambda: Reader(path), str(path), "its digest is", "changed or damaged")


def test_a_manifest_that_is_a_link(tmp_path: Path, path: Path, made: Manifest) -> None:
    (path / "manifest.json").rename(tmp_path / "elsewhere.json")
    (path / "manifest.json").symlink_to(tmp_path / "elsewhere.json")
    refused(lambda: Reader(path), "a link or special file")


@pytest.mark.skipif(sys.platform == "win32", reason="named pipes are a POSIX thing")
def test_a_manifest_that_is_a_pipe_is_not_waited_for(path: Path, made: Manifest) -> None:
    (path / "manifest.json").unlink()
    os.mkfifo(path / "manifest.json")
    refused(lambda: Reader(path), "a link or special file")


def test_a_manifest_that_is_too_large(path: Path, made: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MAX_BYTES", 100)
    refused(lambda: Reader(path), "over 100 bytes")


@pytest.mark.parametrize("kind", ["program", "folder", "weights", "folder instead"])
def test_files_behind_links(tmp_path: Path, path: Path, made: Manifest, kind: str) -> None:
    name = program_of(made) if kind != "weights" else next(n for n in made.files if n.startswith("weights"))
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


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "manifest.json", "", "programs", ".widepack.lock", "programs/../manifest.json"])
def test_only_files_of_the_manifest_are_opened(path: Path, made: Manifest, name: str) -> None:
    refused(lambda: Reader(path).path(name), "not in the manifest's list of files")
    refused(lambda: Reader(path).program(name), "not in the manifest's list of files")


def test_all_differences_in_one_error(path: Path, made: Manifest) -> None:
    weights = next(n for n in made.files if n.startswith("weights"))
    (path / weights).write_bytes(b"w" * 99)
    (path / program_of(made)).unlink()
    refused(Reader(path).check_sizes, "2 of 2 files", f"{weights}: 99 bytes, 100 were written", "incomplete")
    refused(Reader(path).check_hashes, "2 of 2 files", f"{weights}: 99 bytes, 100 were written", "incomplete")


def test_another_content_of_the_same_size(path: Path, made: Manifest) -> None:
    weights = next(n for n in made.files if n.startswith("weights"))
    (path / weights).write_bytes(b"v" * 100)
    program = path / program_of(made)
    program.write_bytes(program.read_bytes().replace(b"linear", b"matmul"))
    Reader(path).check_sizes()
    refused(Reader(path).check_hashes, "2 of 2 files", weights, "was written")
    refused(lambda: Reader(path).program(program_of(made)), "its content is not what was written")


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda p: p["nodes"][0].update(op="aten.from_file.default"), ["aten.from_file.default", "not on the list"]),
        (lambda p: p["nodes"][0].update(op="os.system"), ["os.system", "not on the list"]),
        (lambda p: p.update(format="widepack.program/9"), ["widepack.program/9"]),
        (lambda p: p["nodes"][0].update(args=[{"ref": "z"}]), ["'z'"]),
    ],
)
def test_a_program_that_asks_for_more(path: Path, edit: Callable[[Any], object], words: list[str]) -> None:
    data = PROGRAM.to_json()
    edit(data)
    with Writer(path) as writer:
        name = writer.file("programs/member.forward", "json", json.dumps(data).encode())
        writer.publish(manifest(name))
    refused(lambda: Reader(path).program(name), str(path / name), *words)


@pytest.mark.parametrize("data", [b"", b"[" * 100_000, b'{"a":1,"a":2}', b"\x80\x02c__builtin__\neval\n.", b'{"a":' + b"9" * 5000 + b"}"])
def test_a_program_that_is_no_json(path: Path, data: bytes) -> None:
    with Writer(path) as writer:
        name = writer.file("programs/member.forward", "json", data)
        writer.publish(manifest(name))
    refused(lambda: Reader(path).program(name), str(path / name))


def test_sizes_that_would_fill_the_memory(path: Path, made: Manifest) -> None:
    name = program_of(made)
    reseal(path, lambda d: d["files"][name].update(bytes=2**40))
    refused(lambda: Reader(path).program(name), "1,099,511,627,776 bytes; at most")
    refused(Reader(path).check_sizes, "1,099,511,627,776 were written")


def test_a_file_that_grew(path: Path, made: Manifest) -> None:
    name = program_of(made)
    with (path / name).open("ab") as file:
        file.write(b" " * 10)
    refused(lambda: Reader(path).program(name), "more than it may have")


# Killed, out of space, replaced while it is read: at every single step.


def revise(path: Path, weights: bytes = b"v" * 3000) -> Manifest:
    """An update: the weights file again with other bytes in it, one program stays, one is new."""
    reader = Reader(path)
    with Writer(path, force=True) as writer:
        (old,) = reader.weights_files()
        _, how = writer.revised("weights", "safetensors", old, [(2, [memoryview(b"XY")]), (90, iter([memoryview(b"Z"), memoryview(b"")]))])
        assert how in ("reflink", "kernel", "copy")
        writer.take(reader, reader.manifest.entries["forward"].member)
        writer.file("programs/more", "json", b"[1]")
        return writer.publish(replace(reader.manifest, provenance={"note": "revised"}))


def test_a_revised_file(path: Path) -> None:
    before = build(path)
    seen: list[tuple[int, int]] = []
    (old,) = Reader(path).weights_files()
    made = revise(path)
    (new,) = Reader(path).weights_files()
    assert new.read_bytes() == b"wwXY" + b"w" * 86 + b"Z" + b"w" * 9 and new != old
    Reader(path).check_hashes()
    assert set(content(path)) == {*made.files, "manifest.json"} and made.entries == before.entries
    with Writer(path.with_name("o.wide")) as writer:
        name, _ = writer.revised("weights", "safetensors", new, progress=lambda done, total: seen.append((done, total)))
        assert (name, seen) == (new.name, [(100, 100)])
        writer.take(Reader(path), ["programs/" + n.partition("/")[2] for n in made.files if "member" in n])
        writer.publish(made)
    Reader(path.with_name("o.wide")).check_hashes()


@pytest.mark.parametrize("way", ["copy_file_range", "none"])
def test_where_the_system_copies_nothing(path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
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


def test_what_is_copied_is_held_to_its_hash(path: Path) -> None:
    made = build(path)
    name = next(n for n in made.files if n.startswith("weights"))
    (path / name).write_bytes(b"v" * 100)
    with Writer(path.with_name("o.wide")) as writer:
        refused(lambda: writer.take(Reader(path), [name]), name, "not what was written")
    assert not path.with_name("o.wide").exists()


class Failing:
    """Lets the system refuse the k-th thing that it is asked for, and all that follow until a file is removed."""

    def __init__(self, patch: pytest.MonkeyPatch, fatal: int) -> None:
        self.count, self.fatal, self.failed = 0, fatal, False
        for name in ("replace", "fsync", "mkdir", "copy_file_range"):
            patch.setattr(os, name, self.wrapped(getattr(os, name)))
        patch.setattr(store, "open", self.opened, raising=False)

    def wrapped(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def asked(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            if self.count == self.fatal:
                self.failed = True
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return call(*args, **kwargs)

        return asked

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
        if (path / "manifest.json").exists() and Reader(path).manifest.provenance["note"] == ("revised" if there else ""):
            break  # the folder could not be flushed after the rename: it is published, and stands
        assert content(path.parent) == before
        assert path.exists() == there
    assert fatal > 12
    Reader(path).check_hashes()


KILLED_AT = """
import os, shutil, signal, sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from artifacts.test_store_publish import build, content, revise
from widepack_artifacts.writer import Reader
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
                if event in EVENTS and any(isinstance(a, (str, os.PathLike)) and os.fspath(a).startswith(str(path)) for a in args[:2]):
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
        made = build(path, "next", force=True)
        assert set(content(path)) == {*made.files, "manifest.json"}, set(content(path)) ^ {*made.files, "manifest.json"}
        if not killed:
            break
    print(fatal)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
def test_killed_at_every_step(path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED_AT, str(path), str(Path(__file__).parent)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(int(steps) > 15 for steps in done.stdout.split()) and len(done.stdout.split()) == 2


def test_what_a_killed_writer_left_goes_before_the_next_one_writes(path: Path) -> None:
    made = build(path)
    assert subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False).returncode == 9
    assert set(content(path)) > {*made.files, "manifest.json"}
    with Writer(path, force=True):
        assert set(content(path)) == {*made.files, "manifest.json", ".widepack.lock"}


def test_a_reader_that_meets_a_publishing(path: Path) -> None:
    build(path)
    count = 0

    def use(reader: Reader) -> bytes:
        nonlocal count
        count += 1
        if count < 4:
            build(path, str(count), force=True, weights=bytes([count]) * 100)
        return reader.weights_files()[0].read_bytes()

    reader, found = store.opened(path, use)
    assert (count, found, reader.manifest.provenance) == (4, b"\x03" * 100, {"note": "3"})
    first = Reader(path)
    assert not first.replaced()
    refused(lambda: store.opened(path, lambda reader: reader.path("none")), "not in the manifest's list")
    refused(lambda: store.opened(path, use, "sha256:" + "0" * 64), "expected the artifact")

    def always(reader: Reader) -> None:
        nonlocal count
        count += 1
        build(path, str(count), force=True, weights=bytes([count]) * 100)
        reader.check_hashes()

    refused(lambda: store.opened(path, always), "replaced while it was opened")
    assert first.replaced() and count < 40
    shutil.rmtree(path)
    assert not first.replaced()


def test_what_a_reader_holds_stays(path: Path, made: Manifest) -> None:
    reader, other = Reader(path), Reader(path)
    reader.hold(made.entries["forward"].member)
    other.hold(made.entries["forward"].member, most=3)
    shutil.rmtree(path / "programs")
    assert reader.program(program_of(made)) == PROGRAM and reader.program(program_of(made)) is reader.program(program_of(made))
    refused(lambda: other.program(program_of(made)), "incomplete, or was replaced")


@pytest.mark.skipif(sys.platform == "win32", reason="permissions are POSIX ones")
def test_read_only_media(path: Path, made: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def read_only(place: Any, flags: int, *more: Any, **kwargs: Any) -> int:
        if flags & (os.O_RDWR | os.O_WRONLY | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(place, flags, *more, **kwargs)

    before = content(path)
    monkeypatch.setattr(os, "open", read_only)
    Reader(path, made.digest).check_hashes()
    refused(lambda: build(path, force=True), "cannot write there: Read-only")
    assert content(path) == before
