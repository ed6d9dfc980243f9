"""Tests attacks 55 to 59 of ATTACKS.md: changed files, links, notes of other users, and many nodes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from attacks import refused
from forged import Forged, golden, node, ref

from widepack import load
from widepack.errors import ArtifactError, ProbeError
from widepack.system import user_cache
from widepack_artifacts import reader
from widepack_artifacts.file_identity import FileIdentity
from widepack_artifacts.reader import Reader
from widepack_artifacts.writer import Writer


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the empty cache of a user who has not loaded an artifact."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "widepack"


def weights_of(path: Path) -> Path:
    return next(path.glob("weights-*"))


def flip(place: Path, keep_times: bool = False) -> None:
    """Flips one bit in each of the last 16 weights of the file, in place."""
    before = place.stat()
    with open(place, "r+b") as file:
        file.seek(-64, os.SEEK_END)
        data = bytes(b ^ 0x40 for b in file.read())
        file.seek(-64, os.SEEK_END)
        file.write(data)
    if keep_times:
        os.utime(place, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("keep_times", [False, True])
def test_weights_that_change_after_a_load_that_passed(tmp_path: Path, cache: Path, keep_times: bool) -> None:
    path = Forged().save(tmp_path)
    load(path)
    flip(weights_of(path), keep_times)
    refused(path, "probe", kind=ProbeError)
    refused(path, "SHA-256", verify="hashes")


def test_a_damaged_copy_of_an_artifact_that_passed(tmp_path: Path, cache: Path) -> None:
    path = Forged().save(tmp_path)
    load(path)
    copy = Path(shutil.copytree(path, tmp_path / "copy.wide"))
    flip(weights_of(copy))
    refused(copy, "probe", kind=ProbeError)
    load(path)


def test_unchanged_files_are_not_checked_again(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Forged().save(tmp_path)
    load(path)
    notes = sorted((cache / "probes").iterdir())

    def again(*_: object) -> None:
        raise AssertionError("the probe ran again")

    monkeypatch.setattr("widepack.verification.probe.check", again)
    load(path)
    assert notes and sorted((cache / "probes").iterdir()) == notes


@pytest.mark.parametrize("how", ["flip", "truncate"])
def test_weights_that_change_in_place_while_they_are_mapped(tmp_path: Path, cache: Path, how: str) -> None:
    """The next read for a new program or member is refused, and no page past the end of a file is read."""
    path = Forged().save(tmp_path)
    ens = load(path)
    place = weights_of(path)
    if how == "flip":
        flip(place)
    else:
        os.truncate(place, place.stat().st_size - 64)
    with pytest.raises(ArtifactError, match="changed in place after it was loaded"):
        ens.each(torch.ones(3, 2, 6))
    with pytest.raises(ArtifactError, match="changed in place after it was loaded"):
        ens.swap(0, tmp_path / "new.pt")


def test_files_that_are_replaced_or_removed_stay_mapped(tmp_path: Path, cache: Path) -> None:
    path = Forged().save(tmp_path)
    ens = load(path)
    place = weights_of(path)
    shutil.copy(place, tmp_path / "same")
    flip(tmp_path / "same")
    os.replace(tmp_path / "same", place)
    x = torch.ones(3, 2, 6)
    assert torch.equal(ens.each(x), load(golden("mlp")).each(x))
    refused(path, "probe", kind=ProbeError)


def test_a_file_that_is_replaced_while_it_is_opened(tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.write_bytes(b"one")
    identity = FileIdentity.of(place)
    identity.check_same()
    (tmp_path / "other").write_bytes(b"one")
    os.replace(tmp_path / "other", place)
    identity.check_content()
    with pytest.raises(ArtifactError, match="replaced or changed while it was opened"):
        identity.check_same()
    place.unlink()
    with pytest.raises(ArtifactError, match="No such file"):
        identity.check_same()


@pytest.mark.parametrize("link", [".widepack.lock", "programs"])
def test_links_that_a_writer_would_follow(tmp_path: Path, link: str) -> None:
    path = Forged().save(tmp_path)
    outside = tmp_path / "outside"
    if link == "programs":
        (path / link).rename(outside)
    (path / link).symlink_to(outside)
    before = sorted(p.name for p in tmp_path.rglob("*"))
    with pytest.raises(ArtifactError, match="a link or"), Writer(path, force=True):
        pass
    assert sorted(p.name for p in tmp_path.rglob("*")) == before


def test_special_files_instead_of_the_lock(tmp_path: Path) -> None:
    path = Forged().save(tmp_path)
    os.mkfifo(path / ".widepack.lock")
    with pytest.raises(ArtifactError, match="a link or special file"), Writer(path, force=True):
        pass


def test_an_artifact_that_no_reader_opens_is_not_published(tmp_path: Path) -> None:
    path = Forged().save(tmp_path)
    reader = Reader(path)
    weights = weights_of(path)
    with (
        pytest.raises(ArtifactError, match="a link or special file.*Nothing was published"),
        Writer(path, force=True) as writer,
    ):
        writer.take(reader, reader.manifest.files)
        weights.rename(tmp_path / "weights")
        weights.symlink_to(tmp_path / "weights")
        writer.publish(reader.manifest)


def test_notes_in_the_cache_that_another_user_could_have_written(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user_cache.remember("key", "walks", "3 4")
    assert user_cache.noted("key", "walks") == "3 4" and not user_cache.passed("other", "walks")
    note = cache / "walks" / "key"
    assert note.stat().st_mode & 0o777 == 0o600 and note.parent.stat().st_mode & 0o777 == 0o700

    note.chmod(0o622)
    assert not user_cache.passed("key", "walks") and user_cache.noted("key", "walks") == ""
    user_cache.remember("key", "walks", "5 6")  # replaces the note that is not trusted
    assert user_cache.noted("key", "walks") == "5 6"

    note.rename(tmp_path / "note")
    note.symlink_to(tmp_path / "note")
    assert not user_cache.passed("key", "walks")
    note.unlink()
    os.mkfifo(note)
    assert not user_cache.passed("key", "walks")

    user_cache.remember("key", "walks", "7 8")
    note.parent.chmod(0o770)
    assert not user_cache.passed("key", "walks")
    user_cache.remember("more", "walks")
    assert not (cache / "walks" / "more").exists()
    note.parent.chmod(0o700)

    if os.geteuid() == 0:  # root trusts no other user, and others trust root
        os.chown(note, 12345, -1)
    else:
        mine = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    assert not user_cache.passed("key", "walks")


def aliases(count: int) -> list[dict[str, object]]:
    """Returns nodes that each return the value of the previous node."""
    rows = [node("a0", "aten.alias.default", ref("x"))]
    return rows + [node(f"a{i}", "aten.alias.default", ref(f"a{i - 1}")) for i in range(1, count)]


def test_many_nodes_that_compute_nothing(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = Forged().add(*aliases(reader.MOST_NODES), start="programs/cpu.forward.shared")
    refused(many.save(tmp_path / "many"), "100,0", "nodes", "limit=2")

    monkeypatch.setattr(reader, "MOST_NODES", 200)
    few = Forged().add(*aliases(150)).save(tmp_path / "few")
    refused(few, "nodes", "a load may take 200")  # two programs of pattern `shared`
    assert load(few, limit=2)(torch.ones(2, 6)).shape[0] == 3
    assert load(few, limit=None)(torch.ones(2, 6)).shape[0] == 3
    looped = {"nodes": [{"body": {"nodes": [1, {"body": 3}]}}, 4]}
    assert reader.count_nodes(looped) == 4 and reader.count_nodes([looped]) == 0


def test_bytes_of_programs_are_limited_before_they_are_read(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Forged().save(tmp_path)
    monkeypatch.setattr(reader, "MOST_BYTES", 100)
    refused(path, "bytes of programs", "a load may take 100")
    load(path, limit=1000)
