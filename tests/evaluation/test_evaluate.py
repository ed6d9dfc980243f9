"""Tests `widepack.evaluate`: its figures are those of the formulas, written out in NumPy."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from loaded import built
from safetensors.torch import load_file, save_file
from sklearn.metrics import brier_score_loss, log_loss, roc_auc_score
from torch import Tensor, nn

import widepack
from widepack.errors import InputError, UsageError
from widepack.evaluation.ranks import auroc, rank_correlation, ranks
from widepack_cli.main import cli

N = 5  # members of the fixtures


def calibration_error(p: np.ndarray, y: np.ndarray) -> float:
    confidence, right = p.max(1), p.argmax(1) == y
    total = 0.0
    for least, most in zip(np.arange(15) / 15, np.arange(1, 16) / 15):
        inside = (confidence > least) & (confidence <= most)
        if inside.any():
            total += inside.sum() * abs(right[inside].mean() - confidence[inside].mean())
    return total / len(y)


def test_figures_of_classes(digits: tuple[Path, Path, np.ndarray, np.ndarray]) -> None:
    out, data, p, y = digits
    report = widepack.evaluate(out, data, target="y", of="softmax")
    assert (report.kind, report.rows, len(report.members)) == ("classes", 600, N)
    for one, found in zip([*p, p.mean(0)], [*report.members.values(), report.ensemble], strict=True):
        expected = {
            "accuracy": (one.argmax(1) == y).mean(),
            "nll": -np.log(one[np.arange(len(y)), y]).mean(),
            "brier": ((one - np.eye(10)[y]) ** 2).sum(1).mean(),
            "ece": calibration_error(one, y),
            "error_auroc": roc_auc_score(one.argmax(1) != y, 1 - one.max(1)),
        }
        assert found == pytest.approx(expected, abs=1e-6)
        assert expected["nll"] == pytest.approx(log_loss(y, one))
        assert expected["brier"] == pytest.approx(brier_score_loss(y, one, scale_by_half=False))
    choices = p.argmax(2)
    pairs = [(a, b) for a in range(N) for b in range(a)]
    assert report.disagreement == pytest.approx(np.mean([choices[a] != choices[b] for a, b in pairs]))
    assert sum(b["count"] for b in report.reliability) == 600
    assert [row["members"] for row in report.curve] == [1, 2, 4, 5]
    assert report.curve[0]["nll"] == pytest.approx(np.mean([m["nll"] for m in report.members.values()]))
    assert report.curve[-1]["nll"] == pytest.approx(report.ensemble["nll"])


def test_figures_of_numbers(diabetes: tuple[Path, Path, np.ndarray, np.ndarray]) -> None:
    out, data, found, y = diabetes
    report = widepack.evaluate(out, data, target="y")
    for one, figures in zip(found, report.members.values(), strict=True):
        expected = {"rmse": math.sqrt(((one - y) ** 2).mean()), "mae": np.abs(one - y).mean()}
        assert figures == pytest.approx(expected, abs=1e-6)
    mean = found.mean(0)
    assert report.ensemble["rmse"] == pytest.approx(math.sqrt(((mean - y) ** 2).mean()), abs=1e-6)
    # small variances divide the rounding of float32, so the others are of the artifact's own answers
    answers = widepack.load(out)(load_file(data)["input"]).numpy()[:, :, 0].astype(np.float64)
    mean, variance = answers.mean(0), answers.var(0, ddof=1)
    nll = (0.5 * np.log(2 * np.pi * variance) + (mean - y) ** 2 / (2 * variance)).mean()
    assert report.ensemble["nll"] == pytest.approx(nll, abs=1e-6)
    for interval, z in zip(report.intervals, (0.67448975, 1.28155157, 1.64485363, 1.95996398), strict=True):
        half = z * np.sqrt(variance)
        assert interval["coverage"] == pytest.approx((np.abs(mean - y) <= half).mean(), abs=1e-6)
        assert interval["width"] == pytest.approx((2 * half).mean(), abs=1e-6)
    assert report.disagreement == pytest.approx(np.sqrt(variance).mean(), abs=1e-6)
    assert -1 <= (report.ensemble["error_rank"] or 0) <= 1


@given(st.lists(st.integers(0, 5), min_size=2, max_size=30), st.integers(0, 2**16))
def test_ranks_and_what_is_made_of_them(values: list[int], seed: int) -> None:
    x = torch.tensor(values, dtype=torch.float64)
    below = (x.unsqueeze(1) > x).sum(1) + ((x.unsqueeze(1) == x).sum(1).double() + 1) / 2
    torch.testing.assert_close(ranks(x), below)
    positive = torch.rand(len(values), generator=torch.Generator().manual_seed(seed)) > 0.5
    pairs = [(a > b) + 0.5 * (a == b) for a in x[positive].tolist() for b in x[~positive].tolist()]
    found = auroc(x, positive)
    assert found == (pytest.approx(sum(pairs) / len(pairs)) if pairs else None)
    same = rank_correlation(x, 2 * x + 1)
    assert same == (pytest.approx(1.0) if len(set(values)) > 1 else None)


def run(*args: Any) -> tuple[int, str]:
    result = CliRunner().invoke(cli, ["evaluate", *map(str, args)])
    return result.exit_code, result.output


def test_the_command(digits: tuple[Path, Path, np.ndarray, np.ndarray], tmp_path: Path) -> None:
    out, data, *_ = digits
    code, text = run(out, "--on", data, "--target", "y", "--of", "softmax")
    assert code == 0 and "ensemble" in text and "error_auroc" in text and "confidence above" in text
    code, text = run(out, "--on", data, "--target", "y", "--of", "softmax", "--json")
    values = json.loads(text[text.index("{") :])
    assert code == 0 and values["kind"] == "classes" and len(values["members"]) == N
    code, text = run(out, "--on", data, "--target", "z", "--of", "softmax")
    assert code != 0 and "z" in text and "Traceback" not in text


def test_the_command_of_numbers(diabetes: tuple[Path, Path, np.ndarray, np.ndarray]) -> None:
    out, data, *_ = diabetes
    code, text = run(out, "--on", data, "--target", "y")
    assert code == 0 and "95% intervals" in text and "rmse of ensembles" in text


def test_what_is_refused(digits: tuple[Path, Path, np.ndarray, np.ndarray], tmp_path: Path) -> None:
    out, data, *_ = digits
    with pytest.raises(UsageError, match="no probabilities: those of row 0"):
        widepack.evaluate(out, data, target="y", of="probabilities")
    with pytest.raises(UsageError, match=r"the answers \[.*\]\.\nIf .* give of='softmax' \(--of softmax\)"):
        widepack.evaluate(out, data, target="y")
    with pytest.raises(UsageError, match="known: softmax, probabilities"):
        widepack.evaluate(out, data, target="y", of="logits")
    x = torch.ones(3, 64)
    x[1, 4] = math.inf
    save_file({"input": x, "y": torch.zeros(3, dtype=torch.int64)}, tmp_path / "nan.safetensors")
    with pytest.raises(InputError, match="answers NaN or infinity in 1 of 3 rows, first in row 1"):
        widepack.evaluate(out, tmp_path / "nan.safetensors", target="y", of="softmax")


class Squeezed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(x)
        return y.squeeze(1)


def test_members_that_answer_one_number_a_row(tmp_path: Path) -> None:
    nets = [Squeezed() for _ in range(3)]
    out = built(tmp_path, Squeezed, nets, "x=float32[B,3]")
    x, y = torch.randn(9, 3), torch.randn(9)
    save_file({"x": x, "y": y}, tmp_path / "t.safetensors")
    report = widepack.evaluate(out, tmp_path / "t.safetensors", target="y")
    for module, found in zip(nets, report.members.values(), strict=True):
        assert found["rmse"] == pytest.approx((module(x) - y).square().mean().sqrt().item(), abs=1e-6)


def test_one_member_has_no_spread(tmp_path: Path) -> None:
    out = built(tmp_path, lambda: nn.Linear(3, 1), [nn.Linear(3, 1)], "input=float32[B,3]")
    save_file({"input": torch.randn(9, 3), "y": torch.randn(9, 1)}, tmp_path / "t.safetensors")
    report = widepack.evaluate(out, tmp_path / "t.safetensors", target="y")
    assert report.intervals == [] and report.ensemble["nll"] is None and report.disagreement == 0.0
