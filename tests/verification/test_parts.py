"""Tests builds whose derived weights are too large to be in memory for all members at once.

They are compared in parts, with the same bounds as in one piece. Weights are written in shards.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from loaded import files_of, seeded
from torch import Tensor, nn

from widepack import build, load
from widepack.errors import UsageError, VerificationError
from widepack.spec.config import parse_size
from widepack.verification import parts, reference
from widepack.verification.parts import all_weights
from widepack_artifacts.reader import Reader

N = 7
QUICK: dict[str, Any] = {"pt2": False, "targets": ("cpu",)}


class Net(nn.Module):
    """Has a folded norm, siblings, and a part that runs as a loop. All of them have derived weights."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.a = nn.Linear(8, 4)
        self.b = nn.Linear(8, 4)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:  # [B, 2, 5, 5]
        y = torch.relu(self.norm(self.conv(x))).mean((2, 3))
        z: Tensor = self.a(y) * torch.sigmoid(self.b(y)) + self.seen
        return z


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    def net() -> Net:
        made = Net()
        for name, t in made.state_dict().items():
            if t.is_floating_point():
                t.uniform_(0.5, 1.5) if "var" in name else t.normal_(0, 0.4)
        return made

    return [str(path) for path in files_of(tmp_path, [seeded(net, i) for i in range(N)])]


def built(paths: list[str], out: Path, **more: Any) -> Any:
    return build(paths, out, model=Net, inputs=["x=float32[B,2,5,5]"], **QUICK, **more)


@pytest.mark.extended
def test_a_comparison_in_parts_equals_one_in_one_piece(
    paths: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    undivided = built(paths, tmp_path / "whole.wide")
    assert "parts" not in undivided.verification
    monkeypatch.setattr(parts, "MOST_BYTES", 3000)
    divided = built(paths, tmp_path / "parts.wide")
    assert divided.verification["parts"]
    assert all(2 <= size < N for size in divided.verification["parts"].values())
    one, other = Reader(tmp_path / "whole.wide").manifest, Reader(tmp_path / "parts.wide").manifest
    assert [w.file for w in one.entries["forward"].wide] == [w.file for w in other.entries["forward"].wide]
    assert divided.kernels_wide == undivided.kernels_wide
    for pattern, records in divided.verification["wide"].items():
        for part, expected in zip(records, undivided.verification["wide"][pattern], strict=True):
            assert list(part["members"]) == list(expected["members"]) == [f"m{i}" for i in range(N)]
            assert part["samples"] == expected["samples"]
    x = torch.randn(3, 2, 5, 5)
    assert torch.equal(load(tmp_path / "whole.wide")(x), load(tmp_path / "parts.wide")(x))


def test_a_wrong_member_in_the_last_part_is_found(
    paths: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def swapped(*args: Any) -> dict[str, Any]:
        found = all_weights(*args)
        if args[3].stop == N:
            found["conv.weight"] = found["conv.weight"].flip(0)
        return found

    monkeypatch.setattr(parts, "MOST_BYTES", 3000)
    monkeypatch.setattr(reference, "all_weights", swapped)
    with pytest.raises(VerificationError, match="member m[3-6], .*first wrong node: .*conv"):
        built(paths, tmp_path / "e.wide")
    assert not (tmp_path / "e.wide").exists()


def test_derived_bytes_are_those_of_the_prologue(paths: list[str], tmp_path: Path) -> None:
    built(paths, tmp_path / "e.wide", strategy="wide")
    reader = Reader(tmp_path / "e.wide")
    program = reader.program(reader.manifest.entries["forward"].wide[0].file)
    # For each member in float64: the folded kernel with its bias, the joined siblings, and at most one more
    # copy of the kernel.
    least, most = N * (8 * 2 * 9 + 8 + 8 * 8) * 4, N * (8 * 2 * 9 + 8 + 8 * 8 + 8) * 4 * 5
    assert least <= parts.derived(program, {"B": 4}) <= most


def test_weights_are_written_in_shards(paths: list[str], tmp_path: Path) -> None:
    one, several = tmp_path / "one.wide", tmp_path / "several.wide"
    built(paths, one)
    built(paths, several, max_shard_size="4KB")
    reader = Reader(several)
    files = reader.weights_files()
    assert len(files) > 1
    largest = max(w.bytes(N) for w in reader.manifest.weights)
    assert all(f.stat().st_size <= max(4000, largest) + 2000 for f in files)
    x = torch.randn(3, 2, 5, 5)
    assert torch.equal(load(one)(x), load(several, verify="hashes")(x))
    for i, path in enumerate(paths):
        saved = torch.load(path)
        assert all(torch.equal(value, saved[name]) for name, value in load(several).state_dict(i).items())


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5 * 10**9), ("500 mb", 500 * 10**6), ("2GiB", 2 * 2**30), ("1.5k", 1500), ("17", 17), (9, 9)],
)
def test_sizes_are_parsed(text: int | str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1", "0", "1XB", "1e9", 0, -5, True, "9" * 15 + "TB"])
def test_invalid_sizes_are_refused(text: int | str) -> None:
    with pytest.raises(UsageError, match="for example 5GB"):
        parse_size(text)
