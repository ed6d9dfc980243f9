"""Tests the ONNX graphs in an artifact, and attack 107 of ATTACKS.md: an ONNX file that a stranger wrote."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from loaded import built
from torch import nn

import widepack
from widepack.backends import onnx_graphs, onnx_packed
from widepack.errors import ArtifactError
from widepack.system.machine import name_of
from widepack.tuning.graph_files import publish_graphs
from widepack.tuning.report import publish_plans
from widepack_artifacts.reader import Reader
from widepack_artifacts.writer import Writer

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
pytestmark = pytest.mark.filterwarnings("ignore")
N = 3


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 3))


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WIDEPACK_CACHE", str(tmp_path / "aot"))
    onnx_graphs.forget()
    onnx_packed.forget()


@pytest.fixture
def members() -> list[nn.Module]:
    return [net() for _ in range(N)]


@pytest.fixture
def planned(members: list[nn.Module], tmp_path: Path) -> tuple[Path, str]:
    """An artifact whose plan names ONNX Runtime, and its digest."""
    path = built(tmp_path, net, members, "input=float32[B,16]")
    ens = widepack.load(path, strategies="loop")
    stored = ens.entry("forward").programs.of("shared")[0].stored
    plan = replace(
        stored.plan, backend="onnxruntime", machine=name_of("cpu"), threads=torch.get_num_threads()
    )
    digest = publish_plans(
        path, "cpu", {("forward", "shared"): [(stored.program, plan)]}, ens.manifest.digest
    )
    return path, digest


def graphs(path: Path) -> list[str]:
    return [name for name in Reader(path).manifest.files if name.startswith("programs/onnx.")]


LOADS = """
import sys, warnings
for name in ("onnx", "onnxscript", "onnx_ir"):
    sys.modules[name] = None
import torch, widepack
warnings.simplefilter("ignore")
torch.set_num_threads(int(sys.argv[3]))
ens = widepack.load(sys.argv[1], expect=sys.argv[2] or None)
torch.save(ens(torch.ones(2, 16)), sys.argv[4])
print(ens.backend)
"""


@pytest.mark.parametrize("trusted", [True, False])
def test_a_trusted_artifact_needs_onnxruntime_alone(
    trusted: bool,
    planned: tuple[Path, str],
    members: list[nn.Module],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, digest = planned
    digest = publish_graphs(path, digest)
    assert len(graphs(path)) == 1 and Reader(path).manifest.digest == digest
    assert publish_graphs(path, digest) == digest
    monkeypatch.setenv("WIDEPACK_CACHE", str(tmp_path / "empty"))
    arguments = [str(path), digest if trusted else "", str(torch.get_num_threads()), str(tmp_path / "y.pt")]
    done = subprocess.run([sys.executable, "-c", LOADS, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["onnxruntime" if trusted else "eager"]
    want = torch.stack([m(torch.ones(2, 16)) for m in members])
    torch.testing.assert_close(torch.load(tmp_path / "y.pt"), want)


def test_one_line_says_why_eager_runs(
    planned: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript.optimizer", None)
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.warns(UserWarning, match="'eager' runs instead.*needs the packages onnx and onnxscript"):
        ens = widepack.load(planned[0])
    assert ens.backend == "eager"


def forged(path: Path, content: bytes) -> str:
    """Replaces the graph of an artifact, in agreement with its manifest. Returns: the new digest."""
    with Writer(path, force=True) as writer:
        manifest = Reader(path).manifest
        (name,) = graphs(path)
        writer.keep({n: f for n, f in manifest.files.items() if n != name})
        writer.file(name.rpartition("-")[0], "onnx", content)
        return writer.publish(manifest).digest


def test_the_file_of_a_stranger_is_not_opened(
    planned: tuple[Path, str],
    members: list[nn.Module],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, digest = planned
    digest = publish_graphs(path, digest)
    forged(path, b"what a parser would stumble over")
    read: list[str] = []
    bytes_of = Reader.bytes

    def watched(self: Reader, name: str) -> Any:
        read.append(name)
        return bytes_of(self, name)

    monkeypatch.setattr(Reader, "bytes", watched)
    monkeypatch.setenv("WIDEPACK_CACHE", str(tmp_path / "empty"))
    onnx_graphs.forget()
    x = torch.randn(4, 16)
    ens = widepack.load(path)
    torch.testing.assert_close(ens(x), torch.stack([m(x) for m in members]))
    assert ens.backend == "onnxruntime"  # of a graph that was written here
    assert read and not [name for name in read if name.startswith("programs/onnx.")]
    with pytest.raises(ArtifactError, match="expected the artifact"):
        widepack.load(path, expect=digest)


def test_a_wrong_graph_of_a_trusted_artifact_is_not_used(
    planned: tuple[Path, str], members: list[nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, digest = planned
    publish_graphs(path, digest)
    forged_digest = forged(path, b"no graph")
    monkeypatch.setenv("WIDEPACK_CACHE", str(tmp_path / "empty"))
    onnx_graphs.forget()
    x = torch.randn(4, 16)
    ens = widepack.load(path, expect=forged_digest)
    torch.testing.assert_close(ens(x), torch.stack([m(x) for m in members]))
    assert ens.backend == "onnxruntime"


@pytest.mark.parametrize("change", ["update", "update elsewhere", "append", "drop"])
def test_a_revision_keeps_the_graphs(
    change: str,
    planned: tuple[Path, str],
    members: list[nn.Module],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, digest = planned
    publish_graphs(path, digest)
    before, new = graphs(path), net()
    torch.save(new.state_dict(), tmp_path / "new.pt")
    if change == "drop":
        report, now = widepack.drop(path, [1]), [members[0], members[2]]
    elif change == "append":
        report, now = widepack.append(path, [tmp_path / "new.pt"]), [*members, new]
    else:
        out = tmp_path / "other.wide" if change == "update elsewhere" else None
        report = widepack.update(path, {1: tmp_path / "new.pt"}, out=out)
        path, now = out or path, [members[0], new, members[2]]
    assert graphs(path) == before
    monkeypatch.setenv("WIDEPACK_CACHE", str(tmp_path / "empty"))
    monkeypatch.setitem(sys.modules, "onnxscript.optimizer", None)
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    onnx_graphs.forget()
    asked: Any = {"backend": "onnxruntime", "strategies": "loop"} if change in ("append", "drop") else {}
    ens: Any = widepack.load(path, expect=report.digest, **asked)
    assert ens.backend == "onnxruntime"
    x = torch.randn(4, 16)
    torch.testing.assert_close(ens(x), torch.stack([m(x) for m in now]))
