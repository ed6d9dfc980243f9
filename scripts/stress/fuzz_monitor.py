"""Starts worker processes, and replaces a worker that ends, hangs or uses too much memory."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fuzz_worker import BYTES, SECONDS

SCRIPT = Path(__file__).with_name("fuzz_artifacts.py")
BATCH = 10_000
"""Number of cases of one worker. Then a new worker replaces it."""


def watched(
    mode: str, seed: int, folder: Path, first: int, cases: int, seconds: float
) -> Iterator[dict[str, Any]]:
    """Yields the rows of all cases. A worker that ends, hangs or uses too much memory is replaced."""
    number, end, until = first, first + cases, time.monotonic() + seconds
    while number < end and time.monotonic() < until:
        count = min(BATCH, end - number)
        command = [
            sys.executable,
            str(SCRIPT),
            "--work",
            mode,
            str(seed),
            str(folder),
            str(number),
            str(count),
        ]
        with (
            tempfile.TemporaryFile() as errors,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors) as worker,
        ):
            assert worker.stdout is not None
            began, used, buffer, ready = time.monotonic(), 0.0, b"", False
            while time.monotonic() < until:
                if select.select([worker.stdout], [], [], 0.2)[0]:
                    chunk = os.read(worker.stdout.fileno(), 1 << 20)
                    if not chunk:
                        break
                    *lines, buffer = (buffer + chunk).split(b"\n")
                    for line in lines:
                        began, used, ready = time.monotonic(), _used(worker.pid), True
                        if line == b"ready":
                            continue
                        row = json.loads(line)
                        number = row["case"] + 1
                        yield row
                        if row["outcome"] == "memory":
                            worker.kill()  # the next case needs a new worker
                elif (
                    ready and _used(worker.pid) - used > 2 * SECONDS
                ) or time.monotonic() - began > 30 * SECONDS:
                    yield {"case": number, "outcome": "hang"}
                    number += 1
                    break
                elif ready and _resident(worker.pid) > 2 * BYTES:
                    yield {"case": number, "outcome": "memory"}
                    number += 1
                    break
            stopped = time.monotonic() >= until
            worker.kill()
            code = worker.wait()
            if not stopped and code not in (0, -9):
                errors.seek(0)
                yield {
                    "case": number,
                    "outcome": "crash",
                    "code": code,
                    "text": errors.read()[-600:].decode(errors="replace"),
                }
                number += 1


def _used(pid: int) -> float:
    """Returns the CPU seconds of a process, because other processes may use the cores too."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0


def _resident(pid: int) -> int:
    """Returns the resident bytes of a process."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
