"""Measures `ens.route` on a device, beside what a service would write itself (`route.py`).

    python scripts/measure/device_route.py -o bench/results/device/route.json
    python scripts/measure/device_route.py --device cpu --network convolutional --batches 8 --seconds 0.2

The networks and the baselines are those of `route.py`. `ratio` is the time of the fastest baseline over that
of `route`; on a CUDA device every call ends when the device has done its work.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from route_baselines import baseline_calls, gathered
from route_networks import NETWORKS, members_of
from route_race import raced
from row_file import RowFile, build_threads, device_parser, say

import widepack
from widepack_bench.baselines.members import reason
from widepack_bench.measure.processors import quiet

FORMAT = "widepack.device-route/1"
IDS = ("uniform", "zipf", "one")


def built(name: str, folder: Path, device: str) -> tuple[Any, list[Any]]:
    """Builds a network. Returns the loaded model, and the members as modules on the device."""
    make, count, shape = NETWORKS[name]
    torch.set_num_threads(build_threads(device))
    modules, paths = [], []
    for i in range(count):
        torch.manual_seed(1 + i)
        module = make().eval().requires_grad_(requires_grad=False)
        paths.append(folder / f"m{i}.pt")
        torch.save(module.state_dict(), paths[-1])
        modules.append(module.to(device))
    spec = f"input=float32[B,{','.join(map(str, shape))}]"
    path = folder / "e.wide"
    targets = (torch.device(device).type,)
    widepack.build(paths, path, model=make, inputs=[spec], targets=targets, pt2=False, race=False)
    return widepack.load(path, device=device), modules


def main() -> None:
    """Measures the rows that the file does not have yet."""
    parser = device_parser(__doc__, "device/route.json")
    parser.add_argument("--network", default="", help="only networks with this text in their names")
    parser.add_argument("--batches", default="32,8,128", help="rows of a call")
    given = parser.parse_args()
    file = RowFile(given.out, FORMAT, "rows of several members", given.device)
    for name, (_, count, shape) in NETWORKS.items():
        if given.network not in name:
            continue
        calls_of = {
            f"{name}, {batch}, {ids}": (batch, ids)
            for batch in map(int, given.batches.split(","))
            for ids in (IDS if batch > 1 else IDS[:1])
        }
        waiting = {key: call for key, call in calls_of.items() if file.must_run(key)}
        if not waiting:
            continue
        with tempfile.TemporaryDirectory(prefix="widepack-route-") as folder:
            ens, modules = built(name, Path(folder), given.device)
            with quiet(1), torch.no_grad():
                vmapped = gathered(modules)
                for key, (batch, kind) in waiting.items():
                    ids = members_of(kind, batch, count)
                    x = torch.randn(batch, *shape, generator=torch.Generator().manual_seed(batch))
                    x = x.to(given.device)
                    calls = baseline_calls(ens, modules, vmapped, x, ids)
                    row: dict[str, Any] = {"network": name, "members": count, "batch": batch, "ids": kind}
                    try:
                        row |= raced(ens, [x], ids, calls, given.seconds)
                        say(key, f"{row['ratio']['value']:.2f}x", row["fastest"])
                    except (AssertionError, RuntimeError) as error:
                        row["error"] = reason(error)
                        say(key, row["error"])
                    file.add(key, row)


if __name__ == "__main__":
    main()
