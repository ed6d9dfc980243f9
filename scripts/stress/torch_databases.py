"""Runs the samples of torch's own test databases through widepack, and writes how each case ends.

    python scripts/stress/torch_databases.py                           # all; writes the table
    python scripts/stress/torch_databases.py --only op/linalg --print   # entries by their first letters
    python scripts/stress/torch_databases.py --minutes 20               # continues a table that was cut off

float32, three members, the first three samples of every entry (scripts/stress/database_cases.py). Each case
is compared with every member alone in float64 (scripts/stress/database_check.py). A child process runs the
cases one after the other. If it dies or takes more than `--seconds` for one case, the case is a crash, and
another child goes on with the next case.

The table has the number of cases of each outcome, by database and way, the samples of each entry that were
run, and each case that is not right with its reason. tests/networks/test_torch_databases.py compares a new
run with the table.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
OUT = HERE.parents[1] / "bench" / "results" / "torch-databases.json"
SECONDS = 90.0
Outcomes = dict[str, list[str]]  # key of a case -> [outcome, reason]


def entries(only: Sequence[str] = ("",)) -> list[str]:
    """Returns the names of the entries, `module/nn.Linear` or `op/add`, that begin with one of the texts."""
    from database_cases import database

    names = [f"{kind}/{name}" for kind in ("module", "op") for name in database(kind)]
    return [n for n in names if n.startswith(tuple(only))]


def work(names: Sequence[str], done: Sequence[str], numbers: Sequence[int]) -> None:
    """Runs entries in this process. It prints one JSON line before and one after each case."""
    import torch
    from database_cases import cases_of, database
    from database_check import outcome_of

    torch.set_num_threads(1)
    skip = set(done)
    for full in names:
        kind, _, name = full.partition("/")
        for key, make in cases_of(kind, name, database(kind)[name], numbers):
            if key not in skip:
                print(json.dumps([key]), flush=True)
                outcome = outcome_of(make)
                print(json.dumps([key, outcome.name, outcome.why]), flush=True)


def run(
    names: Sequence[str],
    numbers: Sequence[int] = (0, 1, 2),
    done: Mapping[str, list[str]] | None = None,
    seconds: float = SECONDS,
    deadline: float | None = None,
    progress: Callable[[str, list[str]], None] | None = None,
) -> Outcomes:
    """Runs entries in child processes and returns the outcome of each case.

    Args:
        names: The entries.
        numbers: The samples, by number. Default: the first three.
        done: Outcomes that are known already.
        seconds: The time limit of a case.
        deadline: The time (`time.monotonic`) after which no case begins.
        progress: Called with each case and its outcome.
    """
    found: Outcomes = dict(done or {})
    left = list(names)
    while left and (deadline is None or time.monotonic() < deadline):
        for key, outcome in _child(left, list(found), numbers, seconds, deadline):
            if outcome is None:  # all cases of the entries that are left have ended
                return found
            found[key] = outcome
            if progress is not None:
                progress(key, outcome)
        last = "/".join(list(found)[-1].split("/")[:2]) if found else left[0]
        left = left[left.index(last) :] if last in left else left
    return found


def _child(
    names: Sequence[str],
    done: Sequence[str],
    numbers: Sequence[int],
    seconds: float,
    deadline: float | None,
) -> Iterator[tuple[str, list[str] | None]]:
    """Yields the outcomes of one child, and (\"\", None) if it ended by itself."""
    prefixes = {f"{n}/" for n in names}
    known = [k for k in done if "/".join(k.split("/")[:2]) + "/" in prefixes]
    given = json.dumps([list(names), known, list(numbers)])
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(
        [sys.executable, "-W", "ignore", __file__, "--work"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert child.stdin is not None and child.stdout is not None
    current = ""
    try:
        child.stdin.write(given)
        child.stdin.close()
        while True:
            ready, _, _ = select.select([child.stdout], [], [], seconds + (0 if current else 60))
            if not ready:
                yield current, ["crash", f"no answer after {seconds:.0f} s"]
                return
            line = child.stdout.readline()
            if not line:
                code = child.wait()
                if code > 0:
                    raise SystemExit(f"the child process failed with code {code}")
                if code == 0 and not current:
                    yield "", None
                else:
                    yield current, ["crash", f"the process ended with code {code}"]
                return
            key, *outcome = json.loads(line)
            current = "" if outcome else key
            if outcome:
                yield key, outcome
                if deadline is not None and time.monotonic() > deadline:
                    return
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


def table(found: Mapping[str, list[str]]) -> dict[str, Any]:
    """Returns the counts and the exceptions of a run, as the document has them."""
    counts: dict[str, Counter[str]] = {}
    for key, (name, _) in found.items():
        kind, *_, way = key.split("/")
        counts.setdefault(f"{kind}, {way}", Counter())[name] += 1
    names = ("right", "wrong", "refused", "crash", "apart")
    exceptions: dict[str, dict[str, str]] = {n: {} for n in names[1:]}
    for key, (name, why) in sorted(found.items()):
        if name != "right":
            exceptions[name][key] = why
    return {
        "counts": {group: {n: rows[n] for n in names} for group, rows in counts.items()},
        "samples": _samples(found),
        **exceptions,
    }


def _samples(found: Mapping[str, list[str]]) -> dict[str, list[int]]:
    """Returns for each entry the numbers of the samples that were run."""
    numbers: dict[str, set[int]] = {}
    for key in found:
        kind, name, number, _ = key.split("/")
        numbers.setdefault(f"{kind}/{name}", set()).add(int(number))
    return {name: sorted(rows) for name, rows in sorted(numbers.items())}


def _text(record: Mapping[str, Any]) -> str:
    """Returns the document, with the samples of each entry on one line."""
    rows = [f"  {json.dumps(name)}: {json.dumps(numbers)}" for name, numbers in record["samples"].items()]
    samples = '"samples": {\n' + ",\n".join(rows) + "\n }"
    return json.dumps({**record, "samples": {}}, indent=1).replace('"samples": {}', samples) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("-o", "--out", type=Path, default=OUT)
    parser.add_argument("--only", default="", help="beginnings of entries, separated by commas: op/linalg")
    parser.add_argument("--samples", default="0,1,2", help="samples by number, separated by commas")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="the time limit of a case")
    parser.add_argument("--minutes", type=float, help="the time limit of this run")
    parser.add_argument("--lines", type=Path, help="a file of outcomes, which a later run continues")
    parser.add_argument("--print", action="store_true", help="print the outcomes and write no table")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(*json.loads(sys.stdin.read()))
        return
    done: Outcomes = {}
    if given.lines and given.lines.exists():
        done = {k: v for k, *v in map(json.loads, given.lines.read_text(encoding="utf-8").splitlines())}
    deadline = time.monotonic() + 60 * given.minutes if given.minutes else None

    def progress(key: str, outcome: list[str]) -> None:
        if given.lines:
            with given.lines.open("a", encoding="utf-8") as file:
                file.write(json.dumps([key, *outcome]) + "\n")
        if outcome[0] != "right" or given.print:
            print(f"{len(done) + 1}: {key}: {outcome[0]}: {outcome[1]}"[:300], flush=True)

    names = entries(given.only.split(","))
    numbers = [int(n) for n in given.samples.split(",")]
    found = run(names, numbers, done, given.seconds, deadline, progress)
    document = table(found)
    print(json.dumps(document["counts"], indent=1))
    if not given.print:
        from widepack_bench.report.environment import environment

        what = {"what": __doc__, "environment": environment("cpu", 1)}
        given.out.write_text(_text({**what, **document}), encoding="utf-8")


if __name__ == "__main__":
    main()
