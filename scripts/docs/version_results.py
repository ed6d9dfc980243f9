"""Writes which versions of Python and torch the tests were run with."""

from __future__ import annotations

from results import read


def table() -> str:
    """Returns a row for each pair of versions."""
    document = read("versions")
    lines = ["| Python | torch | tests | passed | failed |", "|---|---|---|---|---|"]
    for row in sorted(document["rows"], key=lambda r: (version_key(r["torch"]), version_key(r["python"]))):
        lines.append(
            f"| {row['python']} | {row['torch']} | {row['tests']} | {row['passed']:,} | "
            f"{', '.join(map(test_name, row['failed'])) or '0'} |"
        )
    return "\n".join([*lines, "", f"{document['environment']['date']}, {document['environment']['device']}."])


def version_key(version: str) -> tuple[int, ...]:
    """Returns the numbers of a version without its local part: `2.13.0+cpu` is (2, 13, 0)."""
    return tuple(int(n) for n in version.partition("+")[0].split("."))


def test_name(case: str) -> str:
    """Returns the name of a test without its module."""
    return f"`{case.rpartition('::')[2]}`"
