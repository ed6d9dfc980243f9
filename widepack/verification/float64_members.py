"""Estimates the rounding error of members in float64, whose own answers are the reference."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..ir.fake_values import CPU
from ..ir.float64 import single_program, single_value
from ..runtime.graph_module import graph_module
from .subject import MemberAnswers, Subject, VerifiedCall
from .tolerance import ErrorStats, floating

_FINER = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
_MOST_RMS = 1e-3  # of the scale: a larger error of float32 is no rounding


class _Float32Error:
    """The errors of one output in float32."""

    def __init__(self) -> None:
        self.square = self.largest = 0.0
        self.count = 0

    def add(self, single: torch.Tensor, own: torch.Tensor) -> None:
        if not floating(own) or single.shape != own.shape:
            return
        finite = torch.isfinite(own) & torch.isfinite(single)
        error = (single[finite].to(own.dtype) - own[finite]).abs()
        if error.numel():
            self.square += float(error.square().sum())
            self.largest = max(self.largest, float(error.max()))
            self.count += error.numel()

    @property
    def rms(self) -> float:
        return math.sqrt(self.square / self.count) if self.count else math.inf


def add_rounding(
    subject: Subject,
    calls: Sequence[VerifiedCall],
    answers: Sequence[MemberAnswers],
    stats: Sequence[ErrorStats],
    outputs: Sequence[int],
) -> None:
    """Adds to the statistics of float64 outputs what rounding costs.

    Rounding errors are in proportion to the eps of a dtype. The error is that of the same program in float32,
    scaled by the ratio of the two eps. Nothing is added if float32 fails, or decides otherwise at a
    threshold.

    outputs: the numbers of the outputs that are computed in float64 throughout.
    """
    errors = {k: _Float32Error() for k in outputs}
    for i in range(len(subject.members)):
        weights = [single_value(w) for w in subject.arguments(i)]
        run = graph_module(single_program(subject.program(i)), CPU).forward
        for call, answer in zip(calls, answers):
            if call.after is not None:
                continue
            try:
                with torch.inference_mode():
                    single = list(run(*weights, *(single_value(x) for x in call.inputs[i])))
            except (RuntimeError, IndexError, ValueError):
                return
            for k, error in errors.items():
                error.add(single[k], answer.own[i][k])
    for k, error in errors.items():
        if error.rms <= _MOST_RMS * stats[k].scale:
            stats[k].raise_own(error.rms * _FINER, error.largest * _FINER)
