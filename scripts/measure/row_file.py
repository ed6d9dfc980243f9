"""Writes the rows of a measurement into one JSON document. A later run measures what is missing."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from widepack.errors import UsageError
from widepack_bench.report.environment import environment
from widepack_bench.report.json_file import read_document, write_whole

CHECKED = ("device", "tf32")
"""What must be equal in all runs of a document."""


class RowFile:
    """A document with rows by key.

    Args:
        path: The file. It may exist: its rows are kept.
        form: The document's format and version.
        what: What the rows are, in words.
        device: Where they are measured.
        threads: Threads inside an op.

    Raises:
        UsageError: The file is another document, or its rows are of another device or version of torch.
    """

    def __init__(self, path: Path, form: str, what: str, device: str, threads: int = 1) -> None:
        self._path = path
        now = environment(device, threads)
        document = read_document(path, form, what) or {"format": form, "what": what, "rows": {}}
        if document["rows"]:
            _check(path, document["environment"], now)
        self.document: dict[str, Any] = {**document, "environment": now}
        path.parent.mkdir(parents=True, exist_ok=True)
        self.write()

    @property
    def rows(self) -> dict[str, Any]:
        """The rows by key."""
        rows: dict[str, Any] = self.document["rows"]
        return rows

    def must_run(self, key: str) -> bool:
        """Returns whether a row is missing or ended with an error."""
        return key not in self.rows or "error" in self.rows[key]

    def add(self, key: str, row: Mapping[str, Any]) -> None:
        """Adds or replaces a row, and writes the file."""
        self.rows[key] = dict(row)
        self.write()

    def write(self) -> None:
        """Writes the file."""
        write_whole(self._path, self.document)


def _check(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    pairs = {key: (before.get(key), now.get(key)) for key in CHECKED}
    pairs["torch"] = before["versions"]["torch"], now["versions"]["torch"]
    if different := [f"{key} {old}, and now {new}" for key, (old, new) in pairs.items() if old != new]:
        raise UsageError(
            f"{path} has rows that were measured elsewhere: {'; '.join(different)}. Give another file, "
            "or remove it"
        )


def device_parser(description: str | None, out: str) -> argparse.ArgumentParser:
    """Returns a parser with the options of all measurements of a device.

    description: the docstring of the script. out: the default name of the file in `bench/results`.
    """
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    results = Path(__file__).resolve().parents[2] / "bench" / "results"
    parser.add_argument("-o", "--out", type=Path, default=results / out, help="the JSON document")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu for a rehearsal (default: cuda)")
    parser.add_argument("--seconds", type=float, default=1.0, help="of timing for each race (default: 1)")
    return parser


def build_threads(device: str) -> int:
    """Returns how many threads a build takes: on a GPU all, since no contestant computes on the CPU."""
    return 1 if device == "cpu" else os.cpu_count() or 1


def say(*words: object) -> None:
    """Prints a line of progress at once."""
    print(*words, file=sys.stderr, flush=True)
