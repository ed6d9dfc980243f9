#!/usr/bin/env python3
"""Measures `widepack.predict` beside a loop in the same process over the same batches.

    taskset -c 1 python scripts/measure/predict.py [-o bench/results/predict-cpu.json] [--rows 1000000]

The members are 100 MLPs 64-128-10. `predict` reads 64 columns of float32, and writes mean and standard
deviation over members to a Parquet file. The loop has the rows as one tensor in memory, calls
`ens.reduce(x, "mean", "std")` for each batch, and keeps the answers in memory. `ratio` is the time of the
loop over that of `predict` for the first `--part` rows, interleaved in one run, with its 95% interval;
`noise` is `predict` against itself. `cpu_ratio` is the same of the CPU time of the process, from the medians.

One process runs all rows. Its private memory (RssAnon of /proc) is read at every block; `over_model_mb` is
the largest value over that of the same process after it has loaded the model and called it with one batch.
Then processes are killed at moments spread over a run; `outputs_left` counts those that left an output.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import widepack
from widepack.inference.model import WideModel
from widepack_bench.measure.processors import quiet
from widepack_bench.measure.race import OURS, race
from widepack_bench.report.environment import environment

ROOT = Path(__file__).resolve().parents[2]
MEMBERS, WIDTH, BATCH = 100, 64, 256
FORMATS = ("parquet", "arrow", "csv", "npy")
NAMES = ("mean", "std")
CHILD = """
import json, sys
import torch, widepack
torch.set_num_threads(1)
artifact, source, output, batch = *sys.argv[1:4], int(sys.argv[4])

def private():
    with open("/proc/self/status") as file:
        return int(next(line for line in file if line.startswith("RssAnon")).split()[1]) / 1024

ens = widepack.load(artifact)
ens.reduce(torch.zeros(batch, 64), "mean", "std")
before = most = private()

def look(stage, done, total):
    global most
    most = max(most, private())
    print(done, flush=True)

report = widepack.predict(ens, source, output, reduce="mean,std", batch=batch, progress=look)
print(json.dumps({"model_mb": before, "over_model_mb": most - before, **report.to_json()}))
"""


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 128), nn.ReLU(), nn.Linear(128, 10))


def artifact_of(folder: Path) -> Path:
    """Builds the members."""
    paths = []
    for i in range(MEMBERS):
        torch.manual_seed(1 + i)
        paths.append(folder / f"m{i}.pt")
        torch.save(mlp().state_dict(), paths[-1])
    path = folder / "ens.wide"
    spec = [f"input=float32[B,{WIDTH}]"]
    widepack.build(paths, path, model=mlp, inputs=spec, pt2=False, race=False)
    return path


def write_rows(path: Path, x: Tensor) -> None:
    """Writes rows to a file of the format that its ending names."""
    import numpy
    import pyarrow
    import pyarrow.csv
    import pyarrow.ipc
    import pyarrow.parquet

    if path.suffix == ".npy":
        numpy.save(path, x.numpy())
        return
    table = pyarrow.table({f"f{k}": x[:, k].contiguous().numpy() for k in range(WIDTH)})
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path)
    elif path.suffix == ".csv":
        pyarrow.csv.write_csv(table, path)
    else:
        with pyarrow.ipc.new_file(path, table.schema) as file:
            file.write_table(table, max_chunksize=65_536)


def loop(ens: WideModel, x: Tensor) -> dict[str, Tensor]:
    """Runs the batches as a user's own code does."""
    found: dict[str, list[Tensor]] = {name: [] for name in NAMES}
    for first in range(0, x.shape[0], BATCH):
        for name, value in ens.reduce(x[first : first + BATCH], *NAMES).items():
            found[name].append(value)
    return {name: torch.cat(parts) for name, parts in found.items()}


def timed(call: Callable[[], object], spent: list[float]) -> None:
    """Runs a call, and adds its CPU time."""
    start = time.process_time()
    call()
    spent.append(time.process_time() - start)


def measure(ens: WideModel, source: Path, x: Tensor, seconds: float) -> dict[str, Any]:
    """Measures the rows of a file. x: the same rows."""
    out = source.with_name("out.parquet")
    ours = partial(widepack.predict, ens, source, out, reduce=NAMES, batch=BATCH, force=True)
    ours()
    expected = loop(ens, x)
    _same(out, expected)
    spent: dict[str, list[float]] = {"predict": [], "loop": []}
    run = race(
        partial(timed, ours, spent["predict"]),
        {"loop": partial(timed, partial(loop, ens, x), spent["loop"])},
        budget_s=seconds,
        min_rounds=12,
    )
    cpu = {name: statistics.median(times) for name, times in spent.items()}
    return {
        "format": source.suffix[1:],
        "rows": x.shape[0],
        "file_mb": source.stat().st_size / 1e6,
        "rows_per_s": x.shape[0] / run.median_ms(OURS) * 1e3,
        "loop_rows_per_s": x.shape[0] / run.median_ms("loop") * 1e3,
        "ratio": run.ratio("loop").to_json(),
        "cpu_ratio": cpu["loop"] / cpu["predict"],
        "cpu_s": cpu,
        "noise": run.noise.to_json(),
        "quiet": run.quiet,
    }


def _same(path: Path, expected: dict[str, Tensor]) -> None:
    """Checks the answers in a file against those of the loop."""
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(path)
    for name, value in expected.items():
        found = torch.tensor(table[f"output.{name}"].to_pylist())
        torch.testing.assert_close(found, value, rtol=1e-4, atol=1e-5)


def started(artifact: Path, source: Path, output: Path) -> subprocess.Popen[str]:
    """Starts a process that runs all rows of a file."""
    command = [sys.executable, "-c", CHILD, str(artifact), str(source), str(output), str(BATCH)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )


def whole_file(artifact: Path, source: Path, output: Path) -> dict[str, Any]:
    """Runs all rows in a process of their own. Returns what it reports."""
    cpu = time.process_time(), os.times().children_user + os.times().children_system
    with started(artifact, source, output) as process:
        assert process.stdout is not None
        last = process.stdout.read().splitlines()[-1]
    report: dict[str, Any] = json.loads(last)
    spent = os.times().children_user + os.times().children_system - cpu[1]
    return {
        "rows": report["rows"],
        "source_mb": source.stat().st_size / 1e6,
        "output_mb": output.stat().st_size / 1e6,
        "seconds": report["seconds"],
        "process_cpu_s": spent,
        "rows_per_s": report["rows_per_s"],
        "model_mb": report["model_mb"],
        "over_model_mb": report["over_model_mb"],
    }


def kills(artifact: Path, source: Path, folder: Path, count: int, blocks: int) -> dict[str, int]:
    """Kills processes after a random number of blocks. Returns how many left an output.

    blocks: fewer than the file has.
    """
    draw = random.Random(0)
    left = litter = 0
    folder.mkdir()
    output = folder / "out.parquet"
    for _ in range(count):
        with started(artifact, source, output) as process:
            assert process.stdout is not None
            for _ in range(draw.randrange(1, blocks)):
                process.stdout.readline()
            process.kill()
            process.stdout.read()
        assert process.returncode < 0, "the process ended before it was killed"
        left += output.exists()
    short = source.with_name("short.npy")
    write_rows(short, torch.zeros(BATCH, WIDTH))
    widepack.predict(artifact, short, folder / "next.npy", reduce="mean")
    litter = len(os.listdir(folder)) - 1
    return {"killed": count, "outputs_left": left, "files_left_by_the_next_run": litter}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--out", type=Path, default=ROOT / "bench" / "results" / "predict-cpu.json")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--part", type=int, default=32_768, help="rows that are compared with the loop")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each format")
    parser.add_argument("--kills", type=int, default=10)
    options = parser.parse_args()
    with quiet(1), torch.no_grad(), tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        artifact = artifact_of(folder)
        x = torch.randn(options.rows, WIDTH, generator=torch.Generator().manual_seed(0))
        ens, part = widepack.load(artifact), x[: options.part]
        rows = []
        for ending in FORMATS:
            source = folder / f"part.{ending}"
            write_rows(source, part)
            rows.append(measure(ens, source, part, options.seconds))
            row = rows[-1]
            print(
                ending,
                f"{row['ratio']['value']:.3f}",
                f"CPU {row['cpu_ratio']:.3f}",
                row["quiet"],
                flush=True,
            )
        source = folder / "all.parquet"
        write_rows(source, x)
        del x, part, ens
        document = {
            "what": "widepack.predict over a loop of ens.reduce over the same batches in memory",
            "environment": environment("cpu", 1),
            "members": MEMBERS,
            "network": "MLP 64-128-10",
            "batch": BATCH,
            "rows": rows,
            "whole": whole_file(artifact, source, folder / "all-out.parquet"),
            "kills": kills(artifact, source, folder / "killed", options.kills, 16),
        }
    options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({k: document[k] for k in ("whole", "kills")}, indent=1))


if __name__ == "__main__":
    main()
