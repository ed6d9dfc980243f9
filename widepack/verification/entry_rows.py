"""Decides for an entry of a build whether the rows of its batch are independent."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from widepack_artifacts.rows import Rows

from ..ir.cast import raise_value
from ..ir.tensor_type import tensor_type
from ..rows.trials import RowTrials
from ..rows.verdict import ExaminedEntry
from .subject import Subject


def rows_of(subject: Subject, outputs: Sequence[str]) -> Rows:
    """Returns whether the rows of an entry's batch are independent. outputs: the type of each output."""
    trials = partial(_trials, subject, outputs)
    return ExaminedEntry(subject.programs, subject.sizes, subject.fits, outputs, trials).rows()


def _trials(subject: Subject, outputs: Sequence[str], number: int, letter: str) -> RowTrials:
    """Returns the trials of a member program, by its number."""
    member = list(subject.signatures).index(number)

    def run(inputs: Sequence[torch.Tensor]) -> Sequence[object]:
        with torch.inference_mode():
            found: Sequence[object] = subject.run(member)(*subject.arguments(member), *inputs)
        return found

    def run_float64(inputs: Sequence[torch.Tensor]) -> Sequence[object]:
        with torch.inference_mode():
            weights = map(raise_value, subject.arguments(member))
            found: Sequence[object] = subject.run(member, exact=True)(*weights, *inputs)
        return found

    types = [t for t in map(tensor_type, outputs) if t is not None]  # others are refused before
    return RowTrials(run, run_float64, subject.sources, types, letter)
