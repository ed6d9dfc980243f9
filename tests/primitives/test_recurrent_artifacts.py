"""Tests artifacts with recurrent layers: a new process reads them, and the report lists their strategies."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from loaded import files_of
from recurrent_cases import rand
from small_builds import QUICK
from torch import Tensor, nn

import widepack


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 5, 2, batch_first=True, bidirectional=True)
        self.gru, self.rnn = nn.GRU(10, 4), nn.RNN(4, 3, nonlinearity="relu", bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.rnn(self.gru(self.lstm(x)[0].transpose(0, 1))[0])[0]
        return y.transpose(0, 1)


READER = """
import sys, torch, widepack
ens = widepack.load(sys.argv[1], strategies=sys.argv[3].split(",") if sys.argv[3] else None)
torch.save(ens(torch.load(sys.argv[2])), sys.argv[4])
"""


@pytest.mark.extended
@pytest.mark.parametrize("strategies", ["", "wide,fused"])
def test_an_artifact_is_read_by_a_new_process(
    strategies: str, tmp_path: Path, recurrent_artifact: Path
) -> None:
    x, found = rand(9, 3, 7, 6), tmp_path / "found.pt"
    torch.save(x, tmp_path / "x.pt")
    subprocess.run(
        [
            sys.executable,
            "-c",
            READER,
            str(recurrent_artifact),
            str(tmp_path / "x.pt"),
            strategies,
            str(found),
        ],
        check=True,
        capture_output=True,
    )
    with torch.inference_mode():
        want = torch.stack([tagger(i)(x) for i in range(3)])
    torch.testing.assert_close(torch.load(found), want, rtol=0, atol=1e-6)


def test_the_report_lists_the_wide_strategies(recurrent_artifact: Path) -> None:
    ens = widepack.load(recurrent_artifact)
    for pattern in ("shared", "each"):
        for plan in ens.plans(pattern):
            assert {plan.choices[n].strategy for n in ("lstm", "gru", "rnn_relu") if n in plan.choices} <= {
                "packed",
                "fused",
            }


def tagger(i: int) -> nn.Module:
    torch.manual_seed(i)
    return Tagger().eval()


@pytest.fixture(scope="module")
def recurrent_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recurrent")
    files = files_of(folder, map(tagger, range(3)))
    how = {**QUICK, "strategy": ["wide", "packed"]}
    report = widepack.build(files, folder / "e.wide", model=Tagger, inputs="x=float32[B,7,6]", **how)
    assert report.wide_share == 1.0
    assert report.strategies["fused"] == 2 and report.strategies["packed"] == 1
    return folder / "e.wide"
