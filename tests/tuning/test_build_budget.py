"""Tests the measurement of a build: a faster plan replaces the predicted one, and no other does."""

from __future__ import annotations

import contextlib
import itertools
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from loaded import files_of, seeded
from torch import Tensor, nn

import widepack
from widepack.errors import ArtifactError, UsageError
from widepack.inference.routing.padded_rows import RowPrices
from widepack.lowering.pattern_programs import PatternPrograms
from widepack.planning.plan import LOOP, Plan
from widepack.planning.request import StrategyRequest
from widepack.tuning import search, tune
from widepack.tuning.candidate_pool import PREDICTED
from widepack.tuning.choice import chosen_plans, conflicts, on_eager, programs_by_class
from widepack.tuning.search import MeasuredPlan, Search, SearchResult
from widepack.tuning.tune import build_seconds, measure_new
from widepack_artifacts.reader import Reader
from widepack_cli.main import cli

N = 32


class Net(nn.Module):
    """Many small ops: the members in a loop take many times as long as the wide plan."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y


class Dropping(Net):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.5, self.training)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    members = [seeded(Net, i) for i in range(N)]
    return [str(path) for path in files_of(tmp_path_factory.mktemp("race"), members)]


@pytest.fixture
def with_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WIDEPACK_BUDGET", "30")
    monkeypatch.setattr(tune, "backends_here", lambda device: ("eager",))


@pytest.fixture
def slow_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Predicted plans that run small ops of many members one after the other."""
    original = PatternPrograms.plans

    def loops(self: PatternPrograms, device: str, request: StrategyRequest) -> list[Plan]:
        whole = "loop" if request.whole == "auto" else request.whole
        return original(self, device, replace(request, whole=whole))

    monkeypatch.setattr(PatternPrograms, "plans", loops)


def build(checkpoints: Sequence[str], out: Path, **options: Any) -> widepack.BuildReport:
    return widepack.build(checkpoints, out, model=Net, inputs=["x=float32[B,4]"], pt2=False, **options)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [w.plan for w in Reader(path).manifest.entries["forward"].wide if w.device == "cpu"]


@pytest.mark.extended
@pytest.mark.usefixtures("with_budget", "slow_prediction")
def test_a_faster_plan_replaces_the_predicted_one(checkpoints: list[str], tmp_path: Path) -> None:
    out = tmp_path / "e.wide"
    report = build(checkpoints, out)
    assert report.measured is not None
    rows = report.measured["rows"]
    assert {(r["pattern"], r["batch"]) for r in rows} >= {("shared", 1), ("shared", 8), ("each", 1)}
    assert all(not r["chosen"].startswith(LOOP) and r["predicted"] > 1.5 for r in rows if r["batch"] == 1)
    assert report.digest == Reader(out).manifest.digest
    ens = widepack.load(out, verify="hashes")
    programs = ens.entry("forward").programs.source.planned("shared")
    assert not programs[0].plan.looped()
    assert programs[0].plan.machine
    x = torch.randn(5, 4)
    for i, path in enumerate(checkpoints):
        alone = Net()
        alone.load_state_dict(torch.load(path))
        torch.testing.assert_close(ens(x)[i], alone(x), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("with_budget")
def test_predicted_plans_that_are_fastest_stay_as_they_are(
    checkpoints: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Search, "_forms", lambda self: iter(()))
    monkeypatch.setattr(tune, "_has_prices", lambda entry, tuned: False)  # no times for `route`
    report = build(checkpoints[:2], tmp_path / "e.wide")
    assert report.measured is not None
    assert {r["chosen"] for r in report.measured["rows"]} == {PREDICTED}
    assert not any("machine" in plan for plan in rows_of(tmp_path / "e.wide"))
    assert report.digest == Reader(tmp_path / "e.wide").manifest.digest


@pytest.mark.extended
def test_the_times_of_each_are_published_where_the_prediction_is_fastest(
    checkpoints: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`route` chooses by them between a call of all members and one of each."""
    monkeypatch.setattr(tune, "chosen_plans", lambda results, *_, **__: dict.fromkeys(results, PREDICTED))
    build(checkpoints, tmp_path / "e.wide", budget=0)
    report = measure_new(tmp_path / "e.wide", seconds=30)
    assert report.kept and {r.chosen for r in report.rows} == {PREDICTED}
    measured = [p for p in rows_of(tmp_path / "e.wide") if "machine" in p]
    assert {p["pattern"] for p in measured} == {"each"}
    ens = widepack.load(tmp_path / "e.wide")
    assert RowPrices(ens.entry("forward").programs.source.stored_plans("each"), N).known
    numbers = [i % N for i in range(40)]
    x = torch.randn(40, 4)
    found = ens.route(x, member=numbers)
    for row, number in enumerate(numbers):
        torch.testing.assert_close(found[row], ens(x[row : row + 1])[number, 0], rtol=1e-4, atol=1e-5)


@pytest.mark.extended
@pytest.mark.usefixtures("with_budget")
def test_a_plan_with_wrong_answers_is_not_chosen(
    checkpoints: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow_prediction: None
) -> None:
    right = Search.is_right
    monkeypatch.setattr(Search, "is_right", lambda self, c: c.name == PREDICTED and right(self, c))
    report = build(checkpoints, tmp_path / "e.wide")
    assert report.measured is not None
    assert {r["chosen"] for r in report.measured["rows"]} == {PREDICTED}


@pytest.mark.extended
@pytest.mark.usefixtures("slow_prediction")
def test_without_time_the_predicted_plans_serve_the_rest(
    checkpoints: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(checkpoints, tmp_path / "e.wide", budget=0)
    monkeypatch.setattr(tune, "_too_long", lambda results, batch, limit: batch > 8)
    report = measure_new(tmp_path / "e.wide", seconds=30)
    assert {r.batch for r in report.rows} == {1, 8}
    assert "forward, shared, batch 32" in report.refused
    raced = [p for p in rows_of(tmp_path / "e.wide") if p.get("machine") and p["pattern"] == "shared"]
    assert raced[0]["batch"][0] == 1
    assert raced[-1]["batch"][1] is None
    assert {r["strategy"] for r in raced[0]["regions"]} == {"wide"}
    assert {r["strategy"] for r in raced[-1]["regions"]} == {"loop"}
    for before, after in itertools.pairwise(raced):
        assert before["batch"][1] + 1 == after["batch"][0]
    widepack.load(tmp_path / "e.wide")(torch.randn(40, 4))


@pytest.mark.extended(keep=1)
@pytest.mark.usefixtures("with_budget")
@pytest.mark.parametrize("options", [{"budget": 0}, {"strategy": "wide"}, {"dry_run": True}])
def test_builds_that_measure_nothing(checkpoints: list[str], tmp_path: Path, options: dict[str, Any]) -> None:
    assert build(checkpoints[:2], tmp_path / "e.wide", **options).measured is None


@pytest.mark.usefixtures("with_budget")
def test_programs_that_draw_random_numbers_are_not_measured(checkpoints: list[str], tmp_path: Path) -> None:
    inputs, out = ["x=float32[B,4]"], tmp_path / "e.wide"
    options: dict[str, Any] = {"model": Dropping, "inputs": inputs, "pt2": False, "n": 3, "dropout": "on"}
    assert widepack.build(checkpoints[:1], out, **options).measured is None
    assert measure_new(out, seconds=30).rows == ()


@pytest.mark.usefixtures("with_budget")
def test_a_measurement_that_fails_leaves_the_artifact_complete(
    checkpoints: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any, **options: Any) -> None:
        raise ArtifactError("no space is left")

    monkeypatch.setattr("widepack.building.stages.measure_new", fails)
    report = build(checkpoints[:2], tmp_path / "e.wide")
    assert report.measured == {"failed": "no space is left"}
    widepack.load(tmp_path / "e.wide")(torch.randn(3, 4))


@pytest.mark.extended
def test_the_command_line_names_the_faster_plans(
    checkpoints: list[str], tmp_path: Path, slow_prediction: None
) -> None:
    model = tmp_path / "net.py"
    model.write_text(
        "from torch import nn\n\n\ndef make() -> nn.Module:\n"
        "    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))\n"
    )
    members = [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(N)]
    words = [
        "build",
        *map(str, files_of(tmp_path, members)),
        "-o",
        str(tmp_path / "e.wide"),
        "--model",
        f"{model}:make",
    ]
    words += ["--input", "input=float32[B,4]", "--no-pt2"]
    result = CliRunner().invoke(cli, [*words, "--budget", "30", "--verbose"])
    assert result.exit_code == 0, result.output
    assert re.search(
        r"^measured +shared, batch 1 to 2: \w+, [0-9.]+ us at 1; [0-9.]+x over the predicted plan",
        result.output,
        re.M,
    )
    result = CliRunner().invoke(cli, [*words, "--force", "--budget", "0", "-v"])
    assert result.exit_code == 0, result.output
    assert "over the predicted plan" not in result.output
    assert "(predicted, not measured)" in result.output
    assert CliRunner().invoke(cli, [*words, "--force", "--budget", "-1"]).exit_code == 2


@pytest.mark.parametrize("installed", [True, False])
def test_onnxruntime_runs_the_plans_that_it_won(
    checkpoints: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    """Without the package a load runs the fastest plan on eager, which the build stored, too."""
    pytest.importorskip("onnxruntime")

    def won(calls: dict[str, Any], budget_s: float, **_: Any) -> dict[str, list[float]]:
        seconds = {"loop on onnxruntime": 1e-3, "bmm": 1.5e-3}
        return {name: [seconds.get(name, 3e-3)] * 7 for name in calls}

    monkeypatch.setattr(search, "race", won)
    monkeypatch.setattr(search, "NEAR", float("inf"))
    monkeypatch.setattr(search, "ONNX_CALL_S", 0.0)
    monkeypatch.setattr(search, "WIN", float("inf"))
    build(checkpoints[:3], tmp_path / "e.wide", budget=0)
    report = measure_new(tmp_path / "e.wide", seconds=60, batches=[4])
    assert {(r.chosen, r.backend) for r in report.rows} == {("loop on onnxruntime", "onnxruntime")}
    if not installed:
        monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with contextlib.nullcontext() if installed else pytest.warns(UserWarning, match="cannot be used here"):
        ens = widepack.load(tmp_path / "e.wide")
    assert ens.backend == ("onnxruntime" if installed else "eager")
    assert not installed or ens.plan.looped()
    x = torch.randn(5, 4)
    for i, path in enumerate(checkpoints[:3]):
        alone = Net()
        alone.load_state_dict(torch.load(path))
        torch.testing.assert_close(ens(x)[i], alone(x), rtol=1e-4, atol=1e-5)


def test_strategies_of_a_load_that_run_nothing_are_named(checkpoints: list[str], tmp_path: Path) -> None:
    build(checkpoints[:2], tmp_path / "e.wide")
    with pytest.warns(UserWarning, match="strategies=grouped runs no node"):
        widepack.load(tmp_path / "e.wide", strategies=["wide", "bmm", "grouped"])


@pytest.mark.parametrize("given", ["soon", "-1", "inf", "nan"])
def test_a_wrong_number_of_seconds_is_refused(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv("WIDEPACK_BUDGET", given)
    with pytest.raises(UsageError, match=f"WIDEPACK_BUDGET={given}: give the seconds"):
        build_seconds()
    with pytest.raises(UsageError, match="give seconds from 0"):
        widepack.build(["a.pt"], "x.wide", model=Net, inputs=["x=float32[B,4]"], budget=-1.0)


def test_the_seconds_of_a_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WIDEPACK_BUDGET")
    assert build_seconds() == 20.0
    monkeypatch.setenv("WIDEPACK_BUDGET", "2.5")
    assert build_seconds() == 2.5


def measured(noise: float = 1.0, **costs: tuple[float, dict[str, str]]) -> SearchResult:
    """The measurements of one batch: by name, the cost and the form of the weights."""
    plan = Plan("cpu", "shared", (1, None), ())
    base = MeasuredPlan(plan, None, {}, {}, 1.0)  # type: ignore[arg-type]
    plans = {n.replace("_", " "): replace(base, cost=c, forms=f) for n, (c, f) in costs.items()}
    return SearchResult(plans, {}, noise=noise)


A, B = {"conv": "packed"}, {"conv": "packed in loops"}


def test_a_small_gain_does_not_replace_the_rules() -> None:
    assert chosen_plans({1: measured(predicted=(1.04, {}), wide=(1.0, {}))}) == {1: PREDICTED}
    assert chosen_plans({1: measured(predicted=(1.2, {}), wide=(1.0, {}))}) == {1: "wide"}


def test_a_gain_within_the_noise_does_not_replace_the_prediction() -> None:
    costs: Any = {"predicted": (1.2, {}), "wide": (1.0, {})}
    assert chosen_plans({1: measured(1.15, **costs)}) == {1: "wide"}
    assert chosen_plans({1: measured(1.25, **costs)}) == {1: PREDICTED}
    costs["wide"], costs["predicted"] = (1.0, {}), (50.0, {})
    assert chosen_plans({1: measured(3.0, **costs)}) == {1: PREDICTED}


def test_small_weights_may_be_in_several_forms() -> None:
    both = {
        1: measured(predicted=(3.0, {}), streamed=(1.0, A)),
        8: measured(predicted=(3.0, {}), packed=(1.0, B)),
    }
    assert conflicts(both)
    assert chosen_plans(both, one_form=False) == {1: "streamed", 8: "packed"}
    assert sorted(chosen_plans(both).values()) != ["packed", "streamed"]


def test_a_machine_without_the_backend_has_plans_on_eager() -> None:
    results = {1: measured(predicted=(3.0, {}), other=(1.0, {"(where)": "x"}), packed=(1.5, A))}
    other = results[1].plans["other"]
    results[1].plans["other"] = replace(other, plan=replace(other.plan, backend="onnxruntime"))
    assert chosen_plans(results) == {1: "other"}
    assert chosen_plans(results, on_eager) == {1: "packed"}


def test_the_loop_replaces_all_that_is_slower() -> None:
    assert chosen_plans({1: measured(predicted=(1.01, {}), loop=(1.0, {}))}) == {1: PREDICTED}
    assert chosen_plans({1: measured(predicted=(1.03, {}), loop=(1.0, {}))}) == {1: "loop"}
    assert chosen_plans({1: measured(predicted=(1.2, {}), loop=(1.02, {}), wide=(1.0, {}))}) == {1: "loop"}


def test_one_batch_is_replaced_where_the_rules_win_at_the_others() -> None:
    costs = {b: measured(predicted=(1.0, A), loop=(1.3, {})) for b in (1, 2, 8)}
    costs[32] = measured(predicted=(1.17, A), loop=(1.0, {}))
    assert chosen_plans(costs) == {1: PREDICTED, 2: PREDICTED, 8: PREDICTED, 32: "loop"}


def test_all_batches_store_weights_in_one_form() -> None:
    both = {
        1: measured(predicted=(2.0, {}), wide=(1.0, A), loop=(1.5, {})),
        8: measured(predicted=(3.0, {}), packed=(1.0, B), loop=(1.2, {}), wide=(2.0, A)),
    }
    # plain and packed loops: 1.5 * 1.0; the wide form: 1.0 * 1.2
    assert chosen_plans(both) == {1: "wide", 8: "loop"}


def test_predicted_may_store_weights_in_their_forms() -> None:
    both = {
        1: measured(predicted=(1.0, A), loop=(1.5, {})),
        8: measured(predicted=(1.0, B), loop=(1.5, {})),
    }
    assert chosen_plans(both) == {1: PREDICTED, 8: PREDICTED}


@pytest.mark.parametrize(
    ("plans", "names", "beyond"),
    [
        ({"wide": {}, LOOP: {}, PREDICTED: A}, {1: "wide"}, "stored"),  # only the rules pack
        ({"wide": B, LOOP: {}, PREDICTED: A}, {1: "wide"}, LOOP),
        ({"wide": B, PREDICTED: {}}, {1: "wide"}, PREDICTED),
        ({"wide": B, PREDICTED: A}, {1: "wide"}, "wide"),  # nothing else has this form of the weights
        ({"wide": {}, "packed": B, LOOP: {}, PREDICTED: A}, {1: "packed", 2: "wide"}, LOOP),
        ({"wide": {}, PREDICTED: A}, {1: PREDICTED}, "stored"),
        ({LOOP: {}, PREDICTED: A}, {1: LOOP}, ""),  # the loop serves all larger batches
    ],
)
def test_which_plan_serves_batches_that_were_not_measured(
    plans: dict[str, dict[str, str]], names: dict[int, str], beyond: str
) -> None:
    plan = Plan("cpu", "shared", (1, None), ())
    result = SearchResult({n: MeasuredPlan(plan, n, {}, f, 1.0) for n, f in plans.items()}, {})  # type: ignore[arg-type]
    predicted: Any = [("stored", plan)]
    last = max(names)
    found: list[Any] = programs_by_class(
        dict.fromkeys(names, result), names, {b: (b, b) for b in names}, predicted
    )
    assert [program for program, _ in found] == [*names.values(), *([beyond] if beyond else [])]
    assert [p.batch[0] for _, p in found] == [*names, *([last + 1] if beyond else [])]
    assert found[-1][1].batch[1] is None


def test_unsteady_times_on_several_threads_are_measured_with_one(
    checkpoints: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(checkpoints, tmp_path / "e.wide", budget=0)
    threads = torch.get_num_threads()
    monkeypatch.setattr(tune, "free_threads", lambda threads: threads)
    monkeypatch.setattr(search, "noise", lambda *_: 1.5 if torch.get_num_threads() > 1 else 1.0)
    try:
        torch.set_num_threads(2)
        report = measure_new(tmp_path / "e.wide", seconds=30, batches=[4])
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert report.threads == 1
    assert report.note == tune.BUSY
    assert {row.noise for row in report.rows} == {1.0}


def test_a_build_without_onnxruntime_says_so(
    checkpoints: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(checkpoints, tmp_path / "e.wide", budget=0)
    monkeypatch.setattr(tune, "backends_here", lambda device: ("eager", "aot"))
    report = measure_new(tmp_path / "e.wide", seconds=30, batches=[4])
    assert report.note.endswith("pip install 'widepack[cpu]'")
