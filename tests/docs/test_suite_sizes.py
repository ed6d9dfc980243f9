"""Tests the sizes of the suite's networks on the pages."""

from __future__ import annotations

import suite_sizes

from widepack_bench.suite.rows import ROWS


def test_every_row_has_its_sizes() -> None:
    text = suite_sizes.table()
    for row in ROWS:
        assert f"| {row.title} |" in text
        for form in row.forms:
            assert f"{suite_sizes.parameters(row, form):,}" in text
