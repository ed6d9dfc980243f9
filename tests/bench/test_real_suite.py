"""Tests the suite `real`: its networks, a measured row, the document of a later run, and its table."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from widepack.errors import UsageError
from widepack_bench.models.factory import factory_of
from widepack_bench.processes import row_runner
from widepack_bench.processes.fresh import ProcessEnded
from widepack_bench.suite.real_networks import NETWORKS, chosen_networks
from widepack_bench.suite.row import run_real as measured_rows
from widepack_bench.suite.run import run_real
from widepack_bench.suite.table import notes, summary, table
from widepack_cli.main import cli

PUBLISHED = {
    "mobilenetv3": 5_483_032,
    "convnext-atto": 3_695_520,
    "resnet18-64": 11_689_512,
    "vit-s": 22_050_664,
}


def ratio(value: float) -> dict[str, float]:
    return {"value": value, "low": value - 0.01, "high": value + 0.01}


def row(default: float, tuned: float, verdict: str = "holds", **changed: Any) -> dict[str, Any]:
    """A measured row. default: over the loop and over the fastest baseline."""
    result = {
        "median_ms": 2.0,
        "fastest": "vmap",
        "baselines": {
            "loop": {"median_ms": 2 * default, "ratio": ratio(default)},
            "vmap": {"median_ms": 2 * default, "ratio": ratio(default)},
        },
        "others": {
            "widepack[tuned]": {"median_ms": 1, "ratio": ratio(tuned), "verdict": verdict, "share": 0.5}
        },
        "ratio": ratio(default),
        "verdict": verdict,
    }
    environment = {"versions": {"torch": "2.13"}, "date": "2026-11-23", "device": "cpu (one)"}
    return {"batch": 1, "pattern": "shared", "result": result, "environment": environment, **changed}


def parameters(name: str) -> int:
    (network,) = chosen_networks([name])
    with torch.device("meta"):
        return sum(p.numel() for p in factory_of(network.model)(**network.options).parameters())


@pytest.mark.parametrize("name", PUBLISHED)
def test_networks_have_their_published_sizes(name: str) -> None:
    assert parameters(name) == PUBLISHED[name]


def test_all_networks_are_larger_than_those_of_the_other_suite() -> None:
    assert min(parameters(network.name) for network in NETWORKS) > 500_000


def test_an_unknown_network_is_refused() -> None:
    with pytest.raises(UsageError, match="no network 'nosuch'; its networks are tabular-mlp, "):
        chosen_networks(["nosuch"])


@pytest.mark.extended
def test_a_row_is_measured() -> None:
    options = {"baselines": ["loop"], "budget_s": 0.01}
    rows = [{"members": 2, "batch": 1, "pattern": "each"}]
    (measured,) = measured_rows("tabular-mlp", rows, **options)
    assert measured["parameters"] == 562_177
    assert set(measured["result"]["baselines"]) == {"loop"}
    assert json.loads(json.dumps(measured)) == measured


def test_a_slow_batch_is_named() -> None:
    rows = [{"members": 2, "batch": 4, "pattern": "shared"}]
    (measured,) = measured_rows("tabular-mlp", rows, call_limit_s=1e-9)
    assert measured["skipped"].startswith("a call of the loop takes ")


def test_a_later_run_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    requested: list[list[tuple[int, str]]] = []

    def lines(function: str, arguments: dict[str, Any], **options: Any) -> Iterator[dict[str, Any]]:
        calls = [(r["batch"], r["pattern"]) for r in arguments["rows"]]
        requested.append(calls)
        for batch, pattern in calls:
            yield {**row(1.5, 2.0, "noisy" if batch == 4 else "holds"), "batch": batch, "pattern": pattern}
            if batch == 16:
                raise ProcessEnded("killed")

    monkeypatch.setattr(row_runner, "lines_of_fresh_process", lines)
    out = tmp_path / "real.json"
    for _ in range(2):
        run_real(out, names=["vit-s"], members=[8], report=None)
    assert requested == [[(1, "shared"), (4, "shared"), (16, "shared")], [(4, "shared")]]
    run_real(out, names=["vit-s"], members=[8], report=None, tune=True)
    assert requested[-1] == [(1, "shared"), (4, "shared"), (16, "shared")]  # no row has a tuned plan
    assert next(iter(json.loads(out.read_text())["rows"])) == "vit-s, N=8, batch 1, shared, 1 thread"


def test_an_ended_process_is_an_error_of_its_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def lines(function: str, arguments: dict[str, Any], **options: Any) -> Iterator[dict[str, Any]]:
        yield {**row(1.5, 2.0), "batch": 1}
        raise ProcessEnded("killed")

    monkeypatch.setattr(row_runner, "lines_of_fresh_process", lines)
    document = run_real(tmp_path / "real.json", names=["vit-s"], members=[8], report=None)
    assert document["rows"]["vit-s, N=8, batch 4, shared, 1 thread"]["error"] == "killed"
    assert document["summary"]["not_measured"] == ["vit-s, N=8, batch 4, shared, 1 thread"]


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"format": "widepack.suite/1"}')
    with pytest.raises(UsageError, match=r"no document of the suite real \(widepack.real/1\)"):
        run_real(tmp_path / "other.json", report=None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["real", "--backend", "aot"], "the suite real does not take --backend"),
        (["real", "--device", "cuda"], "the suite real runs on the CPU: leave --device out"),
        (["real", "--rows", "nosuch"], "the suite real has no network 'nosuch'"),
        (["cpu", "--members", "4", "--pattern", "each"], "the suite cpu does not take --members, --pattern"),
    ],
)
def test_options_of_another_suite_are_refused(arguments: list[str], message: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["bench-suite", *arguments, "--json", f"{tmp_path}/real.json"])
    assert result.exit_code == 2
    assert message in result.output
    assert not list(tmp_path.iterdir())


def test_the_summary_names_what_is_below() -> None:
    rows = {"a": row(2.0, 2.0), "b": row(0.9, 0.8), "c": row(9.0, 9.0, "noisy")}
    totals = summary(rows)
    assert totals["default_over_loop"]["geometric_mean"] == pytest.approx(1.8**0.5)
    assert totals["default_over_loop"]["below"] == ["b"]
    assert totals["tuned"]["below"] == ["b"]
    assert totals["tuned"]["verdicts"] == {"holds": 2}
    assert totals["not_measured"] == ["c"]


def test_the_table_states_the_sizes() -> None:
    rows = {
        "a": row(
            2.0,
            2.5,
            title="ResNet-18",
            size="width 64, 18 layers",
            inputs=["x=float32[B,3,64,64]"],
            parameters=11_689_512,
            members=8,
            threads=1,
        )
    }
    line = table(rows).splitlines()[-1]
    assert "ResNet-18 (width 64, 18 layers, 3x64x64, 11.7 M parameters) | 8 | 1 | shared | 1" in line
    assert "2.00 ms | 2.00 [1.99, 2.01] | 1.00 ms | vmap, 4.00 ms | 2.00 [1.99, 2.01] | 2.50" in line
    text = list(notes(rows))
    assert text[0] == "2026-11-23, cpu (one), torch 2.13."
    assert "1 rows (1 holds), geometric mean 2.50" in text[2]


def test_the_notes_name_every_date_and_version() -> None:
    rows = {"a, N=2": row(0.9, 0.8), "b, N=2": row(0.9, 0.8)}
    newer = {
        "versions": {"torch": "2.14", "onnxruntime": "1.32"},
        "date": "2026-11-24",
        "device": "cpu (one)",
    }
    rows["b, N=2"]["environment"] = newer
    text = list(notes(rows))
    assert text[0] == "2026-11-23 and 2026-11-24, cpu (one), torch 2.13 and 2.14, onnxruntime 1.32."
    assert text[1].endswith("below 0.95: a, N=2; b, N=2.")
