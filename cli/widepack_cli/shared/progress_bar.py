"""Progress of long work on standard error: a bar on a terminal, one line for each stage elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

import click

from widepack.system.progress import IN_BYTES

if TYPE_CHECKING:
    from click._termui_impl import ProgressBar  # click exports no name for the type


class Progress:
    """A context manager that long functions call with a stage, the work that is done, and all of its work.

    Each stage has a `click.progressbar`. Where the stream is not a terminal, click prints the name of the
    stage once.

    Args:
        stream: Where to write. Default: standard error.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._stage = ""
        self._bar: ProgressBar[int] | None = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._finish()

    def __call__(self, stage: str, done: int, total: int) -> None:
        if self._bar is None or stage != self._stage or total != self._bar.length:
            self._finish()
            self._stage = stage
            self._bar = click.progressbar(
                length=max(total, 1),
                label=stage,
                file=self._stream,
                show_pos=stage not in IN_BYTES,
                show_percent=stage in IN_BYTES,
            )
            self._bar.__enter__()
        if done > self._bar.pos:
            self._bar.update(done - self._bar.pos)

    def _finish(self) -> None:
        if self._bar is not None:
            self._bar.__exit__(None, None, None)
            self._bar = None
