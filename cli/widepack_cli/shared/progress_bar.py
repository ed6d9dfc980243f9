"""Progress of long work on standard error: a bar on a terminal, one line for each stage elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

import click

from widepack.system.progress import IN_BYTES

if TYPE_CHECKING:
    from click._termui_impl import ProgressBar  # click exports no name for the type


_MOST_COUNTED = 9_999
"""A larger total, such as the bytes of a file, is shown as a percentage."""


class Progress:
    """A context manager that long functions call with a stage, the work that is done, and all of its work.

    Each stage has a `click.progressbar` with the time that is left. A stage `search: step` is a step of the
    stage `search`, whose bar shows the step that runs. Where the stream is not a terminal, the name of the
    stage is printed once.

    Args:
        stream: Where to write. Default: standard error.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._stage = self._step = ""
        self._bar: ProgressBar[int] | None = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._finish()

    def __call__(self, stage: str, done: int, total: int) -> None:
        stage, _, step = stage.partition(": ")
        counted = self._stream.isatty() and not step
        if self._bar is None or stage != self._stage or (counted and total != self._bar.length):
            self._finish()
            self._stage = stage
            in_percent = stage in IN_BYTES or total > _MOST_COUNTED
            self._bar = click.progressbar(
                length=max(total, 1),
                label=stage,
                file=self._stream,
                show_eta=not step,
                show_pos=not (in_percent or step),
                show_percent=in_percent,
                item_show_func=lambda _: self._step,
                bar_template="%(label)s  %(info)s" if step else "%(label)s  [%(bar)s]  %(info)s",
            )
            self._bar.__enter__()
        if step and step != self._step:
            self._step = step
            self._bar.render_progress()
        elif not step and done > self._bar.pos:
            self._bar.update(done - self._bar.pos)

    def _finish(self) -> None:
        if self._bar is not None:
            self._step = ""
            self._bar.__exit__(None, None, None)
            self._bar = None
