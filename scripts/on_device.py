#!/usr/bin/env python3
"""Tests and measures a device in one call: each step has a time limit, and the results are JSON.

    python scripts/on_device.py -o results [--device cuda] [--steps tests,primitives,blocks,networks] [--limit
    540]

The script writes two kinds of documents into the folder. `device.json` lists every step: its command,
seconds, exit status and the end of its output. For the tests, it also lists each failure, the number of
comparisons, and the ops without a kernel on the device. The others are the documents of `widepack bench`,
which a later call continues. A step that exceeds its time limit is stopped, and its results so far are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PLACES = [str(ROOT / place) for place in (".", "artifacts", "bench", "cli")]
sys.path[:0] = PLACES  # the packages need not be installed on the device

from widepack_bench.report.environment import environment  # noqa: E402

OUTPUT_CHARS = 4000  # number of characters of the output of a step that are kept
GRACE_S = 20  # seconds in which an interrupted step writes its results


def commands(device: str, out: Path) -> dict[str, list[str]]:
    """Returns the command of each step."""
    cli = [sys.executable, "-m", "widepack_cli"]
    return {
        "tests": [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-m",
            "gpu",
            str(ROOT / "tests/gpu"),
            f"--junitxml={out / 'tests.xml'}",
        ],
        "primitives": [
            *cli,
            "bench-layers",
            "all",
            "--device",
            device,
            "-p",
            "full",
            "--resume",
            str(out / "primitives.json"),
        ],
        "blocks": [
            *cli,
            "bench-layers",
            "block",
            "--device",
            device,
            "-p",
            "full",
            "--resume",
            str(out / "blocks.json"),
        ],
        "networks": [*cli, "bench-suite", "full", "--device", device, "--json", str(out / "networks.json")],
    }


def step(command: list[str], device: str, limit_s: float) -> dict[str, Any]:
    """Runs a command and interrupts it at its time limit."""
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(PLACES),
        "WIDEPACK_TEST_DEVICE": device,
        "TOKENIZERS_PARALLELISM": "false",
    }
    begun = time.monotonic()
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        stopped = False
        try:
            printed, _ = process.communicate(timeout=max(1.0, limit_s))
        except subprocess.TimeoutExpired:
            stopped = True
            process.send_signal(signal.SIGINT)
            try:
                printed, _ = process.communicate(timeout=GRACE_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                printed, _ = process.communicate()
    return {
        "command": " ".join(command[1:]),
        "seconds": round(time.monotonic() - begun, 1),
        "stopped": stopped,
        "exit": process.returncode,
        "said": printed[-OUTPUT_CHARS:],
    }


def tests(path: Path) -> dict[str, Any]:
    """Returns counts, failures with messages, and the sums of the tests' properties of a JUnit file."""
    counts: dict[str, Any] = {"passed": 0, "skipped": 0, "failed": {}, "compared": 0, "without_kernel": []}
    if not path.exists():
        return counts
    for case in ElementTree.parse(path).iter("testcase"):
        bad = next((b for kind in ("failure", "error") for b in case.iter(kind)), None)
        if bad is not None:
            counts["failed"][f"{case.get('classname')}.{case.get('name')}"] = (
                bad.text or bad.get("message") or ""
            )[-OUTPUT_CHARS:]
        elif case.find("skipped") is not None:
            counts["skipped"] += 1
        else:
            counts["passed"] += 1
        for row in case.iter("property"):
            if row.get("name") == "compared":
                counts["compared"] += int(row.get("value") or 0)
            elif row.get("name") == "absent":
                counts["without_kernel"] += [
                    op.strip(" '[]") for op in (row.get("value") or "").split(",") if op.strip(" '[]")
                ]
    return counts


def main() -> int:
    known = list(commands("", Path()))
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--steps", default=",".join(known), help=f"steps, separated by commas: {', '.join(known)}"
    )
    parser.add_argument("--limit", type=float, default=540.0, help="limit in seconds for all steps together")
    given = parser.parse_args()
    steps = given.steps.split(",")
    if unknown := [s for s in steps if s not in known]:
        parser.error(f"unknown steps {', '.join(unknown)}; known: {', '.join(known)}")
    given.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + given.limit
    document: dict[str, Any] = {"environment": environment(given.device, 0), "steps": {}}
    for name in steps:
        document["steps"][name] = step(
            commands(given.device, given.out.absolute())[name], given.device, end - time.monotonic()
        )
        if name == "tests":
            document["steps"][name] |= tests(given.out / "tests.xml")
        (given.out / "device.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        print(
            name,
            json.dumps({k: v for k, v in document["steps"][name].items() if k != "said"})[:OUTPUT_CHARS],
            flush=True,
        )
    return int(max(s["exit"] != 0 for s in document["steps"].values()))


if __name__ == "__main__":
    sys.exit(main())
