"""Tests files that appear complete or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner
from loaded import saved
from support import fresh
from torch import nn

from widepack.errors import ArtifactExists, UsageError
from widepack.system import atomic_file
from widepack_artifacts.lock import lock_handle
from widepack_cli.main import cli


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    saved(lambda: nn.Linear(64, 64), folder, "input=float32[B,64]", members=2)
    return folder / "e.wide"


def test_a_file_appears_complete_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    with atomic_file.whole(path, force=False) as temporary:
        temporary.write_text("one")
        assert not path.exists()
    with (
        pytest.raises(ArtifactExists, match="exists; give another path, or force=True"),
        atomic_file.whole(path, force=False),
    ):
        pass
    with pytest.raises(KeyboardInterrupt), atomic_file.whole(path, force=True) as temporary:
        temporary.write_text("hal")
        raise KeyboardInterrupt
    assert path.read_text() == "one"
    with atomic_file.whole(path, force=True) as temporary:
        temporary.write_text("two")
        os.chmod(temporary, 0o600)  # some libraries do this
    assert path.read_text() == "two"
    assert os.listdir(tmp_path) == ["a.json"], "no temporary file is left"
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~_umask()
    with pytest.raises(UsageError, match="is a folder"), atomic_file.whole(tmp_path, force=True):
        pass


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_file_that_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with pytest.raises(ArtifactExists), atomic_file.whole(path, force=False) as temporary:
        temporary.write_text("new")
        path.write_text("other")
    assert path.read_text() == "other"


def test_files_of_a_killed_process_are_removed_by_the_next_write(tmp_path: Path) -> None:
    left, busy = tmp_path / f".widepack-{'a' * 16}.pt2", tmp_path / f".widepack-{'b' * 16}"
    left.write_bytes(b"half")
    with open(busy, "xb") as other:
        lock_handle(other.fileno())  # another process is writing
        with atomic_file.whole(tmp_path / ("x" * 255), force=False) as temporary:
            temporary.write_text("one")
        assert {p.name for p in tmp_path.iterdir()} == {"x" * 255, busy.name}


@pytest.mark.parametrize("name", ["manifest.json", "weights", "programs", ".widepack.lock"])
def test_a_part_of_an_artifact_is_not_overwritten(pair: Path, name: str) -> None:
    (place,) = [
        p for p in pair.rglob("*") if p.name == name or (p.name.startswith(name) and p.is_file())
    ] or [pair / name]
    before = {p: p.read_bytes() for p in pair.rglob("*") if p.is_file()}
    with (
        pytest.raises(UsageError, match=r"part of the artifact|is a folder"),
        atomic_file.whole(place, force=True),
    ):
        pass
    for command in (["extract", str(pair), "0"], ["export", str(pair), "--to", "pt2"]):
        ran = CliRunner().invoke(
            cli, [*command, "--force", "-o", str(place.with_suffix(".pt") if name == "weights" else place)]
        )
        assert ran.exit_code == 2, ran.output
    assert {p: p.read_bytes() for p in pair.rglob("*") if p.is_file()} == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ["extract", "0", "-o", "o.pt"],
        ["extract", "0", "-o", "o.safetensors"],
        ["export", "--to", "pt2", "-o", "o.pt2"],
    ],
)
def test_a_full_disk_gives_a_message(pair: Path, tmp_path: Path, command: list[str]) -> None:
    """A limit on file sizes simulates a full disk. torch's writer ends the process when a write fails."""
    code = f"""
import os, resource, signal, sys
os.chdir(sys.argv[1])
sys.dont_write_bytecode = True  # cut off by the limit, other processes would read it
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
from widepack_cli.main import cli
import torch
resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048))
cli({[command[0], str(pair), *command[1:]]!r})
"""
    ran = fresh(code, tmp_path)
    assert ran.returncode == 1, ran.stderr
    assert "o.p" in ran.stderr or "o.safetensors" in ran.stderr
    assert "File too large" in ran.stderr and "fault of widepack" not in ran.stderr
    assert not list(tmp_path.iterdir())


def test_a_damaged_artifact_is_not_extracted(pair: Path, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "e.wide"
    shutil.copytree(pair, copy)
    (weights,) = copy.glob("weights-*")
    data = bytearray(weights.read_bytes())
    data[-5] ^= 1
    weights.write_bytes(data)
    ran = CliRunner().invoke(cli, ["extract", str(copy), "1", "-o", str(tmp_path / "m.pt")])
    assert ran.exit_code == 1 and "SHA-256" in ran.output, ran.output
    assert not (tmp_path / "m.pt").exists()
