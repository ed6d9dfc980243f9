"""Progress on standard error: a bar on a terminal, a line a stage elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TextIO

from widepack.system.progress import IN_BYTES

WIDTH = 24
TOLD_AFTER_S = 2


class Progress:
    """A context manager that `build` and `bench` call with a stage, what is done of it, and of how much.

    On a terminal one line is drawn again and again, and is gone at the end; on a pipe each stage is one line, when it starts.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._terminal = self._stream.isatty()
        self._stage = ""
        self._begun = 0.0
        self._drawn = 0.0
        self._length = 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if self._length:
            self._draw("")

    def __call__(self, stage: str, done: int, total: int) -> None:
        new = stage != self._stage
        self._stage = stage
        if not self._terminal:
            if new:
                print(stage, file=self._stream, flush=True)
            return
        now = time.monotonic()
        if new:
            self._begun = now
        if new or done >= total or now - self._drawn > 0.05:
            self._drawn = now
            filled = WIDTH * min(done, total) // total if total > 0 else 0
            bar = f" [{'#' * filled}{'.' * (WIDTH - filled)}] {self._amount(done, total)}{self._left(done, total, now)}" if total > 1 else ""
            self._draw(f"{stage}{bar}")

    def _amount(self, done: int, total: int) -> str:
        if self._stage not in IN_BYTES:
            return f"{done}/{total}"
        unit, size = ("GB", 10**9) if total >= 10**9 else ("MB", 10**6)
        return f"{done / size:.1f} of {total / size:.1f} {unit}"

    def _left(self, done: int, total: int, now: float) -> str:
        """How long the stage will take yet, once it has taken long enough to tell."""
        taken = now - self._begun
        return f", {taken * (total - done) / done:.0f} s left" if done and taken > TOLD_AFTER_S else ""

    def _draw(self, line: str) -> None:
        self._stream.write("\r" + line.ljust(self._length) + ("" if line else "\r"))
        self._stream.flush()
        self._length = len(line)
