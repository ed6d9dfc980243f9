"""Tests `scripts/measure/as_built.py`: rounds, ratios, intervals, and rows that are measured later."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path

import as_built
import pytest
import torch

from widepack_bench.as_built.networks import KNOWN, NETWORKS
from widepack_bench.as_built.row import Ask, doubts, race_of, row_of, timed
from widepack_bench.as_built.stage import Case, Stage, inputs_of
from widepack_bench.as_built.summary import summary

CASE = Case("two-towers", 1, 1, "shared")


def takes(milliseconds: float, noise: float = 0.0, wall: float = 1.0) -> Ask:
    """Returns a contestant. noise: how much longer two of three samples are. wall: over processor time."""
    count = itertools.count()

    def ask() -> tuple[float, float]:
        cpu = 1e6 * milliseconds * (1 + noise * (next(count) % 3))
        return wall * cpu, cpu

    return ask


def contestants(**others: Ask) -> dict[str, Ask]:
    return {
        "widepack": takes(2.0, 0.01),
        "widepack again": takes(2.0, 0.01),
        "loop": takes(9.0, 0.01),
        "onnxruntime": takes(1.5, 0.01),
        "vmap": takes(1.6, 0.01),
        **others,
    }


def test_the_ratio_is_that_of_the_fastest_alternative() -> None:
    samples, slow = timed(contestants(**{"load packed": takes(1.2), "load wide": takes(40.0)}), "cpu", 5.0)
    row = row_of(CASE, samples, "cpu")
    assert row["valid"] and row["fastest"] == "onnxruntime"
    assert row["ratio"]["low"] <= row["ratio"]["value"] <= row["ratio"]["high"]
    assert row["ratio"]["value"] == pytest.approx(0.75, rel=0.02)
    assert row["over_loop"]["value"] == pytest.approx(4.5, rel=0.02)
    assert row["over_torch"]["value"] == pytest.approx(0.8, rel=0.02)
    assert row["forms"] == {"packed": pytest.approx(1.25, rel=0.02)}
    assert slow == {"load wide": pytest.approx(40 / 1.5, rel=0.02)}
    assert row["ms"]["loop"] == pytest.approx(9.0, rel=0.02)


def test_a_form_of_a_load_is_no_alternative() -> None:
    """However fast another load is, the ratio is that of what users write."""
    samples, _ = timed(contestants(**{"load packed": takes(0.1)}), "cpu", 5.0)
    assert row_of(CASE, samples, "cpu")["fastest"] == "onnxruntime"


def test_the_clock_decides() -> None:
    samples, _ = timed(contestants(onnxruntime=takes(1.5, wall=4.0)), "cpu", 5.0)
    assert row_of(CASE, samples, "cpu")["fastest"] == "onnxruntime"
    assert row_of(CASE, samples, "wall")["fastest"] == "vmap"


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"widepack again": takes(2.4)}, "the artifact over itself is"),
        ({"onnxruntime": takes(0.9, 0.3)}, "is wider than 0.1"),
    ],
)
def test_a_ratio_that_is_not_known_is_not_valid(
    changed: dict[str, Ask], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count()
    monkeypatch.setattr("widepack_bench.as_built.row.time.monotonic", lambda: float(next(clock)))
    samples, _ = timed(contestants(**changed), "cpu", 20.0)
    row = row_of(CASE, samples, "cpu")
    assert len(samples["widepack"]) > 50  # rounds go on until the time is over
    assert not row["valid"] and why in row["why"]
    assert doubts(race_of(samples, "cpu")) == row["why"]


def test_the_summary_counts_the_upper_ends() -> None:
    def row(low: float, high: float, call: str) -> dict[str, object]:
        ends = {"value": (low + high) / 2, "low": low, "high": high}
        fields = {"ratio": ends, "over_loop": ends, "over_torch": ends, "forms": {"packed": 2.0}}
        return {"threads": 1, "call": call, "valid": True, **fields}

    found = summary([row(0.90, 0.98, "shared"), row(0.85, 0.91, "shared"), row(1.4, 1.5, "each")])
    assert list(found) == ["all", "threads=1, shared", "threads=1, each"]
    assert (found["all"]["rows"], found["all"]["below_0.92"], found["all"]["over_loop_below_1"]) == (3, 1, 2)
    assert found["all"]["at_least_0.97"] == pytest.approx(2 / 3)
    assert found["all"]["geometric_mean"] == pytest.approx((0.94 * 0.88 * 1.45) ** (1 / 3))
    assert found["all"]["best_form_geometric_mean"] == pytest.approx(2.0)


def test_a_later_run_measures_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, asked = tmp_path / "rows.json", list[str]()

    def measured(case: Case, stage: Stage, clock: str, seconds: float) -> dict[str, object]:
        assert (stage.network, stage.threads, clock, seconds) == (case.network, case.threads, "cpu", 1.0)
        asked.append(case.key)
        if case.call == "each" and len(asked) < 3:
            raise RuntimeError("stopped")
        samples, _ = timed(contestants(), clock, seconds)
        return row_of(case, samples, clock)

    def run(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["as_built.py", "-o", str(out), "--seconds", "1", *words])
        return as_built.main()

    monkeypatch.setattr(as_built, "measured", measured)
    given = ["--networks", "vgg", "--clock", "cpu", "--threads", "1", "--rows", "B=1,", "--calls"]
    assert run(*given, "shared,each") == 3
    assert run(*given, "shared,each,route") == 0
    keys = [f"vgg, B=1, threads=1, {call}" for call in ("shared", "each", "route")]
    assert asked == [keys[0], keys[1], keys[1], keys[2]]
    document = json.loads(out.read_text(encoding="utf-8"))
    assert list(document["rows"]) == keys and document["summary"]["all"]["rows"] == 3


def test_the_list_tells_what_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--list", "-o", str(tmp_path / "rows.json"), "--threads", "2", "--networks", "known"]
    monkeypatch.setattr(sys, "argv", ["as_built.py", *words])
    assert as_built.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == KNOWN * 2 * 3
    assert all(line.endswith("not measured") for line in lines)


@pytest.mark.parametrize("call", as_built.CALLS)
def test_inputs_have_the_members_of_the_call(call: str) -> None:
    case = Case("tabular-categories", 4, 1, call)
    (ids, x), members = inputs_of(case)
    first = (16, 4) if call == "each" else (4,)
    assert (ids.shape, x.shape) == ((*first, 8), (*first, 20))
    assert len(members) == 4 and all(0 <= i < 16 for i in members)
    again = inputs_of(case)
    assert torch.equal(again[0][1], x) and again[1] == members


def test_there_are_36_networks() -> None:
    """36 networks, of 4 to 50 members at batches of 1 to 32."""
    assert (KNOWN, len(NETWORKS)) == (12, 36)
    assert all(4 <= n.members <= 50 and 1 <= b <= 32 for n in NETWORKS.values() for b in n.batches)


@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_runs(name: str) -> None:
    """Rows of a batch are independent, so that a service may route them."""
    make: Callable[[], torch.nn.Module] = NETWORKS[name].make
    inputs, _ = inputs_of(Case(name, 3, 1, "shared"))
    with torch.inference_mode():
        module = make().eval()
        whole = module(*inputs)
        torch.testing.assert_close(whole[1:2], module(*(x[1:2] for x in inputs)), rtol=1e-3, atol=1e-4)
