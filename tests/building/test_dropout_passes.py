"""Tests `build -n N --dropout on`: an artifact of stochastic passes of one checkpoint, and its refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from small_builds import QUICK
from torch import Tensor, nn
from torch.nn import functional

import widepack
from widepack import UsageError
from widepack_cli.main import cli

DRAWS = "draws random numbers at every call"


def net(p: float = 0.5) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(p), nn.Linear(8, 3))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("passes") / "m.pt"
    torch.save(net().state_dict(), path)
    return path


@pytest.fixture(scope="module")
def artifact(checkpoint: Path) -> Path:
    out = checkpoint.parent / "passes.wide"
    report = widepack.build([checkpoint], out, model=net, inputs=["input=float32[B,6]"], n=48, dropout="on")
    assert report.members == tuple(map(str, range(48)))
    assert report.weights["stacked"] == 0
    assert report.verification["draws"].startswith("at rest")
    return out


def test_each_pass_draws_and_the_mean_is_the_answer_without_dropout(checkpoint: Path, artifact: Path) -> None:
    ens = widepack.load(artifact)
    original = net()
    original.load_state_dict(torch.load(checkpoint))
    original.eval()
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        y = ens(x)
        assert y.shape == (48, 5, 3)
        assert all(not torch.equal(y[i], y[j]) for i in range(48) for j in range(i))
        assert not torch.equal(y, ens(x))
        mean = torch.stack([ens(x) for _ in range(200)]).mean((0, 1))
        torch.testing.assert_close(mean, original(x), atol=0.02, rtol=0.02)
        assert float(ens.std(x, of=None).mean()) > 0.05
        assert not torch.equal(ens.member(3)(x), ens.member(3)(x))
        assert ens.each(x.expand(48, 5, 6)).shape == (48, 5, 3)
        assert widepack.load(artifact, members=[3, 7], strategies="loop")(x).shape == (2, 5, 3)
    ens.probe()  # the probe runs with dropout switched off
    assert torch.equal(ens.state_dict(7)["0.weight"], original.state_dict()["0.weight"])


def test_a_wrong_weight_is_found_by_the_probe(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe of a program with dropout can fail."""

    from widepack.inference.loaded_weights import LoadedWeights

    right = LoadedWeights.get

    def wrong(self: LoadedWeights, name: str) -> Any:
        return right(self, name) * 1.5

    monkeypatch.setattr(LoadedWeights, "get", wrong)
    with pytest.raises(widepack.ArtifactError, match="probe"):
        widepack.load(artifact, strategies="wide")(torch.ones(2, 6))


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda a, m: widepack.tune(a), f"forward {DRAWS}, but tune compares the answers"),
        (
            lambda a, m: widepack.export(a, a.parent / "x.pt2", to="pt2"),
            f"{DRAWS} .*; build with dropout off to export",
        ),
        (
            lambda a, m: widepack.append(a, [m], names=["more"]),
            "append: entry forward of .* draws random numbers .*: build the artifact again",
        ),
        (lambda a, m: widepack.load(a).swap(3, m), f"swap: entry forward {DRAWS}"),
    ],
)
def test_calls_that_compare_answers_are_refused(
    artifact: Path, checkpoint: Path, ask: Callable[[Path, Path], Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        ask(artifact, checkpoint)


def test_passes_run_on_eager_whatever_backend_is_named(artifact: Path) -> None:
    with pytest.warns(
        UserWarning, match="draws random numbers, .* backend 'compile' .*: 'eager' runs instead"
    ):
        ens = widepack.load(artifact, backend="compile", compile="now")
    assert ens.backend == "eager"
    assert not torch.equal(ens(torch.ones(2, 6)), ens(torch.ones(2, 6)))


def test_each_of_several_checkpoints_draws_separately(checkpoint: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    other = tmp_path / "other.pt"
    torch.save(net().state_dict(), other)
    out = tmp_path / "two.wide"
    report = widepack.build(
        [checkpoint, other], out, model=net, inputs=["input=float32[B,6]"], dropout="on", targets=("cpu",)
    )
    assert report.weights["shared"] == 0
    y = widepack.load(out)(torch.ones(64, 6))
    masks = [{tuple(row.tolist()) for row in member} for member in y]
    assert all(len(m) > 4 for m in masks)
    assert not masks[0] & masks[1]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"n": 3}, 'give equal answers without dropout; give dropout="on"'),
        ({"n": 0, "dropout": "on"}, "n is 0; it is how many passes"),
        ({"dropout": "yes"}, "dropout is 'yes'; it is"),
        ({"n": 3, "dropout": "on", "tune": True}, "tune compares the answers of strategies"),
        (
            {"n": 3, "dropout": "on", "model_args": {"p": 0.0}},
            "dropout is on, but the program of Sequential draws no random numbers",
        ),
    ],
)
def test_invalid_options_are_refused(
    checkpoint: Path, tmp_path: Path, more: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        widepack.build([checkpoint], tmp_path / "a.wide", model=net, inputs=["input=float32[B,6]"], **more)
    assert not (tmp_path / "a.wide").exists()


def test_n_is_for_one_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    inputs = ["input=float32[B,6]"]
    with pytest.raises(UsageError, match="n=3 is for one checkpoint, but 2 are given"):
        widepack.build([checkpoint] * 2, tmp_path / "a.wide", model=net, inputs=inputs, n=3, dropout="on")


def test_on_the_command_line(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "from torch import nn\n\n\ndef make():\n    return nn.Sequential(nn.Linear(6, "
        "8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))\n"
    )
    words = f"build {checkpoint} -n 4 --dropout on --model {tmp_path}/net.py:make --input input=float32[B,6]"
    done = CliRunner().invoke(cli, [*words.split(), "--dry-run", "--json"], prog_name="widepack")
    assert done.exit_code == 0, done.output
    assert len(json.loads(done.stdout)["members"]) == 4


def _by_function(drop: Callable[[Tensor], Tensor]) -> type[nn.Module]:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return drop(self.linear(x))

    return Dropping


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize(
    "drop",
    [
        pytest.param(lambda x: functional.dropout(x, 0.5, training=True), id="dropout"),
        pytest.param(lambda x: functional.dropout(x + 0, 0.5, True, inplace=True), id="in place"),
        pytest.param(lambda x: functional.dropout2d(x[:, :, None, None], 0.5, True)[:, :, 0, 0], id="2d"),
        pytest.param(lambda x: functional.alpha_dropout(x, 0.5, training=True), id="alpha"),
        pytest.param(lambda x: functional.rrelu(x, training=True), id="rrelu"),
        pytest.param(
            lambda x: functional.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5)[0],
            id="attention",
        ),
    ],
)
def test_dropout_by_function(drop: Callable[[Tensor], Tensor], tmp_path: Path) -> None:
    """Each member and call draws its own numbers, and the mean of many draws is that of the member."""
    make = _by_function(drop)
    torch.manual_seed(0)
    member = make().eval()
    torch.save(member.state_dict(), tmp_path / "m.pt")
    x = torch.randn(3, 6)
    widepack.build(
        [tmp_path / "m.pt"], tmp_path / "e.wide", model=make, sample=(x,), n=100, dropout="on", **QUICK
    )
    y = widepack.load(tmp_path / "e.wide")(x)
    assert not torch.equal(y[0], y[1])
    with torch.no_grad():
        alone = torch.stack([member(x) for _ in range(400)])
    spread = (alone.std(0).square() / 400 + y.std(0).square() / 100).sqrt()
    assert ((y.mean(0) - alone.mean(0)).abs() <= 6 * spread + 1e-6).all()
