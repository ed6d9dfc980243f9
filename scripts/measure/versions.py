"""Runs a small set of the tests with other versions of Python and torch, and counts what passes.

    python scripts/measure/versions.py python3.10:2.13.0 python3.12:2.13.0 python3.11:2.14.1
    python scripts/measure/versions.py ~/envs/py312

A version is `PYTHON:TORCH`, for which the script makes an environment and installs torch and the packages of
constraints.txt, or the folder of an environment that has them. The set is the networks, live modules, calls,
builds, checkpoints, the command line, and artifacts that earlier versions wrote. `--all` runs all tests of
`make test`. A run replaces the row of the same versions.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from runner import file_of, parser

from widepack_bench.report.environment import commit

ROOT = Path(__file__).resolve().parents[2]
PARTS = [ROOT, *(ROOT / name for name in ("artifacts", "bench", "cli"))]
ROOMS = ("building", "checkpoints", "cli", "fused", "inference")
FILES = ("artifacts/test_golden.py", "networks/test_networks.py", "networks/test_patterns.py")
SET = [f"tests/{name}" for name in (*ROOMS, *FILES)]
PACKAGES = "click safetensors tomli hypothesis jsonschema numpy pytest pytest-xdist scikit-learn transformers"


def environment_of(version: str, folder: Path) -> Path:
    """Returns the environment of a version: the folder that it names, or a new one in `folder`."""
    if (Path(version).expanduser() / "bin" / "python").exists():
        return Path(version).expanduser()
    python, _, torch = version.partition(":")
    made = folder / re.sub(r"[^\w.]+", "-", version)
    subprocess.run([python, "-m", "venv", str(made)], check=True)
    pinned = folder / "constraints.txt"
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned.write_text("\n".join(line for line in lines if not line.startswith("torch==")), encoding="utf-8")
    pip = [str(made / "bin" / "python"), "-m", "pip", "install", "--quiet", "-c", str(pinned)]
    subprocess.run([*pip, f"torch=={torch}" if torch else "torch"], check=True)
    subprocess.run([*pip, *PACKAGES.split()], check=True)
    return made


def tested(environment: Path, every: bool, workers: int) -> dict[str, Any]:
    """Runs the tests in an environment. Returns the versions and the counts."""
    python = str(environment / "bin" / "python")
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    variables["PYTHONPATH"] = os.pathsep.join(map(str, PARTS))
    code = "import sys, torch; print(sys.version.split()[0], torch.__version__)"
    named = subprocess.run([python, "-c", code], env=variables, capture_output=True, text=True, check=True)
    versions = named.stdout.split()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["-q", "-m", "not slow", "-p", "no:cacheprovider", f"--junit-xml={report}"]
        options += ["-n", str(workers), "--dist", "worksteal"] if workers > 1 else []
        subprocess.run([python, "-m", "pytest", *options, *([] if every else SET)], cwd=ROOT, env=variables)
        cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    skipped = [c for c in cases if c.find("skipped") is not None]
    return {
        "python": versions[0],
        "torch": versions[1],
        "tests": "all" if every else "the small set",
        "passed": len(cases) - len(failed) - len(skipped),
        "skipped": len(skipped),
        "failed": [f"{c.get('classname')}::{c.get('name')}" for c in failed],
        "seconds": round(time.monotonic() - begin),
    }


def main() -> int:
    options = parser(__doc__, "versions.json")
    options.add_argument("versions", nargs="+", help="PYTHON:TORCH, or the folder of an environment")
    options.add_argument("--all", action="store_true", help="run all tests of `make test`")
    options.add_argument("--workers", type=int, default=2, help="processes that run tests")
    given = options.parse_args()
    file = file_of(given)
    with tempfile.TemporaryDirectory(prefix="widepack-versions-") as folder:
        for version in given.versions:
            row = tested(environment_of(version, Path(folder)), given.all, given.workers)
            file.add(f"python {row['python']}, torch {row['torch']}", {**row, "commit": commit()})
            print(json.dumps(row, indent=1), flush=True)
    return int(any(row["failed"] for row in file.rows.values()))


if __name__ == "__main__":
    sys.exit(main())
