#!/usr/bin/env python3
"""Measures `ens.route` on the networks of the suite and of the suite `real`, beside what a service would
write itself.

    taskset -c 1 python scripts/measure/route_suite.py [NAME ...] [-o bench/results/route-suite-cpu.json]

Batches of 1, 8, 32 and 128 rows, with members drawn evenly, by Zipf's law, and one for all. The baselines are
those of `route.py`. A row whose call takes longer than `--call-limit` is left out, and so is a baseline of
which one call takes five times as long as `dict`. Existing rows of other networks stay in the file.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from route_baselines import by_dict, by_sort, gathered, padded
from route_networks import members_of
from route_race import raced
from torch import nn

import widepack
from widepack_bench.measure.inputs import make
from widepack_bench.measure.processors import quiet
from widepack_bench.models.factory import factory_of
from widepack_bench.models.weights import write_checkpoints
from widepack_bench.report.environment import environment
from widepack_bench.suite.real_networks import NETWORKS
from widepack_bench.suite.rows import ROWS

ROOT = Path(__file__).resolve().parents[2]
BATCHES = (1, 8, 32, 128)
IDS = ("uniform", "zipf", "one")
MEMBERS = 8
"""The number of members of the networks of the suite `real`."""
GATHERED = 64 * 2**20
"""The most bytes of weights that the baseline `vmap` gathers for a call."""


def networks() -> dict[str, tuple[str, Callable[[], nn.Module], int, Sequence[str], Any]]:
    """Returns title, factory, members, inputs and shared weights of each network, by name."""
    found: dict[str, tuple[str, Callable[[], nn.Module], int, Sequence[str], Any]] = {}
    for row in ROWS:
        form = row.form("cpu")
        if row.name not in ("mlp-b1", "gru-8"):  # another row has the same network
            make_one = partial(factory_of(row.model), **form.options)
            found[row.name] = (f"{row.title}, size for a CPU", make_one, row.members, form.inputs, row.shared)
    for network in NETWORKS:
        make_one = partial(factory_of(network.model), **network.options)
        title = f"{network.title}, {network.size}"
        found[f"real-{network.name}"] = (title, make_one, MEMBERS, network.inputs, lambda name: False)
    return found


def seconds_of(call: Callable[[], Any]) -> float:
    """Returns the time of the second of two calls."""
    call()
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def measure(name: str, folder: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures all rows of a network."""
    title, factory, count, specs, shared = networks()[name]
    paths = write_checkpoints(factory, count, folder, shared)
    modules = []
    for path in paths:
        modules.append(factory().eval().requires_grad_(requires_grad=False))
        modules[-1].load_state_dict(torch.load(path, weights_only=True))
    widepack.build(paths, f"{folder}/e.wide", model=factory, inputs=list(specs), targets=("cpu",), pt2=False)
    ens = widepack.load(f"{folder}/e.wide")
    size = sum(p.numel() * p.element_size() for p in modules[0].parameters())
    vmapped = gathered(modules) if size * 8 <= GATHERED else None
    commit = environment("cpu", 1)["commit"]
    found: list[dict[str, Any]] = []
    for batch in BATCHES:
        for kind in IDS if batch > 1 else IDS[:1]:
            ids = members_of(kind, batch, count)
            torch.manual_seed(batch)
            inputs, _, _ = make(ens.manifest.entries["forward"], batch, members=0, device="cpu")
            row = {"name": name, "network": title, "members": count, "batch": batch, "ids": kind}
            row["commit"] = commit
            calls: dict[str, Callable[[], Any]] = {
                "dict": partial(by_dict, modules, inputs, ids),
                "sorted": partial(by_sort, modules, inputs, ids),
            }
            limit = seconds_of(calls["dict"])
            if limit > options.call_limit:
                found.append({**row, "skipped": f"a call of dict takes {limit:.2f} s"})
                continue
            more: dict[str, Callable[[], Any]] = {"each": partial(padded, ens, inputs, ids)}
            if vmapped is not None and size * batch <= GATHERED:
                more["vmap"] = partial(vmapped, inputs, ids)
            for other, call in more.items():
                if _runs(call, limit):
                    calls[other] = call
            figures = raced(ens, inputs, ids, calls, options.seconds, 4 * options.seconds)
            ratio = figures["ratio"]["value"]
            if ratio is None:
                found.append({**row, "skipped": "too few rounds fit into the time"})
                continue
            found.append({**row, **figures})
            print(
                name, batch, kind, f"{found[-1]['ms']:.3f} ms, {ratio:.2f}x", found[-1]["fastest"], flush=True
            )
    return found


def _runs(call: Callable[[], Any], limit: float) -> bool:
    """Returns whether a baseline runs, and is not many times slower than `dict`."""
    try:
        return seconds_of(call) < 5 * limit
    except RuntimeError:  # vmap does not take every op
        return False


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(networks())}")
    parser.add_argument("-o", "--out", type=Path, default=ROOT / "bench" / "results" / "route-suite-cpu.json")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each row")
    parser.add_argument("--call-limit", type=float, default=0.3, help="seconds of a call of dict")
    options = parser.parse_args()
    names = options.names or list(networks())
    rows: list[dict[str, Any]] = []
    if options.out.exists():
        rows = json.loads(options.out.read_text(encoding="utf-8"))["rows"]
    with quiet(1), torch.no_grad():
        for name in names:
            with tempfile.TemporaryDirectory() as folder:
                rows = [r for r in rows if r["name"] != name] + measure(name, folder, options)
            document = {
                "what": "ens.route on the networks of the suites over the fastest baseline of route.py",
                "environment": environment("cpu", 1),
                "rows": rows,
            }
            options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
