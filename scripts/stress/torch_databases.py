"""Runs the samples of torch's own test databases through widepack, and writes how each case ends.

    python scripts/stress/torch_databases.py                           # all; writes the table
    python scripts/stress/torch_databases.py --only op/linalg --print   # entries by their first letters
    python scripts/stress/torch_databases.py --minutes 20               # continues a table that was cut off

float32, three members, the first three samples of every entry (tests/helpers/database_cases.py). Each case is
compared with every member alone in float64 (tests/helpers/database_check.py). A process of its own runs the
cases one after the other. If it ends or takes more than `--seconds` for one case, the case is a crash, and
another process goes on with the next case.

The table has the number of cases of each outcome, by database and way, the samples of each entry that were
run, and each case that is not right with its reason. tests/networks/test_torch_databases.py compares a new
run with the table.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from widepack_bench.processes.fresh import ProcessEnded, lines_of_fresh_process
from widepack_bench.report.environment import environment
from widepack_bench.report.json_file import write_whole

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "helpers"))
OUT = ROOT / "bench" / "results" / "torch-databases.json"
SECONDS = 90.0
Outcomes = dict[str, list[str]]  # key of a case -> [outcome, reason]


def entries(only: Sequence[str] = ("",)) -> list[str]:
    """Returns the names of the entries, `module/nn.Linear` or `op/add`, that begin with one of the texts."""
    from database_cases import database

    names = [f"{kind}/{name}" for kind in ("module", "op") for name in database(kind)]
    return [n for n in names if n.startswith(tuple(only))]


def work(names: Sequence[str], done: Sequence[str], numbers: Sequence[int]) -> Iterator[dict[str, str]]:
    """Yields the key of each case before it runs, and then its outcome. Runs in a process of its own."""
    import torch
    from database_cases import cases_of, database
    from database_check import outcome_of

    torch.set_num_threads(1)
    skip = set(done)
    for full in names:
        kind, _, name = full.partition("/")
        for key, make in cases_of(kind, name, database(kind)[name], numbers):
            if key not in skip:
                yield {"key": key}
                outcome = outcome_of(make)
                yield {"key": key, "outcome": outcome.name, "why": outcome.why}


def run(
    names: Sequence[str],
    numbers: Sequence[int] = (0, 1, 2),
    done: Mapping[str, list[str]] | None = None,
    seconds: float = SECONDS,
    deadline: float = math.inf,
    progress: Callable[[str, list[str]], None] = lambda key, outcome: None,
) -> Outcomes:
    """Runs entries in processes of their own and returns the outcome of each case.

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
    while left and time.monotonic() < deadline:
        current, known = "", [key for key in found if entry_of(key) in left]
        given = {"names": left, "done": known, "numbers": list(numbers)}
        try:
            for line in lines_of_fresh_process("torch_databases:work", given, threads=1, limit_s=seconds):
                current = "" if "outcome" in line else line["key"]
                if not current:
                    found[line["key"]] = [line["outcome"], line["why"]]
                    progress(line["key"], found[line["key"]])
                    if time.monotonic() > deadline:
                        return found
            return found
        except ProcessEnded as error:
            if not current:
                raise
            found[current] = ["crash", str(error)]
            progress(current, found[current])
        left = left[left.index(entry_of(current)) :]
    return found


def entry_of(key: str) -> str:
    """Returns the entry of a case."""
    return "/".join(key.split("/")[:2])


def table(found: Mapping[str, list[str]]) -> dict[str, Any]:
    """Returns the counts and the exceptions of a run, as the document has them."""
    counts: dict[str, Counter[str]] = {}
    samples: dict[str, set[int]] = {}
    for key, (name, _) in found.items():
        kind, entry, number, way = key.split("/")
        counts.setdefault(f"{kind}, {way}", Counter())[name] += 1
        samples.setdefault(f"{kind}/{entry}", set()).add(int(number))
    names = ("right", "wrong", "refused", "crash", "apart")
    exceptions: dict[str, dict[str, str]] = {n: {} for n in names[1:]}
    for key, (name, why) in sorted(found.items()):
        if name != "right":
            exceptions[name][key] = why
    return {
        "counts": {group: {n: rows[n] for n in names} for group, rows in counts.items()},
        "samples": {name: sorted(rows) for name, rows in sorted(samples.items())},
        **exceptions,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("-o", "--out", type=Path, default=OUT)
    parser.add_argument("--only", default="", help="beginnings of entries, separated by commas: op/linalg")
    parser.add_argument("--samples", default="0,1,2", help="samples by number, separated by commas")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="the time limit of a case")
    parser.add_argument("--minutes", type=float, default=math.inf, help="the time limit of this run")
    parser.add_argument("--lines", type=Path, help="a file of outcomes, which a later run continues")
    parser.add_argument("--print", action="store_true", help="print the outcomes and write no table")
    given = parser.parse_args()
    done: Outcomes = {}
    if given.lines and given.lines.exists():
        done = {k: v for k, *v in map(json.loads, given.lines.read_text(encoding="utf-8").splitlines())}
    deadline = time.monotonic() + 60 * given.minutes

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
        what = {"what": __doc__, "environment": environment("cpu", 1)}
        write_whole(given.out, {**what, **document})


if __name__ == "__main__":
    main()
