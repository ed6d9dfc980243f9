"""Tests the checkpoints that a loaded model names for its members, and swaps of weights that no program
reads.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from loaded import built
from torch import Tensor, nn

import widepack
from widepack import MemberMismatch, UsageError
from widepack.inference.members import swap as swapping

COUNTER = "norm.num_batches_tracked"


class Net(nn.Module):
    """Has a batch norm, whose counter eval mode does not read, and a counter that forward reads."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6)
        self.register_buffer("steps", torch.tensor(3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.fc(x)) * self.steps
        return y


def trained(seed: int, batches: int, steps: int = 3) -> Net:
    torch.manual_seed(seed)
    net = Net()
    net.norm.running_mean = torch.randn(6)
    net.norm.num_batches_tracked = torch.tensor(batches)
    net.steps.fill_(steps)
    return net.eval()


def saved(path: Path, net: Net) -> Path:
    torch.save(net.state_dict(), path)
    return path


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    return built(tmp_path, Net, (trained(i, 10) for i in range(3)), "x=float32[B,4]")


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("members", [None, [2, 1]])
def test_a_retrained_batch_norm_is_swapped(artifact: Path, members: list[int] | None) -> None:
    new = trained(7, 25)
    path = saved(artifact.parent / "new.pt", new)
    ens = widepack.load(artifact, members=members)
    assert [c.name for c in ens.checkpoints] == list(ens.members)
    before = ens.checkpoints
    report = ens.swap("m1", path)
    place = ens.members.index("m1")
    x = torch.randn(5, 4)
    torch.testing.assert_close(ens(x)[place], new(x).detach(), rtol=1e-5, atol=1e-6)
    state = ens.state_dict("m1")
    assert report.weights == 4
    assert all(torch.equal(state[n], v) for n, v in new.state_dict().items())
    assert ens.state_dict("m2")[COUNTER] == 10
    row = ens.checkpoints[place]
    assert (row.name, row.source) == ("m1", str(path))
    assert row.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert row.bytes == path.stat().st_size
    assert [c for c in ens.checkpoints if c.name != "m1"] == [c for c in before if c.name != "m1"]
    assert ens.manifest.members[1].source.endswith("m1.pt")
    ens.swap("m1", artifact.parent / "m1.pt")
    assert ens.state_dict("m1")[COUNTER] == 10
    assert ens.checkpoints == before


def test_a_state_dict_in_memory_is_swapped_as_its_file(artifact: Path) -> None:
    """Also inside of a dict, as it is saved, and later changes of the tensors change nothing."""
    new, x = trained(7, 25), torch.randn(5, 4)
    with torch.no_grad():
        expected = new(x)
    by_file, by_state = widepack.load(artifact), widepack.load(artifact)
    by_file.swap(1, saved(artifact.parent / "new.pt", new))
    report = by_state.swap(1, {"epoch": 3, "model": new.state_dict()}, key="model")
    with torch.no_grad():
        for p in new.fc.parameters():
            p.add_(1)
    assert torch.equal(by_state(x), by_file(x))
    torch.testing.assert_close(by_state(x)[1], expected)
    now = by_state.checkpoints[1]
    size = sum(v.nbytes for v in new.state_dict().values())
    assert (report.checkpoint, now.source, now.bytes) == ("<state dict>", "<state dict>", size)
    first = now.sha256
    assert len(first) == 64 and first != by_file.checkpoints[1].sha256
    by_state.swap(1, new.state_dict())
    assert by_state.checkpoints[1].sha256 != first
    for name, value in new.state_dict().items():
        assert torch.equal(by_state.state_dict(1)[name], value)


@pytest.mark.extended
def test_a_checkpoint_that_differs_in_unread_weights_only_is_swapped(artifact: Path) -> None:
    path = saved(artifact.parent / "longer.pt", trained(0, 99))
    ens = widepack.load(artifact)
    report = ens.swap(0, path)
    assert (report.weights, report.bytes) == (1, 0)
    assert ens.state_dict(0)[COUNTER] == 99
    assert ens.checkpoints[0].source == str(path)


def test_a_change_of_a_shared_weight_that_forward_reads_is_refused(artifact: Path) -> None:
    path = saved(artifact.parent / "other.pt", trained(0, 99, steps=4))
    ens = widepack.load(artifact)
    before = ens.checkpoints
    with pytest.raises(MemberMismatch, match=r"1 weight that all members share, 8 bytes: steps \(8 bytes\)"):
        ens.swap(0, path)
    assert ens.checkpoints == before
    assert ens.state_dict(0)[COUNTER] == 10


def test_a_refused_swap_keeps_the_old_checkpoint(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ens = widepack.load(artifact)
    ens.swap(1, saved(artifact.parent / "first.pt", trained(7, 25)))
    before = ens.checkpoints
    path = saved(artifact.parent / "second.pt", trained(8, 50))

    def wrong(*args: object) -> None:
        assert ens.checkpoints[1].source == str(path)
        raise widepack.VerificationError("wrong")

    monkeypatch.setattr(swapping, "_verify", wrong)
    with pytest.raises(widepack.VerificationError, match="wrong"):
        ens.swap(1, path)
    monkeypatch.undo()
    assert ens.checkpoints == before
    assert ens.state_dict(1)[COUNTER] == 25


@pytest.mark.extended
def test_a_closed_model_returns_no_state_dict(artifact: Path) -> None:
    ens = widepack.load(artifact)
    ens.close()
    for use in (lambda: ens.state_dict(0), lambda: ens[0], lambda: list(ens)):
        with pytest.raises(UsageError, match="this model was closed"):
            use()
    assert [c.name for c in ens.checkpoints] == ["m0", "m1", "m2"]
