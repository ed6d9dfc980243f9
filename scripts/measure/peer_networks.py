"""Measures networks with a published figure: widepack in several forms beside all baselines, and peak memory.

    python scripts/measure/peer_networks.py
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
from runner import build_threads, file_of, parser, say

import widepack
from widepack_bench.baselines.table import BASELINES
from widepack_bench.models.factory import factory_of
from widepack_bench.models.weights import write_checkpoints
from widepack_bench.processes.fresh import in_fresh_process
from widepack_bench.suite.bench import bench

FORMS = ("auto", "compile")
MEMORY_LIMIT_S = 120.0


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

    size: `cpu` or `full`, as in `widepack bench-suite`. members: 0 for the number of the claim. limit_s: the
    seconds in which each baseline must be compiled. baselines: names; empty for all.
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
        budget=0,
    )
    build_s = time.perf_counter() - begin
    report = bench(
        f"{folder}/e.wide",
        device=device,
        batches=(row.batch,),
        backends=[*FORMS, *(f"{f}+graph" for f in FORMS if device.startswith("cuda"))],
        baselines=list(baselines) or list(BASELINES),
        budget_s=seconds,
        compile_limit_s=limit_s,
        threads=1,
        factory=row.model,
        factory_args=form.options,
        roofline=True,
    )
    found = {"title": row.title, "members": count, "batch": row.batch, "build_s": build_s}
    return {**found, "report": {**report.to_json(), "name": name}}


def with_memory(row: dict[str, Any], name: str, size: str, device: str, folder: str) -> dict[str, Any]:
    """Adds the peak memory of the forms without compilation to a row."""
    described = network(name)
    memory = {}
    for graph in (False, True) if device.startswith("cuda") else (False,):
        arguments = {"artifact": f"{folder}/e.wide", "factory": described.model, "batch": described.batch}
        arguments |= {"factory_args": dict(described.form(size).options), "device": device, "graph": graph}
        memory["auto+graph" if graph else "auto"] = in_fresh_process(
            "device_memory:measured", arguments, threads=1, limit_s=MEMORY_LIMIT_S
        )
    return {**row, "memory": memory}


def in_process(name: str, given: argparse.Namespace, folder: str, seconds: float) -> dict[str, Any]:
    """Runs `measured` in a process of its own."""
    arguments = {key: getattr(given, key) for key in ("size", "device", "members")}
    arguments |= {"name": name, "seconds": seconds, "limit_s": given.compile_limit}
    arguments |= {"baselines": given.baseline, "folder": folder}
    return in_fresh_process("peer_networks:measured", arguments, threads=1, limit_s=given.row_limit)


def prepare(names: Sequence[str], given: argparse.Namespace) -> None:
    """Compiles what the networks compare, each network in its own process: it fills the compiler's caches."""

    def run(name: str) -> None:
        with tempfile.TemporaryDirectory(prefix="widepack-peer-") as folder:
            say("prepared", name, in_process(name, given, folder, 0.01).get("error", ""))

    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(run, names))


def refused(row: dict[str, Any]) -> bool:
    """Returns whether a row was refused as noisy, or lacks its memory: it is measured again."""
    return "memory" not in row or any(r["verdict"] == "noisy" for r in row["report"]["rows"])


def main() -> None:
    """Measures the networks that the file does not have yet."""
    options = parser(__doc__, "device/claims.json", seconds=1.0, device="cuda")
    options.add_argument("--names", default=",".join(NETWORKS), help="networks, separated by commas")
    options.add_argument("--size", choices=["cpu", "full"], default="full")
    options.add_argument("--members", type=int, default=0, help="number of members (default: the claim's)")
    options.add_argument("--baseline", action="append", default=[], help="repeatable (default: all)")
    options.add_argument("--compile-limit", type=float, default=40.0, help="seconds for each baseline")
    options.add_argument("--row-limit", type=float, default=240.0, help="seconds for each network")
    words = "compile, all networks at once; write nothing"
    options.add_argument("--prepare", action="store_true", help=words)
    given = options.parse_args()
    if given.prepare:
        prepare(given.names.split(","), given)
        return
    file = file_of(given)
    file.document["size"] = given.size
    for name in given.names.split(","):
        if not file.must_run(name) and not refused(file.rows[name]):
            continue
        with tempfile.TemporaryDirectory(prefix="widepack-peer-") as folder:
            row = in_process(name, given, folder, given.seconds)
            file.add(name, row)
            say(name, row.get("error", "is measured"))
            if "error" not in row:
                file.add(name, with_memory(row, name, given.size, given.device, folder))


if __name__ == "__main__":
    main()
