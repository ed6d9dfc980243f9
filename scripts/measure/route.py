"""Measures `ens.route` beside what a service would write itself, for rows of several members.

    taskset -c 1 python scripts/measure/route.py [--seconds 2]
    python scripts/measure/route.py --device cuda -o bench/results/device/route.json

The baselines hold the members as modules: `dict` groups the rows by member and calls each module, `sorted`
sorts the rows once and calls each module on a slice, `vmap` gathers the weights of each row and calls one
module, `each` pads the rows to the largest group and runs all members. `ratio` is the time of the fastest
baseline over that of `route`, interleaved in one run, with its 95% interval; `noise` is `route` against
itself. Every baseline's answer is compared with `route`'s first. Members are drawn evenly, by Zipf's law,
or one for all.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from route_networks import NETWORKS, members_of, trunk
from runner import built, parser, run
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import widepack
from widepack_bench.baselines.routes import by_dict, by_sort, gathered
from widepack_bench.measure.processors import quiet
from widepack_bench.measure.race import OURS, race

IDS = ("uniform", "zipf", "one")
GATHERED = 64 * 2**20  # bytes of weights that the baseline `vmap` gathers for a call at most
Call = Callable[[], Any]
Inputs = Sequence[Tensor]


def padded(ens: widepack.WideModel, inputs: Inputs, ids: Sequence[int]) -> Any:
    """Pads the rows of each member to the largest group and runs all members with `each`."""
    rows: dict[int, list[int]] = {}
    for row, i in enumerate(ids):
        rows.setdefault(i, []).append(row)
    most = max(map(len, rows.values()))
    places = torch.empty(len(ids), dtype=torch.int64)
    for i, at in rows.items():
        places[at] = torch.arange(len(at)) + i * most
    places = places.to(inputs[0].device)
    wide = []
    for x in inputs:
        wide.append(x.new_zeros(len(ens.members), most, *x.shape[1:]))
        wide[-1].flatten(0, 1)[places] = x
    return tree_map(lambda y: y.flatten(0, 1)[places], ens.each(*wide))


@lru_cache(1)
def loaded(name: str, device: str) -> tuple[widepack.WideModel, list[nn.Module]]:
    """Returns the artifact of a network, and the members as modules."""
    factory, members, shape = NETWORKS[name]
    inputs = [f"input=float32[B,{','.join(map(str, shape))}]"]
    with tempfile.TemporaryDirectory(prefix="widepack-route-") as folder:
        modules, path = built(folder, factory, members, inputs, device, trunk)
        return widepack.load(path, device=device), modules  # its mapped files need no names


def baselines(
    ens: widepack.WideModel, modules: Sequence[nn.Module], x: Tensor, ids: Sequence[int]
) -> dict[str, Call]:
    """Returns the baselines by name; `vmap` only where its weights take at most `GATHERED`."""
    calls: dict[str, Call] = {
        "dict": partial(by_dict, modules, [x], ids),
        "sorted": partial(by_sort, modules, [x], ids),
        "each": partial(padded, ens, [x], ids),
    }
    if sum(p.nbytes for p in modules[0].parameters()) * len(ids) <= GATHERED:
        calls["vmap"] = partial(gathered(modules), [x], ids)
    return calls


def measured(name: str, device: str, batch: int, kind: str, seconds: float) -> dict[str, Any]:
    """Measures one row. Raises: AssertionError where a baseline answers otherwise than `route`."""
    _, members, shape = NETWORKS[name]
    ens, modules = loaded(name, device)
    ids, generator = members_of(kind, batch, members), torch.Generator().manual_seed(batch)
    x = torch.randn(batch, *shape, generator=generator).to(device)
    calls, ours = baselines(ens, modules, x, ids), partial(ens.route, x, member=ids)
    right = ours()
    for call in calls.values():
        torch.testing.assert_close(call(), right, rtol=1e-3, atol=1e-4 * max(1.0, float(right.abs().max())))
    sync = torch.cuda.synchronize if x.is_cuda else None
    found = race(ours, calls, budget_s=seconds, sync=sync)
    return {
        "network": name,
        "members": members,
        "batch": batch,
        "ids": kind,
        "active": len(set(ids)),
        "ms": found.median_ms(OURS),
        "baselines_ms": {k: found.median_ms(k) for k in calls},
        "fastest": found.fastest,
        "ratio": found.ratio(found.fastest).to_json(),
        "over_dict": min((found.ratio(k) for k in ("dict", "sorted")), key=lambda r: r.value).to_json(),
        "noise": found.noise.to_json(),
        "quiet": found.quiet,
    }


def main() -> int:
    options = parser(__doc__, "route-cpu.json", seconds=2.0, device="cpu")
    options.add_argument("--batches", default="1,8,32,128", help="rows of a call")
    given = options.parse_args()

    cases = {
        f"{name}, {batch}, {kind}": partial(measured, name, given.device, batch, kind, given.seconds)
        for name in NETWORKS
        for batch in map(int, given.batches.split(","))
        for kind in (IDS if batch > 1 else IDS[:1])
    }
    with quiet(1), torch.no_grad():
        return run(given, cases)


if __name__ == "__main__":
    sys.exit(main())
