"""A function of this package in a process of its own: `python -m widepack_bench.processes.fresh MODULE:FUNCTION ARGUMENTS`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from widepack.errors import WidepackError

from ..errors import BenchError


def in_fresh_process(function: str, arguments: Mapping[str, Any], *, threads: int | None = None, limit_s: float | None = None) -> dict[str, Any]:
    """What a function gives, which takes and gives what JSON can hold, or `{"error": why}`.

    function: `module:function`. threads: of the process's own OpenMP, which torch reads as it is imported. limit_s: seconds after which it is ended.
    """
    try:
        done = subprocess.run(_command(function, arguments), capture_output=True, text=True, check=False, timeout=limit_s, env=_environment(threads))
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


ATTACHED = "attached"  # to whoever started it: a process that ends when that one does, however it ended
STEADY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 34), "MALLOC_TOP_PAD_": str(1 << 26)}
"""What makes glibc keep the memory that is freed. By itself it gives a large answer's back and asks the system for it again at the next call, or does not, by
what the process did before."""


def lines_of_fresh_process(
    function: str,
    arguments: Mapping[str, Any],
    *,
    threads: int | None = None,
    limit_s: float = 900.0,
    steady: bool = False,
    stopped: threading.Event | None = None,
) -> Iterator[dict[str, Any]]:
    """What a generator gives, one by one, as it gives it. limit_s: seconds between two of them. steady: memory that is freed stays the process's (`STEADY`). stopped: ends it when it is set.

    Raises: ProcessEnded, with why, where its process ends before the generator does.
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        child = subprocess.Popen(
            [*_command(function, arguments), ATTACHED],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**_environment(threads), **(STEADY if steady else {})},
        )
        assert child.stdout is not None
        assert child.stdin is not None
        late = threading.Event()

        def stop() -> None:
            late.set()
            child.kill()

        timer = threading.Timer(limit_s, stop)
        timer.start()
        ended = threading.Event()
        if stopped is not None:
            threading.Thread(target=_kill_when, args=(stopped, ended, child), daemon=True).start()
        try:
            for line in child.stdout:
                timer.cancel()
                try:
                    found = json.loads(line)
                except ValueError:
                    raise ProcessEnded(f"it gave something else than a result: {line[:200]!r}") from None
                yield found
                timer = threading.Timer(limit_s, stop)
                timer.start()
            code = child.wait()
        finally:
            ended.set()
            timer.cancel()
            if child.poll() is None:
                child.kill()
                child.wait()
            child.stdout.close()
            child.stdin.close()
        if code:
            log.seek(0)
            said = [line for line in log.read().splitlines() if line.strip()]
            raise ProcessEnded(f"it did not go on within {limit_s:.0f} s" if late.is_set() else said[-1][:1000] if said else f"exit code {code}")


def _kill_when(stopped: threading.Event, ended: threading.Event, child: subprocess.Popen[str]) -> None:
    while not ended.wait(0.2):
        if stopped.is_set():
            child.kill()
            return


def tell(value: Mapping[str, Any]) -> None:
    """A line of a generator's process between two of its values."""
    print(json.dumps(value), file=sys.__stdout__, flush=True)


class ProcessEnded(BenchError):
    """A process that ended before it had given all that was asked of it."""


def _command(function: str, arguments: Mapping[str, Any]) -> list[str]:
    return [sys.executable, "-m", "widepack_bench.processes.fresh", function, json.dumps(arguments)]


def _environment(threads: int | None) -> dict[str, str]:
    own = {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), **({} if threads is None else {"OMP_NUM_THREADS": str(threads)})}
    return {**os.environ, **own}


def _end_with_parent() -> None:
    """Nothing comes on standard input; it ends when the process that holds its other end has ended, even where that was killed."""
    while os.read(0, 4096):  # not `sys.stdin.read()`, which holds a lock that an interpreter waits for at its end
        pass
    os._exit(1)


def main() -> None:
    """One line of JSON on standard output, of a generator one for each of its values; an error as one line on standard error."""
    module, _, function = sys.argv[1].partition(":")
    if ATTACHED in sys.argv[3:]:
        threading.Thread(target=_end_with_parent, daemon=True).start()
    written, sys.stdout = sys.stdout, sys.stderr  # what libraries print is no result
    try:
        found = getattr(import_module(module), function)(**json.loads(sys.argv[2]))
        if isinstance(found, Iterator):
            for part in found:
                print(json.dumps(part), file=written, flush=True)
            return
    except WidepackError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        sys.exit(1)
    print(json.dumps(found), file=written)


if __name__ == "__main__":
    main()
