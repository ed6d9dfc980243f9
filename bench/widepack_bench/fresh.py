"""A function of this package in a process of its own: `python -m widepack_bench.fresh MODULE:FUNCTION ARGUMENTS`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from widepack.errors import WidepackError


def in_fresh_process(function: str, arguments: Mapping[str, Any], *, threads: int | None = None, limit_s: float | None = None) -> dict[str, Any]:
    """What a function gives, which takes and gives what JSON can hold, or `{"error": why}`.

    function: `module:function`. threads: of the process's own OpenMP, which torch reads as it is imported. limit_s: seconds after which it is ended.
    """
    own = {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), **({} if threads is None else {"OMP_NUM_THREADS": str(threads)})}
    command = [sys.executable, "-m", "widepack_bench.fresh", function, json.dumps(arguments)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit_s, env={**os.environ, **own})
    except subprocess.TimeoutExpired:
        return {"error": f"it did not end within {limit_s:.0f} s"}
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return {"error": lines[-1][:1000] if lines else f"exit code {done.returncode}"}
    try:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):  # something wrote behind the result
        return {"error": f"its process gave no result: {done.stdout[-200:]!r}"}
    return found


def main() -> None:
    """One line of JSON on standard output, an error as one line on standard error."""
    module, _, function = sys.argv[1].partition(":")
    written, sys.stdout = sys.stdout, sys.stderr  # what libraries print is no result
    try:
        found = getattr(import_module(module), function)(**json.loads(sys.argv[2]))
    except WidepackError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        sys.exit(1)
    print(json.dumps(found), file=written)


if __name__ == "__main__":
    main()
