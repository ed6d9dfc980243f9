"""Lengths of packed sequences.

    sequence_lengths    y[i] = lengths[i], if they descend from at most T to at least 1
    lengths: [N, B]    steps: [T]

| strategy | when | how |
|---|---|---|
| `leading` | steps for all members | one check of the lengths of all members |
"""

from __future__ import annotations

from ..ir.values import Shared, Stacked, WideValue
from ..kernels.sequences import OP
from ..registry.registry import strategy
from ..registry.samples import B, Draw, Sample, call, samples
from ..registry.writer import Writer


def _same_steps(w: Writer, lengths: WideValue, steps: WideValue) -> bool:
    return isinstance(lengths, Stacked) and isinstance(steps, Shared)


@strategy(OP, "leading", family="leading", when=_same_steps)
def sequence_lengths(w: Writer, lengths: Stacked, steps: Shared) -> WideValue:
    """checks the lengths of all members at once"""
    return Stacked(w.call(OP, w.stack(lengths), steps.value))


@samples(OP)
def _sequence_lengths(draw: Draw) -> list[Sample]:
    lengths = draw.ints(1, 7, B).sort(descending=True).values
    return [call(lengths, draw.normal(6)), call(lengths[:1], draw.normal(7))]
