"""Tests the time limit of a tuning run, and the progress that it reports."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from loaded import saved
from torch import nn

import widepack
from widepack.errors import UsageError
from widepack.planning import plan_cache
from widepack.planning.plan import LOOP
from widepack.system import timing
from widepack.system.time_limit import NO_LIMIT, TimeLimit
from widepack.tuning import tune
from widepack.tuning.candidate_pool import PREDICTED, Candidate, affordable
from widepack.tuning.report import TIME_OVER
from widepack_artifacts.errors import ArtifactError
from widepack_cli.main import cli


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("limit")
    saved(mlp, folder, "input=float32[B,8]", members=3)
    return folder / "e.wide"


@pytest.fixture(autouse=True)
def plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WIDEPACK_PLANS", str(tmp_path / "plans"))
    return tmp_path / "plans"


def test_a_part_of_a_time_limit() -> None:
    assert math.isinf(NO_LIMIT.left) and not NO_LIMIT.over and NO_LIMIT.part(0.5) == NO_LIMIT
    limit = TimeLimit.of(10.0)
    assert 9 < limit.left <= 10 and 4 < limit.part(0.5).left <= 5
    assert TimeLimit.of(0.0).over
    assert limit.later(5.0, NO_LIMIT).left > 14
    assert limit.later(5.0, TimeLimit.of(12.0)).left <= 12


def test_a_limit_of_processor_time_does_not_count_what_others_compute() -> None:
    limit = TimeLimit.working(0.5)
    time.sleep(0.6)
    assert limit.left > 0 and limit.part(0.5).left <= 0.25
    time.sleep(1.0)
    assert limit.left == 0, "at most three times as long by the wall clock"
    limit = TimeLimit.working(0.05)
    end = time.perf_counter() + 30
    while not limit.over and time.perf_counter() < end:
        pass
    assert limit.over


def test_a_race_ends_at_its_time_limit_and_reports_progress() -> None:
    seen: list[tuple[int, int]] = []
    times = timing.race(
        {"a": lambda: time.sleep(0.01)}, 60.0, limit_s=0.0, report=lambda *done: seen.append(done)
    )
    assert len(times["a"]) == timing.LEAST_ROUNDS and len(seen) == timing.LEAST_ROUNDS
    assert all(0 <= done <= total == 100 for done, total in seen)


def test_slow_candidates_are_left_out_of_a_short_race() -> None:
    def candidate(name: str, seconds: float) -> Candidate:
        c = Candidate(name, None, None, {}, object(), "")  # type: ignore[arg-type]
        c.seconds = seconds
        return c

    several = [
        candidate(n, s) for n, s in ((PREDICTED, 2.0), ("a", 0.1), ("b", 0.2), ("c", 0.3), (LOOP, 3.0))
    ]
    assert [c.name for c in affordable(several, 0.0)] == [PREDICTED, "a", "b", LOOP]
    assert affordable(several, math.inf) == several


@pytest.mark.extended
def test_total_time_limits_the_call(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without time left, the fewest plans are measured, and the report gives the reason for the others."""
    monkeypatch.setattr(tune, "backends_here", lambda device: ("eager", "aot"))
    stages: list[str] = []
    begin = time.perf_counter()
    report = widepack.tune(
        artifact, batches=[2, 8], total_s=1e-3, progress=lambda stage, done, total: stages.append(stage)
    )
    assert time.perf_counter() - begin < 20, "the default is 20 s of measurement for each of four searches"
    assert len(report.rows) == 4 and all({PREDICTED, LOOP} & set(r.times_ms) for r in report.rows)
    assert any(TIME_OVER in why for r in report.rows for why in r.dropped.values())
    assert all(r.backend == "eager" for r in report.rows), "no plan is compiled without time left"
    assert stages[0] == "load" and stages[1].endswith(PREDICTED)
    widepack.load(artifact)(torch.randn(2, 8))


def test_every_stage_reports_progress(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The progress of a race is reported while it runs."""
    seen: list[tuple[str, int, int]] = []
    widepack.tune(
        artifact,
        batches=[2],
        patterns=["shared"],
        budget_s=0.05,
        backends=["eager"],
        progress=lambda *stage: seen.append(stage),
    )
    assert len({done for stage, done, _ in seen if stage.endswith(": race")}) > 1


def test_a_cache_that_cannot_be_written_is_refused_before_the_measurement(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(*_: Any, **__: Any) -> None:
        raise AssertionError("it was measured first")

    monkeypatch.setattr(tune, "tune_pattern", measured)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("WIDEPACK_PLANS", str(tmp_path / "file" / "plans"))
    with pytest.raises(UsageError, match="measured plans cannot be stored here: .*\nSet WIDEPACK_PLANS"):
        widepack.tune(artifact, batches=[2])
    result = CliRunner().invoke(cli, ["tune", str(artifact), "--batch", "2"])
    assert result.exit_code == 2 and "WIDEPACK_PLANS" in result.output

    def refuse(*_: Any, **__: Any) -> None:
        raise ArtifactError("cannot write there")

    monkeypatch.setattr(tune, "Writer", refuse)
    with pytest.raises(ArtifactError, match="cannot write there"):
        widepack.tune(artifact, batches=[2], write=True)


def test_the_check_of_the_cache_leaves_no_file(plans: Path) -> None:
    plan_cache.check_writable()
    assert plans.is_dir() and not os.listdir(plans)
