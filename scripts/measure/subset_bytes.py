#!/usr/bin/env python3
"""Measures the bytes that the load of a subset reads from the disk: `load(members=[3, 7])` of 64.

    python scripts/measure/subset_bytes.py [-o bench/results/subset-cpu.json] [--members 64] [--folder DIR]

The script builds an artifact of `--members` members of 10 MB each under `--folder`. For each subset, a new
process removes the weights files from the page cache, loads the subset and calls it once. Then it counts the
pages of the files in the page cache (`mincore`) and the bytes that the process read from the disk
(`read_bytes` of /proc/self/io, if the file system has a disk). Both counts include the pages that the kernel
read ahead. `part` is the share of the weights files that these pages are. `expected` is the share of the
members that the subset is.

`holds`: a subset of 2 of 64 reads at most 1.2 times its share.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

import widepack
from widepack_artifacts.reader import Reader
from widepack_bench.report.environment import environment

ROOT = Path(__file__).resolve().parents[2]
WIDTH = 1600
SUBSETS = ([3, 7], [3, 4], [5], [0, 63], list(range(0, 64, 4)))


def model() -> nn.Module:
    """A member with 10 MB in one weight."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4))


def resident(path: Path) -> int:
    """Returns the number of bytes of a file that are in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    size = path.stat().st_size
    with (
        open(path, "rb") as file,
        mmap.mmap(
            file.fileno(), size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
        ) as mapped,
    ):
        pages = (size + mmap.PAGESIZE - 1) // mmap.PAGESIZE
        there = (ctypes.c_ubyte * pages)()
        at = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        if libc.mincore(ctypes.c_void_p(at), ctypes.c_size_t(size), there):
            raise OSError(ctypes.get_errno(), "mincore")
        return sum(p & 1 for p in there) * mmap.PAGESIZE


def drop(path: Path) -> None:
    """Removes a file from the page cache."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_bytes() -> int:
    return int(
        next(
            line.split()[1]
            for line in Path("/proc/self/io").read_text().splitlines()
            if line.startswith("read_bytes")
        )
    )


def measured(artifact: Path, members: list[int]) -> dict[str, Any]:
    """Measures a subset in this process, which has not opened the artifact yet."""
    torch.set_num_threads(1)
    files = Reader(artifact).weights_files()
    widepack.load(
        artifact, members=[1], warmup=False
    ).close()  # the code and the small files are in the cache
    for file in files:
        drop(file)
    before, cold = read_bytes(), sum(map(resident, files))
    ens = widepack.load(artifact, members=members)
    loaded = sum(map(resident, files)) - cold
    ens(torch.randn(1, WIDTH))
    size = sum(f.stat().st_size for f in files)
    found = sum(map(resident, files)) - cold
    expected = len(members) / len(ens.manifest.members)
    return {
        "members": members,
        "expected": expected,
        "part": found / size,
        "part_after_load": loaded / size,
        "bytes": found,
        "cold_bytes": cold,
        "read_bytes": read_bytes() - before,
        "files_bytes": size,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("-o", "--out", type=Path, default=ROOT / "bench/results/subset-cpu.json")
    parser.add_argument("--members", type=int, default=64)
    parser.add_argument("--folder", type=Path, help="folder of the artifact; default: a temporary folder")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--subset", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        print(json.dumps(measured(given.measure, given.subset)))
        return
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder = Path(name)
        paths = []
        for i in range(given.members):
            torch.manual_seed(i)
            torch.save(model().state_dict(), folder / f"{i}.pt")
            paths.append(folder / f"{i}.pt")
        widepack.build(
            paths,
            folder / "e.wide",
            model=model,
            inputs=[f"input=float32[B,{WIDTH}]"],
            targets=("cpu",),
            pt2=False,
        )
        rows = []
        for members in SUBSETS:
            command = [
                sys.executable,
                __file__,
                "--measure",
                str(folder / "e.wide"),
                "--subset",
                json.dumps([m for m in members if m < given.members]),
            ]
            rows.append(
                json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
            )
            row = rows[-1]
            print(
                f"{len(row['members'])} of {given.members}: {row['part']:.4f} of the files, "
                f"{row['expected']:.4f} expected; the disk gave {row['read_bytes']:,} bytes"
            )
    record = {
        "what": __doc__,
        "environment": environment("cpu", 1),
        "members": given.members,
        "rows": rows,
        "holds": rows[0]["part"] <= 1.2 * rows[0]["expected"],
    }
    given.out.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
