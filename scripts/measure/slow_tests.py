"""Runs the slow tests file by file, and writes how each file ended.

usage: python scripts/measure/slow_tests.py [-o ROWS.json] [--workers 2] [--seconds S] [FILE ...]

Each file of tests is one row, written when it is known. A second run with the same document goes on where
the first one ended; rows of files that have changed since, or that had failures, run again. `--seconds` ends
the run before the next file.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from runner import RowFile, file_of, parser, say

from widepack_bench.report.environment import commit

ROOT = Path(__file__).resolve().parents[2]
COUNTS = ("tests", "failures", "errors", "skipped")
LONGEST = 3600  # seconds of one test


def slow_files() -> dict[str, int]:
    """Returns how many slow tests each file of tests has."""
    words = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-m", "slow"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    found: dict[str, int] = {}
    for line in done.stdout.splitlines():
        name, colons, _ = line.partition("::")
        if colons and name.startswith("tests/"):
            found[name] = found.get(name, 0) + 1
    if not found:
        raise SystemExit(f"pytest found no slow tests:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return found


def outcome(file: str, workers: int) -> dict[str, Any]:
    """Runs the slow tests of one file. Returns its row."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        start = time.perf_counter()
        words = ["-q", "-m", "slow", "-n", str(workers), "--dist", "worksteal"]
        words += ["--timeout", str(LONGEST), "--junitxml", str(report), file]
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        command = [sys.executable, "-m", "pytest", *words]
        done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
        row: dict[str, Any] = {"seconds": round(time.perf_counter() - start, 1), "commit": commit()}
        if not report.exists():
            return {**row, "error": (done.stdout + done.stderr)[-1000:]}
        suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
    row |= {name: int(suite.get(name, 0)) for name in COUNTS}
    failed = [str(c.get("name")) for c in suite.iter("testcase") if {e.tag for e in c} & {"failure", "error"}]
    return {**row, "failed": failed, **({"error": f"{len(failed)} failed"} if failed else {})}


def total(document: RowFile, counts: dict[str, int]) -> None:
    """Adds up the rows, without those of files that are gone or have no slow tests."""
    for file in [f for f in document.rows if f not in counts]:
        del document.rows[file]
    totals = {name: sum(row.get(name, 0) for row in document.rows.values()) for name in COUNTS}
    document.document["totals"] = {**totals, "files": len(document.rows), "of_files": len(counts)}
    document.write()
    say(document.document["totals"])


def main() -> None:
    options = parser(__doc__, "slow-tests.json")
    options.add_argument("files", nargs="*", help="files of tests (default: all with slow tests)")
    options.add_argument("--workers", type=int, default=2, help="processes (default: 2)")
    options.add_argument("--seconds", type=float, default=float("inf"), help="no file begins after this time")
    given = options.parse_args()
    document, start, counts = file_of(given), time.monotonic(), slow_files()
    chosen = {f: n for f, n in counts.items() if not given.files or f in given.files}
    for k, file in enumerate(sorted(chosen, key=lambda f: (chosen[f], f))):
        digest = hashlib.sha256((ROOT / file).read_bytes()).hexdigest()
        if not document.must_run(file) and document.rows[file]["sha256"] == digest:
            continue
        if time.monotonic() - start > given.seconds:
            say(f"no time for {len(chosen) - k} more files")
            break
        row = outcome(file, given.workers)
        document.add(file, {**row, "sha256": digest})
        words = f"{row.get('tests', 0)} tests, {row['seconds']} s {row.get('error', '')}"
        say(f"[{k + 1}/{len(chosen)}] {file}: {words}")
    total(document, counts)


if __name__ == "__main__":
    main()
