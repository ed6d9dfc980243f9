"""Runs the steps within a time, and keeps what was finished.

1. Steps that measure no times run first, all at once. The others run one after the other: the time that is
   left is divided by their shares, and what a step leaves, the next ones have.
2. A step at the end of its time is interrupted, and killed some seconds later, with all processes that it
   started. Its document has the rows that were finished.
3. A step that failed does not stop the next ones.
4. A later call leaves out finished steps, and the others continue their documents.

`device.json` in the folder has for each step its commands, seconds, exit codes and the end of its output.
It is written after every step.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from widepack.kernels.triton_kernels.available import TF32_SWITCH
from widepack.system.user_cache import cache_folder
from widepack_bench.report.json_file import read_document, write_whole

from .record_tests import VARIABLE
from .steps import CPU, ROOT, Command, Plan, Step

FORMAT = "widepack.device/1"
OUTPUT_CHARS = 4000  # of the output of a step that are kept
GRACE_S = 10.0  # of a step's time, in which an interrupted step writes its document
LEAST_S = 5.0  # no step begins with less
PLACES = (".", "artifacts", "bench", "cli", "serve", "scripts", "scripts/measure")


class OtherMachine(Exception):
    """A folder has results of another device or another version of torch."""


def compiled_folder() -> Path:
    """Returns a folder for compiled code, into which no other user can write: steps run what is in it.

    It is `device` in the user's cache folder, so that a later call finds what was compiled. Where it cannot
    be made, or is not this user's alone, it is a new temporary folder.
    """
    folder = cache_folder() / "device"
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = os.lstat(folder)
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077:
            return folder
    return Path(tempfile.mkdtemp(prefix="widepack-device-"))


def environment_of_steps(plan: Plan, packages: Sequence[str], tf32: bool) -> dict[str, str]:
    """Returns the environment of the steps.

    Args:
        plan: Where the steps run.
        packages: Folders with packages that are not installed.
        tf32: Whether float32 products and convolutions may use TF32. Without it all NVIDIA libraries of the
            process compute in float32, so that answers can be compared with float64.
    """
    compiled = compiled_folder()
    places = [*(str(ROOT / place) for place in PLACES), *packages, os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(place for place in places if place),
        "WIDEPACK_TEST_DEVICE": plan.device,
        "TOKENIZERS_PARALLELISM": "false",
        "TORCHINDUCTOR_CACHE_DIR": str(compiled / "inductor"),  # later steps and calls find what was compiled
        "TRITON_CACHE_DIR": str(compiled / "triton"),
        VARIABLE: plan.file("tests"),
        **({} if tf32 or plan.device == CPU else {TF32_SWITCH: "0"}),
    }


def run_command(command: Command, environment: Mapping[str, str], limit_s: float) -> dict[str, Any]:
    """Runs a command, and stops it with all its processes at the end of its time.

    Returns: the command, seconds, exit code, whether it was stopped, and the end of its output.
    """
    begun = time.monotonic()
    with tempfile.TemporaryFile() as output, tempfile.TemporaryDirectory(prefix="widepack-step-") as folder:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**environment, "TMPDIR": folder},  # what a killed step leaves is removed
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        stopped = False
        try:
            process.wait(max(1.0, limit_s))
        except subprocess.TimeoutExpired:
            stopped = True
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(max(0, output.seek(0, os.SEEK_END) - OUTPUT_CHARS))
        printed = output.read().decode(errors="replace")
    return {
        "command": " ".join(command[1:]),
        "seconds": round(time.monotonic() - begun, 1),
        "stopped": stopped,
        "exit": process.returncode,
        "said": printed,
    }


class DeviceRun:
    """The runs of a folder.

    Args:
        plan: Where the steps run.
        machine: What describes the device and the versions; `environment` of the benchmarks.
        environment: Of the steps.

    Raises:
        OtherMachine: The folder has results of another machine.
        UsageError: `device.json` is another document.
    """

    def __init__(self, plan: Plan, machine: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        self.plan, self._environment = plan, environment
        self._path = plan.out / "device.json"
        plan.out.mkdir(parents=True, exist_ok=True)
        document = read_document(self._path, FORMAT, "scripts/on_device.py")
        self.document: dict[str, Any] = document or {"format": FORMAT, "calls": [], "steps": {}}
        if document is not None:
            from runner import differences  # it imports torch

            if other := differences(document["environment"], machine):
                raise OtherMachine(
                    f"{plan.out} has results that were measured elsewhere: {other}. Give another folder, or "
                    "remove it"
                )
        self.document |= {"environment": dict(machine), "rehearsal": plan.rehearsal}
        self.write()

    def waiting(self, steps: Sequence[Step], again: bool) -> list[Step]:
        """Returns the steps that have to run. again: also those that are finished."""
        done = {name for name, row in self.document["steps"].items() if row["finished"]}
        return [step for step in steps if again or step.name not in done]

    def run(self, steps: Sequence[Step], seconds: float, report: Callable[[str], object] = print) -> bool:
        """Runs steps within a time. Returns whether all of them are finished."""
        begun = time.monotonic()
        self.document["calls"].append({"seconds": seconds, "steps": [step.name for step in steps]})
        timed = [step for step in steps if step.timed]
        together = [step for step in steps if not step.timed]
        if together:
            with ThreadPoolExecutor(len(together)) as pool:
                rows = [pool.submit(self._step, step, begun + seconds) for step in together]
                for row in as_completed(rows):
                    self._add(together[rows.index(row)], row.result(), report)
        begun, seconds = time.monotonic(), seconds - (time.monotonic() - begun)
        total = sum(step.share for step in timed)
        over = 0.0
        for step in timed:
            over += step.share
            self._add(step, self._step(step, begun + seconds * over / total), report)
        return all(self.document["steps"][step.name]["finished"] for step in steps)

    def _add(self, step: Step, row: dict[str, Any], report: Callable[[str], object]) -> None:
        self.document["steps"][step.name] = row
        self.write()
        words = "finished" if row["finished"] else "not finished"
        report(f"{step.name}: {words} after {row['seconds']:.0f} s")

    def _step(self, step: Step, end: float) -> dict[str, Any]:
        """Runs the commands of a step until `end`, by `time.monotonic`."""
        runs: list[dict[str, Any]] = []
        commands = step.commands(self.plan)
        environment = {k: v for k, v in self._environment.items() if not (step.tf32 and k == TF32_SWITCH)}
        if not step.timed:  # many processes compile at once
            environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        for command in commands:
            left = end - time.monotonic() - GRACE_S
            if left < LEAST_S:
                break
            runs.append(run_command(command, environment, left))
        finished = len(runs) == len(commands) and all(
            not run["stopped"] and run["exit"] in step.finished for run in runs
        )
        return {
            "decides": step.decides,
            "finished": finished,
            "seconds": round(sum(run["seconds"] for run in runs), 1),
            "runs": runs,
            "left_out": len(commands) - len(runs),
        }

    def write(self) -> None:
        """Writes `device.json`."""
        write_whole(self._path, self.document)
