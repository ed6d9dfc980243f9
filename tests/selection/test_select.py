"""Tests `widepack.select`: a validation file in, weights and a cascade in the artifact out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from loaded import built, saved
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import widepack
from widepack.errors import ArtifactError, UsageError
from widepack_artifacts.reader import Reader
from widepack_artifacts.writer import Writer
from widepack_cli.main import cli

CLASSES, MEMBERS = 3, 6


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(x)
        return y


def data(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 5, generator=generator)
    noise = 0.4 * torch.randn(rows, CLASSES, generator=generator)
    return x, (x[:, :CLASSES] + noise).argmax(1)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """Returns an artifact of members that are good in different degrees, and a validation file."""
    nets = []
    for i in range(MEMBERS):
        torch.manual_seed(i)
        nets.append(Net())
        with torch.no_grad():
            nets[i].head.weight.copy_(torch.eye(CLASSES, 5) * 3 + (0.3 + 0.4 * i) * torch.randn(CLASSES, 5))
    out = built(tmp_path, Net, nets, "x=float32[B,5]")
    x, y = data(400, 0)
    save_file({"x": x, "y": y}, tmp_path / "val.safetensors")
    return out, tmp_path / "val.safetensors"


def test_scores_weights_and_the_cascade_are_those_of_the_data(files: tuple[Path, Path]) -> None:
    out, val = files
    before = {f: (out / f).read_bytes() for f in Reader(out).manifest.files}
    report = widepack.select(out, val, target="y", of="softmax", allowed=0.005)
    ens = widepack.load(out)
    x, y = data(400, 0)
    probabilities = ens(x).softmax(-1)
    accuracies = {n: float((p.argmax(1) == y).double().mean()) for n, p in zip(ens.members, probabilities)}
    assert report.scores["best_member"] == pytest.approx(max(accuracies.values()))
    assert report.scores["all"] == pytest.approx(
        float((probabilities.mean(0).argmax(1) == y).double().mean())
    )
    weights = [report.weights.get(n, 0.0) for n in ens.members]
    assert ens.selected_weights == weights
    mean = ens.mean(x, of="softmax", weights=ens.selected_weights)
    assert report.scores["selected"] == pytest.approx(float((mean.argmax(1) == y).double().mean()))
    assert report.scores["selected"] >= report.scores["best_member"]
    assert report.cascade is not None
    found = ens.cascade(x)
    assert found.calls == pytest.approx(report.cascade["calls"], abs=0.02)
    accuracy = float((found.mean.argmax(1) == y).double().mean())
    assert accuracy == pytest.approx(report.cascade["score"], abs=0.003)
    assert accuracy >= report.scores["selected"] - 0.005 - 0.003
    assert {f: (out / f).read_bytes() for f in Reader(out).manifest.files} == before


def test_an_artifact_of_the_selected_members_alone(files: tuple[Path, Path], tmp_path: Path) -> None:
    out, val = files
    digest = Reader(out).manifest.digest
    report = widepack.select(out, val, target="y", of="softmax", most=3, out=tmp_path / "few.wide")
    few = widepack.load(tmp_path / "few.wide")
    assert set(few.members) == set(report.weights) and len(few.members) <= 3
    assert Reader(out).manifest.digest == digest
    x, _ = data(50, 1)
    if report.cascade is not None:
        whole = widepack.load(out)
        found = few.cascade(x)
        rows = found.members == len(few)
        weights = [report.weights[n] for n in few.members]
        torch.testing.assert_close(found.mean[rows], few.mean(x[rows], of="softmax", weights=weights))
        assert len(whole) == MEMBERS


def test_regression_targets(tmp_path: Path) -> None:
    ens, out = saved(lambda: nn.Linear(5, 1), tmp_path, "input=float32[B,5]"), tmp_path / "e.wide"
    x = torch.randn(60, 5)
    y = 0.75 * ens(x)[2] + 0.25 * ens(x)[1]
    save_file({"input": x, "y": y[:, 0].contiguous()}, tmp_path / "val.safetensors")
    report = widepack.select(out, tmp_path / "val.safetensors", target="y")
    assert report.metric == "squared_error" and report.cascade is None
    assert report.weights == pytest.approx({"m2": 0.75, "m1": 0.25})
    assert report.scores["selected"] == pytest.approx(0, abs=1e-10)
    with pytest.raises(UsageError, match="has no cascade"):
        widepack.load(out).cascade(x)


def test_a_changed_member_makes_the_record_void(files: tuple[Path, Path], tmp_path: Path) -> None:
    out, val = files
    report = widepack.select(out, val, target="y", of="softmax", allowed=0.01)
    assert report.cascade is not None
    name = report.cascade["order"][0]
    torch.manual_seed(99)
    torch.save(Net().state_dict(), tmp_path / "new.pt")
    widepack.update(out, {name: tmp_path / "new.pt"})
    ens = widepack.load(out)
    with pytest.raises(UsageError, match=f"another checkpoint of member {name}.*select` again"):
        ens.cascade(torch.randn(2, 5))
    with pytest.raises(UsageError, match="select` again"):
        ens.selected_weights  # noqa: B018  the property raises


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize(
    "change",
    [
        lambda r: r.pop("weights"),
        lambda r: r.update(weights=3),
        lambda r: r["weights"].update(dict.fromkeys(r["weights"], 1e308)),
        lambda r: r["weights"].update(dict.fromkeys(r["weights"], -1.0)),
        lambda r: r["weights"].update(dict.fromkeys(r["weights"], 1e-300)),
        lambda r: r["cascade"].update(dim=1e308),
        lambda r: r["cascade"].update(order=5),
        lambda r: r["cascade"].update(stages=["a"]),
        lambda r: r["cascade"].update(stages=[9]),
        lambda r: r["cascade"].update(until="x"),
        lambda r: r["cascade"].update(until=7.0),
        lambda r: r["cascade"].update(of="other"),
        lambda r: r["cascade"].pop("dim"),
        lambda r: r.update(entry="none"),
    ],
)
def test_a_wrong_record_is_refused(files: tuple[Path, Path], change: Any) -> None:
    out, val = files
    widepack.select(out, val, target="y", of="softmax", allowed=0.01)
    with Writer(out, force=True) as writer:
        manifest = Reader(out).manifest
        writer.keep(manifest.files)
        change(manifest.provenance["selection"])
        writer.publish(manifest)
    with pytest.raises((ArtifactError, UsageError)):
        widepack.load(out).cascade(torch.randn(2, 5))


@pytest.mark.extended(keep=2)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"target": "z"}, "z"),
        ({"of": "sigmoid"}, "of='sigmoid' is unknown"),
        ({"metric": "accuracy"}, "give of='softmax'"),
        ({"of": "softmax", "metric": "squared_error"}, "is for numbers"),
        ({"metric": "f1"}, "metric='f1' is unknown"),
        ({"most": 0, "of": "softmax"}, "most=0"),
        ({"rounds": 0, "of": "softmax"}, "rounds=0"),
        ({"allowed": 1.5, "of": "softmax"}, "allowed=1.5"),
        ({"first": 50, "of": "softmax"}, "first=50"),
        ({"of": "softmax", "dim": 7}, "dim=7 is no dim of classes"),
        ({}, "targets have the shape"),
    ],
)
def test_wrong_options_are_refused(files: tuple[Path, Path], options: dict[str, Any], words: str) -> None:
    out, val = files
    digest = Reader(out).manifest.digest
    with pytest.raises(UsageError, match=words):
        widepack.select(out, val, **{"target": "y", **options})
    assert Reader(out).manifest.digest == digest


def test_targets_that_are_no_classes_are_refused(files: tuple[Path, Path], tmp_path: Path) -> None:
    out, _ = files
    for y in (torch.full((4,), 3), torch.full((4,), -1), torch.full((4,), 0.5), torch.zeros(4, 2)):
        save_file({"x": torch.randn(4, 5), "y": y}, tmp_path / "bad.safetensors")
        with pytest.raises(UsageError, match="targets"):
            widepack.select(out, tmp_path / "bad.safetensors", target="y", of="softmax")


@pytest.mark.extended
def test_the_command_line(files: tuple[Path, Path], tmp_path: Path) -> None:
    out, val = files
    args = ["select", str(out), "--on", str(val), "--target", "y", "--of", "softmax"]
    found = CliRunner().invoke(cli, [*args, "--allowed", "0.01", "--dry-run"])
    assert found.exit_code == 0, found.output
    assert "accuracy on 400 rows: all 6 members" in found.output and "nothing was written" in found.output
    assert "cascade      stages" in found.output and "held out" in found.output
    assert "selection" not in Reader(out).manifest.provenance
    found = CliRunner().invoke(cli, [*args, "--json"])
    assert found.exit_code == 0, found.output
    document = json.loads(found.stdout)
    assert document["digest"] == Reader(out).manifest.digest and sum(document["weights"].values()) == 1
    found = CliRunner().invoke(cli, [*args[:-4], "--target", "none", "--of", "softmax"])
    assert found.exit_code == 2 and "none" in found.output


def regression(folder: Path, targets: Tensor, x: Tensor) -> tuple[Path, Path]:
    """Returns an artifact of six members with one number each, and a file with inputs and targets."""
    saved(lambda: nn.Linear(5, 1), folder, "input=float32[B,5]", members=6)
    save_file({"input": x, "y": targets}, folder / "val.safetensors")
    return folder / "e.wide", folder / "val.safetensors"


def test_the_nll_of_numbers(tmp_path: Path) -> None:
    x = torch.randn(200, 5, generator=torch.Generator().manual_seed(0))
    out, val = regression(tmp_path, torch.zeros(200, 1), x)
    y = widepack.load(out)(x).double()
    save_file({"input": x, "y": (y.mean(0) + 0.3 * torch.randn(200, 1)).float()}, val)
    truth = load_file(val)["y"].double()
    report = widepack.select(out, val, target="y", metric="nll")
    ens = widepack.load(out)
    found = ens.reduce(x, "mean", "std", weights=ens.selected_weights)
    log_density: Any = torch.distributions.Normal(found["mean"].double(), found["std"].double()).log_prob
    nll = -log_density(truth).mean()
    assert report.scores["selected"] == pytest.approx(nll.item(), rel=1e-4)
    log_density = torch.distributions.Normal(y.mean(0), y.std(0, correction=0)).log_prob
    everyone = -log_density(truth).mean()
    assert report.scores["all"] == pytest.approx(everyone.item(), rel=1e-4)
    assert "best_member" not in report.scores and nll < everyone + 1e-4
    result = CliRunner().invoke(
        cli, ["select", str(out), "--on", str(val), "--target", "y", "--metric", "nll"]
    )
    assert result.exit_code == 0 and f"best member {report.best_member} -; selected" in result.output


def test_no_selection_is_worse_than_all_members(tmp_path: Path) -> None:
    x = torch.randn(50, 5, generator=torch.Generator().manual_seed(0))
    out, val = regression(tmp_path, torch.zeros(50, 1), x)
    save_file({"input": x, "y": widepack.load(out).mean(x)}, val)
    digest = Reader(out).manifest.digest
    one = widepack.select(out, val, target="y", rounds=1, dry_run=True)
    assert one.scores["selected"] == one.scores["all"] == pytest.approx(0, abs=1e-12)
    assert one.weights == pytest.approx(dict.fromkeys(widepack.load(out).members, 1 / 6))
    few = widepack.select(out, val, target="y", most=2, dry_run=True)
    assert len(few.weights) <= 2 and few.scores["selected"] > few.scores["all"]
    refused: list[tuple[dict[str, Any], str]] = [
        ({"most": 2}, "so that nothing was written; select more with most="),
        ({"most": 2, "out": tmp_path / "few.wide"}, "so that nothing was written; select more with most="),
        ({"metric": "nll", "most": 1}, "most=1 selects one"),
        ({"metric": "nll", "of": "softmax"}, "is for numbers"),
    ]
    for options, words in refused:
        with pytest.raises(UsageError, match=words):
            widepack.select(out, val, target="y", **options)
    assert Reader(out).manifest.digest == digest and not (tmp_path / "few.wide").exists()
