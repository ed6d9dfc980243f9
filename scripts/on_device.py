#!/usr/bin/env python3
"""Tests and measures a device in one call, in order of worth.

    python scripts/on_device.py -o bench/results/device --seconds 560
    python scripts/on_device.py --list
    python scripts/on_device.py -o /tmp/rehearsal --device cpu --seconds 300

The steps are in `scripts/device/steps.py`. Each has a part of the time, and writes its document into the
folder row by row. A second call with the same folder leaves out the steps that are finished, and continues
the others; `--steps` runs the named ones again, for what their documents lack. `device.json` has the
commands, seconds and the end of the output of each step, `verdict.json` has each line that a device decides,
with its figure.

The packages of this repository need not be installed. `--packages` names folders with others, made elsewhere
by `pip install --target FOLDER click safetensors pytest hypothesis transformers`. On a CUDA device TF32 is
off in all measurements, unless `--tf32` is given: otherwise convolutions are as exact as TF32, and are
refused as wrong. The tests choose TF32 themselves.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Returns the options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--out", type=Path, help="folder for the documents; it may have earlier ones")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu for a rehearsal (default: cuda)")
    parser.add_argument("--seconds", type=float, default=540.0, help="for all steps together (default: 540)")
    parser.add_argument("--steps", default="", help="steps, separated by commas; finished ones run again")
    parser.add_argument("--list", action="store_true", help="print the steps, and run nothing")
    parser.add_argument("--packages", action="append", default=[], help="folder with packages; repeatable")
    parser.add_argument("--collection", type=Path, help="folder of architectures for the step `backends`")
    parser.add_argument("--tf32", action="store_true", help="let float32 products and convolutions use TF32")
    parser.add_argument("--commit", default="", help="of this source tree, where git does not know it")
    given = parser.parse_args(arguments)
    if given.out is None and not given.list:
        parser.error("give a folder for the documents: -o FOLDER")
    return given


def machine(device: str, commit: str) -> dict[str, Any]:
    """Returns the device and the versions, and whether they are those that widepack is tested with."""
    import torch

    from widepack_bench.report.environment import environment

    found = environment(device, 1)
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = "".join(line.partition("==")[2].strip() for line in lines if line.startswith("torch=="))
    return {
        **found,
        "commit": commit or found["commit"],
        "torch_of_the_tests": pinned,
        "other_torch": bool(pinned) and torch.__version__.partition("+")[0] != pinned.partition("+")[0],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the steps. Returns the exit code: 0 if all are finished, else 1."""
    given = parsed(arguments)
    places = (".", "artifacts", "bench", "cli", "serve", "scripts", "scripts/measure")
    sys.path[:0] = [*(str(ROOT / place) for place in places), *given.packages]
    from device import running, steps, verdict

    out = (given.out or Path("results")).absolute()
    plan = steps.Plan(given.device, out, given.collection and given.collection.absolute())
    if given.list:
        print(steps.listed(plan))
        return 0
    environment = running.environment_of_steps(plan, given.packages, given.tf32)
    os.environ.update({k: v for k, v in environment.items() if k.startswith("NVIDIA_")})
    from widepack.errors import UsageError
    from widepack_bench.report.json_file import write_whole

    try:
        chosen = steps.chosen(given.steps)
        run = running.DeviceRun(plan, machine(given.device, given.commit), environment)
    except (ValueError, running.OtherMachine, UsageError) as error:
        print(error, file=sys.stderr)
        return 2
    where = run.document["environment"]
    if where["other_torch"]:
        print(f"torch {where['versions']['torch']}; widepack is tested with {where['torch_of_the_tests']}")
    waiting = run.waiting(chosen, again=bool(given.steps))
    done = run.run(waiting, given.seconds, report=partial(print, flush=True))
    document = verdict.verdict(out)
    write_whole(out / "verdict.json", document)
    print(f"\n{verdict.table(document)}")
    return 0 if done else 1


if __name__ == "__main__":
    sys.exit(main())
