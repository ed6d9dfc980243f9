"""Tests `advise`: outcomes of moves, parts of a call, what is written, and that nothing else changes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from support import Artifacts

import widepack
from widepack.errors import UsageError
from widepack_artifacts.reader import Reader
from widepack_bench.advice import advise, plan_moves, run, trial
from widepack_bench.advice.move import Move, NotPossible, Opened
from widepack_bench.advice.report import GAIN, Advice, MeasuredMove
from widepack_bench.advice.subject import AdvisedArtifact, Workload
from widepack_bench.advice.trial import tried
from widepack_bench.errors import BenchError
from widepack_bench.measure.race import Interval
from widepack_cli.main import cli


def move(call: Any, answers: Any, seconds: float | None = None, **changed: Any) -> Move:
    def open_(_: AdvisedArtifact) -> Opened:
        return Opened(call=call, answers=answers, seconds=seconds)

    values: dict[str, Any] = {"name": "try", "how": "do it", "predict": lambda _: seconds, "open": open_}
    return Move(**{**values, **changed})


def slow(answers: Any, seconds: float) -> Any:
    def call() -> Any:
        time.sleep(seconds)
        return answers

    return call


# ---------------------------------------------------------------- outcomes


@pytest.mark.extended
def test_a_faster_call_with_right_answers_is_recommended(subject: AdvisedArtifact) -> None:
    answers = subject.expected
    row = tried(subject, move(lambda: answers, lambda: answers), 3, 0.2)
    assert row.gain is not None and row.gain.value >= GAIN
    assert row.number == 3 and row.outcome in ("recommended", "noisy")  # noisy on a busy machine


@pytest.mark.extended
def test_a_slower_call_is_rejected(subject: AdvisedArtifact) -> None:
    row = tried(subject, move(slow(subject.expected, 0.02), lambda: subject.expected), 1, 0.2)
    assert row.outcome == "rejected"
    assert row.gain is not None and row.gain.value < 0.5


@pytest.mark.extended
def test_a_faster_call_with_other_answers_is_wrong(subject: AdvisedArtifact) -> None:
    wrong = subject.expected + 0.5
    row = tried(subject, move(lambda: wrong, lambda: wrong), 1, 0.2)
    assert row.outcome == "wrong" and "rms error" in row.reason and row.gain is None


@pytest.mark.extended
def test_a_move_that_is_predicted_to_be_slow_is_not_tried(subject: AdvisedArtifact) -> None:
    def fail() -> Any:
        raise AssertionError("it was tried")

    row = tried(subject, move(fail, fail, 100.0), 1, 0.2)
    assert row.outcome == "not tried" and row.predicted is not None and row.predicted < 0.1


@pytest.mark.parametrize("error", [NotPossible, UsageError, RuntimeError])
def test_a_move_that_fails_is_a_row_with_its_reason(subject: AdvisedArtifact, error: type[Exception]) -> None:
    def open_(_: AdvisedArtifact) -> Opened:
        raise error("no reason")

    row = tried(subject, move(None, None, open=open_), 1, 0.2)
    assert row.outcome == "not possible" and "no reason" in row.reason


def test_a_gain_that_a_second_run_does_not_confirm_is_rejected(
    subject: AdvisedArtifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = iter([Interval(1.4, 1.2, 1.6), Interval(1.2, 0.9, 1.5)])
    monkeypatch.setattr(trial, "_timed", lambda *_: trial.Timed(next(runs), True, 1.0))
    row = tried(subject, move(lambda: None, lambda: subject.expected), 1, 0.2)
    assert row.outcome == "rejected" and "second run" in row.reason


def test_a_noisy_run_recommends_nothing(subject: AdvisedArtifact, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_timed", lambda *_: trial.Timed(Interval(3.0, 2.0, 4.0), False, 1.0))
    assert tried(subject, move(lambda: None, lambda: subject.expected), 1, 0.2).outcome == "noisy"


@pytest.mark.extended
def test_threads_are_set_for_each_call_and_restored(subject: AdvisedArtifact) -> None:
    seen: list[int] = []

    def call() -> Any:
        seen.append(torch.get_num_threads())
        return subject.expected

    def open_(_: AdvisedArtifact) -> Opened:
        return Opened(call=call, answers=lambda: subject.expected, seconds=None, threads=2)

    tried(subject, move(None, None, open=open_), 1, 0.1)
    assert set(seen) == {2} and torch.get_num_threads() == 1


def test_variables_are_measured_in_processes_of_their_own(
    subject: AdvisedArtifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[dict[str, str]] = []

    def seconds(work: Workload, environment: dict[str, str], limit_s: float) -> float:
        given.append(environment)
        return 1.0 if environment else 2.0

    monkeypatch.setattr(trial, "seconds_apart", seconds)
    row = tried(subject, move(None, None, open=None, environment={"A": "1"}), 1, 0.1)
    assert row.outcome == "recommended" and row.gain is not None and row.gain.value == 2.0
    assert given == [{}, {"A": "1"}] * trial.PAIRS


@pytest.mark.extended
def test_a_process_times_the_artifact(subject: AdvisedArtifact) -> None:
    from widepack_bench.advice.environment_moves import seconds_apart

    assert 0 < seconds_apart(subject.work, {"MALLOC_MMAP_MAX_": "0"}, 120.0) < 1
    lost = Workload(path=Path("/nothing.wide"), entry="", pattern="shared", batch=8, threads=1)
    with pytest.raises(BenchError, match=r"nothing\.wide"):
        seconds_apart(lost, {}, 120.0)


# ---------------------------------------------------------------- the whole


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_moves, "backends_here", lambda _: ("eager",))
    monkeypatch.setattr(plan_moves, "TUNE_S", 0.2)
    monkeypatch.setattr(run, "RUN_S", 0.2)
    monkeypatch.setattr(run, "LADDER_S", 0.2)
    monkeypatch.setattr(run, "compile_moves", lambda *_: iter(()))


@pytest.mark.extended
def test_advice_has_every_move_and_leaves_the_artifact_alone(artifacts: Artifacts, quick: None) -> None:
    path = artifacts("mlp")
    before = Reader(path).manifest.digest
    found = advise(path, batch=8, threads=1, dtypes=["bf16"])
    assert Reader(path).manifest.digest == before
    names = [m.name for m in found.moves]
    assert names[:2] == ["plan", "2 calls of 4 rows"] and "bf16" in names
    assert not any("thread" in n for n in names)  # they were given
    assert [m.number for m in found.moves] == list(range(1, len(names) + 1))
    assert {"now", run.MEMBERS, "level loop"} <= set(found.ladder)
    assert set(found.predicted_ms) == {"now", run.MEMBERS}
    document = json.loads(json.dumps(found.to_json()))
    assert document["format"] == "widepack.advice/1" and document["moves"][0]["name"] == "plan"
    table = found.table()
    assert all(n in table for n in names)


@pytest.mark.extended
def test_an_applied_move_writes_an_artifact(
    artifacts: Artifacts, tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def moves(subject: AdvisedArtifact, *_: Any) -> Iterator[Move]:
        answers = subject.expected
        plan_moves.copied(subject.work.path, subject.folder / "made.wide")
        yield move(lambda: answers, lambda: answers, artifact="made.wide", name="fast")
        yield move(slow(answers, 0.02), lambda: answers, artifact="made.wide", name="slow")
        yield move(lambda: answers, lambda: answers, name="an argument")

    def timed(_: AdvisedArtifact, opened: Opened, budget_s: float) -> trial.Timed:
        begin = time.perf_counter()
        opened.call()
        gain = 0.5 if time.perf_counter() - begin > 0.01 else 2.0
        return trial.Timed(Interval(gain, gain, gain), True, 1.0)

    monkeypatch.setattr(trial, "_timed", timed)
    monkeypatch.setattr(run, "moves_of", moves)
    path = artifacts("mlp")
    found = advise(path, threads=1, only="fast", out=tmp_path / "better.wide")
    assert [m.name for m in found.recommended] == ["fast"] and not found.ladder
    assert len(widepack.load(tmp_path / "better.wide").members) == found.members
    assert not advise(path, threads=1, only="2", out=tmp_path / "none.wide").recommended
    assert not (tmp_path / "none.wide").exists()
    with pytest.raises(UsageError, match=r"move 3 \(an argument\) writes no artifact. Do it by: do it"):
        advise(path, threads=1, only="3", out=tmp_path / "none.wide")
    with pytest.raises(UsageError, match=r"there is no move 'plan'.*1 \(fast\), 2 \(slow\)"):
        advise(path, threads=1, only="plan")


@pytest.mark.extended
def test_moves_after_the_time_limit_are_not_tried(artifacts: Artifacts, quick: None) -> None:
    found = advise(artifacts("mlp"), threads=1, total_s=0.01)
    assert found.moves and {m.outcome for m in found.moves} == {"out of time"}
    assert all("time limit" in m.reason for m in found.moves)


def test_arguments_are_checked(artifacts: Artifacts, tmp_path: Path) -> None:
    path = artifacts("mlp")
    with pytest.raises(UsageError, match="pattern 'both'"):
        advise(path, pattern="both")
    with pytest.raises(UsageError, match="at least one row"):
        advise(path, batch=0)
    with pytest.raises(UsageError, match="name it with `only`"):
        advise(path, out=tmp_path / "x.wide")
    with pytest.raises(UsageError, match="exists; name a new folder"):
        advise(path, only="plan", out=tmp_path)
    with pytest.raises(UsageError, match="nothing can be written into"):
        advise(path, only="plan", out=tmp_path / "none" / "x.wide")
    with pytest.raises(UsageError, match="dtype"):
        advise(path, dtypes=["foo"])
    with pytest.raises(UsageError, match=r"this process may use \d+ processors"):
        advise(path, threads=100_000)
    with pytest.raises(UsageError, match="positive number of seconds"):
        advise(path, total_s=float("nan"))


def test_recommended_moves_come_first_by_gain() -> None:
    def row(number: int, gain: float, outcome: Any) -> MeasuredMove:
        found = MeasuredMove(number=number, name=f"m{number}", how=f"how {number}", predicted=1.0)
        return replace(found, gain=Interval(gain, gain, gain), ms=1.0, outcome=outcome)

    moves = (row(1, 1.2, "recommended"), row(2, 3.0, "rejected"), row(3, 1.5, "recommended"))
    advice = Advice(
        path="e.wide",
        entry="forward",
        pattern="shared",
        batch=1,
        members=2,
        threads=1,
        ms=1.0,
        plan={},
        ladder={},
        predicted_ms={},
        moves=moves,
    )
    assert [m.number for m in advice.recommended] == [3, 1]
    assert advice.table().splitlines()[-2:] == [
        "recommended, 1.50 [1.50, 1.50]x as fast: how 3",
        "recommended, 1.20 [1.20, 1.20]x as fast: how 1",
    ]


# ---------------------------------------------------------------- the command


def command(*words: str | Path) -> Any:
    return CliRunner().invoke(cli, ["advise", *map(str, words)], prog_name="widepack")


@pytest.mark.extended
def test_the_command_prints_the_table_or_json(artifacts: Artifacts, quick: None) -> None:
    result = command(artifacts("mlp"), "--threads", "1", "--batch", "4")
    assert result.exit_code == 0, result.output
    assert "members in turn" in result.stdout and "predicted" in result.stdout
    result = command(artifacts("mlp"), "--threads", "1", "--batch", "4", "--json")
    assert json.loads(result.stdout)["batch"] == 4


def test_the_command_refuses_options_that_do_not_go_together(
    artifacts: Artifacts, tmp_path: Path, quick: None
) -> None:
    path = artifacts("mlp")
    for words, message in (
        (["--apply", "plan"], "--apply and -o go together"),
        (["-o", tmp_path / "x.wide"], "--apply and -o go together"),
        (["--apply", "plan", "-o", tmp_path], "exists; name a new folder"),
        (["--model-arg", "a=1"], "give --model, too"),
    ):
        result = command(path, *words)
        assert result.exit_code == 2 and message in result.stderr, result.output
    result = command(path, "--threads", "1", "--apply", "nothing", "-o", tmp_path / "x.wide")
    assert result.exit_code == 2 and "there is no move 'nothing'" in result.stderr
    assert command(tmp_path / "none.wide").exit_code != 0


def test_an_artifact_is_not_written_for_a_move_that_is_not_recommended(
    artifacts: Artifacts, tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rejected(subject: AdvisedArtifact, tried_move: Move, number: int, budget_s: float) -> MeasuredMove:
        row = MeasuredMove(number=number, name=tried_move.name, how=tried_move.how, predicted=1.0)
        return replace(row, outcome="rejected", reason="less than 1.05 times as fast")

    monkeypatch.setattr(run, "tried", rejected)
    result = command(artifacts("mlp"), "--threads", "1", "--apply", "plan", "-o", tmp_path / "x.wide")
    assert result.exit_code == 1 and "was not written" in result.stderr
    assert not (tmp_path / "x.wide").exists()
