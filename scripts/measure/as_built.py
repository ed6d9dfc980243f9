"""Measures artifacts as built and loaded by default, over the fastest of what users would write instead.

    python scripts/measure/as_built.py [--networks vit-384,vgg] [--threads 1] [--calls shared] [--list]
    python scripts/measure/as_built.py --clock cpu --threads 1   # on a machine that also does other work

A row is a network (`widepack_bench/as_built/networks.py`), a batch, one thread or two, and a call: `shared`,
`each` or `route`. Contestants are processes of their own on the same processors, which take turns in blocks
of ten milliseconds or one call:

| contestant | what it is |
|---|---|
| `widepack`, `widepack again` | the artifact: the ratio of the two is the noise |
| `load NAME` | the same artifact, loaded with other options: a column that is no contestant |
| `loop` | the modules one after another; for `route` each with its rows |
| `vmap` | `torch.func.vmap` over stacked weights |
| `compiled-loop`, `vmap-compiled` | the same with `torch.compile`; the loop up to 8 members |
| `onnxruntime` | N sessions of ONNX Runtime |
| `onnxruntime-divided` | with two threads: sessions of one thread, which two Python threads share |

`ratio` is the time of the fastest alternative, which the odd rounds choose, over that of `widepack` on the
even rounds, with its 95% interval. `over_loop` is the same for the eager loop, `over_torch` for the fastest
without ONNX Runtime. A row is `valid` if its interval and that of the noise are at most 0.1 wide, and else
says `why` not. `--clock` says which time counts: `wall`, or the processor's time of all threads of the
process, which other work changes less; `busy` is wall over processor time of `widepack`. Answers that differ
from the loop's end a row, or leave a contestant out.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from runner import RowFile, file_of, parser, run, say

from widepack_bench.as_built.contestant import FORMS
from widepack_bench.as_built.networks import KNOWN, NETWORKS
from widepack_bench.as_built.row import CLOCKS, measured
from widepack_bench.as_built.stage import Case, Stage
from widepack_bench.as_built.summary import summary
from widepack_bench.measure.race import Interval

CALLS = ("shared", "each", "route")


def cases(networks: Sequence[str], threads: Sequence[int], calls: Sequence[str]) -> list[Case]:
    """Returns the rows; those of a network and a number of threads in a row, because they share processes."""
    return [Case(n, b, t, c) for n in networks for t in threads for b in NETWORKS[n].batches for c in calls]


def measures(
    given: argparse.Namespace, rows: Sequence[Case]
) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yields the rows with what measures them. A stage lives as long as its rows are measured."""
    stage: Stage | None = None
    forms, without = ([name for name in text.split(",") if name] for text in (given.forms, given.without))
    with ExitStack() as folders:
        folder = Path()
        for case in rows:
            if stage is None or stage.network != case.network:
                folders.close()
                folder = Path(folders.enter_context(tempfile.TemporaryDirectory(prefix="widepack-as-built-")))
            if stage is None or (stage.network, stage.threads) != (case.network, case.threads):
                if stage is not None:
                    stage.close()
                stage = Stage(case.network, case.threads, forms, folder, without)
                folders.callback(stage.close)
            yield case.key, partial(measured, case, stage, given.clock, given.seconds)


def listed(file: RowFile, rows: Sequence[Case]) -> None:
    """Prints the rows with the ratios that the document has."""
    for key in (case.key for case in rows):
        row = file.rows.get(key, {"error": "not measured"})
        known = "error" not in row
        ratio = (
            Interval(*(row["ratio"][k] or 0.0 for k in ("value", "low", "high"))) if known else row["error"]
        )
        print(key, ratio, *([f"over {row['fastest']}", row.get("why", "")] if known else []))


def main() -> int:
    options = parser(__doc__, "as-built-cpu.json", seconds=8.0)
    options.add_argument("--networks", default="", help="names, or `known` or `new` (default: all)")
    options.add_argument("--rows", dest="only", default="", help="the same as --only")
    options.add_argument("--threads", default="1,2")
    options.add_argument("--calls", default=",".join(CALLS))
    options.add_argument("--forms", default=",".join(FORMS), help="other loads that are measured, or nothing")
    options.add_argument("--without", default="", help="alternatives to leave out, such as compiled-loop")
    options.add_argument("--clock", choices=CLOCKS, default="wall")
    options.add_argument("--list", action="store_true", help="print the rows, and measure nothing")
    given = options.parse_args()
    every = list(NETWORKS)
    named = {"": every, "known": every[:KNOWN], "new": every[KNOWN:]}
    networks = named.get(given.networks) or given.networks.split(",")
    rows = cases(networks, [int(t) for t in given.threads.split(",")], given.calls.split(","))
    rows = [case for case in rows if given.only in case.key]
    if given.list:
        listed(file_of(given), rows)
        return 0
    say(f"{len(rows)} rows, by the time of the {'wall' if given.clock == 'wall' else 'processor'}")
    return run(given, measures(given, rows), summary=summary)


if __name__ == "__main__":
    sys.exit(main())
