"""Tests what the backend `onnxruntime` keeps in the cache: graphs, packed weights, and what was bound."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from isolating import poisoned
from loaded import built
from torch import nn

import widepack
from widepack.backends import onnx_graphs, onnx_packed
from widepack.errors import ProbeError

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
pytestmark = pytest.mark.filterwarnings("ignore")
N = 3


@pytest.fixture(autouse=True)
def forget() -> None:
    onnx_graphs.forget()
    onnx_packed.forget()


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 3))


@pytest.fixture(scope="module")
def members() -> list[nn.Module]:
    return [net() for _ in range(N)]


@pytest.fixture(scope="module")
def artifact(members: list[nn.Module], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("artifact"), net, members, "input=float32[B,16]")


def opened(artifact: Path, cache: Path) -> widepack.WideModel:
    return widepack.load(artifact, backend="onnxruntime", strategies="loop", cache=cache)


def right(ens: widepack.WideModel, members: list[nn.Module]) -> None:
    assert ens.backend == "onnxruntime"
    for rows in (1, 4):
        x = torch.randn(rows, 16)
        torch.testing.assert_close(ens(x), torch.stack([m(x) for m in members]))
        x = torch.randn(N, rows, 16)
        torch.testing.assert_close(ens.each(x), torch.stack([m(row) for m, row in zip(members, x)]))


def files(cache: Path, name: str) -> list[Path]:
    return sorted(cache.glob(f"*/{name}"))


def test_patterns_share_a_graph_and_packed_weights(
    artifact: Path, members: list[nn.Module], tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    right(opened(artifact, cache), members)
    assert len(files(cache, onnx_graphs.FILE)) == len(files(cache, onnx_packed.WEIGHTS)) == 1


WARM = """
import sys, torch, widepack
ens = widepack.load(sys.argv[1], backend="onnxruntime", cache=sys.argv[2])
torch.save(ens(torch.ones(2, 16)), sys.argv[3])
found = [m for m in ("onnx", "onnxscript", "onnx_ir", "torch.onnx._internal.exporter") if m in sys.modules]
assert not found, found
run = ens.entry("forward").programs.of("shared")[0].executable
assert "given" not in vars(run), "the prologue has run"
maps = open("/proc/self/maps").read() if sys.platform == "linux" else sys.argv[2]
assert sys.argv[2] in maps, "no packed weight is mapped"
"""


def test_a_load_from_the_cache_needs_onnxruntime_alone(
    artifact: Path, members: list[nn.Module], tmp_path: Path
) -> None:
    cache, answer = tmp_path / "cache", tmp_path / "answer.pt"
    widepack.load(artifact, backend="onnxruntime", cache=cache)
    done = subprocess.run(
        [sys.executable, "-c", WARM, str(artifact), str(cache), str(answer)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    torch.testing.assert_close(torch.load(answer), torch.stack([m(torch.ones(2, 16)) for m in members]))


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("damage", ["cut off", "removed", "a bit"])
def test_damaged_packed_weights_are_made_again(
    damage: str, artifact: Path, members: list[nn.Module], tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    opened(artifact, cache)
    onnx_packed.forget()
    (file,) = files(cache, onnx_packed.WEIGHTS)
    before = file.read_bytes()
    if damage == "removed":
        file.unlink()
    else:
        file.write_bytes(before[:-100] if damage == "cut off" else bytes([before[0] ^ 1]) + before[1:])
    right(opened(artifact, cache), members)
    (file,) = files(cache, onnx_packed.WEIGHTS)
    assert file.read_bytes() == before


def test_weights_of_other_values_are_others(artifact: Path, members: list[nn.Module], tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    opened(artifact, cache)
    other = [net() for _ in range(N)]
    right(opened(built(tmp_path, net, other, "input=float32[B,16]"), cache), other)
    right(opened(artifact, cache), members)
    assert len(files(cache, onnx_graphs.FILE)) == 1 and len(files(cache, onnx_packed.WEIGHTS)) == 2


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_without_a_place_weights_stay_in_memory(
    artifact: Path, members: list[nn.Module], tmp_path: Path
) -> None:
    (tmp_path / "cache").mkdir(mode=0o500)
    right(opened(artifact, tmp_path / "cache" / "inside"), members)


def test_without_space_weights_stay_in_memory(
    artifact: Path, members: list[nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx_packed, "free_bytes", lambda folder: 0)
    right(opened(artifact, tmp_path / "cache"), members)
    assert not files(tmp_path / "cache", onnx_packed.WEIGHTS)


@pytest.mark.parametrize("strategies", ["loop", "wide"])
def test_a_swap_changes_the_answers_of_its_member_alone(
    strategies: str, artifact: Path, members: list[nn.Module], tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    ens = widepack.load(artifact, backend="onnxruntime", strategies=strategies, cache=cache)
    new = net()
    torch.save(new.state_dict(), tmp_path / "new.pt")
    ens.swap(1, tmp_path / "new.pt")
    right(ens, [members[0], new, members[2]])
    right(opened(artifact, tmp_path / "cache"), members)


def test_some_of_the_members(artifact: Path, members: list[nn.Module], tmp_path: Path) -> None:
    opened(artifact, tmp_path / "cache")
    some = widepack.load(
        artifact, members=[2, 0], backend="onnxruntime", strategies="loop", cache=tmp_path / "cache"
    )
    x = torch.randn(4, 16)
    torch.testing.assert_close(some(x), torch.stack([members[2](x), members[0](x)]))
    assert len(files(tmp_path / "cache", onnx_graphs.FILE)) == 1


def test_nan_of_one_member_stays_with_it(artifact: Path, members: list[nn.Module], tmp_path: Path) -> None:
    ens = opened(artifact, tmp_path / "cache")
    x = torch.randn(N, 4, 16)
    x[1, 2] = float("nan")
    y = ens.each(x).clone()
    assert y[1, 2].isnan().all()
    y[1, 2] = 0
    assert not y.isnan().any()
    torch.testing.assert_close(y[0], members[0](x[0]))


@pytest.mark.parametrize("strategies", ["loop", "wide"])
def test_nan_in_one_members_weights_reaches_no_other_member(
    strategies: str, artifact: Path, tmp_path: Path
) -> None:
    x, xs = torch.randn(4, 16), torch.randn(N, 4, 16)

    def answers(path: Path) -> torch.Tensor:
        ens = widepack.load(
            path, backend="onnxruntime", strategies=strategies, cache=tmp_path / "cache", verify="off"
        )
        assert ens.backend == "onnxruntime"
        return torch.stack([ens(x), ens.each(xs)], 1)

    clean = answers(artifact)
    for ill in range(N):
        found = answers(poisoned(artifact, ill, tmp_path / f"{ill}.wide"))
        assert found[ill].isnan().all()
        for i in set(range(N)) - {ill}:
            assert torch.equal(found[i], clean[i])


def test_changed_weights_are_found(artifact: Path, tmp_path: Path) -> None:
    opened(artifact, tmp_path / "cache").probe()
    ill = poisoned(artifact, 1, tmp_path / "ill.wide")
    with pytest.raises(widepack.ArtifactError, match="are not what was written"):
        widepack.load(ill, backend="onnxruntime", cache=tmp_path / "cache", verify="hashes")
    with pytest.raises(ProbeError):  # not the packed weights of before
        widepack.load(ill, backend="onnxruntime", strategies="loop", cache=tmp_path / "cache")


def test_a_member_gives_gradients(artifact: Path, members: list[nn.Module], tmp_path: Path) -> None:
    ens = opened(artifact, tmp_path / "cache")
    x = torch.randn(4, 16, requires_grad=True)
    (found,) = torch.autograd.grad(ens[1](x).sum(), x)
    (want,) = torch.autograd.grad(members[1](x).sum(), x)
    torch.testing.assert_close(found, want)


def test_a_load_writes_only_small_graphs_unasked(
    artifact: Path, members: list[nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An artifact of a stranger must not make a load work for minutes."""
    monkeypatch.setattr(onnx_graphs, "MOST_UNASKED", 2)
    with pytest.raises(widepack.Unavailable, match="writes at most 2 as ONNX without being asked"):
        opened(artifact, tmp_path / "cache")
    asked = widepack.load(
        artifact, backend="onnxruntime", strategies="loop", cache=tmp_path / "cache", compile="now"
    )
    right(asked, members)
    onnx_graphs.forget()
    right(opened(artifact, tmp_path / "cache"), members)


def test_loads_of_one_number_of_threads_share_a_session(artifact: Path, tmp_path: Path) -> None:
    opened(artifact, tmp_path)(torch.randn(1, 16))
    (place,) = [file.parent for file in files(tmp_path, onnx_packed.MODEL)][:1]
    import onnxruntime

    before = torch.get_num_threads()
    try:
        sessions = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            named, default = (onnx_packed.opened(place, [False], n, onnxruntime) for n in (threads, 0))
            assert named is default
            sessions.append(named)
        assert sessions[0] is not sessions[1]
    finally:
        torch.set_num_threads(before)
