"""Writes the output file: opened at the first block, and published at the end, whole or not at all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import InputError, UsageError
from ..system.atomic_file import whole
from .formats import FileSink
from .table import place


class OutputFile:
    """The columns of the output, block by block.

    Args:
        source: The input file, for messages.
        sink: The file.

    Attributes:
        columns: The names of the columns that were written.
    """

    def __init__(self, source: Path, sink: FileSink) -> None:
        self._source, self._sink = source, sink
        self._shapes: dict[str, tuple[int, ...]] = {}
        self.columns: tuple[str, ...] = ()

    def write(self, start: int, passed: Mapping[str, Any], answers: Mapping[str, Tensor]) -> None:
        """Writes a block.

        Args:
            start: The number of its first row.
            passed: The columns that are passed on.
            answers: The answers, `[rows, ...]`.

        Raises:
            UsageError: A column that is passed on has the name of an answer.
            InputError: The answers have another shape than before.
        """
        shapes = {name: tuple(value.shape[1:]) for name, value in answers.items()}
        if not self.columns:
            if both := [n for n in passed if n in answers]:
                raise UsageError(
                    f"{self._source}: the column {both[0]} has the name of an answer; give the answers "
                    "another name with name= (--name), or name the columns to pass on with ids= (--id)"
                )
            self._shapes, self.columns = shapes, (*passed, *answers)
        for name, shape in shapes.items():
            if shape != self._shapes.get(name):
                before = list(self._shapes.get(name, ()))
                raise InputError(
                    f"{place(self._source, start)}: the answer {name} has the shape {list(shape)}, and those "
                    f"before had {before}; the rows of a column have one shape"
                )
        self._sink.write({**passed, **answers})


@contextmanager
def output_file(
    source: Path, output: Path, force: bool, opened: Callable[[Path], FileSink]
) -> Iterator[OutputFile]:
    """Yields an output file that gets its name at the end, unless the block raises.

    opened: opens a file at a temporary path. Raises: as `whole`.
    """
    with whole(output, force) as made:
        sink = opened(made)
        try:
            yield OutputFile(source, sink)
        except BaseException:
            with contextlib.suppress(Exception):  # the first error counts
                sink.close()
            raise
        sink.close()
