"""Loads changed artifacts in a monitored process, one after the other: damaged ones, and forged ones.

    python scripts/stress/fuzz_artifacts.py --hashes on --cases 100000 -o fuzz.json
    python scripts/stress/fuzz_artifacts.py --fixed-up --seconds 600 -o fuzz.json

With `--hashes on`, files are damaged: bits, ends, parts, JSON. With `--fixed-up`, manifest, programs and
tensors are rewritten, and hashes, names and digest are correct again.

A damaged artifact must raise an ArtifactError with one sentence, or give the same answers as before, bit for
bit. A forged artifact may load. Neither may raise another exception, crash, use more than 10 s of a core or
more than 1 GB, open a file outside the folder, or import a module that the load of a valid artifact does not
import.

`-o` appends the run to the list of runs in the file. A case depends only on the seed, the mode and its
number: `--case 123 --seed 0` runs one case again.

| module | purpose |
|---|---|
| `fuzz_files.py` | builds the artifacts, reads and writes their files |
| `fuzz_json.py` | changes JSON documents |
| `fuzz_damage.py` | damages files |
| `fuzz_nodes.py` | adds nodes to programs |
| `fuzz_forge.py` | forges artifacts with correct hashes |
| `fuzz_worker.py` | loads the artifacts |
| `fuzz_monitor.py` | starts and replaces workers |
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from fuzz_files import corpus
from fuzz_monitor import watched
from fuzz_worker import FINE, serve


def arguments() -> argparse.Namespace:
    """Returns the arguments of the command line."""
    parser = argparse.ArgumentParser(description="Load mutated artifacts.")
    parser.add_argument("--hashes", choices=["on"], help="damage files; every load checks all hashes")
    parser.add_argument(
        "--fixed-up",
        action="store_true",
        help="rewrite manifest, programs and tensors, and correct hashes, names and digest",
    )
    parser.add_argument("--cases", type=int, default=10**9, help="number of cases")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--case", type=int, help="run only this case, and print its row")
    parser.add_argument("--seconds", type=float, default=3600.0, help="time limit of the run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--corpus", type=Path, help="a folder of artifacts; an empty folder is filled")
    parser.add_argument("-o", "--output", type=Path)
    return parser.parse_args()


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """Returns a row without the changed files."""
    return {k: v for k, v in row.items() if k != "files"}


class Run:
    """Collects the rows of a run: counts, failures and maxima."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.ways: Counter[str] = Counter()
        self.failed: list[dict[str, Any]] = []
        self.longest, self.largest = 0.0, 0

    def add(self, row: dict[str, Any]) -> None:
        """Counts a row, and prints it if the case failed."""
        self.outcomes[row["outcome"]] += 1
        self.ways[f"{row.get('how', '?')}: {row['outcome']}"] += 1
        self.longest = max(self.longest, row.get("seconds", 0.0))
        self.largest = max(self.largest, row.get("bytes", 0))
        if row["outcome"] not in (*FINE, "none"):
            self.failed.append(row)
            print(json.dumps(shown(row))[:1500], file=sys.stderr, flush=True)

    def document(self, mode: str, seed: int, first: int, seconds: float) -> dict[str, Any]:
        """Returns the document of the run."""
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return {
            "mode": mode,
            "seed": seed,
            "first": first,
            "cases": sum(self.outcomes.values()),
            "seconds": round(seconds, 1),
            "seconds_of_a_core": round(used.ru_utime + used.ru_stime, 1),
            "outcomes": dict(self.outcomes.most_common()),
            "longest_s": self.longest,
            "largest_rss_bytes": self.largest,
            "failed": self.failed,
            "ways": dict(sorted(self.ways.items())),
        }


def main() -> None:
    if sys.argv[1:2] == ["--work"]:
        serve(*sys.argv[2:])
        return
    given = arguments()
    mode = "fixed-up" if given.fixed_up else "hashes"
    run = Run()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as temporary:
        folder = given.corpus or Path(temporary)
        folder.mkdir(exist_ok=True)
        if not list(folder.glob("*.wide")):
            corpus(folder)
        start = time.monotonic()
        first, cases = (given.case, 1) if given.case is not None else (given.first, given.cases)
        for row in watched(mode, given.seed, folder, first, cases, given.seconds):
            run.add(row)
            if given.case is not None:
                print(json.dumps(shown(row), indent=1))
        for left in [*folder.glob("at-work-*"), *folder.glob("tmp*")]:
            shutil.rmtree(left, ignore_errors=True)
    document = run.document(mode, given.seed, first, time.monotonic() - start)
    print(json.dumps({k: v for k, v in document.items() if k not in ("failed", "ways")}, indent=1))
    if given.output:
        runs = json.loads(given.output.read_text()) if given.output.exists() else []
        given.output.write_text(json.dumps([*runs, document], indent=1) + "\n")


if __name__ == "__main__":
    main()
