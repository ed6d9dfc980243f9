"""Tests that `bench` ends within its time, and that it refuses files that cannot be written."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from loaded import saved
from torch import nn

from widepack_bench import bench
from widepack_bench.measure import race as noise
from widepack_cli.main import cli


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("limit")
    saved(lambda: nn.Linear(4, 2), folder, "input=float32[B,4]", members=2)
    return folder / "e.wide"


def test_a_race_ends_with_its_time() -> None:
    seen: list[tuple[int, int]] = []
    found = noise.race(
        lambda: time.sleep(1e-3),
        {"loop": lambda: time.sleep(1e-3)},
        budget_s=60.0,
        limit_s=0.2,
        report=lambda *done: seen.append(done),
    )
    assert 0 < len(found.rounds) < noise.MIN_ROUNDS and seen and seen[-1][1] == 100


def test_a_race_without_time_is_reported_too() -> None:
    seen: list[tuple[int, int]] = []
    found = noise.race(
        lambda: time.sleep(1e-3),
        {"loop": lambda: time.sleep(1e-3)},
        limit_s=0.0,
        report=lambda *done: seen.append(done),
    )
    assert len(found.rounds) == 1 and seen == [(0, 100)]


@pytest.mark.extended
def test_bench_ends_with_its_time(artifact: Path) -> None:
    stages: list[str] = []
    begin = time.perf_counter()
    report = bench(
        artifact,
        batches=(1, 2),
        baselines=["loop", "compiled-member"],
        total_s=1.0,
        threads=1,
        progress=lambda stage, done, total: stages.append(stage),
    )
    assert time.perf_counter() - begin < 10, (
        "the run took longer than its time; the default is 20 s for each batch size"
    )
    assert len(report.rows) == 2, report.refused
    assert stages[0] == "load" and any("measuring" in s for s in stages)


@pytest.mark.parametrize("option", ["--json", "--html", "--trace"])
def test_a_file_that_cannot_be_written_is_refused_before_the_measurement(
    artifact: Path, tmp_path: Path, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = CliRunner().invoke(cli, ["bench", str(artifact), option, str(tmp_path / "none" / "x")])
    assert result.exit_code == 2 and "there is no folder" in result.output
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path and access(path, mode))
    result = CliRunner().invoke(cli, ["bench", str(artifact), option, str(tmp_path / "x")])
    assert result.exit_code == 2 and "cannot be written" in result.output
