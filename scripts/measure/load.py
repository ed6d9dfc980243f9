"""Times `widepack.load` of a large artifact, on a device beside copies from pinned memory.

    python scripts/measure/load.py --gb 2,10 -o bench/results/device/load.json
    python scripts/measure/load.py --device cpu --gb 1 --runs 5 -o bench/results/load-1gb-cpu.json

An artifact has 16 members of four square linear layers. Most of the time goes into its build, which checks
it: a small size comes first. Its file was written just before, so the system has it in memory. `load` runs in
new processes: the first one checks the artifact by its probe, the later ones find in the user's cache that it
passed. Seconds are from the call of `load` until the device has all weights, without the start of CUDA.
`anon_bytes` is the private memory (RssAnon) that the load takes. The bandwidth is the best of several copies
of pinned memory of `--copy-gb`, measured before and after the loads. On a CPU the copy is one of memory to
memory, and the starts of `widepack --help` and `widepack inspect` are timed too.
"""

from __future__ import annotations

import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from runner import FAILED, RowFile, build_threads, child, file_of, parser, say
from torch import nn

import widepack
from widepack_bench.baselines.members import reason

MEMBERS, LAYERS, COPIES = 16, 4, 5
PROCESS = """
import json, sys, time
import torch
import widepack.inference.load
path, device, width = sys.argv[1], sys.argv[2], int(sys.argv[3])
cuda = device.startswith("cuda")
torch.ones(8, 8, device=device) @ torch.ones(8, 8, device=device)
wait = torch.cuda.synchronize if cuda else lambda: None
def anon():
    line = next(line for line in open("/proc/self/status") if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024
wait()
before, start = anon(), time.perf_counter()
ens = widepack.load(path, device=device)
wait()
loaded, after = time.perf_counter(), anon()
ens(torch.zeros(2, width, device=device))
wait()
first_call_s = time.perf_counter() - loaded
print(json.dumps({"load_s": loaded - start, "first_call_s": first_call_s, "anon_bytes": after - before}))
"""


def width_of(gigabytes: float) -> int:
    """Returns the width with which all members have about so many bytes in float32."""
    return max(16, 16 * round(math.sqrt(gigabytes * 1e9 / (4 * MEMBERS * LAYERS)) / 16))


def build(folder: Path, width: int, device: str) -> dict[str, Any]:
    """Writes the members and the artifact. Returns its size, and the seconds of the build."""

    def net() -> nn.Module:
        return nn.Sequential(*(part for _ in range(LAYERS) for part in (nn.Linear(width, width), nn.ReLU())))

    torch.set_num_threads(build_threads(device))
    first, paths = net().state_dict(), []
    for i in range(MEMBERS):
        paths.append(folder / f"m{i:02}.pt")
        torch.save({name: value * (1 + 0.01 * i) for name, value in first.items()}, paths[-1])
    began, inputs = time.perf_counter(), [f"input=float32[B,{width}]"]
    targets = (torch.device(device).type,)
    report = widepack.build(
        paths, folder / "e.wide", model=net, inputs=inputs, targets=targets, pt2=False, budget=0
    )
    for path in paths:
        path.unlink()
    return {"weights_bytes": sum(report.weights.values()), "build_s": time.perf_counter() - began}


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


def seconds_of(*words: str) -> float:
    """Returns the seconds of a process of the command line."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "widepack_cli", *words], capture_output=True, check=True)
    return time.perf_counter() - start


def measure(file: RowFile, key: str, width: int, device: str, copy_gb: float, runs: int) -> bool:
    """Measures one size, and writes the row after every load. Returns whether a load succeeded."""
    row: dict[str, Any] = {"members": MEMBERS, "width": width, "error": "it was stopped while it was built"}
    file.add(key, row)
    with tempfile.TemporaryDirectory(prefix="widepack-load-") as name:
        path, variables = Path(name) / "e.wide", {"XDG_CACHE_HOME": f"{name}/cache"}
        row |= build(Path(name), width, device)
        row |= {"error": "it was stopped before the first load", "loads": []}
        file.add(key, row)
        rates = [bandwidth(device, copy_gb)]
        for number in range(runs):
            probe = "remembered" if number else "run"
            try:
                found = child(PROCESS, path, device, width, variables=variables)
            except RuntimeError as error:
                found = {"error": reason(error)}
            row["loads"].append({"probe": probe, **found})
            rates.append(bandwidth(device, copy_gb))
            _rate(row, rates)
            file.add(key, row)
            say(key, row["loads"][-1])
        if device == "cpu":
            for command in (["--help"], ["inspect", str(path)]):
                row[f"{command[0].strip('-')}_s"] = sorted(seconds_of(*command) for _ in range(runs))
            file.add(key, row)
    return "error" not in row


def _rate(row: dict[str, Any], rates: Sequence[float]) -> None:
    """Adds the rate of the fastest load. rates: of the copies, in bytes a second."""
    seconds = [r["load_s"] for r in row["loads"] if "load_s" in r]
    if not seconds:
        row["error"] = f"no load succeeded: {row['loads'][-1].get('error')}"
        return
    row.pop("error", None)
    row["pinned_bytes_per_s"] = max(rates)
    row["load_bytes_per_s"] = row["weights_bytes"] / min(seconds)
    row["part"] = row["load_bytes_per_s"] / row["pinned_bytes_per_s"]


def main() -> int:
    """Measures the sizes that the file does not have yet. Returns the exit code."""
    options = parser(__doc__, "device/load.json", device="cuda")
    options.add_argument("--gb", default="2,10", help="sizes of the weights, in order (default: 2,10)")
    options.add_argument("--copy-gb", type=float, default=1.0, help="the size of a copy for the bandwidth")
    options.add_argument("--runs", type=int, default=3, help="loads (default: 3)")
    given = options.parse_args()
    file, right = file_of(given), True
    for gigabytes in map(float, given.gb.split(",")):
        key = f"{gigabytes:g} GB"
        if file.must_run(key):
            right &= measure(file, key, width_of(gigabytes), given.device, given.copy_gb, given.runs)
    return 0 if right else FAILED


if __name__ == "__main__":
    sys.exit(main())
