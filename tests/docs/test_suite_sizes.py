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


def test_sizes_are_counted() -> None:
    assert suite_sizes.short("mlp-b32") == "64, 17 thousand parameters"  # 64*128 + 128 + 128*64 + 64
    assert suite_sizes.short("resnet18").startswith("3x16x16, ")
