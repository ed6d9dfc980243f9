"""Tests the suite `training`: its contestants train as the loop does, a measured row, and the document."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from widepack.errors import UsageError
from widepack_bench.errors import BenchError
from widepack_bench.processes import row_runner
from widepack_bench.processes.fresh import ProcessEnded
from widepack_bench.training import contestants
from widepack_bench.training import row as rows_of_suite
from widepack_bench.training.networks import BASELINES, NETWORKS, chosen_networks
from widepack_bench.training.row import TrainingOptions, measured, run_rows
from widepack_bench.training.run import run_training
from widepack_bench.training.table import summary, training_table
from widepack_bench.training.task import TrainingTask, task_of
from widepack_cli.main import cli


def task(name: str = "mlp", each: bool = False) -> TrainingTask:
    (network,) = chosen_networks([name])
    return task_of(network, 3, each)


def losses(step: Any, count: int = 4) -> torch.Tensor:
    return torch.stack([torch.as_tensor(step()).float() for _ in range(count)])


def test_every_baseline_has_a_step() -> None:
    assert tuple(contestants.CONTESTANTS) == BASELINES
    assert set(contestants.COMPILED) < set(BASELINES)


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])
@pytest.mark.parametrize("name", ["vmap", "processes", "fused"])
def test_steps_train_as_the_loop_does(name: str, each: bool) -> None:
    given = task(each=each)
    make = contestants.fused if name == "fused" else contestants.CONTESTANTS[name]
    expected = losses(contestants.loop(given))
    torch.testing.assert_close(losses(make(given)), expected, rtol=1e-5, atol=1e-6)
    assert (expected[-1] < expected[0]).all()  # they learn the batch
    assert expected.std(1).min() > 1e-3  # members are different


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.* is deprecated")  # torch's compiler, where it is imported
@pytest.mark.parametrize("name", contestants.COMPILED)
def test_compiled_steps_train_as_the_loop_does(name: str) -> None:
    given = task()
    expected = losses(contestants.loop(given))
    torch.testing.assert_close(losses(contestants.CONTESTANTS[name](given)), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("network", NETWORKS, ids=lambda n: n.name)
def test_the_networks_take_their_inputs(network: Any) -> None:
    given = task_of(network, 2, each=True)
    y = given.modules[0](given.data(0)[0])
    assert list(y.shape) == [network.batch, 10]
    assert not torch.equal(*(next(m.parameters()) for m in given.modules))


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore:`torch.jit.* is deprecated")  # torch's compiler, where it is imported
def test_a_row_is_measured() -> None:
    options = {"baselines": ["loop", "vmap"], "budget_s": 0.01}
    rows = [{"network": "mlp", "members": 2, "pattern": "shared"}]
    (result,) = run_rows(rows, **options)
    assert set(result["result"]["baselines"]) == {"loop", "vmap"}
    assert set(result["result"]["others"]) == {"widepack[compile]"}
    assert set(result["cpu_ms"]) == {"widepack", result["result"]["fastest"]}
    assert min(result["cpu_ms"].values()) > 0
    assert json.loads(json.dumps(result)) == result


def test_a_fused_module_that_trains_wrong_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(given: TrainingTask) -> Any:
        step = contestants.fused(given)
        return lambda: step() * 1.01

    monkeypatch.setattr(rows_of_suite, "fused", wrong)
    with pytest.raises(BenchError, match="does not train as the members do"):
        measured(task(), 32, TrainingOptions(baselines=("loop",), budget_s=0.01))


@pytest.mark.extended
def test_a_baseline_that_trains_wrong_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(given: TrainingTask) -> Any:
        step = contestants.loop(given)
        return lambda: [loss + 1 for loss in step()]

    monkeypatch.setattr(rows_of_suite, "CONTESTANTS", {"loop": contestants.loop, "vmap": wrong})
    monkeypatch.setattr(rows_of_suite, "fused_compiled", contestants.fused)
    row, _ = measured(task(), 32, TrainingOptions(budget_s=0.01))
    assert row.skipped["vmap"].startswith("its losses are not the loop's")


def ratio(value: float) -> dict[str, float]:
    return {"value": value, "low": value - 0.01, "high": value + 0.01}


def result(fastest: float, loop: float, verdict: str = "holds") -> dict[str, Any]:
    baselines = {
        "loop": {"median_ms": 2 * loop, "ratio": ratio(loop)},
        "vmap": {"median_ms": 2 * fastest, "ratio": ratio(fastest)},
    }
    compiled = {"widepack[compile]": {"median_ms": 4.0, "ratio": ratio(fastest / 2)}}
    timed = {"median_ms": 2.0, "fastest": "vmap", "baselines": baselines, "others": compiled}
    timed["ratio"] = ratio(fastest)
    return {"result": {**timed, "verdict": verdict}}


def test_a_later_run_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    requested: list[tuple[str, int, str]] = []

    def lines(function: str, arguments: dict[str, Any], **options: Any) -> Iterator[dict[str, Any]]:
        (row,) = arguments["rows"]
        requested.append((row["network"], row["members"], row["pattern"]))
        if row["members"] == 32 and len(requested) < 3:
            raise ProcessEnded("killed")
        yield result(1.5, 2.0)

    monkeypatch.setattr(row_runner, "lines_of_fresh_process", lines)
    for _ in range(2):
        document = run_training(tmp_path / "t.json", names=["mlp"], report=None)
    assert requested == [("mlp", 8, "shared"), ("mlp", 32, "shared"), ("mlp", 32, "shared")]
    assert list(document["rows"]) == ["mlp, N=8, shared, 1 thread", "mlp, N=32, shared, 1 thread"]
    assert document["summary"]["over_fastest"]["geometric_mean"] == pytest.approx(1.5)


def test_the_summary_and_the_table() -> None:
    common = {"title": "MLP", "size": "64-10", "members": 8, "batch": 32, "pattern": "each"}
    rows = {
        "a": {**common, **result(1.5, 2.0)},
        "b": {**common, **result(0.9, 1.2, "slower")},
        "c": {**common, "error": "killed"},
    }
    totals = summary(rows)
    assert totals["over_fastest"]["below"] == ["b"]
    assert totals["not_measured"] == ["c"]
    assert totals["over_loop"]["least"] == 1.2
    lines = training_table(rows).splitlines()
    assert lines[2] == (
        "| MLP (64-10) | 8 | 32 | a batch for each | 2.00 ms | 4.00 ms | vmap, 3.00 ms, of 2 | "
        "1.50 [1.49, 1.51] | 0.75 [0.74, 0.76] | 2.00 [1.99, 2.01] | holds |"
    )
    assert lines[4].endswith("|  |  |  |  |  |  | error: killed |")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tune"], "the suite training does not take --tune"),
        (["--dtype", "bfloat16"], "the suite training does not take --dtype"),
        (["--device", "cuda"], "the suite training runs on the CPU: leave --device out"),
        (["--baseline", "onnxruntime"], "the suite training has no baseline onnxruntime; it has loop, "),
        (["--rows", "nosuch"], "the suite training has no network 'nosuch'"),
    ],
)
def test_options_of_another_suite_are_refused(arguments: list[str], message: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["bench-suite", "training", *arguments, "--json", f"{tmp_path}/t.json"])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert not list(tmp_path.iterdir())


def test_an_unknown_network_is_refused() -> None:
    with pytest.raises(UsageError, match="no network 'nosuch'; its networks are mlp, "):
        chosen_networks(["nosuch"])
