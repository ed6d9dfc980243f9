"""Tests the sizes of the suite's networks on the pages."""

from __future__ import annotations

import network_results

from results import PARTS
from widepack_bench.suite.rows import ROWS


def test_every_row_has_its_sizes() -> None:
    text = PARTS["suite-sizes"]()
    for row in ROWS:
        assert f"| {row.title} |" in text
        for form in row.forms:
            assert f"{network_results.parameters(row, form):,}" in text
