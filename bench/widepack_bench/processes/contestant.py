"""Measures peak memory and start-up: each contestant runs in its own process.

The parent writes the child's inputs and state dicts to a folder, starts `python -m
widepack_bench.processes.child`, and reads the child's memory from the system every 2 ms. The measurement of
memory begins after the child's first answer, when the memory of compiling and exporting is freed.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ..measure.figures import Memory, Start
from ..measure.race import OURS
from .fresh import environment_of

if TYPE_CHECKING:
    from ..report.document import Report

Progress = Callable[[str, int, int], None]
STARTS = 3  # The start-up is the median of this many processes.
LIMIT_S = 900.0  # Seconds that one process may take.
POLL_S = 0.002


def measured_alone(
    report: Report,
    *,
    model: str,
    factory: str,
    factory_args: Mapping[str, Any],
    unnamed: bool,
    device: str,
    pin: bool,
    inputs: Any = None,
    progress: Progress | None = None,
) -> Report:
    """Adds memory to a report's rows, and the start-up of widepack and of the eager loop.

    model: the artifact's path. factory: its name; "" for the artifact's member programs. unnamed: the members
    are objects, which another process cannot get.
    """
    import torch

    import widepack

    from ..baselines.members import call_inputs

    ens = widepack.load(model, device="cpu")
    entry = ens.manifest.entries[report.entry]
    if entry.state:
        return report
    rows = []
    with tempfile.TemporaryDirectory(prefix="widepack-bench-") as folder:
        common = {
            "artifact": os.path.abspath(model),
            "entry": report.entry,
            "pattern": report.pattern,
            "device": device,
            "threads": report.environment["threads"],
            "pin": pin,
            "factory": factory,
            "factory_args": dict(factory_args),
        }
        steps = sum(1 + len(r.others) + len(r.timings) for r in report.rows)
        done = 0
        for row in report.rows:
            args, kwargs, _ = call_inputs(
                entry, inputs, row.batch, len(ens) if report.pattern == "each" else 0, "cpu"
            )
            torch.save((args, kwargs), f"{folder}/inputs-{row.batch}.pt")
            memory: dict[str, Memory | str] = {}
            for name, _, _ in row.contestants():
                if progress:
                    progress("memory, each contestant in a process of its own", done, steps)
                done += 1
                how = _how(name, report.backend)
                if how is not None and "baseline" in how and unnamed:
                    memory[name] = "the modules are objects; give the name of their factory, file.py:factory"
                elif how is not None:
                    inputs_file = f"{folder}/inputs-{row.batch}.pt"
                    memory[name] = _memory({**common, **how, "inputs": inputs_file, "mode": "memory"})
            rows.append(replace(row, memory=memory))
        start: dict[str, Start | str] = {}
        spec = {**common, "inputs": f"{folder}/inputs-{report.rows[0].batch}.pt", "mode": "start"}
        if progress:
            progress("start-up", 0, 2)
        start[OURS] = _start({**spec, "backend": report.backend})
        if progress:
            progress("start-up", 1, 2)
        if not factory or factory == "hf" or report.entry != "forward":
            start["loop"] = "a loop starts from checkpoints and your own code: give its name, file.py:factory"
        else:
            paths = []
            for i in range(len(ens)):
                paths.append(f"{folder}/{i}.pt")
                state = ens.state_dict(i)
                for k, v in state.items():  # clones: a file of views would have the weights of all members
                    state[k] = v.clone() if isinstance(v, torch.Tensor) else v
                torch.save(state, paths[-1])
            start["loop"] = _start({**spec, "baseline": "loop", "checkpoints": paths})
    return replace(report, rows=tuple(rows), start=start)


def _how(name: str, backend: str) -> dict[str, Any] | None:
    """Returns what a child needs to run the contestant of this name; None for a caller's own call."""
    if name == OURS:
        return {"backend": backend}
    if name.startswith(f"{OURS}["):
        return {"backend": name[len(OURS) + 1 : -1]}
    if name.startswith("level "):
        return {"level": name.removeprefix("level ")}
    from ..baselines.table import BASELINES

    return {"baseline": name} if name in BASELINES else None


@contextmanager
def _child(spec: Mapping[str, Any]) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    """Starts a child, and yields it with the file of its standard error. It is ended after `LIMIT_S`.

    The child gets its start time, by the clock that processes share.
    """
    command = [sys.executable, "-m", "widepack_bench.processes.child", json.dumps(spec)]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        child = subprocess.Popen(
            [*command, str(time.monotonic_ns())],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment_of(spec["threads"]),
        )
        limit = threading.Timer(LIMIT_S, child.kill)
        limit.start()
        try:
            yield child, log
        finally:
            limit.cancel()
            if child.poll() is None:
                child.kill()
                child.wait()
            if child.stdout is not None:
                child.stdout.close()


def _memory(spec: Mapping[str, Any]) -> Memory | str:
    """Returns the child's peak memory after its first answer, or the reason why there is none."""
    with _child(spec) as (child, log):
        assert child.stdout is not None
        line = child.stdout.readline()  # After its first answer.
        peak = [0, 0]
        while line and child.poll() is None:
            peak = [max(p, n) for p, n in zip(peak, resident(child.pid), strict=True)]
            time.sleep(POLL_S)
        rest = _finish(child, log)
    if isinstance(rest, str):
        return rest
    ready = json.loads(line)
    if "private_bytes" in rest:  # Memory of the GPU.
        return Memory(int(rest["private_bytes"]), 0)
    if not any(peak):
        return "this system does not say what a process takes (/proc/<pid>/status)"
    return Memory(max(0, peak[0] - ready["private"]), max(0, peak[1] - ready["mapped"]))


def _start(spec: Mapping[str, Any]) -> Start | str:
    """Returns the median of some starts. The first start fills caches and is not counted."""
    starts = []
    for _ in range(STARTS + 1):
        with _child(spec) as (child, log):
            rest = _finish(child, log)
        if isinstance(rest, str):
            return rest
        starts.append((rest["start_ms"], rest["torch_ms"]))
    return Start(
        statistics.median(s for s, _ in starts[1:]), statistics.median(t for _, t in starts[1:]), STARTS
    )


def _finish(child: subprocess.Popen[str], log: IO[str]) -> dict[str, float] | str:
    """Returns the child's result, or the reason why it has none."""
    out, _ = child.communicate()
    if child.returncode == 0:
        result: dict[str, float] = json.loads(out.splitlines()[-1])
        return result
    if child.returncode == -signal.SIGKILL:
        return f"its process was ended: it took longer than {LIMIT_S:g} s, or more memory than there is"
    log.seek(0)
    lines = [line for line in log.read().splitlines() if line.strip()]
    return lines[-1][:300] if lines else f"its process ended with exit code {child.returncode}"


def resident(pid: int | str = "self") -> tuple[int, int]:
    """Returns a process's private and mapped bytes in memory now; zeros where the system does not tell."""
    private = mapped = 0
    try:
        for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("RssAnon:"):
                private = int(line.split()[1]) * 1024
            elif line.startswith(("RssFile:", "RssShmem:")):
                mapped += int(line.split()[1]) * 1024
    except OSError:
        pass
    return private, mapped
