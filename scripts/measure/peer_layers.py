"""Measures layers and blocks in the way of published tables, and beside N layers in one program.

    python scripts/measure/peer_layers.py -o bench/results/device/layers.json
    python scripts/measure/peer_layers.py --device cpu --preset ci --members 2 --names linear,layernorm

`peer_claims.py` has the published figures, `peer_layer_row.py` says what is compared. The shapes are those
of `widepack bench-layers -p full`. The largest number of members is measured first, for all layers. With
`--jobs` the rows are taken in groups of so many: their processes compile at the same time, which fills the
caches of torch's compiler; then one process measures row by row. If it ends, a new one goes on with the next
row.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from peer_claims import LAYERS
from peer_layer_row import key_of
from row_file import RowFile, device_parser, say

from widepack_bench.processes.fresh import ProcessEnded, in_fresh_process, lines_of_fresh_process

FORMAT = "widepack.peer-layers/1"
MEMBERS = (32, 16, 8, 4)
MORE_S = 60.0  # what a row may take beyond the compilation of its contestants
CONTESTANTS = 12

Task = tuple[str, int]


def prepare(tasks: Sequence[Task], options: dict[str, Any], limit_s: float) -> None:
    """Compiles the contestants of rows, each row in its own process.

    tasks: of the rows. options: those of `peer_layer_row.rows`. limit_s: after which a process is ended: what
    it did not compile is compiled when it is measured.
    """

    def run(task: Task) -> None:
        found = in_fresh_process(
            "peer_layer_row:prepared",
            {"tasks": [task], **options},
            threads=1,
            limit_s=limit_s,
            environment={"TORCHINDUCTOR_COMPILE_THREADS": "1"},
        )
        say("prepared", key_of(*task), found.get("error", ""))

    with ThreadPoolExecutor(len(tasks)) as pool:
        list(pool.map(run, tasks))


def measure(tasks: Sequence[Task], file: RowFile, options: dict[str, Any]) -> None:
    """Measures rows into the file. A row whose process ends has the reason as its error."""
    waiting = list(tasks)
    limit_s = CONTESTANTS * options["limit_s"] + MORE_S
    while waiting:
        why, given = "it gave no row", 0
        try:
            for line in lines_of_fresh_process(
                "peer_layer_row:rows",
                {"tasks": waiting, "timed": True, **options},
                threads=1,
                limit_s=limit_s,
                steady=True,
            ):
                key = key_of(*waiting.pop(0))
                file.add(key, line["row"])
                say(key, _one_line(line["row"]))
                given += 1
        except ProcessEnded as error:
            why, given = str(error), 0
        if waiting and not given:  # a process that gave rows and returned cannot use the device any more
            name, count = waiting.pop(0)
            file.add(
                key_of(name, count), {"name": name, "members": count, "error": f"its process ended: {why}"}
            )


def _one_line(row: dict[str, Any]) -> str:
    if "error" in row:
        return str(row["error"])
    parts = []
    for way in ("published", "inference"):
        found = row[way]
        ratios = {k: r["value"] for k, r in found.get("ratios", {}).items() if r["value"] is not None}
        parts.append(f"{way}: " + ", ".join(f"{k} {v:.2f}" for k, v in ratios.items()))
    return "; ".join(parts)


def main() -> None:
    """Measures the rows that the file does not have yet."""
    parser = device_parser(__doc__, "device/layers.json")
    parser.add_argument("--names", help="layers, separated by commas (default: those of a published table)")
    parser.add_argument("--members", default=",".join(map(str, MEMBERS)), help="numbers of members, in order")
    parser.add_argument("--preset", choices=["ci", "full"], default="full", help="the shapes")
    parser.add_argument("--compile-limit", type=float, default=40.0, help="seconds for each contestant")
    parser.add_argument(
        "--jobs", type=int, default=max(1, (os.cpu_count() or 1) - 4), help="rows that are compiled at once"
    )
    parser.add_argument("--prepare-limit", type=float, default=60.0, help="seconds of compiling beforehand")
    given = parser.parse_args()
    names = given.names.split(",") if given.names else list(LAYERS)
    options = {
        "preset": given.preset,
        "device": given.device,
        "seconds": given.seconds,
        "limit_s": given.compile_limit,
    }
    file = RowFile(given.out, FORMAT, "layers in the way of published tables", given.device)
    for count in map(int, given.members.split(",")):
        tasks = [(name, count) for name in names if file.must_run(key_of(name, count))]
        part = given.jobs if given.jobs > 1 else len(tasks)
        for begin in range(0, len(tasks), max(1, part)):
            some = tasks[begin : begin + part]
            if given.jobs > 1:
                prepare(some, options, given.prepare_limit)
            measure(some, file, options)


if __name__ == "__main__":
    main()
