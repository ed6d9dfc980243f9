"""Tests that bench/README.md and docs/results/networks.md name the rows of the suite."""

from __future__ import annotations

import json
import re

from paths import ROOT

from widepack_bench.suite.real_networks import NETWORKS
from widepack_bench.suite.real_table import summary
from widepack_bench.suite.rows import ROWS


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
    for page in ("README.md", "docs/results/networks.md"):
        assert sentence in (ROOT / page).read_text(encoding="utf-8"), page
