"""Reads the measurements in bench/results, and keeps the parts of pages that are made of them.

A part is a function of a document, under the name that its page has:

    @part("reduce", "reduce-cpu", "scripts/measure/reduce.py")
    def reduce(document: Any) -> str: ...
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PARTS: dict[str, Callable[[], str]] = {}
"""What writes each part, by its name."""


def part(
    name: str, document: str, script: str = "", place: bool = True
) -> Callable[[Callable[[Any], str]], Callable[[Any], str]]:
    """Registers a function as what writes a part of a page, from a document of bench/results.

    Args:
        name: Of the part.
        document: Its name.
        script: What measures it, which the part says where there is no document.
        place: Whether a last line says where it was measured.
    """

    def of(write: Callable[[Any], str]) -> Callable[[Any], str]:
        def text() -> str:
            if not (ROOT / "bench" / "results" / f"{document}.json").exists():
                return f"There are no figures yet. This measures them: `python {script}`."
            found = read(document)
            told = place and "environment" in found
            return write(found) + (f"\n\n{where(found['environment'])}" if told else "")

        PARTS[name] = text
        return write

    return of


def read(name: str) -> Any:
    """Returns a document of bench/results."""
    return json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def rows_of(document: Mapping[str, Any]) -> list[Any]:
    """Returns the rows of a document that did not end with an error."""
    return [row for row in document["rows"].values() if "error" not in row]


def where(environment: Mapping[str, Any]) -> str:
    """Returns the date, the device, the threads and the version of torch in one line."""
    threads = environment["threads"]
    words = f"{threads} thread" + ("" if threads == 1 else "s")
    device, torch = environment["device"], f"torch {environment['versions']['torch']}"
    return ", ".join(p for p in (environment.get("date", ""), device, words, torch) if p) + "."


def table(head: str, rows: Iterable[Sequence[Any]]) -> str:
    """Returns a table in Markdown. Columns of numbers are on the right.

    head: the names of the columns, separated by `|`.
    """
    names = [name.strip() for name in head.split("|")]
    cells = [[str(cell) for cell in row] for row in rows]
    columns = list(zip(*cells, strict=True)) or [()] * len(names)
    rule = ["--:" if all(_is_number(c) for c in column) else "---" for column in columns]
    lines = [" | ".join(names), " | ".join(rule), *(" | ".join(row) for row in cells)]
    return "\n".join(f"| {line} |" for line in lines)


def _is_number(cell: str) -> bool:
    return re.fullmatch(r"[\d.,]+ ?(%|x|s|ms|us|MB)?", cell) is not None or not cell


def ratio(value: Mapping[str, Any], quiet: bool = True) -> str:
    """Returns a ratio with its interval, and whether its race was noisy."""
    high = "" if value["high"] is None else f"{value['high']:.2f}"
    return f"{value['value']:.2f} [{value['low']:.2f}, {high}]{'' if quiet else ', noisy'}"
