"""Tests that `update`, `append` and `drop` write the same members as a build from the same checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from revisions import (
    SPECS,
    Net,
    Scratch,
    X,
    add_measured_plan,
    check_answers,
    check_refused,
    check_same,
    checked_manifest,
    content,
    member,
    save,
)
from torch import nn

import widepack
from widepack import append, build, drop, load, update
from widepack.errors import ArtifactError, UsageError
from widepack_artifacts.reader import Reader
from widepack_artifacts.weights import Weights
from widepack_cli.shared.revision import lines


def test_an_update_equals_a_build(
    copy: Path, three: Path, paths: list[Path], nets: list[nn.Module], scratch: Scratch
) -> None:
    before = Reader(copy).manifest
    report = update(copy, {1: paths[3]})
    check_same(copy, scratch(0, 3, 2), (X,))
    check_answers(copy, [nets[0], nets[3], nets[2]], X)
    after = Reader(copy).manifest
    assert (report.did, report.kinds, report.lowered, report.left_out, report.members) == (
        "update",
        [],
        [],
        [],
        ("m0", "m1", "m2"),
    )
    assert report.written in ("reflink", "kernel", "copy")
    assert (report.before, report.digest) == (before.digest, after.digest) and before.digest != after.digest
    assert after.members[1].source == str(paths[3]) and after.members[0] == before.members[0]
    gone = {n for n in before.files if n not in after.files}
    assert {n.partition("-")[0] for n in gone} == {"weights", "probe"}, "the programs do not change"
    (history,) = after.provenance["history"]
    assert history["did"] == "update" and history["from"] == before.digest
    assert history["members"] == [
        {"member": "m1", "source": str(paths[3]), "sha256": after.members[1].sha256, "left": str(paths[1])}
    ]
    assert {k: v for k, v in after.provenance.items() if k != "history"} == before.provenance
    assert after.verification["capture"] == before.verification["capture"]
    assert set(after.verification["wide"]) == set(before.verification["wide"])
    assert set(after.verification["wide"]["shared.0"][0]["members"]) == {"m0", "m1", "m2"}
    update(copy, {"m1": paths[1], 0: paths[0]})
    check_same(copy, three, (X,))
    assert [h["did"] for h in Reader(copy).manifest.provenance["history"]] == ["update", "update"]


def test_a_shared_weight_becomes_stacked(
    copy: Path, paths: list[Path], nets: list[nn.Module], scratch: Scratch
) -> None:
    report = update(copy, {2: paths[5]})
    kinds = {k["weight"]: (k["was"], k["kind"], k["before"], k["after"]) for k in report.kinds}
    assert kinds["trunk.weight"] == ("shared", "stacked", 144, 3 * 144)
    assert set(kinds) == {"trunk.weight", "trunk.bias"}
    assert (report.lowered, report.written) == (["forward"], "streamed")
    check_same(copy, scratch(0, 1, 5), (X,))
    check_answers(copy, [nets[0], nets[1], nets[5]], X)
    # A stacked weight stays stacked for all values.
    assert update(copy, {2: paths[2]}).kinds == []
    assert {w.name: w.kind for w in Reader(copy).manifest.weights}["trunk.weight"] == "stacked"
    check_answers(copy, nets[:3], X)


def test_a_value_that_no_program_reads_may_differ(copy: Path, paths: list[Path], tmp_path: Path) -> None:
    state = torch.load(paths[0], weights_only=True)
    state["norm.num_batches_tracked"] += 5
    torch.save(state, tmp_path / "longer.pt")
    add_measured_plan(copy)
    report = update(copy, {0: tmp_path / "longer.pt"})
    assert [k["weight"] for k in report.kinds] == ["norm.num_batches_tracked"]
    assert (report.lowered, report.left_out, report.written) == ([], [], "streamed")
    checked_manifest(copy)
    assert (
        load(copy).state_dict(0)["norm.num_batches_tracked"] == 5
        and load(copy).state_dict(1)["norm.num_batches_tracked"] == 0
    )


def test_all_members_change_a_shared_weight_at_once(copy: Path, tmp_path: Path) -> None:
    others = [member(Net, i, trunk=9) for i in range(3)]
    report = update(copy, dict(enumerate(save(tmp_path / "others", others))))
    assert report.kinds == [] and report.lowered == [] and report.written != "streamed"
    checked_manifest(copy)
    check_answers(copy, others, X)
    assert torch.equal(load(copy).state_dict(0)["trunk.weight"], others[1].get_parameter("trunk.weight"))


@pytest.mark.extended
def test_append_and_drop_equal_a_build(
    copy: Path, paths: list[Path], nets: list[nn.Module], scratch: Scratch
) -> None:
    report = append(copy, paths[3:5], names="a, b")
    assert (report.did, report.members, report.lowered) == (
        "append",
        ("m0", "m1", "m2", "a", "b"),
        ["forward"],
    )
    check_same(copy, scratch(0, 1, 2, 3, 4), (X,))
    check_answers(copy, nets[:5], X)
    report = drop(copy, ["a", 0])
    assert (report.did, report.members) == ("drop", ("m1", "m2", "b"))
    assert report.changed == [{"member": "m0", "left": str(paths[0])}, {"member": "a", "left": str(paths[3])}]
    checked_manifest(copy)
    check_answers(copy, [nets[1], nets[2], nets[4]], X)
    drop(copy, [0, 1])
    assert len(load(copy)) == 1
    check_answers(copy, [nets[4]], X)
    check_refused(lambda: drop(copy, [0]), UsageError, "all 1 members", "at least one")


@pytest.mark.slow
def test_updates_keep_torch_export_and_cuda_programs(
    paths: list[Path], nets: list[nn.Module], scratch: Scratch, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(scratch(0, 1, 2, all_programs=True), tmp_path / "e.wide"))
    update(path, {1: paths[3]})
    check_same(path, scratch(0, 3, 2, all_programs=True), (X,))
    append(path, [paths[1]], names=["one"])
    check_same(path, scratch(0, 3, 2, 1, all_programs=True), (X,))
    drop(path, [1])
    check_same(path, scratch(0, 2, 1, all_programs=True), (X,))
    update(path, {0: paths[5]})
    check_answers(path, [nets[5], nets[2], nets[1]], X)
    stored = Weights(Reader(path).weights_files())
    exported = next(n for n in Reader(path).manifest.files if ".shared-" in n and n.endswith(".pt2"))
    module = torch.export.load(path / exported).module()
    module.load_state_dict({k: stored.get(k) for k in module.state_dict()}, assign=True)
    with torch.no_grad():
        torch.testing.assert_close(module(X), load(path)(X))


@pytest.mark.slow
def test_a_revision_is_written_to_another_artifact(
    three: Path, paths: list[Path], nets: list[nn.Module], tmp_path: Path
) -> None:
    before, out = content(three), tmp_path / "deep" / "o.wide"
    update(three, {0: paths[4]}, out=out)
    check_answers(out, [nets[4], nets[1], nets[2]], X)
    check_refused(lambda: drop(three, [0], out=out), ArtifactError, "is an artifact already")
    drop(three, [0], out=out, force=True)
    check_answers(out, nets[1:3], X)
    checked_manifest(out)
    assert content(three) == before
    damaged = Path(shutil.copytree(three, tmp_path / "damaged.wide"))
    name = next(n for n in Reader(three).manifest.files if "member." in n)
    (damaged / name).write_bytes((damaged / name).read_bytes()[:-1] + b"?")
    check_refused(
        lambda: update(damaged, {0: paths[4]}, out=tmp_path / "p.wide"),
        ArtifactError,
        name,
        "not what was written",
    )
    assert not (tmp_path / "p.wide").exists()


@pytest.mark.extended
def test_members_that_answer_nan_are_named(paths: list[Path], tmp_path: Path) -> None:
    broken = tmp_path / "broken.pt"
    torch.save(
        {n: v * float("nan") if n == "head.weight" else v for n, v in torch.load(paths[0]).items()}, broken
    )
    path = tmp_path / "e.wide"
    built = build([broken, *paths[1:3]], path, model=Net, **SPECS)
    (row,) = built.not_finite
    assert (
        row["entry"] == "forward"
        and row["member"] == "broken"
        and row["numbers"] == row["of"] > 0
        and built.to_json()["not_finite"] == [row]
    )
    report = update(path, {"broken": paths[3], "m2": broken})
    assert [r["member"] for r in report.not_finite] == ["m2"]
    (line,) = (text for text in lines(report) if text.startswith("not finite"))
    assert "member m2" in line and "NaN or inf" in line and "check its weights" in line
    assert not update(path, {"m2": paths[4]}).not_finite


def test_the_functions_are_public() -> None:
    assert {"update", "append", "drop", "ReviseReport"} <= set(widepack.__all__)
