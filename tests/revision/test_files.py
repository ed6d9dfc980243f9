"""Tests the files of revisions: sizes, concurrent readers, full disks, and killed processes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from paths import ROOT
from revisions import SPECS, Net, X, check_answers, check_refused, checked_manifest, content
from safetensors.torch import load_file
from torch import nn

from widepack import append, build, drop, load, update
from widepack.errors import ArtifactError, UsageError
from widepack.revision.revised_weights import shard_size
from widepack_artifacts.reader import Reader


@pytest.mark.slow
def test_a_source_artifact_may_be_replaced_while_another_is_written(
    copy: Path, paths: list[Path], nets: list[nn.Module]
) -> None:
    count = 0

    def replaced_once(stage: str, done: int, total: int) -> None:
        nonlocal count
        count += stage == "lower" and done == 0
        if stage == "lower" and done == 0 and count == 1:
            append(copy, [paths[4]], names=["more"])  # replaces the programs of the artifact

    report = update(copy, {0: paths[3]}, out=copy.with_name("o.wide"), progress=replaced_once)
    assert count == 2 and report.members == ("m0", "m1", "m2", "more")
    check_answers(copy.with_name("o.wide"), [nets[3], nets[1], nets[2], nets[4]], X)


@pytest.mark.extended
def test_updates_keep_weights_files_small(copy: Path, paths: list[Path], nets: list[nn.Module]) -> None:
    def files() -> list[int]:
        return [sum(t.numel() * 4 for t in load_file(p).values()) for p in Reader(copy).weights_files()]

    assert len(files()) == 1
    report = update(copy, {1: paths[3]}, max_shard_size="400")
    assert report.written == "streamed" and len(files()) > 1 and max(files()) <= 400
    check_answers(copy, [nets[0], nets[3], nets[2]], X)
    assert update(copy, {1: paths[1]}).written != "streamed" and max(files()) <= 400
    update(copy, {0: paths[5]})  # the trunk is no longer Shared
    assert max(files()) <= 3 * 6 * 6 * 4  # one weight is never divided between files
    append(copy, [paths[4]])
    assert len(files()) > 2 and sorted(files())[-2] <= 400
    check_answers(copy, [nets[5], *nets[1:3], nets[4]], X)
    reader = Reader(copy)
    assert shard_size(reader) == 400
    reader.manifest = replace(reader.manifest, provenance={})  # as in an artifact of an earlier version
    assert shard_size(reader) == max(p.stat().st_size for p in reader.weights_files())
    drop(copy, [0, 1, 2], max_shard_size="5GB")
    assert len(files()) == 1 and shard_size(Reader(copy)) == 5 * 10**9
    check_answers(copy, [nets[4]], X)
    check_refused(lambda: drop(copy, [0], max_shard_size="lots"), UsageError, "size 'lots'", "5GB")


def test_a_loaded_model_still_answers_after_an_update(
    copy: Path, paths: list[Path], nets: list[nn.Module]
) -> None:
    ens = load(copy)
    update(copy, {0: paths[5]})
    xs = torch.stack([X, X + 1, X + 2])
    with torch.no_grad():
        for i, got in enumerate(ens.each(xs)):  # a pattern that is first used after the update
            torch.testing.assert_close(got, nets[i](xs[i]), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ens.member(1)(X), nets[1](X), rtol=1e-4, atol=1e-5)
    ens.probe()


@pytest.mark.extended
def test_readers_during_updates(copy: Path, paths: list[Path], nets: list[nn.Module]) -> None:
    with torch.no_grad():
        expected = [torch.stack([n(X) for n in (nets[k], nets[1], nets[2])]) for k in (0, 3)]
    stop, wrong, count = threading.Event(), [], 0

    def read() -> None:
        nonlocal count
        while not stop.is_set():
            try:
                got = load(copy, verify="hashes")(X)
                if not any(torch.allclose(got, r, rtol=1e-4, atol=1e-5) for r in expected):
                    wrong.append("other answers")
            except Exception as e:  # noqa: BLE001  # no error may reach a reader
                wrong.append(repr(e))
            count += 1

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for k in range(2):
            update(copy, {0: paths[0 if k % 2 else 3]})
    finally:
        stop.set()
        reader.join()
    assert wrong == [] and count > 3


@contextmanager
def mounted(place: Path, kilobytes: int) -> Iterator[None]:
    """Mounts a file system of this size, or skips the test if mounting is not allowed."""
    place.mkdir(exist_ok=True)
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(place)],
        capture_output=True,
        check=False,
    ).returncode:
        pytest.skip("nothing may be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("did", ["update", "append", "drop", "build"])
def test_a_full_disk_leaves_the_old_artifact(
    did: str, three: Path, paths: list[Path], tmp_path: Path
) -> None:
    """The test makes the disk larger until the change fits.

    After each try, the artifact is either the old one, bit for bit, or the new one.
    """
    size = sum(-(-len(data) // 4096) * 4 for data in content(three).values())  # kilobytes, in pages
    outcomes = set()
    for room in range(size + 4, 4 * size + 200, 8):
        with mounted(tmp_path / "disk", room):
            path = Path(shutil.copytree(three, tmp_path / "disk" / "e.wide"))
            before = content(path)
            try:
                if did == "update":
                    update(path, {1: paths[3]})
                elif did == "append":
                    append(path, [paths[3]])
                elif did == "drop":
                    drop(path, [0])
                else:
                    build(paths[1:4], path, model=Net, force=True, **SPECS)
                checked_manifest(path)
                outcomes.add("done")
            except ArtifactError as e:
                assert "No space left" in str(e) or "are free there" in str(e)
                assert content(path) == before
                outcomes.add("refused")
        if "done" in outcomes:
            break
    assert outcomes == {"done", "refused"}


@pytest.mark.slow
def test_folders_that_cannot_be_written(
    three: Path, paths: list[Path], nets: list[nn.Module], tmp_path: Path
) -> None:
    with mounted(tmp_path / "disk", 4096):
        path = Path(shutil.copytree(three, tmp_path / "disk" / "e.wide"))
        before = content(path)
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path / "disk")], check=True)
        check_refused(lambda: update(path, {0: paths[3]}), ArtifactError, "Read-only file system")
        check_answers(path, nets[:3], X)
        update(path, {0: paths[3]}, out=tmp_path / "o.wide")
        check_answers(tmp_path / "o.wide", [nets[3], nets[1], nets[2]], X)
        assert content(path) == before


SCRIPT = ROOT / "scripts" / "stress" / "kills.py"


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize(
    "words",
    [
        ["--kills", "1", "--only", "update", "--times", "1"],
        pytest.param(["--kills", "10", "--only", "update", "--times", "1"], marks=pytest.mark.slow),
        pytest.param(["--kills", "24", "--steps"], marks=pytest.mark.slow),
    ],
)
def test_a_killed_process_leaves_a_valid_artifact(words: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *words, "--out", str(tmp_path / "kills.json")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "kills.json").read_text())
    for part in [found[p] for p in ("random", "steps") if p in found]:
        assert part["damaged_or_missing"] == part["litter_left_by_the_next_writer"] == 0
    assert found["random"]["killed"] == found["kills"]
    assert "steps" not in found or found["steps"]["killed"] == found["steps"]["runs"] > 100
