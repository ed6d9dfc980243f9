"""Measures networks with a published figure: widepack in several forms beside all baselines, and peak memory.

    python scripts/measure/peer_networks.py -o bench/results/device/claims.json
    python scripts/measure/peer_networks.py --device cpu --size cpu --names mlp-20 --seconds 0.3

`peer_claims.py` has the figures. Each network is built and measured in processes of its own. The forms are
the plan by rules of thumb (`auto`), the same under `torch.compile`, and on a CUDA device both by CUDA
graphs. The row has the report of `widepack bench`, and the memory of two forms (`device_memory.py`).
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from peer_claims import NETWORKS, network
from row_file import RowFile, build_threads, device_parser, say

import widepack
from widepack_bench.baselines.table import BASELINES
from widepack_bench.models.factory import factory_of
from widepack_bench.models.weights import write_checkpoints
from widepack_bench.processes.fresh import in_fresh_process
from widepack_bench.suite.bench import bench

FORMAT = "widepack.peer-networks/1"
FORMS = ("auto", "compile")
MEMORY_LIMIT_S = 120.0


def forms(device: str) -> list[str]:
    """Returns the backends of a device, as `widepack bench --backend` takes them."""
    graphs = [f"{form}+graph" for form in FORMS] if device.startswith("cuda") else []
    return [*FORMS, *graphs]


def measured(
    name: str,
    size: str,
    device: str,
    members: int,
    seconds: float,
    limit_s: float,
    baselines: Sequence[str],
    folder: str,
) -> dict[str, Any]:
    """Builds a network in a folder, and returns its report.

    Args:
        name: Of `peer_claims.NETWORKS`.
        size: `cpu` or `full`, as in `widepack bench-suite`.
        device: Where to measure.
        members: The number of members; 0 for that of the claim.
        seconds: The time of the race.
        limit_s: The seconds in which each baseline must be compiled.
        baselines: Names; empty for all.
        folder: Where the checkpoints and the artifact are written.
    """
    row = network(name)
    form, count = row.form(size), members or row.members
    begin = time.perf_counter()
    torch.set_num_threads(build_threads(device))
    paths = write_checkpoints(partial(factory_of(row.model), **form.options), count, folder)
    widepack.build(
        paths,
        f"{folder}/e.wide",
        model=row.model,
        model_args=dict(form.options),
        inputs=list(form.inputs),
        targets=(torch.device(device).type,),
        pt2=False,
        race=False,
    )
    build_s = time.perf_counter() - begin
    report = bench(
        f"{folder}/e.wide",
        device=device,
        batches=(row.batch,),
        backends=forms(device),
        baselines=list(baselines) or list(BASELINES),
        budget_s=seconds,
        compile_limit_s=limit_s,
        threads=1,
        factory=row.model,
        factory_args=form.options,
        roofline=True,
    )
    return {
        "title": row.title,
        "members": count,
        "batch": row.batch,
        "build_s": build_s,
        "report": {**report.to_json(), "name": name},
    }


def with_memory(row: dict[str, Any], name: str, size: str, device: str, folder: str) -> dict[str, Any]:
    """Adds the peak memory of the forms without compilation to a row."""
    described = network(name)
    memory = {}
    for graph in (False, True) if device.startswith("cuda") else (False,):
        memory["auto+graph" if graph else "auto"] = in_fresh_process(
            "device_memory:measured",
            {
                "artifact": f"{folder}/e.wide",
                "factory": described.model,
                "factory_args": dict(described.form(size).options),
                "batch": described.batch,
                "device": device,
                "graph": graph,
            },
            threads=1,
            limit_s=MEMORY_LIMIT_S,
        )
    return {**row, "memory": memory}


def main() -> None:
    """Measures the networks that the file does not have yet."""
    parser = device_parser(__doc__, "device/claims.json")
    parser.add_argument("--names", default=",".join(NETWORKS), help="networks, separated by commas")
    parser.add_argument("--size", choices=["cpu", "full"], default="full")
    parser.add_argument("--members", type=int, default=0, help="number of members (default: the claim's)")
    parser.add_argument("--baseline", action="append", default=[], help="repeatable (default: all)")
    parser.add_argument("--compile-limit", type=float, default=40.0, help="seconds for each baseline")
    parser.add_argument("--row-limit", type=float, default=240.0, help="seconds for each network")
    parser.add_argument("--prepare", action="store_true", help="compile, all networks at once; write nothing")
    given = parser.parse_args()
    if given.prepare:
        prepare(given.names.split(","), given)
        return
    file = RowFile(given.out, FORMAT, "networks with a published figure", given.device)
    file.document["size"] = given.size
    for name in given.names.split(","):
        if not file.must_run(name) and not refused(file.rows[name]):
            continue
        with tempfile.TemporaryDirectory(prefix="widepack-peer-") as folder:
            row = in_fresh_process(
                "peer_networks:measured",
                arguments(name, given, folder),
                threads=1,
                limit_s=given.row_limit,
            )
            file.add(name, row)
            say(name, _one_line(row))
            if "error" not in row:
                file.add(name, with_memory(row, name, given.size, given.device, folder))


def prepare(names: Sequence[str], given: argparse.Namespace) -> None:
    """Compiles what the networks compare, each network in its own process: it fills the compiler's caches.

    names: of the networks. given: the options of the command line.
    """

    def run(name: str) -> None:
        with tempfile.TemporaryDirectory(prefix="widepack-peer-") as folder:
            row = in_fresh_process(
                "peer_networks:measured",
                {**arguments(name, given, folder), "seconds": 0.01},
                threads=1,
                limit_s=given.row_limit,
            )
            say("prepared", name, row.get("error", ""))

    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(run, names))


def arguments(name: str, given: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Returns the arguments of `measured`."""
    return {
        "name": name,
        "size": given.size,
        "device": given.device,
        "members": given.members,
        "seconds": given.seconds,
        "limit_s": given.compile_limit,
        "baselines": given.baseline,
        "folder": folder,
    }


def refused(row: dict[str, Any]) -> bool:
    """Returns whether a row was refused as noisy, or lacks its memory: it is measured again."""
    return "memory" not in row or any(r["verdict"] == "noisy" for r in row["report"]["rows"])


def _one_line(row: dict[str, Any]) -> str:
    if "error" in row:
        return str(row["error"])
    (found,) = row["report"]["rows"]
    return f"{found['median_ms']:.3g} ms, {found['fastest']} {found['ratio']['value']:.2f}"


if __name__ == "__main__":
    main()
