#!/usr/bin/env python3
"""Measures the memory of a build and the speed of its stacking. The N members together are many times larger
than the memory limit of the process.

    python scripts/measure/build_memory.py [--row conv|attention|small]... [-n 64] [-o
    bench/results/build-memory-cpu.json] [--limit-mb 1500]

The script writes the members one by one into a separate folder. Then a new process builds them, and its
private memory (RssAnon of /proc) is read every 5 ms. The baseline is the private memory of the process after
it has imported torch and built two tiny members. The figure is the memory above the baseline and includes the
activations of the verification. With --limit-mb the process runs in a memory cgroup of that size (version 1,
which needs root). The page cache counts toward this limit, but the kernel can reclaim it.

Stacking is the stage `write weights` of the build: it reads, hashes, writes and flushes. For comparison, the
script times `cp` of the same files and a flush, before and after the build, from the page cache.

| row | the member |
|---|---|
| `conv` | ResNet-50, images of 64 x 64: 102 MB |
| `attention` | a BERT of 8 layers, 512 wide: 101 MB |
| `wide` | an MLP of two layers, 5000-2500-5000: 100 MB |
| `small` | an MLP of 0.4 MB, 1000 of them |
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

from widepack.checkpoints.factory import load_factory
from widepack_artifacts.reader import Reader
from widepack_bench.models.weights import write_checkpoints
from widepack_bench.report.environment import environment

ROWS: dict[str, tuple[str, dict[str, Any], list[str], int]] = {
    "conv": ("widepack_bench.models.resnet:resnet50", {}, ["x=float32[B,3,64,64]"], 64),
    "attention": (
        "widepack_bench.models.transformer:bert",
        {"dim": 512, "depth": 8, "heads": 8, "vocabulary": 100, "length": 64},
        ["ids=int64[B,4]:0..99", "mask=int64[B,4]:0..1"],
        64,
    ),
    "wide": (
        "widepack_bench.models.mlp:mlp",
        {"inputs": 5000, "width": 2500, "outputs": 5000},
        ["input=float32[B,5000]"],
        64,
    ),
    "small": ("widepack_bench.models.mlp:mlp", {"width": 784}, ["input=float32[B,64]"], 1000),
}
CHILD = """
import json, sys, time
import torch, torch.export, tempfile
from torch import nn
import widepack
order = json.loads(sys.argv[1])

def say(*words):
    print(json.dumps([time.monotonic(), *words]), flush=True)

def tiny():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 4))

with tempfile.TemporaryDirectory() as folder:
    for i in range(2):
        torch.manual_seed(i)
        torch.save(tiny().state_dict(), f"{folder}/{i}.pt")
    paths = [f"{folder}/0.pt", f"{folder}/1.pt"]
    widepack.build(paths, f"{folder}/t.wide", model=tiny, inputs=["input=float32[B,3,4,4]"])
say("begin")
seen = None
def progress(stage, done, total):
    global seen
    if stage != seen:
        seen = stage
        say(stage)
options = {"model": order["model"], "model_args": order["args"], "inputs": order["inputs"]}
report = widepack.build(order["paths"], order["out"], **options, progress=progress)
say("end", report.seconds)
"""


def _anonymous(pid: int) -> int:
    """Returns the private memory of a process in bytes; 0 if the process has ended."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def _limited(limit_mb: int) -> Path:
    group = Path(f"/sys/fs/cgroup/memory/widepack-{os.getpid()}")
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(str(limit_mb * 10**6))
    return group


def _copied(paths: list[str], folder: Path) -> float:
    """Returns the seconds of `cp` and a flush."""
    folder.mkdir()
    start = time.perf_counter()
    subprocess.run(["cp", *paths, str(folder)], check=True)
    for path in folder.iterdir():
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
    taken = time.perf_counter() - start
    shutil.rmtree(folder)
    return taken


def measured(name: str, count: int, folder: Path, limit_mb: int) -> dict[str, Any]:
    model, args, inputs, _ = ROWS[name]
    paths = write_checkpoints(load_factory(model, args), count, folder)
    size = sum(os.path.getsize(p) for p in paths)
    os.sync()
    before = _copied(paths, folder / "copy") if not limit_mb else 0.0
    order = {"paths": paths, "out": str(folder / "e.wide"), "model": model, "args": args, "inputs": inputs}
    group = _limited(limit_mb) if limit_mb else None
    start = time.monotonic()
    child = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", CHILD, json.dumps(order)], stdout=subprocess.PIPE, text=True
    )
    if group is not None:
        (group / "cgroup.procs").write_text(str(child.pid))
    marks: list[list[Any]] = []
    assert child.stdout is not None
    reader = threading.Thread(target=lambda: marks.extend(json.loads(line) for line in child.stdout or ()))
    reader.start()
    read: list[tuple[float, int]] = []
    while child.poll() is None:
        read.append((time.monotonic(), _anonymous(child.pid)))
        time.sleep(0.005)
    reader.join()
    peak_with_cache = int((group / "memory.max_usage_in_bytes").read_text()) if group is not None else None
    if group is not None:
        group.rmdir()
    if child.returncode:
        return {
            "members": count,
            "bytes": size,
            "limit_mb": limit_mb or None,
            "failed": child.returncode,
            "stages": [m[1] for m in marks],
        }
    base = next(b for t, b in reversed(read) if t <= marks[0][0])
    stages = {}
    for mark, after in itertools.pairwise(marks):
        within = [b for t, b in read if mark[0] <= t <= after[0]]
        stages[mark[1]] = round((max(within, default=base) - base) / 1e6, 1)
    seconds = marks[-1][2]
    row = {
        "members": count,
        "member_mb": round(size / count / 1e6, 2),
        "bytes": size,
        "limit_mb": limit_mb or None,
        "peak_in_group_mb": None if peak_with_cache is None else round(peak_with_cache / 1e6, 1),
        "base_mb": round(base / 1e6, 1),
        "private_above_base_mb": {**stages, "peak": max(stages.values())},
        "seconds": seconds,
        "seconds_process": round(time.monotonic() - start, 1),
        "artifact_bytes": sum(f.bytes for f in Reader(folder / "e.wide").manifest.files.values()),
    }
    if not limit_mb:
        after_s = _copied(paths, folder / "copy")
        row["cp_seconds"] = [round(before, 2), round(after_s, 2)]
        row["stacking_of_cp_speed"] = round((before + after_s) / 2 / seconds["write weights"], 2)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--row", action="append", choices=ROWS, help="default: all")
    parser.add_argument("-n", type=int, help="number of members; default: that of the row")
    parser.add_argument("--limit-mb", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="working folder; default: a temporary folder")
    parser.add_argument("-o", type=Path)
    given = parser.parse_args()
    rows: dict[str, Any] = {}
    for name in given.row or ROWS:
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            rows[name] = measured(name, given.n or ROWS[name][3], Path(folder), given.limit_mb)
        print(name, json.dumps(rows[name], indent=1), flush=True)
    if given.o:
        kept = json.loads(given.o.read_text())["rows"] if given.o.exists() else {}
        named = {f"{n}, limit {given.limit_mb} MB" if given.limit_mb else n: row for n, row in rows.items()}
        command = "python scripts/measure/build_memory.py" + (
            f" --limit-mb {given.limit_mb}" if given.limit_mb else ""
        )
        for row in named.values():
            row["command"] = command
        given.o.write_text(
            json.dumps({"rows": {**kept, **named}, **environment("cpu", torch.get_num_threads())}, indent=1)
            + "\n"
        )


if __name__ == "__main__":
    main()
