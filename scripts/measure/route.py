#!/usr/bin/env python3
"""Measures `ens.route` beside what a service would write itself, for rows of several members.

    taskset -c 1 python scripts/measure/route.py [-o bench/results/route-cpu.json] [--seconds 2]

The baselines hold the members as modules: `dict` groups the rows by member and calls each module, `sorted`
sorts the rows once and calls each module on a slice, `vmap` gathers the weights of each row and calls one
module, `each` pads the rows to the largest group and runs all members. `ratio` is the time of the fastest
baseline over that of `route`, interleaved in one run, with its 95% interval; `noise` is `route` against
itself. Every baseline's answer is compared with `route`'s first.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from route_networks import NETWORKS, members_of
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

import widepack
from widepack_bench.measure.processors import quiet
from widepack_bench.measure.race import OURS, race
from widepack_bench.report.environment import environment

ROOT = Path(__file__).resolve().parents[2]
BATCHES = (1, 8, 32, 128)
IDS = ("uniform", "zipf", "one")
GATHERED = 64 * 2**20
"""The most bytes of weights that the baseline `vmap` gathers for a call."""


def by_dict(modules: Sequence[nn.Module], x: Tensor, ids: Sequence[int]) -> Tensor:
    rows: dict[int, list[int]] = {}
    for row, i in enumerate(ids):
        rows.setdefault(i, []).append(row)
    if len(rows) == 1:
        y: Tensor = modules[ids[0]](x)
        return y
    found: Tensor | None = None
    for i, at in rows.items():
        y = modules[i](x[at])
        if found is None:
            found = x.new_empty(len(ids), *y.shape[1:])
        found[at] = y
    assert found is not None
    return found


def by_sort(modules: Sequence[nn.Module], x: Tensor, ids: Sequence[int]) -> Tensor:
    numbers = torch.tensor(ids)
    order = numbers.argsort(stable=True)
    ordered, counts = x[order], torch.bincount(numbers, minlength=len(modules)).tolist()
    answers, start = [], 0
    for i, n in enumerate(counts):
        if n:
            answers.append(modules[i](ordered[start : start + n]))
            start += n
    joined = torch.cat(answers)
    found = torch.empty_like(joined)
    found[order] = joined
    return found


def gathered(modules: Sequence[nn.Module]) -> Callable[[Tensor, Sequence[int]], Tensor]:
    parameters, buffers = stack_module_state(list(modules))
    base = modules[0]

    def one(p: Any, b: Any, x: Tensor) -> Any:
        return functional_call(base, (p, b), (x.unsqueeze(0),)).squeeze(0)

    def run(x: Tensor, ids: Sequence[int]) -> Tensor:
        at = torch.tensor(ids)
        found: Tensor = vmap(one)(
            {k: v[at] for k, v in parameters.items()}, {k: v[at] for k, v in buffers.items()}, x
        )
        return found

    return run


def padded(ens: widepack.WideModel, x: Tensor, ids: Sequence[int]) -> Tensor:
    rows: dict[int, list[int]] = {}
    for row, i in enumerate(ids):
        rows.setdefault(i, []).append(row)
    most = max(map(len, rows.values()))
    inputs = x.new_zeros(len(ens.members), most, *x.shape[1:])
    places = torch.empty(len(ids), dtype=torch.int64)
    for i, at in rows.items():
        places[at] = torch.arange(len(at)) + i * most
    inputs.flatten(0, 1)[places] = x
    y: Tensor = ens.each(inputs).flatten(0, 1)[places]
    return y


def measure(name: str, folder: Path, seconds: float) -> list[dict[str, Any]]:
    """Measures all rows of a network."""
    make, count, shape = NETWORKS[name]
    modules, paths = [], []
    for i in range(count):
        torch.manual_seed(1 + i)
        modules.append(make().eval().requires_grad_(requires_grad=False))
        paths.append(folder / f"m{i}.pt")
        torch.save(modules[-1].state_dict(), paths[-1])
    spec = f"input=float32[B,{','.join(map(str, shape))}]"
    path = folder / "e.wide"
    widepack.build(paths, path, model=make, inputs=[spec], pt2=False, race=False, force=True)
    ens = widepack.load(path)
    size = sum(p.numel() * p.element_size() for p in modules[0].parameters())
    vmapped = gathered(modules)
    found: list[dict[str, Any]] = []
    for batch in BATCHES:
        for kind in IDS:
            ids = members_of(kind, batch, count)
            if kind != "uniform" and batch == 1:
                continue
            x = torch.randn(batch, *shape, generator=torch.Generator().manual_seed(batch))
            calls: dict[str, Callable[[], Any]] = {
                "dict": partial(by_dict, modules, x, ids),
                "sorted": partial(by_sort, modules, x, ids),
                "each": partial(padded, ens, x, ids),
            }
            if size * batch <= GATHERED:
                calls["vmap"] = partial(vmapped, x, ids)
            right = ens.route(x, member=ids)
            for call in calls.values():
                torch.testing.assert_close(call(), right, rtol=1e-3, atol=1e-4)
            run = race(partial(ens.route, x, member=ids), calls, budget_s=seconds)
            better = run.ratio("dict"), run.ratio("sorted")
            found.append(
                {
                    "network": name,
                    "members": count,
                    "batch": batch,
                    "ids": kind,
                    "active": len(set(ids)),
                    "ms": run.median_ms(OURS),
                    "baselines_ms": {k: run.median_ms(k) for k in calls},
                    "fastest": run.fastest,
                    "ratio": run.ratio(run.fastest).to_json(),
                    "over_dict": min(better, key=lambda r: r.value).to_json(),
                    "noise": run.noise.to_json(),
                    "quiet": run.quiet,
                }
            )
            row = found[-1]
            print(
                name, batch, kind, f"{row['ms'] * 1e3:.0f} us, {row['ratio']['value']:.2f}x", row["fastest"]
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--out", type=Path, default=ROOT / "bench" / "results" / "route-cpu.json")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each row")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with quiet(1), torch.no_grad():
        for name in NETWORKS:
            with tempfile.TemporaryDirectory() as folder:
                rows += measure(name, Path(folder), options.seconds)
        document = {
            "what": "ens.route over the fastest of dict, sorted, vmap over gathered weights, and padded each",
            "environment": environment("cpu", 1),
            "rows": rows,
        }
    options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
