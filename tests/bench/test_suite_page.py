"""bench/README.md and README.md name the rows of the suite that are there."""

from __future__ import annotations

import re
from pathlib import Path

from widepack_bench.suite.rows import ROWS

ROOT = Path(__file__).parents[1]


def test_the_table_has_every_row_with_its_members_and_batch() -> None:
    page = (ROOT / "bench" / "README.md").read_text(encoding="utf-8")
    table = page[page.index("| rows | network | N | batch |") :].split("\n\n")[0]
    said: dict[str, tuple[int, int]] = {}
    for line in table.splitlines()[2:]:
        names, _, members, batch = (cell.strip() for cell in line.strip("|").split("|"))
        rows = re.findall(r"`([\w-]+)`", names)
        counts, batches = ([int(n) for n in text.split(", ")] for text in (members, batch))
        for i, name in enumerate(rows):
            said[name] = counts[i % len(counts)], batches[i % len(batches)]
    assert said == {row.name: (row.members, row.batch) for row in ROWS}


def test_their_number_is_said() -> None:
    assert len(ROWS) == 18
    assert "Eighteen rows over" in (ROOT / "bench" / "README.md").read_text(encoding="utf-8")
    assert "eighteen rows over" in (ROOT / "README.md").read_text(encoding="utf-8")
