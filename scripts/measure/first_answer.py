"""Measures the time of a process to its first answer, without `import torch`. Compiled programs are in the
cache, and the machine has no compiler.

    taskset -c 1 python scripts/measure/first_answer.py [--rounds 15]

The artifact has 100 MB of weights: 8 members of a 3-layer MLP of width 1024. Times are from just before the
start of a process to a mark that the process prints, by one clock. A round starts one process of each kind,
in changing order. The time of a kind beyond `import torch` is the difference of two processes of one round.
`in_process_ms` is measured within one process, from the end of `import torch`. All are medians over rounds,
with 95% intervals. The files are in the page cache of the system.

| kind | what the process does |
|---|---|
| `torch` | imports torch |
| `aot` | loads with backend `aot` from the warm cache, and calls once; the probe has passed on this machine |
| `aot, probe` | the same, and runs the artifact's probe, as the first process on a machine does |
| `eager` | loads with backend `eager`, and calls once |
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from runner import built, child, in_turns, parser, run
from torch import nn

import widepack
from widepack_bench.measure.race import median_interval

MEMBERS, WIDTH, LAYERS = 8, 1024, 3
KINDS = ("torch", "aot", "aot, probe", "eager")
PROCESS = """
import sys, time
import torch
marks = {"torch": time.monotonic_ns()}
kind, path, cache = sys.argv[1:4]
if kind != "torch":
    import widepack
    widepack.load
    marks["widepack"] = time.monotonic_ns()
    ens = widepack.load(path, backend=kind, cache=cache)
    marks["load"] = time.monotonic_ns()
    ens(torch.zeros(1, int(sys.argv[4])))
    marks["answer"] = time.monotonic_ns()
import json
print(json.dumps(marks))
"""


def net() -> nn.Module:
    return nn.Sequential(*(part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))


def marks_of(folder: Path, kind: str, number: int) -> dict[str, float]:
    """Returns the milliseconds from just before the start of a process to each of its marks."""
    home = folder / (f"cold{number}" if kind.endswith("probe") else "warm")
    variables = {"PATH": "/nonexistent", "XDG_CACHE_HOME": str(home), "OMP_NUM_THREADS": "1"}
    unset = dict.fromkeys(("CC", "CXX", "WIDEPACK_CACHE", "WIDEPACK_PLANS"))
    arguments = (kind.partition(",")[0], folder / "e.wide", folder / "compiled", WIDTH)
    begin = time.monotonic_ns()
    marks = child(PROCESS, *arguments, variables={**variables, **unset})
    return {name: (at - begin) / 1e6 for name, at in marks.items()}


def row(kind: str, rounds: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Returns the time of a kind beyond `import torch`, and the medians of its parts, in milliseconds."""
    beyond = [a["answer"] - t["torch"] for a, t in zip(rounds[kind], rounds["torch"])]
    parts = (("torch", "widepack"), ("widepack", "load"), ("load", "answer"))
    return {
        "beyond_torch_ms": median_interval(beyond).to_json(),
        "in_process_ms": median_interval([r["answer"] - r["torch"] for r in rounds[kind]]).to_json(),
        "parts_ms": {b: statistics.median(r[b] - r[a] for r in rounds[kind]) for a, b in parts},
        "all_ms": [round(value, 1) for value in beyond],
    }


def main() -> int:
    options = parser(__doc__, "first-answer-cpu.json")
    options.add_argument("--rounds", type=int, default=15, help="number of processes of each kind")
    given = options.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        modules, path = built(folder, net, MEMBERS, [f"input=float32[B,{WIDTH}]"])
        ens = widepack.load(path, backend="aot", compile="now", cache=folder / "compiled")
        x = torch.randn(4, WIDTH)
        torch.testing.assert_close(ens(x), torch.stack([m(x) for m in modules]))
        rounds = in_turns(KINDS, partial(marks_of, folder), given.rounds)
        size = sum(w.bytes(MEMBERS) for w in ens.manifest.weights)
        torch_ms = median_interval([r["torch"] for r in rounds["torch"]]).to_json()
        given.again = True  # rounds of different runs are not one race
        cases = {kind: partial(row, kind, rounds) for kind in KINDS[1:]}
        return run(given, cases, weights_bytes=size, rounds=given.rounds, import_torch_ms=torch_ms)


if __name__ == "__main__":
    sys.exit(main())
