"""Tests the limits of trials of rows: the sizes of their inputs, their memory and their time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from row_cases import Examined, Of

from widepack.errors import LoweringError
from widepack.rows.trials import NoTrial
from widepack.rows.verdict import NUMBERS, ExaminedEntry
from widepack.system import deadline


def test_trials_have_small_sizes_where_the_example_is_large() -> None:
    x = torch.randn(2, 60_000)
    one = Examined(Of(lambda x: x.flip(1)), [x], [{0: "B", 1: "T"}])
    most = 0

    def run(given: Sequence[torch.Tensor]) -> Sequence[object]:
        nonlocal most
        most = max(most, *(v.numel() for v in given))
        return [v.flip(1) for v in given]

    trials = replace(one.trials(), run=run, run_float64=run)
    sources = [replace(s, example=None) for s in trials.sources]
    entry = ExaminedEntry(
        [one.program], one.sizes, one.fits, one.outputs, lambda *_: replace(trials, sources=sources)
    )
    assert entry.rows().independent
    assert 0 < most <= NUMBERS


def test_inputs_of_trials_that_take_too_much_memory() -> None:
    one = Examined(Of(lambda x: x.exp()), [torch.randn(4, 6)])
    trials = replace(one.trials(), most_bytes=4 * 3 * 6 * 4 + 5 * 8 * 6 * 4 - 1)
    with pytest.raises(NoTrial, match="the inputs of trials would take 1,248 bytes"):
        trials.difference(one.sizes, 3, 8, [1])
    assert not replace(trials, most_bytes=trials.most_bytes + 1).difference(one.sizes, 3, 8, [1])


def test_each_run_of_a_trial_reads_the_deadline() -> None:
    one = Examined(Of(lambda x: x.exp()), [torch.randn(4, 6)])
    with deadline.within(-1.0), pytest.raises(LoweringError, match="takes too long"):
        one.trials().difference(one.sizes, 3, 8, [1])
