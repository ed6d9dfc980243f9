"""Estimates the rounding error of members in float64, whose own answers are the reference.

No dtype is finer, so the error is measured in two ways, with the member's own program:

| way | what it finds |
|---|---|
| in float32, scaled by the ratio of the two eps | errors in proportion to the eps |
| in float64, with each weight and input moved by one ulp | errors that are not |

A root of a sum whose terms cancel has an error like the root of the eps: the distance of a point from itself
is 1e-8 or 0, and which of them is rounding. So the scaled error of float32 is thousands of times too small.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..ir.cast import single_program, single_value
from ..ir.fake_values import CPU
from ..kernels.exact_norms import as_torch_computes
from ..runtime.graph_module import graph_module
from .root_mean_square import RootMeanSquare
from .subject import AnsweredCalls, Subject
from .tolerance import FLOAT64_EPS, floating

_SINGLE_EPS = torch.finfo(torch.float32).eps
_FINER = FLOAT64_EPS / _SINGLE_EPS
_MOST_RMS = 1e-3  # of the scale: a larger error is no rounding

Run = Callable[[Sequence[torch.Tensor]], Sequence[Any]]


def add_rounding(answered: AnsweredCalls, coarse: Sequence[float]) -> None:
    """Adds to the statistics of outputs that are computed in float64 throughout what rounding costs.

    A way adds nothing if the program fails, or if it decides otherwise at a threshold. Moved numbers add at
    most the error of float32; where all answers overflow in float32, at most its eps. An output of which they
    change more than 0.1% is in doubt (`ErrorStats.doubt`).

    coarse: for each output the coarsest eps that it is computed through.
    """
    outputs = [k for k, eps in enumerate(coarse) if eps == FLOAT64_EPS]
    if not outputs or not answered.calls:
        return
    single = _errors(_in_float32, answered, outputs)
    moved = _errors(_moved_by_an_ulp, answered, outputs)
    for k in outputs:
        stats, rms, largest = answered.stats[k], single[k].value, single[k].largest
        most = _MOST_RMS * stats.scale
        if rms <= most:
            stats.raise_own(rms * _FINER, largest * _FINER)
        if not single[k].count:
            rms = largest = _SINGLE_EPS * stats.scale
        if moved[k].value <= most:
            stats.raise_own(min(moved[k].value, rms), min(moved[k].largest, largest))
        else:
            stats.say_doubt(moved[k].value)


def _errors(
    way: Callable[[Subject, int], Run], answered: AnsweredCalls, outputs: Sequence[int]
) -> dict[int, RootMeanSquare]:
    """Returns the errors of the outputs over all members and calls; none if a call fails."""
    errors = {k: RootMeanSquare() for k in outputs}
    for i in range(len(answered.subject.members)):
        run = way(answered.subject, i)
        for call, answer in zip(answered.calls, answered.found):
            if call.after is not None:
                continue
            try:
                with torch.inference_mode():
                    found = run(call.inputs[i])
            except (RuntimeError, IndexError, ValueError):
                return {k: RootMeanSquare() for k in outputs}
            for k, of_output in errors.items():
                own = answer.own[i][k]
                if floating(own) and found[k].shape == own.shape:
                    finite = torch.isfinite(own) & torch.isfinite(found[k])
                    of_output.add(found[k][finite].to(own.dtype) - own[finite])
    return errors


def _in_float32(subject: Subject, i: int) -> Run:
    weights = [single_value(w) for w in subject.arguments(i)]
    run = graph_module(single_program(subject.program(i)), CPU).forward
    return lambda inputs: list(run(*weights, *(single_value(x) for x in inputs)))


def _moved_by_an_ulp(subject: Subject, i: int) -> Run:
    weights = [_moved(w, k) for k, w in enumerate(subject.arguments(i))]
    run = subject.run(i)

    def answer(inputs: Sequence[torch.Tensor]) -> Sequence[Any]:
        with as_torch_computes():
            return list(run(*weights, *(_moved(x, -1 - k) for k, x in enumerate(inputs))))

    return answer


def _moved(value: Any, seed: int) -> Any:
    """Returns numbers in float64 whose last bits differ, at random by one up or down. Zeros stay."""
    if isinstance(value, torch.Tensor) and value.dtype == torch.complex128:
        return torch.view_as_complex(_moved(torch.view_as_real(value.resolve_conj()), seed))
    if not isinstance(value, torch.Tensor) or value.dtype != torch.float64:
        return value
    g = torch.Generator().manual_seed(seed % 2**32)
    up = torch.randint(2, value.shape, generator=g, dtype=torch.bool)
    towards = torch.where(up, math.inf, -math.inf).to(value.dtype)
    stays = (value == 0) | ~torch.isfinite(value)
    moved = torch.nextafter(value, towards)
    return torch.where(stays | ~torch.isfinite(moved), value, moved)
