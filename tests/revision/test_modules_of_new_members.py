"""Tests comparison (a) of new members, with a factory and with torch.export programs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from revisions import Net, X, check_answers, check_refused, checked_manifest, content
from torch import Tensor, nn

from widepack import append, build, drop, update
from widepack.errors import VerificationError
from widepack_artifacts.reader import Reader


class Changed(Net):
    """Has the same names and shapes as `Net`, but another program."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


def test_a_new_member_is_compared_with_its_module(copy: Path, paths: list[Path]) -> None:
    before = content(copy)
    check_refused(
        lambda: update(copy, {1: paths[3]}, model=Changed),
        VerificationError,
        "the captured program gives other answers than the members",
        "m1",
    )
    assert content(copy) == before
    report = update(copy, {1: paths[3]}, model=Net)
    assert report.asked == ["m1"]
    record = Reader(copy).manifest.verification
    assert set(record["capture_again"][0]["members"]) == {"m1"}

    def compared() -> list[set[str]]:
        return [set(row["members"]) for row in Reader(copy).manifest.verification.get("capture_again", [])]

    update(copy, {2: paths[4]}, model=Net)
    assert compared() == [{"m1"}, {"m2"}]  # the record of an unchanged member is kept
    update(copy, {1: paths[0]})
    assert compared() == [{"m2"}]
    drop(copy, ["m2"])
    assert compared() == []


@pytest.mark.slow
def test_a_new_torch_export_program_is_compared_with_its_module(tmp_path: Path) -> None:
    class Plain(nn.Sequential):
        pass

    def program(seed: int, path: Path, extra: bool = False) -> Path:
        torch.manual_seed(seed)
        net = Plain(nn.Linear(6, 4), nn.ReLU() if not extra else nn.Tanh(), nn.Linear(4, 2)).eval()
        torch.export.save(
            torch.export.export(net, (torch.randn(3, 6),), dynamic_shapes=[{0: torch.export.Dim.DYNAMIC}]),
            path,
        )
        return path

    paths = [program(i, tmp_path / f"p{i}.pt2") for i in range(3)]
    build(paths[:2], tmp_path / "e.wide", targets=("cpu",), pt2=False)
    assert update(tmp_path / "e.wide", {0: paths[2]}).asked == ["p0"]
    checked_manifest(tmp_path / "e.wide")
    check_answers(tmp_path / "e.wide", [torch.export.load(p).module() for p in (paths[2], paths[1])], X)
    check_refused(
        lambda: append(tmp_path / "e.wide", [program(7, tmp_path / "q.pt2", True)]),
        VerificationError,
        "the captured program gives other answers than the members",
    )
