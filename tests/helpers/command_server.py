"""Runs `widepack serve` in a process of its own, on free ports of the loopback."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

_HTTP = re.compile(r" on http://(\S+?)(?: |;|$)")
_GRPC = re.compile(r" and gRPC on (\S+?)(?: |;|$)")
_START_S = 60.0


class ServeProcess:
    """A process of `widepack serve`.

    Attributes:
        process: The process.
        http: `HOST:PORT` of REST.
        grpc: `HOST:PORT` of gRPC; "" without it.
        line: The line that it printed when it was ready.
    """

    def __init__(self, process: subprocess.Popen[str], line: str) -> None:
        self.process, self.line = process, line
        http, grpc = _HTTP.search(line), _GRPC.search(line)
        assert http is not None
        self.http = http[1]
        self.grpc = grpc[1] if grpc is not None else ""


MODULE = ("-m", "widepack_cli")


def command(*words: str | Path, program: Sequence[str] = MODULE) -> list[str]:
    return [sys.executable, *program, "serve", *map(str, words)]


@contextmanager
def command_server(*words: str | Path, program: Sequence[str] = MODULE) -> Iterator[ServeProcess]:
    """Starts `widepack serve` on a free port, waits until it is ready, and ends it.

    words: more arguments. program: what Python runs.
    """
    process = subprocess.Popen(
        command(*words, "--port", "0", program=program),
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stderr is not None
    try:
        yield ServeProcess(process, _start_line(process, process.stderr))
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)  # without a drain
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stderr.close()


def _start_line(process: subprocess.Popen[str], stream: IO[str]) -> str:
    """Returns the line that says where the server is."""
    limit = time.monotonic() + _START_S
    seen = ""
    while time.monotonic() < limit:
        if not select.select([stream], [], [], 0.5)[0]:
            continue
        line = stream.readline()
        if line.startswith("serving "):
            return line
        if not line and process.poll() is not None:
            break
        seen += line
    raise AssertionError(f"the server did not start: {seen}")
