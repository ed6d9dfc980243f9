"""Tests the suite of reference networks: its rows, one that is measured, later runs, and the tables."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import ROOT

from widepack.errors import UsageError
from widepack_bench.baselines.table import difference, loop
from widepack_bench.models.factory import factory_of
from widepack_bench.models.weights import states
from widepack_bench.processes import row_runner
from widepack_bench.processes.fresh import ProcessEnded, in_fresh_process, lines_of_fresh_process
from widepack_bench.processes.row_runner import must_run
from widepack_bench.suite.real_networks import NETWORKS
from widepack_bench.suite.row import BY_HAND, by_hand, run_reference
from widepack_bench.suite.rows import ROWS, SuiteRow, chosen
from widepack_bench.suite.run import run_suite
from widepack_bench.suite.table import reference_table, summary


def test_rows_of_the_suite() -> None:
    names = [row.name for row in ROWS]
    assert len(set(names)) == len(names)
    facts = {(row.name, row.members, row.batch) for row in ROWS}
    assert {
        ("mlp-b1", 100, 1),
        ("deep-mlp", 20, 32),
        ("resnet50", 32, 1),
        ("bert", 8, 4),
        ("lstm", 16, 8),
        ("cnn1d", 30, 16),
        ("rnn-8", 8, 8),
    } <= facts
    assert [row.name for row in chosen(["unet", "vit"])] == ["vit", "unet"], (
        "the rows are not in the order of the suite"
    )
    with pytest.raises(UsageError, match="no row 'nope'; its rows are mlp-b32"):
        chosen(["vit", "nope"])


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_networks_of_the_suite(row: SuiteRow) -> None:
    """Every network runs at its CPU size. Its published form has the published number of parameters."""
    from widepack.spec.draws import InputSource, draw_all
    from widepack.spec.input_spec import parse_inputs, type_text

    make = factory_of(row.model)
    form = row.form("cpu")
    first, second = states(lambda: make(**form.options), 2, row.shared)
    module = make(**form.options).eval()
    module.load_state_dict(first)
    specs, _ = parse_inputs(list(form.inputs))
    calls = draw_all([InputSource(s.name, type_text(s), s.low, s.high) for s in specs], {"B": 2}, 0)
    with torch.inference_mode():
        y = module(*calls)
    assert y.shape[0] == 2 and torch.isfinite(y).all() and y.std() > 1e-3
    unequal = {name for name in first if not torch.equal(first[name], second[name])}
    assert unequal == {n for n in first if not row.shared(n)} - {
        n for n in first if n.endswith("num_batches_tracked")
    }
    with torch.device("meta"):
        count = sum(p.numel() for p in make(**row.form("full").options).parameters())
    published = {"resnet18": 11_689_512, "resnet50": 25_557_032, "vit": 22_050_664}
    assert count == published.get(row.name, count)


def test_a_row_is_measured() -> None:
    options = {"baselines": ["loop"], "budget_s": 0.2}
    (found,) = run_reference("mlp-b1", "cpu", [{"members": 3}], **options)
    assert found["report"]["modules"] == "your own modules"
    assert found["report"]["rows"][0]["roofline"]["stream_ms"] > 0
    assert json.loads(json.dumps(found)) == found


@pytest.mark.extended
def test_a_row_is_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("widepack.tuning.tune.backends_here", lambda device: ("eager",))
    options = {"baselines": ["loop"], "budget_s": 0.2, "tune": True, "backends": ["eager"]}
    (found,) = run_reference("mlp-b1", "cpu", [{"members": 3}], **options)
    assert found["tuned_plan"]["backend"] == "eager" and found["tune_s"] > 0


@pytest.mark.parametrize(
    ("verdict", "again"), [("holds", False), ("slower", False), ("noisy", True), ("error", True)]
)
def test_a_later_run_goes_on(
    verdict: str, again: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    requested: list[dict[str, Any]] = []

    def lines(function: str, arguments: dict[str, Any], **options: Any) -> Iterator[dict[str, Any]]:
        requested.append(arguments)
        if verdict == "error":
            raise ProcessEnded("killed")
        yield {"report": fake_row(2.0, verdict)["report"]}

    monkeypatch.setattr(row_runner, "lines_of_fresh_process", lines)
    out, said = tmp_path / "suite.json", list[str]()
    for _ in range(2):
        document = run_suite("cpu", out, names=["mlp-b1"], budget_s=0.2, report=said.append)
    assert len(requested) == 1 + again
    row = {"title": "MLP 64-128-64", "members": 100, "batch": 1}
    common = {"budget_s": 0.2, "threads": 1, "rows": [row]}
    assert requested[0] == {"name": "mlp-b1", "size": "cpu", **common}
    assert json.loads(out.read_text()) == document
    assert said[0].startswith("mlp-b1, 1 thread: ")
    assert "| MLP 64-128-64 | 100 | 1 |" in said[-1]


def test_other_documents_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "suite.json"
    out.write_text('{"format": "widepack.suite/1", "size": "cpu", "rows": {}}')
    with pytest.raises(UsageError, match="has rows of the size 'cpu', but this run is for 'full'"):
        run_suite("full", out, report=None)
    out.write_text("{}")
    with pytest.raises(UsageError, match="is no document of the suite"):
        run_suite("cpu", out, report=None)


def test_rows_are_run_again() -> None:
    assert must_run(None) and must_run({"error": "it broke"})
    assert not must_run({"skipped": "too slow"})
    assert must_run(fake_row(1.0, "holds"), tune=True)
    assert not must_run({**fake_row(1.0, "holds"), "tuned_plan": {}}, tune=True)


@pytest.mark.extended
def test_a_row_in_a_process_that_fails() -> None:
    with pytest.raises(ProcessEnded, match="the suite has no row 'nope'"):
        arguments = {"name": "nope", "size": "cpu", "rows": [{}]}
        list(lines_of_fresh_process("widepack_bench.suite.row:run_reference", arguments))
    assert "did not end within 0 s" in in_fresh_process("time:sleep", {}, limit_s=0.001)["error"]
    assert "AttributeError" in in_fresh_process("time:nothing", {})["error"]


def fake_row(ratio: float, verdict: str, **others: Any) -> dict[str, Any]:
    interval = {"value": ratio, "low": ratio - 0.01, "high": ratio + 0.01}
    row = {
        "median_ms": 1.0,
        "fastest": "vmap",
        "ratio": interval,
        "verdict": verdict,
        "baselines": {
            "vmap": {"median_ms": ratio, "ratio": interval},
            "loop": {"median_ms": 9.0, "ratio": {**interval, "value": 9.0}},
        },
        "others": others,
        "roofline": {"share": 0.5, "stream_ms": 0.2, "least_bytes": 6_600_000, "stream_bytes_per_s": 33e9},
    }
    environment = {"threads": 1, "device": "cpu (X)", "date": "2026-11-21", "versions": {"torch": "2.13"}}
    return {"title": "net", "members": 100, "batch": 1, "report": {"rows": [row], "environment": environment}}


def test_the_summary_and_the_table() -> None:
    over_ours = {"value": 1.1, "low": 1.05, "high": 1.15}
    rows = {
        "bert, 1 thread": fake_row(0.5, "slower"),
        "mlp-b1, 1 thread": fake_row(2.0, "holds"),
        "lstm, 1 thread": fake_row(8.0, "holds", **{BY_HAND: {"median_ms": 1.1, "over_ours": over_ours}}),
        "gru, 1 thread": fake_row(50.0, "noisy"),
        "vit, 1 thread": {"title": "d", "members": 2, "batch": 1, "error": "it broke"},
    }
    found = summary(rows)
    assert found["default"]["geometric_mean"] == pytest.approx(2.0)
    assert found["default"]["verdicts"] == {"slower": 1, "holds": 2}
    assert found["default"]["below"] == ["bert, 1 thread"]
    assert found["not_measured"] == ["gru, 1 thread", "vit, 1 thread"]
    lines = reference_table(rows).splitlines()
    assert [line.rpartition(" | ")[2] for line in lines[2:7]] == [
        *("holds |", "error: it broke |", "slower |", "holds |", "noisy |"),
    ]
    cells = "100 | 1 | 1 | 1.00 ms | vmap, 2.00 ms | 2.00 [1.99, 2.01] | 9.00 [1.99, 2.01] | 50% | holds"
    assert lines[2] == f"| net | {cells} |"
    assert lines[8] == "2026-11-21, cpu (X), torch 2.13."
    plans = "Plans over the fastest baseline: 3 rows (2 holds, 1 slower), geometric mean 2.00, "
    assert lines[10].startswith(plans)
    hand = f"lstm, 1 thread: the {BY_HAND} takes 1.10 ms, 1.10 [1.05, 1.15] times as long as widepack."
    assert lines[-1] == hand


def test_a_trunk_shared_by_hand_is_the_loop() -> None:
    row = next(r for r in ROWS if r.by_hand)
    from widepack_bench.models.transformer import bert

    modules: list[Any] = []
    for state in states(lambda: bert(**row.form("cpu").options), 3, row.shared):
        module = bert(**row.form("cpu").options).eval()
        module.load_state_dict(state)
        modules.append(module)
    ids, mask = torch.randint(0, 1000, (2, 32)), torch.ones(2, 32, dtype=torch.int64)
    with torch.inference_mode():
        assert difference(by_hand(modules, "cpu")(ids, mask), loop(modules, False)(ids, mask)) == ""


def test_the_table_has_every_row_with_its_members_and_batch() -> None:
    page = (ROOT / "bench" / "README.md").read_text(encoding="utf-8")
    table = page[page.index("| rows | network | N | batch |") :].split("\n\n")[0]
    listed: dict[str, tuple[int, int]] = {}
    for line in table.splitlines()[2:]:
        names, _, members, batch = (cell.strip() for cell in line.strip("|").split("|"))
        rows = re.findall(r"`([\w-]+)`", names)
        counts, batches = ([int(n) for n in text.split(", ")] for text in (members, batch))
        for i, name in enumerate(rows):
            listed[name] = counts[i % len(counts)], batches[i % len(batches)]
    assert listed == {row.name: (row.members, row.batch) for row in ROWS}


def test_pages_state_the_row_count() -> None:
    assert len(ROWS) == 18
    assert "Eighteen rows over" in (ROOT / "bench" / "README.md").read_text(encoding="utf-8")
    assert "eighteen rows over" in (ROOT / "docs" / "results" / "networks.md").read_text(encoding="utf-8")


def test_pages_count_the_networks_at_real_sizes() -> None:
    rows = json.loads((ROOT / "bench" / "results" / "real-cpu.json").read_text(encoding="utf-8"))["rows"]
    not_measured = set(summary(rows)["not_measured"])  # also the rows that were too noisy
    measured = {row["network"] for key, row in rows.items() if key not in not_measured}
    words = {10: "Ten", 11: "Eleven", 12: "twelve"}
    sentence = f"{words[len(measured)]} of the {words[len(NETWORKS)]} networks of `widepack bench-suite real`"
    assert sentence in (ROOT / "docs" / "results" / "networks.md").read_text(encoding="utf-8")
