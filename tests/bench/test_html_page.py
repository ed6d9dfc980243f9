"""Tests the page of `bench --html`: the summary comes first, and plots show all values."""

from __future__ import annotations

from widepack_bench.measure.race import AGAIN, OURS, Race
from widepack_bench.report.document import Report
from widepack_bench.report.html import bars, page
from widepack_bench.report.row import Row
from widepack_bench.text import duration


def report() -> Report:
    race = Race((OURS, AGAIN, "loop", "vmap"), tuple((1e4, 1e4, 9.9e3, 3e4) for _ in range(40)))
    row = Row.of(8, {"B": 8}, race, {}, 4)
    where = {"device": "cpu", "threads": 1, "versions": {}, "date": "", "command": ""}
    return Report("e.wide", 4, "shared", "your own modules", (row,), {}, where, "forward")


def test_the_summary_is_on_top_with_the_rule_of_its_verdicts() -> None:
    text = page(report().to_json())
    assert text.index("Summary") < text.index("<h2>Batch 8")
    summary = text[text.index("Summary") : text.index("<h2>Batch 8")]
    verdict = report().to_json()["rows"][0]["verdict"]
    assert "loop, 9.90 us" in summary and f"class={verdict}>{verdict}</b>: " in summary
    assert "95% interval" in summary


def test_the_unit_is_next_to_its_number() -> None:
    text = page(report().to_json())
    assert "Milliseconds" not in text and "10.0 us" in text


def test_a_whisker_that_is_cut_has_a_mark_and_its_value() -> None:
    latency = {"widepack": {"p95_ms": 1.2, "p99_ms": 40.0}, "loop": {"p95_ms": 2.1, "p99_ms": 2.2}}
    text = bars({"widepack": 1.0, "loop": 2.0}, duration, latency)
    assert text.count('class="cut"') == 1 and "1.00 ms, p99 40.0 ms" in text
    whole = {"widepack": {"p95_ms": 1.2, "p99_ms": 1.4}, "loop": {"p95_ms": 2.1, "p99_ms": 2.2}}
    assert 'class="cut"' not in bars({"widepack": 1.0, "loop": 2.0}, duration, whole)


def test_plots_scroll_on_a_narrow_screen() -> None:
    text = page(report().to_json())
    assert "@media (max-width: 40rem)" in text and text.count("<div class=bars><svg") == text.count("<svg")
