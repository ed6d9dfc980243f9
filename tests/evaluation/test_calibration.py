"""Tests calibrations: they are those of the formulas in NumPy, and all calls apply them alike."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from loaded import built
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_digits
from torch import Tensor, nn

import widepack
from widepack.errors import UsageError
from widepack.evaluation.calibration_fit import fitted_factor, fitted_temperature, halves
from widepack.evaluation.evaluate import EvaluateReport
from widepack.reduction.calibration import BOUNDS
from widepack_artifacts.reader import Reader
from widepack_cli.main import cli

Ensemble = tuple[Path, Path, np.ndarray, np.ndarray]


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


@pytest.fixture(scope="module")
def overconfident(tmp_path_factory: pytest.TempPathFactory) -> Ensemble:
    """Returns an ensemble that was trained long on few digits, of which some have a wrong label."""
    folder = tmp_path_factory.mktemp("overconfident")
    data = load_digits()
    x, y = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    noisy = torch.where(torch.arange(150) % 6 == 0, (y[:150] + 1) % 10, y[:150])
    nets = []
    for i in range(4):
        torch.manual_seed(i)
        nets.append(make())
        optimizer = torch.optim.Adam(nets[-1].parameters(), lr=0.01)
        for _ in range(100):
            optimizer.zero_grad()
            loss: Any = nn.functional.cross_entropy(nets[-1](x[:150]), noisy)
            loss.backward()
            optimizer.step()
    out = built(folder, make, nets, "input=float32[B,64]")
    x, y = x[150:951].clone(), y[150:951].clone()
    save_file({"input": x, "y": y}, folder / "test.safetensors")
    with torch.no_grad():
        p = torch.stack([n.double()(x.double()).softmax(1) for n in nets]).numpy()
    return out, folder / "test.safetensors", p, y.numpy()


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[Ensemble], tuple[Path, Path]]:
    """Returns what copies an artifact, so that a test may change it."""

    def copy(ensemble: Ensemble) -> tuple[Path, Path]:
        shutil.copytree(ensemble[0], tmp_path / "e.wide")
        return tmp_path / "e.wide", ensemble[1]

    return copy


def tempered(p: np.ndarray, temperature: float) -> np.ndarray:
    powers = np.maximum(p, 1e-12) ** (1 / temperature)
    return np.asarray(powers / powers.sum(-1, keepdims=True))


def log_loss(p: np.ndarray, y: np.ndarray) -> float:
    return float(-np.log(np.maximum(p[np.arange(len(y)), y], 1e-12)).mean())


def error_of_calibration(p: np.ndarray, y: np.ndarray) -> float:
    which = np.ceil(p.max(1) * 15)  # bins are open below
    gaps = [abs((p.argmax(1) == y)[which == k].sum() - p.max(1)[which == k].sum()) for k in np.unique(which)]
    return float(sum(gaps) / len(y))


def least(function: Callable[[float], float], low: float, high: float) -> float:
    """Returns where a function of one minimum has it: the best of a grid, which becomes finer around it."""
    for _ in range(6):
        grid = np.geomspace(low, high, 60)
        k = int(np.argmin([function(float(g)) for g in grid]))
        low, high = grid[max(k - 1, 0)], grid[min(k + 1, 59)]
    return float(np.sqrt(low * high))


def calibrate(out: Path, data: Path, **options: Any) -> tuple[EvaluateReport, dict[str, Any]]:
    report = widepack.evaluate(out, data, target="y", calibrate=True, **options)
    assert report.calibration is not None
    return report, report.calibration


def test_a_temperature_is_that_of_the_least_nll(overconfident: Ensemble) -> None:
    out, data, p, y = overconfident
    _, found = calibrate(out, data, of="softmax")
    fit, others = (rows.numpy() for rows in halves(len(y)))
    assert (found["rows"], found["held_out"]) == (400, 401)
    assert sorted([*fit, *others]) == list(range(801))
    mean = p.mean(0)
    best = least(lambda t: log_loss(tempered(mean[fit], t), y[fit]), 0.01, 100)
    assert found["kind"] == "temperature" and not found["at_bound"] and found["saved"] == ""
    assert found["value"] == pytest.approx(best, rel=1e-5)
    for when, q in (("before", mean[others]), ("after", tempered(mean[others], found["value"]))):
        truth = y[others]
        expected = {
            "accuracy": (q.argmax(1) == truth).mean(),
            "nll": log_loss(q, truth),
            "brier": ((q - np.eye(10)[truth]) ** 2).sum(1).mean(),
            "ece": error_of_calibration(q, truth),
        }
        assert {k: found[when][k] for k in expected} == pytest.approx(expected, abs=1e-6)
    assert found["value"] > 1.2  # it was too sure
    assert found["after"]["ece"] < 0.6 * found["before"]["ece"]
    assert found["after"]["nll"] < found["before"]["nll"]
    assert found["after"]["accuracy"] == found["before"]["accuracy"]


def test_a_factor_of_the_variance_is_that_of_the_least_nll(diabetes: Ensemble) -> None:
    out, data, _, y = diabetes
    _, found = calibrate(out, data)
    # of the artifact's own answers, since small variances divide the rounding of float32
    members = widepack.load(out)(load_file(data)["input"]).numpy()[:, :, 0].astype(np.float64)
    fit, others = (rows.numpy() for rows in halves(len(y)))
    mean, variance = members.mean(0), members.var(0)

    def nll(factor: float, rows: np.ndarray) -> float:
        v = factor * variance[rows]
        return float((0.5 * np.log(2 * np.pi * v) + (mean[rows] - y[rows]) ** 2 / (2 * v)).mean())

    best = least(lambda f: nll(f, fit), 0.01, 1e4)
    assert found["kind"] == "variance"
    assert found["value"] == pytest.approx(best, rel=1e-5)
    assert found["before"]["nll"] == pytest.approx(nll(5 / 4, others), abs=1e-6)
    assert found["after"]["nll"] == pytest.approx(nll(found["value"], others), abs=1e-6)
    for interval, z in zip(found["after"]["intervals"], (0.67448975, 1.28155157, 1.64485363, 1.95996398)):
        half = z * np.sqrt(found["value"] * variance[others])
        assert interval["coverage"] == pytest.approx((np.abs(mean - y)[others] <= half).mean(), abs=1e-6)
        assert interval["width"] == pytest.approx((2 * half).mean(), abs=1e-6)
    assert found["after"]["nll"] < found["before"]["nll"]


def test_numbers_stay_within_the_bounds() -> None:
    p = torch.tensor([[0.6, 0.4]] * 8, dtype=torch.float64)
    right, wrong = torch.zeros(8, dtype=torch.int64), torch.ones(8, dtype=torch.int64)
    assert fitted_temperature(p, right) == pytest.approx(BOUNDS["temperature"][0])
    assert fitted_temperature(p, wrong) == pytest.approx(BOUNDS["temperature"][1])
    zero, one = torch.zeros(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    assert fitted_factor(zero, zero, one) == BOUNDS["variance"][1]  # no spread, and errors
    assert fitted_factor(zero, one, zero) == BOUNDS["variance"][0]  # spread, and no errors


FRESH = """
import sys, torch, widepack
from safetensors.torch import load_file, save_file
ens = widepack.load(sys.argv[1])
x = load_file(sys.argv[2])["input"]
names = sys.argv[4].split(",")
of = {"of": "softmax"} if "entropy" in names else {}
save_file({n: v.contiguous() for n, v in ens.reduce(x, *names, calibrated=True, **of).items()}, sys.argv[3])
"""


def in_a_fresh_process(out: Path, data: Path, names: str) -> dict[str, np.ndarray]:
    found = out.parent / "found.safetensors"
    done = subprocess.run(
        [sys.executable, "-c", FRESH, str(out), str(data), str(found), names], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return {n: v.numpy() for n, v in load_file(found).items()}


def test_another_process_applies_a_saved_temperature(
    overconfident: Ensemble, copied: Callable[[Ensemble], tuple[Path, Path]]
) -> None:
    out, data = copied(overconfident)
    p = overconfident[2]
    report, found = calibrate(out, data, of="softmax", save=True)
    manifest = Reader(out).manifest
    assert found["saved"] == manifest.digest != report.digest
    assert manifest.provenance["calibration"]["value"] == found["value"]
    figures = in_a_fresh_process(out, data, "mean,entropy,vote")
    q = tempered(p.mean(0), found["value"])
    np.testing.assert_allclose(figures["mean"], q, atol=1e-6)
    np.testing.assert_allclose(figures["entropy"], -(q * np.log(q)).sum(1), atol=5e-6)
    assert (figures["vote"] == widepack.load(out).vote(load_file(data)["input"]).numpy()).all()
    again, _ = calibrate(out, data, of="softmax")
    assert again.ensemble == report.ensemble  # evaluate itself measures the ensemble as it is


def test_another_process_applies_a_saved_factor(
    diabetes: Ensemble, copied: Callable[[Ensemble], tuple[Path, Path]]
) -> None:
    out, data = copied(diabetes)
    _, found = calibrate(out, data, save=True)
    figures = in_a_fresh_process(out, data, "mean,std,var")
    mean, variance = diabetes[2].mean(0), found["value"] * diabetes[2].var(0)
    np.testing.assert_allclose(figures["mean"][:, 0], mean, atol=1e-6)
    np.testing.assert_allclose(figures["var"][:, 0], variance, rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(figures["std"][:, 0], np.sqrt(variance), rtol=1e-3, atol=1e-6)


@pytest.fixture
def saved(
    overconfident: Ensemble, copied: Callable[[Ensemble], tuple[Path, Path]]
) -> tuple[Path, Tensor, float]:
    """Returns an artifact with a temperature, inputs, and the temperature."""
    out, data = copied(overconfident)
    _, found = calibrate(out, data, of="softmax", save=True)
    return out, load_file(data)["input"][:40], found["value"]


def test_all_ways_to_a_mean_give_the_same(saved: tuple[Path, Tensor, float]) -> None:
    out, x, value = saved
    ens = widepack.load(out)
    mean = ens.mean(x, of="softmax")
    expected = mean.clamp_min(1e-12).log().div(value).softmax(1)
    entropy = torch.special.entr(expected).sum(1)
    for model in (ens, widepack.load(out, device=["cpu", "cpu"]), widepack.load(out, strategies="loop")):
        torch.testing.assert_close(model.mean(x, of="softmax", calibrated=True), expected)
        torch.testing.assert_close(model.mean(x, of="softmax"), mean)
        found = model.reduce(x, "entropy", of="softmax", dim=1, output=0, calibrated=True)
        assert list(found) == ["entropy"]
        torch.testing.assert_close(found["entropy"], entropy)
    assert (ens.entry("forward").calibration.kind, ens.entry("forward").calibration.value) == (
        "temperature",
        value,
    )


def test_what_a_calibration_is_not_of(saved: tuple[Path, Tensor, float]) -> None:
    out, x, _ = saved
    ens = widepack.load(out)
    refused: dict[Any, str] = {
        lambda: ens.mean(
            x, calibrated=True
        ): r"for of='softmax', and this call has of=None. Give of='softmax' \(--of softmax\)",
        lambda: ens.mean(x, of="probabilities", calibrated=True): "this call has of='probabilities'",
        lambda: ens.reduce(
            x, "mean", of="softmax", dim=0, calibrated=True
        ): r"for dim=1, and this call has dim=0. Give dim=1 \(--dim 1\)",
        lambda: ens.std(x, of="softmax", calibrated=True): "std has no calibrated value by a temperature",
        lambda: ens.reduce(
            x, "mutual_information", of="softmax", calibrated=True
        ): "mutual_information has no",
        lambda: ens.mean(x, of="softmax", weights=[1, 2, 3, 4], calibrated=True): "with equal weights",
        lambda: ens.mean(x, of="softmax", members=[0, 1], calibrated=True): "of all members",
        lambda: widepack.load(out, members=[0, 1]).mean(x, of="softmax", calibrated=True): "and 2 are loaded",
        lambda: widepack.load(out, members=[1, 0, 2, 3]).mean(
            x, of="softmax", calibrated=True
        ): "their order",
    }
    for call, words in refused.items():
        with pytest.raises(UsageError, match=words):
            call()


def test_without_a_record(overconfident: Ensemble) -> None:
    ens = widepack.load(overconfident[0])
    with pytest.raises(UsageError, match="records no calibration; fit one .* --calibrate --save"):
        ens.mean(torch.randn(2, 64), of="softmax", calibrated=True)


def test_a_swap_makes_it_void(saved: tuple[Path, Tensor, float], tmp_path: Path) -> None:
    out, x, _ = saved
    torch.save(make().state_dict(), tmp_path / "new.pt")
    for ens in (widepack.load(out), widepack.load(out, device=["cpu", "cpu"])):
        ens.mean(x, of="softmax", calibrated=True)
        report = ens.swap(1, tmp_path / "new.pt")
        assert report.uncalibrated and "the calibration no longer counts" in str(report)
        with pytest.raises(UsageError, match="a member was swapped in this process"):
            ens.mean(x, of="softmax", calibrated=True)
        assert ens.mean(x, of="softmax").isfinite().all()


def test_revisions_remove_it_and_say_so(saved: tuple[Path, Tensor, float], tmp_path: Path) -> None:
    out, x, _ = saved
    new = str(tmp_path / "new.pt")
    torch.save(make().state_dict(), new)
    for did, args in {
        "update": ["--member", "1", new],
        "append": [new, "--names", "e"],
        "drop": ["1"],
    }.items():
        target = tmp_path / f"{did}.wide"
        result = CliRunner().invoke(cli, [did, str(out), *args, "-o", str(target)])
        assert result.exit_code == 0, result.output
        assert "removed      the calibration, which was of the members before" in result.output
        assert "calibration" not in Reader(target).manifest.provenance
    report = widepack.drop(target, [0])
    assert not report.uncalibrated  # it had none any more
    with pytest.raises(UsageError, match="records no calibration"):
        widepack.load(target).mean(x, of="softmax", calibrated=True)


def test_a_selection_keeps_it(saved: tuple[Path, Tensor, float], overconfident: Ensemble) -> None:
    out, x, _ = saved
    before = widepack.load(out).mean(x, of="softmax", calibrated=True)
    widepack.select(out, overconfident[1], target="y", of="softmax")
    torch.testing.assert_close(widepack.load(out).mean(x, of="softmax", calibrated=True), before)


class Pixels(nn.Module):
    """Answers scores of classes in dim 0, before the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:  # [B, 6, 4] -> [3, B, 6]
        y: Tensor = self.head(x)
        return y.movedim(-1, 0)


def test_classes_before_the_rows(tmp_path: Path) -> None:
    nets = [Pixels() for _ in range(3)]
    out = built(tmp_path, Pixels, nets, "x=float32[B,6,4]")
    x = torch.randn(20, 6, 4)
    save_file({"x": x, "y": torch.randint(3, (20, 6))}, tmp_path / "d.safetensors")
    report, found = calibrate(out, tmp_path / "d.safetensors", of="softmax", dim=0, save=True)
    p = torch.stack([n(x).softmax(0) for n in nets]).mean(0)
    y = load_file(tmp_path / "d.safetensors")["y"]
    nll = -p.gather(0, y.unsqueeze(0)).log().mean()
    assert report.ensemble["nll"] == pytest.approx(nll.item(), abs=1e-6)
    expected = (p.log() / found["value"]).softmax(0)
    ens = widepack.load(out)
    torch.testing.assert_close(ens.reduce(x, "mean", of="softmax", dim=0, calibrated=True)["mean"], expected)
    torch.testing.assert_close(ens.reduce(x, "mean", of="softmax", dim=-3, calibrated=True)["mean"], expected)
    with pytest.raises(UsageError, match="dim=1 is no dim of classes"):
        widepack.evaluate(out, tmp_path / "d.safetensors", target="y", of="softmax", dim=1)


def run(*args: Any) -> tuple[int, str]:
    result = CliRunner().invoke(cli, ["evaluate", *map(str, args)])
    assert "Traceback" not in result.output
    return result.exit_code, result.output


def test_the_command(overconfident: Ensemble, copied: Callable[[Ensemble], tuple[Path, Path]]) -> None:
    out, data = copied(overconfident)
    digest = Reader(out).manifest.digest
    args = (out, "--on", data, "--target", "y", "--of", "softmax")
    code, text = run(*args, "--calibrate")
    assert (
        code == 0 and "temperature of the mean: " in text and "fitted on 400 rows; of the other 401" in text
    )
    assert "not recorded; --save does it" in text and Reader(out).manifest.digest == digest
    code, text = run(*args, "--calibrate", "--save", "--json")
    document = json.loads(text[text.index("{") :])
    assert code == 0 and document["calibration"]["saved"] == Reader(out).manifest.digest != digest
    code, text = run(*args, "--calibrate", "--save")
    assert code == 0 and f"wrote {out}, now {Reader(out).manifest.digest}" in text
    code, text = run(*args, "--save")
    assert code == 2 and "give calibrate=True (--calibrate) too" in text


def test_a_calibration_that_makes_answers_worse(
    overconfident: Ensemble, copied: Callable[[Ensemble], tuple[Path, Path]], tmp_path: Path
) -> None:
    """The targets of the rows to fit on are those that the ensemble chooses, and the others are not."""
    out, data = copied(overconfident)
    chosen = torch.from_numpy(overconfident[2].mean(0)[:60].argmax(1))
    wrong = torch.zeros(60, dtype=torch.int64).index_fill(0, halves(60)[1], 1)
    save_file(
        {"input": load_file(data)["input"][:60].clone(), "y": (chosen + wrong) % 10},
        tmp_path / "bad.safetensors",
    )
    args = ("--target", "y", "--of", "softmax", "--calibrate", "--save")
    code, text = run(out, "--on", tmp_path / "bad.safetensors", *args)
    assert code == 0 and "it does not improve the nll of the other rows" in text
    assert not Reader(out).manifest.provenance["calibration"]["improves"]
    shown = CliRunner().invoke(cli, ["inspect", str(out)]).output
    assert re.search("calibration: kind temperature, value [0-9.]+, output output, of softmax\n", shown)
    code, text = run(out, "--on", data, *args)
    assert code == 0 and "does not improve" not in text


def test_the_command_of_numbers(diabetes: Ensemble, tmp_path: Path) -> None:
    out, data, *_ = diabetes
    code, text = run(out, "--on", data, "--target", "y", "--calibrate")
    assert code == 0 and "factor of the variance: " in text and "95% intervals contain" in text
    rows = {name: value[:1].clone() for name, value in load_file(data).items()}
    save_file(rows, tmp_path / "one.safetensors")
    code, text = run(out, "--on", tmp_path / "one.safetensors", "--target", "y", "--calibrate")
    assert code == 2 and "give two at least" in text
    one = built(tmp_path, lambda: nn.Linear(10, 1), [nn.Linear(10, 1)], "input=float32[B,10]")
    code, text = run(one, "--on", data, "--target", "y", "--calibrate")
    assert code == 2 and "one member has no variance to calibrate" in text


def test_predict_applies_it(saved: tuple[Path, Tensor, float], tmp_path: Path) -> None:
    out, x, _ = saved
    ens = widepack.load(out)
    save_file({"input": x}, tmp_path / "in.safetensors")
    args = ["predict", str(out), str(tmp_path / "in.safetensors"), "-o", str(tmp_path / "out.safetensors")]

    def predicted(*words: str) -> tuple[int, str]:
        result = CliRunner().invoke(cli, [*args, *words])
        assert "Traceback" not in result.output
        return result.exit_code, result.output

    code, text = predicted(
        "--reduce", "mean,entropy,vote", "--of", "softmax", "--batch", "16", "--calibrated"
    )
    assert code == 0, text
    found = load_file(tmp_path / "out.safetensors")
    expected = ens.reduce(x, "mean", "entropy", "vote", of="softmax", calibrated=True)
    assert {n.partition(".")[2] for n in found} == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[f"output.{name}"], value)
    (tmp_path / "out.safetensors").unlink()
    for words, message in {
        ("--calibrated",): "calibrated=True is about statistics",
        ("--reduce", "mean", "--calibrated"): "Give of='softmax' (--of softmax)",
        ("--reduce", "std", "--of", "softmax", "--calibrated"): "std has no calibrated value",
    }.items():
        code, text = predicted(*words)
        assert code == 2 and message in " ".join(text.split()), text
        assert not (tmp_path / "out.safetensors").exists()
    widepack.drop(out, [0])
    code, text = predicted("--reduce", "mean", "--of", "softmax", "--calibrated")
    assert code == 2 and "this artifact records no calibration" in " ".join(text.split())
