"""Checks the arguments of `widepack.predict` that need neither the model nor the content of the file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..inference.reduced_answer import Reduction
from ..spec.names import path_of
from ..system.atomic_file import admit
from .answers import Figures
from .formats import ARROW, check_package, suffix_of

BATCH = 256
"""The rows of a batch by default."""


@dataclass(frozen=True)
class Files:
    """The input file and the output file. suffix: of the output."""

    source: Path
    output: Path
    suffix: str

    @property
    def is_table(self) -> bool:
        """Whether the output holds columns of any type. False: only tensors."""
        return self.suffix in ARROW

    @classmethod
    def of(cls, source: Any, output: Any, force: bool) -> Files:
        """Checks the paths, and that the output can be written. Raises: UsageError, ArtifactExists,
        Unavailable.
        """
        source = Path(path_of(source, "source", "the path of the input file"))
        output = Path(path_of(output, "output", "the path of the file to write"))
        suffix_of(source, "input")
        suffix = suffix_of(output, "output")
        if os.path.exists(output) and os.path.exists(source) and os.path.samefile(source, output):
            raise UsageError(f"{output} is the input file; give another path for the output")
        admit(output, force)
        if not os.access(output.parent, os.W_OK | os.X_OK):
            raise UsageError(f"{output}: the folder {output.parent} cannot be written; give another path")
        check_package(suffix)
        return cls(source, output, suffix)


def figures_of(reduce: str | Sequence[str], of: str | None, dim: int, member: str | None) -> Figures | None:
    """Returns the figures that are requested; None for none. Raises: UsageError."""
    names = [w.strip() for w in reduce.split(",")] if isinstance(reduce, str) else list(reduce)
    names = [n for n in names if n]
    if not names:
        if of is not None:
            raise UsageError(f"of={of!r} is about figures; name them with reduce=, for example reduce='mean'")
        return None
    if member is not None:
        raise UsageError(
            "member= and reduce= exclude each other: a row that one member answers has no figures of all "
            "members"
        )
    Reduction.of_call(names, of, None, dim, None, None)
    return Figures(tuple(dict.fromkeys(names)), of, dim)


def check_batch(batch: Any) -> None:
    """Raises: UsageError for a batch that is no positive number."""
    if batch is not None and (type(batch) is not int or batch < 1):
        raise UsageError(f"batch={batch!r} is not a number of rows; give a positive integer")
