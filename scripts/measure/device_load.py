"""Times `widepack.load` of a large artifact on a device, beside copies from pinned memory.

    python scripts/measure/device_load.py --gb 2,10 -o bench/results/device/load.json
    python scripts/measure/device_load.py --device cpu --gb 0.02

An artifact has 16 members of four square linear layers. Most of the time goes into its build, which checks
it: a small size comes first. Its file was written just before, so the system has it in memory. `load` runs
in new processes: the first one checks the artifact by its probe, the later ones find in the user's cache
that it passed. Seconds are from the call of `load` until the device has all weights, without the start of
CUDA. The bandwidth is the best of several copies of pinned memory of `--copy-gb`, measured before and after
the loads. On a CPU the copy is one of memory to memory.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from row_file import RowFile, build_threads, device_parser, say
from torch import nn

import widepack

FORMAT = "widepack.device-load/1"
MEMBERS, LAYERS, COPIES = 16, 4, 5
LOAD = """
import json, sys, time
import torch
import widepack.inference.load
path, device, width = sys.argv[1], sys.argv[2], int(sys.argv[3])
cuda = device.startswith("cuda")
torch.ones(8, 8, device=device) @ torch.ones(8, 8, device=device)
wait = torch.cuda.synchronize if cuda else lambda: None
wait()
start = time.perf_counter()
ens = widepack.load(path, device=device)
wait()
loaded = time.perf_counter()
ens(torch.zeros(2, width, device=device))
wait()
first_call_s = time.perf_counter() - loaded
print(json.dumps({"load_s": loaded - start, "first_call_s": first_call_s}))
"""


def net(width: int) -> nn.Module:
    """Returns a member."""
    return nn.Sequential(*(part for _ in range(LAYERS) for part in (nn.Linear(width, width), nn.ReLU())))


def width_of(gigabytes: float) -> int:
    """Returns the width with which all members have about so many bytes in float32."""
    return max(16, 16 * round(math.sqrt(gigabytes * 1e9 / (4 * MEMBERS * LAYERS)) / 16))


def build(folder: Path, width: int, device: str) -> dict[str, Any]:
    """Writes the members and the artifact. Returns what the build reports."""
    torch.set_num_threads(build_threads(device))
    torch.manual_seed(0)
    first = net(width).state_dict()
    paths = []
    for i in range(MEMBERS):
        paths.append(folder / f"m{i:02}.pt")
        torch.save({name: value * (1 + 0.01 * i) for name, value in first.items()}, paths[-1])
    began = time.perf_counter()
    report = widepack.build(
        paths,
        folder / "e.wide",
        model=lambda: net(width),
        inputs=[f"input=float32[B,{width}]"],
        targets=(torch.device(device).type,),
        pt2=False,
        race=False,
    )
    for path in paths:
        path.unlink()
    return {
        "weights_bytes": sum(report.weights.values()),
        "build_s": time.perf_counter() - began,
        "stages_s": report.seconds,
    }


def bandwidth(device: str, gigabytes: float) -> float:
    """Returns the bytes for each second of the best copy from pinned memory to the device."""
    cuda = device.startswith("cuda")
    source = torch.empty(max(1, int(gigabytes * 1e9)), dtype=torch.uint8, pin_memory=cuda)
    source.fill_(1)
    target = torch.empty_like(source, device=device, pin_memory=False)
    wait: Callable[[], object] = torch.cuda.synchronize if cuda else lambda: None
    times = []
    for _ in range(COPIES):
        wait()
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        wait()
        times.append(time.perf_counter() - start)
    return source.nbytes / min(times)


def load_once(path: Path, device: str, width: int, cache: Path) -> dict[str, Any]:
    """Loads the artifact in a new process. Returns its seconds, or the reason why it failed."""
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(path), device, str(width)],
        capture_output=True,
        text=True,
        check=False,
        env={
            **os.environ,
            "XDG_CACHE_HOME": str(cache),
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        },
    )
    if done.returncode:
        lines = done.stderr.splitlines() or [f"exit code {done.returncode}"]
        return {"error": lines[-1][:300]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(file: RowFile, gigabytes: float, device: str, copy_gb: float, runs: int) -> None:
    """Measures one size, and writes the row after every load.

    Args:
        file: The document.
        gigabytes: The size of the weights.
        device: Where to load.
        copy_gb: The size of a copy for the bandwidth.
        runs: How many loads.
    """
    key, width = key_of(gigabytes), width_of(gigabytes)
    row: dict[str, Any] = {"members": MEMBERS, "width": width, "error": "it was stopped while it was built"}
    file.add(key, row)
    with tempfile.TemporaryDirectory(prefix="widepack-load-") as name:
        folder = Path(name)
        row |= build(folder, width, device)
        row |= {"error": "it was stopped before the first load", "loads": []}
        file.add(key, row)
        rates = [bandwidth(device, copy_gb)]
        for run in range(runs):
            found = load_once(folder / "e.wide", device, width, folder / "cache")
            row["loads"].append({"probe": "run" if run == 0 else "remembered", **found})
            rates.append(bandwidth(device, copy_gb))
            seconds = [r["load_s"] for r in row["loads"] if "load_s" in r]
            if seconds:
                row.pop("error", None)
                row["pinned_bytes_per_s"] = max(rates)
                row["load_bytes_per_s"] = row["weights_bytes"] / min(seconds)
                row["part"] = row["load_bytes_per_s"] / row["pinned_bytes_per_s"]
            else:
                row["error"] = f"no load succeeded: {found.get('error')}"
            file.add(key, row)
            say(key, row["loads"][-1])


def key_of(gigabytes: float) -> str:
    """Returns the key of a row: `10 GB`."""
    return f"{gigabytes:g} GB"


def main() -> None:
    """Measures the sizes that the file does not have yet."""
    parser = device_parser(__doc__, "device/load.json")
    parser.add_argument("--gb", default="2,10", help="sizes of the weights, in order (default: 2,10)")
    parser.add_argument("--copy-gb", type=float, default=1.0, help="the size of a copy for the bandwidth")
    parser.add_argument("--runs", type=int, default=3, help="loads (default: 3)")
    given = parser.parse_args()
    file = RowFile(given.out, FORMAT, "load of a large artifact", given.device)
    for gigabytes in map(float, given.gb.split(",")):
        if file.must_run(key_of(gigabytes)):
            measure(file, gigabytes, given.device, given.copy_gb, given.runs)


if __name__ == "__main__":
    main()
