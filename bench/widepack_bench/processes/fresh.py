"""Runs a function of this package in its own process.

The command is `python -m widepack_bench.processes.fresh MODULE:FUNCTION ARGUMENTS`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any

from widepack.errors import WidepackError

from ..errors import BenchError


def in_fresh_process(
    function: str,
    arguments: Mapping[str, Any],
    *,
    threads: int | None = None,
    limit_s: float | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Runs a function in its own process, and returns its JSON result or `{"error": reason}`.

    function: `module:function`, with JSON arguments. threads: OpenMP threads of the process, which torch
    reads at import. limit_s: seconds after which the process is ended. environment: variables of the process.
    """
    try:
        done = subprocess.run(
            _command(function, arguments),
            capture_output=True,
            text=True,
            check=False,
            timeout=limit_s,
            env={**environment_of(threads), **environment},
        )
    except subprocess.TimeoutExpired:
        return {"error": f"it did not end within {limit_s:.0f} s"}
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return {"error": lines[-1][:1000] if lines else f"exit code {done.returncode}"}
    try:
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):  # Other output follows the result.
        return {"error": f"its process gave no result: {done.stdout[-200:]!r}"}
    return result


ATTACHED = "attached"  # Connected to the parent: the process ends when the parent ends.
STEADY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 34), "MALLOC_TOP_PAD_": str(1 << 26)}
"""Makes glibc keep freed memory. By default it returns the memory of a large answer to the system, and
requests it again at the next call, or does not, depending on earlier calls.
"""


def lines_of_fresh_process(
    function: str,
    arguments: Mapping[str, Any],
    *,
    threads: int | None = None,
    limit_s: float = 900.0,
    steady: bool = False,
    stopped: threading.Event | None = None,
) -> Iterator[dict[str, Any]]:
    """Runs a generator in its own process, and yields each of its values at once.

    limit_s: seconds between two values. steady: freed memory stays in the process (`STEADY`). stopped: ends
    the process when it is set. Raises: ProcessEnded, with the reason, where the process ends before the
    generator does.
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        child = subprocess.Popen(
            [*_command(function, arguments), ATTACHED],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**environment_of(threads), **(STEADY if steady else {})},
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
                    value = json.loads(line)
                except ValueError:
                    raise ProcessEnded(f"it gave something else than a result: {line[:200]!r}") from None
                yield value
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
            messages = [line for line in log.read().splitlines() if line.strip()]
            raise ProcessEnded(
                f"it did not go on within {limit_s:.0f} s"
                if late.is_set()
                else messages[-1][:1000]
                if messages
                else f"exit code {code}"
            )


def _kill_when(stopped: threading.Event, ended: threading.Event, child: subprocess.Popen[str]) -> None:
    while not ended.wait(0.2):
        if stopped.is_set():
            child.kill()
            return


def tell(value: Mapping[str, Any]) -> None:
    """Prints a line between two values of a generator's process."""
    print(json.dumps(value), file=sys.__stdout__, flush=True)


class ProcessEnded(BenchError):
    """A process ended before all its results were there."""


def _command(function: str, arguments: Mapping[str, Any]) -> list[str]:
    return [sys.executable, "-m", "widepack_bench.processes.fresh", function, json.dumps(arguments)]


def environment_of(threads: int | None) -> dict[str, str]:
    """Returns the environment of a process: with the path of this one, and OpenMP's threads."""
    own = {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    return {**os.environ, **own, **({} if threads is None else {"OMP_NUM_THREADS": str(threads)})}


def _end_with_parent() -> None:
    """Ends this process when its parent ends, even where the parent was killed.

    The parent keeps standard input open and writes nothing.
    """
    while os.read(0, 4096):  # `sys.stdin.read()` would take a lock that the interpreter waits for at exit.
        pass
    os._exit(1)


def main() -> None:
    """Prints one line of JSON on standard output, for a generator one for each value.

    An error is one line on standard error.
    """
    module, _, function = sys.argv[1].partition(":")
    if ATTACHED in sys.argv[3:]:
        threading.Thread(target=_end_with_parent, daemon=True).start()
    written, sys.stdout = sys.stdout, sys.stderr  # Libraries may print, which is not the result.
    try:
        result = getattr(import_module(module), function)(**json.loads(sys.argv[2]))
        if isinstance(result, Iterator):
            for part in result:
                print(json.dumps(part), file=written, flush=True)
            return
    except WidepackError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        sys.exit(1)
    print(json.dumps(result), file=written)


if __name__ == "__main__":
    main()
