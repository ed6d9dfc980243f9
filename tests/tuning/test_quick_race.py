"""Tests the race of a build: a plan that is faster replaces that by rules of thumb, and no other does."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from loaded import files_of, seeded
from torch import Tensor, nn

import widepack
from widepack.errors import ArtifactError, UsageError
from widepack.inference.routing.padded_rows import RowPrices
from widepack.planning import heuristics
from widepack.planning.plan import Plan
from widepack.tuning import quick_race
from widepack.tuning.candidate_pool import LOOP, RULES
from widepack.tuning.quick_race import (
    PACKED,
    QuickSearch,
    RacedBatch,
    RacedPlan,
    chosen_plans,
    programs_by_class,
    race_plans,
    race_seconds,
)
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
def with_race(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WIDEPACK_RACE_S", "30")


@pytest.fixture
def slow_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules of thumb that run small ops of many members one after the other."""

    def loops(regions: Any, members: Any, sizes: Any, batch: Any, choices: Any, training: bool) -> list[Plan]:
        return [regions.loop("a wrong rule", choices)]

    monkeypatch.setattr(heuristics, "cpu_plans", loops)


def build(checkpoints: Sequence[str], out: Path, **options: Any) -> widepack.BuildReport:
    return widepack.build(checkpoints, out, model=Net, inputs=["x=float32[B,4]"], pt2=False, **options)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [w.plan for w in Reader(path).manifest.entries["forward"].wide if w.device == "cpu"]


@pytest.mark.extended
@pytest.mark.usefixtures("with_race", "slow_rules")
def test_a_faster_plan_replaces_that_by_rules_of_thumb(checkpoints: list[str], tmp_path: Path) -> None:
    out = tmp_path / "e.wide"
    report = build(checkpoints, out)
    assert report.raced is not None
    rows = report.raced["rows"]
    assert {(r["pattern"], r["batch"]) for r in rows} >= {("shared", 1), ("shared", 2), ("each", 1)}
    assert all(r["chosen"] == "wide" and r["rules"] > 1.5 for r in rows if r["batch"] <= 2)
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


@pytest.mark.usefixtures("with_race")
def test_rules_of_thumb_that_are_fastest_stay_as_they_are(
    checkpoints: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(QuickSearch, "_plans", lambda self: iter(()))
    report = build(checkpoints[:2], tmp_path / "e.wide")
    assert report.raced is not None
    assert {r["chosen"] for r in report.raced["rows"]} == {RULES}
    assert not any("machine" in plan for plan in rows_of(tmp_path / "e.wide"))
    assert report.digest == Reader(tmp_path / "e.wide").manifest.digest


@pytest.mark.extended
def test_the_times_of_each_are_published_where_the_rules_are_fastest(
    checkpoints: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`route` chooses by them between a call of all members and one of each."""
    monkeypatch.setattr(quick_race, "chosen_plans", lambda raced: dict.fromkeys(raced, RULES))
    build(checkpoints, tmp_path / "e.wide", race=False)
    report = race_plans(tmp_path / "e.wide", seconds=30)
    assert report.kept and {r.chosen for r in report.rows} == {RULES}
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
@pytest.mark.usefixtures("with_race")
def test_a_plan_with_wrong_answers_is_not_chosen(
    checkpoints: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow_rules: None
) -> None:
    right = QuickSearch.is_right
    monkeypatch.setattr(QuickSearch, "is_right", lambda self, c: c.name == RULES and right(self, c))
    report = build(checkpoints, tmp_path / "e.wide")
    assert report.raced is not None
    assert {r["chosen"] for r in report.raced["rows"]} == {RULES}


@pytest.mark.extended
@pytest.mark.usefixtures("slow_rules")
def test_without_time_the_plans_by_rules_of_thumb_serve_the_rest(
    checkpoints: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(checkpoints, tmp_path / "e.wide", race=False)
    run = QuickSearch.race_plans

    def only_small(self: QuickSearch, limit: Any) -> RacedBatch | None:
        return run(self, limit) if self.sizes["B"] <= 2 else None

    monkeypatch.setattr(QuickSearch, "race_plans", only_small)
    report = race_plans(tmp_path / "e.wide", seconds=30)
    assert {r.batch for r in report.rows} == {1, 2}
    assert "forward, shared, batch 8" in report.refused
    raced = [p for p in rows_of(tmp_path / "e.wide") if p.get("machine") and p["pattern"] == "shared"]
    assert raced[0]["batch"][0] == 1
    assert raced[-1]["batch"][1] is None
    assert {r["strategy"] for r in raced[0]["regions"]} == {"wide"}
    assert {r["strategy"] for r in raced[-1]["regions"]} == {"loop"}
    for before, after in itertools.pairwise(raced):
        assert before["batch"][1] + 1 == after["batch"][0]
    widepack.load(tmp_path / "e.wide")(torch.randn(40, 4))


@pytest.mark.extended(keep=1)
@pytest.mark.usefixtures("with_race")
@pytest.mark.parametrize("options", [{"race": False}, {"strategy": "wide"}, {"dry_run": True}])
def test_builds_without_a_race(checkpoints: list[str], tmp_path: Path, options: dict[str, Any]) -> None:
    assert build(checkpoints[:2], tmp_path / "e.wide", **options).raced is None


@pytest.mark.usefixtures("with_race")
def test_programs_that_draw_random_numbers_are_not_raced(checkpoints: list[str], tmp_path: Path) -> None:
    inputs, out = ["x=float32[B,4]"], tmp_path / "e.wide"
    options: dict[str, Any] = {"model": Dropping, "inputs": inputs, "pt2": False, "n": 3, "dropout": "on"}
    assert widepack.build(checkpoints[:1], out, **options).raced is None
    assert race_plans(out, seconds=30).rows == ()


@pytest.mark.usefixtures("with_race")
def test_a_race_that_fails_leaves_the_artifact_complete(
    checkpoints: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any, **options: Any) -> None:
        raise ArtifactError("no space is left")

    monkeypatch.setattr("widepack.building.stages.race_plans", fails)
    report = build(checkpoints[:2], tmp_path / "e.wide")
    assert report.raced == {"failed": "no space is left"}
    widepack.load(tmp_path / "e.wide")(torch.randn(3, 4))


@pytest.mark.extended
def test_the_command_line_names_the_faster_plans(
    checkpoints: list[str], tmp_path: Path, slow_rules: None
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
    result = CliRunner(env={"WIDEPACK_RACE_S": "30"}).invoke(cli, words)
    assert result.exit_code == 0, result.output
    assert "faster than rules of thumb: shared batch 1: wide (" in result.output
    result = CliRunner(env={"WIDEPACK_RACE_S": "30"}).invoke(cli, [*words, "--force", "--no-race"])
    assert result.exit_code == 0, result.output
    assert "faster than rules of thumb" not in result.output


@pytest.mark.parametrize("given", ["soon", "-1", "inf", "nan"])
def test_a_wrong_number_of_seconds_is_refused(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv("WIDEPACK_RACE_S", given)
    with pytest.raises(UsageError, match=f"WIDEPACK_RACE_S={given}: give the seconds"):
        race_seconds()


def test_the_seconds_of_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WIDEPACK_RACE_S")
    assert race_seconds() == 10.0
    monkeypatch.setenv("WIDEPACK_RACE_S", "2.5")
    assert race_seconds() == 2.5
    assert "WIDEPACK_RACE_S" in os.environ


def raced(**costs: tuple[float, dict[str, str]]) -> RacedBatch:
    """The measurements of one batch: by name, the cost and the form of the weights."""
    plan = Plan("cpu", "shared", (1, None), ())
    base = RacedPlan(plan, None, {}, {}, 1.0)  # type: ignore[arg-type]
    plans = {n.replace("_", " "): replace(base, cost=c, forms=f) for n, (c, f) in costs.items()}
    return RacedBatch(plans, {}, {})


A, B = {"conv": "packed"}, {"conv": "packed in loops"}


def test_a_small_gain_does_not_replace_the_rules() -> None:
    assert chosen_plans({1: raced(rules_of_thumb=(1.05, {}), wide=(1.0, {}))}) == {1: RULES}
    assert chosen_plans({1: raced(rules_of_thumb=(1.2, {}), wide=(1.0, {}))}) == {1: "wide"}


def test_the_loop_replaces_all_that_is_slower() -> None:
    assert chosen_plans({1: raced(rules_of_thumb=(1.01, {}), loop=(1.0, {}))}) == {1: RULES}
    assert chosen_plans({1: raced(rules_of_thumb=(1.04, {}), loop=(1.0, {}))}) == {1: "loop"}
    assert chosen_plans({1: raced(rules_of_thumb=(1.2, {}), loop=(1.02, {}), wide=(1.0, {}))}) == {1: "loop"}


def test_one_batch_is_replaced_where_the_rules_win_at_the_others() -> None:
    costs = {b: raced(rules_of_thumb=(1.0, A), loop=(1.3, {})) for b in (1, 2, 8)}
    costs[32] = raced(rules_of_thumb=(1.17, A), loop=(1.0, {}))
    assert chosen_plans(costs) == {1: RULES, 2: RULES, 8: RULES, 32: "loop"}


def test_all_batches_store_weights_in_one_form() -> None:
    both = {
        1: raced(rules_of_thumb=(2.0, {}), wide=(1.0, A), loop=(1.5, {})),
        8: raced(rules_of_thumb=(3.0, {}), packed=(1.0, B), loop=(1.2, {}), wide=(2.0, A)),
    }
    # plain and packed loops: 1.5 * 1.0; the wide form: 1.0 * 1.2
    assert chosen_plans(both) == {1: "wide", 8: "loop"}


def test_rules_of_thumb_may_store_weights_in_their_forms() -> None:
    both = {
        1: raced(rules_of_thumb=(1.0, A), loop=(1.5, {})),
        8: raced(rules_of_thumb=(1.0, B), loop=(1.5, {})),
    }
    assert chosen_plans(both) == {1: RULES, 8: RULES}


@pytest.mark.parametrize(
    ("plans", "names", "beyond"),
    [
        ({"wide": {}, LOOP: {}, RULES: A}, {1: "wide"}, "stored"),  # only the rules pack
        ({"wide": B, LOOP: {}, RULES: A}, {1: "wide"}, LOOP),
        ({"wide": B, RULES: {}}, {1: "wide"}, RULES),
        ({"wide": B, RULES: A}, {1: "wide"}, "wide"),  # nothing else has this form of the weights
        ({"wide": {}, PACKED: B, LOOP: {}, RULES: A}, {1: PACKED, 2: "wide"}, LOOP),
        ({"wide": {}, RULES: A}, {1: RULES}, "stored"),
        ({LOOP: {}, RULES: A}, {1: LOOP}, ""),  # the loop serves all larger batches
    ],
)
def test_which_plan_serves_batches_that_were_not_measured(
    plans: dict[str, dict[str, str]], names: dict[int, str], beyond: str
) -> None:
    plan = Plan("cpu", "shared", (1, None), ())
    result = RacedBatch({n: RacedPlan(plan, n, {}, f, 1.0) for n, f in plans.items()}, {}, {})  # type: ignore[arg-type]
    stored = SimpleNamespace(program="stored", plan=plan)
    source = SimpleNamespace(wide=lambda pattern: [stored])
    programs = SimpleNamespace(source=source, artifact=SimpleNamespace(device=torch.device("cpu")))
    entry: Any = SimpleNamespace(programs=programs)
    last = max(names)
    found: list[Any] = programs_by_class(
        entry, "shared", dict.fromkeys(names, result), names, {b: (b, b) for b in names}
    )
    assert [program for program, _ in found] == [*names.values(), *([beyond] if beyond else [])]
    assert [p.batch[0] for _, p in found] == [*names, *([last + 1] if beyond else [])]
    assert found[-1][1].batch[1] is None
