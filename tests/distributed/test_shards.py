"""Tests `build(shards=...)`: the artifact has the programs of each part, and loads of the parts read them."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from loaded import save_members, saved
from torch import nn

import widepack
from widepack import UsageError
from widepack.inference.programs.program_source import ProgramSource
from widepack_artifacts.reader import Reader
from widepack_cli.main import cli


class Net(nn.Module):
    """Two layers with a normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.b(torch.relu(self.norm(self.a(x))))
        return y


def made(folder: Path, **options: Any) -> Path:
    folder.mkdir(exist_ok=True)
    saved(Net, folder, "x=float32[B,6]", members=5, targets=("cpu", "cuda"), **options)
    return folder / "e.wide"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("shards"), shards=[2, 3])


@pytest.fixture
def no_lowering(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: ProgramSource, pattern: str) -> None:
        raise AssertionError(f"the pattern {pattern} was lowered at load")

    monkeypatch.setattr(ProgramSource, "lower", refuse)


def parts_of(path: Path) -> set[tuple[int, int]]:
    return {w.members for w in Reader(path).manifest.entries["forward"].wide if w.members is not None}


def test_the_manifest_names_the_parts(path: Path) -> None:
    manifest = Reader(path).manifest
    assert manifest.version == (1, 3)
    assert parts_of(path) == {(0, 3), (3, 2), (0, 2), (2, 1)}
    for first, count in parts_of(path):
        for device in ("cpu", "cuda"):
            for pattern in ("shared", "each"):
                batches = sorted(
                    w.batch
                    for w in manifest.entries["forward"].wide
                    if (w.device, w.pattern, w.members) == (device, pattern, (first, count))
                )
                assert batches and batches[0][0] <= 1 and batches[-1][1] is None
                assert all(a[1] is not None and a[1] + 1 == b[0] for a, b in pairwise(batches))


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("count", [2, 3])
def test_devices_read_the_programs_of_their_parts(path: Path, count: int, no_lowering: None) -> None:
    x = torch.randn(4, 6)
    each = torch.randn(5, 4, 6)
    whole, parts = widepack.load(path), widepack.load(path, device=["cpu"] * count)
    torch.testing.assert_close(parts(x), whole(x))
    torch.testing.assert_close(parts.each(each), whole.each(each))
    members = [3, 0, 4, 1]
    torch.testing.assert_close(parts.route(x, member=members), whole.route(x, member=members))


def test_a_load_of_the_members_of_a_part_reads_its_programs(path: Path, no_lowering: None) -> None:
    first, count = min(parts_of(path))
    some = widepack.load(path, members=list(range(first, first + count)))
    x = torch.randn(3, 6)
    torch.testing.assert_close(some(x), widepack.load(path)(x)[first : first + count])


def test_other_members_are_lowered_at_load(path: Path) -> None:
    x = torch.randn(3, 6)
    whole = widepack.load(path)(x)
    for members in ([4, 0], [1, 0], [1, 2, 3]):
        torch.testing.assert_close(widepack.load(path, members=members)(x), whole[members])


def test_a_revision_keeps_the_number_of_parts(tmp_path: Path, no_lowering: None) -> None:
    path = made(tmp_path / "r", shards=2)
    before = parts_of(path)
    torch.manual_seed(9)
    new = Net()
    torch.save(new.state_dict(), tmp_path / "new.pt")
    widepack.update(path, {4: tmp_path / "new.pt"})
    assert parts_of(path) == before
    x = torch.randn(4, 6)
    torch.testing.assert_close(widepack.load(path, device=["cpu", "cpu"])(x)[4], new(x).detach())
    widepack.append(path, [tmp_path / "new.pt"], names=["n"])
    assert parts_of(path) == {(0, 3), (3, 3)}
    torch.testing.assert_close(widepack.load(path, device=["cpu", "cpu"])(x)[5], new(x).detach())
    widepack.drop(path, [0, 1, 2, 3, 4])
    assert parts_of(path) == set() and Reader(path).manifest.version < (1, 3)


@pytest.mark.parametrize("sizes", [(3, 4, 4, 2), (3, 3, 4, 4)])
def test_members_of_different_shapes_have_programs_of_their_parts(
    tmp_path: Path, no_lowering: None, sizes: tuple[int, ...]
) -> None:
    class Head(nn.Module):
        def __init__(self, state_dict: dict[str, torch.Tensor] | None = None) -> None:
            super().__init__()
            self.a = nn.Linear(6, 8)
            self.b = nn.Linear(8, 3 if state_dict is None else len(state_dict["b.bias"]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.b(torch.relu(self.a(x))) / self.b.out_features
            return y

    for i, classes in enumerate(sizes):
        torch.manual_seed(i)
        torch.save(Head({"b.bias": torch.empty(classes)}).state_dict(), tmp_path / f"m{i}.pt")
    widepack.build(
        sorted(tmp_path.glob("*.pt")),
        tmp_path / "e.wide",
        model=Head,
        inputs=["x=float32[B,6]"],
        pt2=False,
        budget=0,
        shards=2,
    )
    x = torch.randn(4, 6)
    whole, parts = widepack.load(tmp_path / "e.wide"), widepack.load(tmp_path / "e.wide", device=["cpu"] * 2)
    for a, b in zip(parts(x), whole(x), strict=True):
        torch.testing.assert_close(a, b)


def test_the_command_line_builds_verifies_and_shows_the_parts(tmp_path: Path) -> None:
    save_members(lambda: nn.Linear(4, 2), tmp_path, 2)
    (tmp_path / "net.py").write_text("from torch import nn\n\ndef make():\n    return nn.Linear(4, 2)\n")
    out = tmp_path / "e.wide"
    arguments = [
        *("build", str(tmp_path / "m0.pt"), str(tmp_path / "m1.pt"), "-o", str(out), "--budget", "0"),
        *("--model", f"{tmp_path / 'net.py'}:make", "--input", "input=float32[B,4]", "--no-pt2"),
    ]
    result = CliRunner().invoke(cli, [*arguments, "--shards", "3"])
    assert result.exit_code == 2 and "3 shards for 2 members" in result.output and not out.exists()
    result = CliRunner().invoke(cli, [*arguments, "--shards", "2"])
    assert result.exit_code == 0, result.output
    shown = CliRunner().invoke(cli, ["inspect", str(out)]).output
    assert "members 0 to 0" in shown and "members 1 to 1" in shown
    result = CliRunner().invoke(cli, ["verify", str(out), "--json"])
    found = {c["check"]: c["found"] for c in json.loads(result.output)["checks"]}
    assert result.exit_code == 0 and found["parts"].startswith("2 parts")


def test_a_number_that_is_no_number_of_parts(tmp_path: Path) -> None:
    for wrong in (1, 0, True, [2, 1]):
        with pytest.raises(UsageError, match="is not a number of parts"):
            made(tmp_path / "w", shards=wrong)
    with pytest.raises(UsageError, match="6 shards for 5 members"):
        made(tmp_path / "w", shards=6)
