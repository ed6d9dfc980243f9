"""Tests the calls that `update`, `append` and `drop` refuse. A refused call does not change the artifact."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from revisions import SPECS, Net, check_refused, content, member, save
from torch import nn

from widepack import append, build, drop, update
from widepack.errors import ArtifactError, CheckpointError, MemberMismatch, UsageError
from widepack_artifacts.reader import Reader


class Other(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 4)


def test_refused_calls_do_not_change_the_artifact(three: Path, paths: list[Path], tmp_path: Path) -> None:
    wrong = save(tmp_path / "wrong", [member(Other, 0)])[0]
    missing = tmp_path / "missing.pt"
    torch.save({k: v for k, v in member(Net, 0).state_dict().items() if k != "head.bias"}, missing)
    no_path: Any = None
    before = content(three)
    check_refused(
        lambda: update(three, {0: wrong}), MemberMismatch, str(wrong), "head.weight", "[4, 6]", "[3, 6]"
    )
    check_refused(lambda: update(three, {0: missing}), MemberMismatch, "lacks head.bias")
    check_refused(lambda: append(three, [wrong], names=["w"]), MemberMismatch, "head.weight")
    check_refused(lambda: update(three, {3: paths[3]}), UsageError, "there is no member 3")
    check_refused(
        lambda: update(three, {"m9": paths[3]}),
        UsageError,
        "no member is called 'm9'; the members are m0, m1, m2",
    )
    check_refused(lambda: update(three, {"m1": paths[3], 1: paths[4]}), UsageError, "named twice: m1")
    check_refused(lambda: update(three, {}), UsageError, "members is empty")
    check_refused(lambda: update(three, {True: paths[3]}), UsageError, "bool")
    check_refused(lambda: update(three, [paths[3]]), UsageError, "list")  # type: ignore[arg-type]
    check_refused(lambda: append(three, []), UsageError, "no checkpoints", "widepack append")
    check_refused(
        lambda: append(three, [paths[3], no_path]),
        UsageError,
        "checkpoint 1 is a NoneType; give the path of a file or folder",
    )
    check_refused(lambda: update(three, {1: None}), UsageError, "the checkpoint of member 1 is a NoneType")  # type: ignore[dict-item]
    check_refused(
        lambda: update(three, {"m1": ""}), UsageError, "the checkpoint of member 'm1' is an empty text"
    )
    check_refused(lambda: drop(three, 2.5), UsageError, "members is a float; give a list")  # type: ignore[arg-type]
    check_refused(
        lambda: update(no_path, {0: paths[0]}), UsageError, "path is a NoneType; give the artifact's folder"
    )
    check_refused(lambda: append(no_path, [paths[3]]), UsageError, "path is a NoneType")
    check_refused(lambda: drop("", [0]), UsageError, "path is an empty text")
    check_refused(lambda: update(three, {0: paths[3]}, out=3), UsageError, "out is a int")  # type: ignore[arg-type]
    check_refused(
        lambda: update(three, {0: paths[3]}, out=three / "inside" / "in.wide"),
        ArtifactError,
        "lies in the artifact",
        "Give another path",
    )
    check_refused(
        lambda: build(paths[:2], three / "in.wide", model=Net, **SPECS), ArtifactError, "lies in the artifact"
    )
    check_refused(lambda: append(three, [paths[1]]), UsageError, "m1: a member", "has this name already")
    check_refused(lambda: append(three, paths[3:5], names=["a", "a"]), UsageError, "a is given twice")
    check_refused(lambda: append(three, paths[3:5], names=["a"]), UsageError, "2 checkpoints and 1 names")
    check_refused(lambda: update(three, {0: tmp_path / "none.pt"}), CheckpointError, "there is no such file")
    check_refused(lambda: drop(three, ["m0", 1, "m2"]), UsageError, "all 3 members")
    check_refused(lambda: drop(three, []), UsageError, "members is empty")
    check_refused(lambda: drop(three, "m0"), UsageError, "give a list")
    check_refused(lambda: update(three, {0: paths[0]}, model_args={"width": 3}), UsageError, "no model")
    check_refused(lambda: drop(three, [0], out=three), ArtifactError, "is an artifact already")
    calls: list[Callable[[Path], object]] = [
        lambda p: update(p, {0: paths[0]}),
        lambda p: append(p, [paths[3]]),
        lambda p: drop(p, [0]),
    ]
    for call in calls:
        check_refused(lambda: call(tmp_path / "none.wide"), ArtifactError, "it does not exist")  # noqa: B023
    assert not (tmp_path / "none.wide").exists()
    assert content(three) == before


def test_damaged_files_are_refused(copy: Path, paths: list[Path]) -> None:
    (weights,) = Reader(copy).weights_files()
    data = bytearray(weights.read_bytes())
    data[-5] ^= 1
    weights.write_bytes(data)
    before = content(copy)
    for call in (
        lambda: update(copy, {0: paths[3]}),
        lambda: append(copy, [paths[3]]),
        lambda: drop(copy, [0]),
    ):
        check_refused(call, ArtifactError, weights.name, "was written")
    assert content(copy) == before
