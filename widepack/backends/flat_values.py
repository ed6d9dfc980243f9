"""Computes the shapes and dtypes of a flat program's values, with named dims as symbols."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..ir.fake_values import Fakes, replay
from ..system import deadline
from .flat import Flat


def fake_values(flat: Flat, example: Mapping[str, int]) -> tuple[Fakes, dict[str, Any]]:
    """Computes the fake value of each weight, input and node of a flat program, by name.

    The program may be a stranger's, so the time has a limit.

    example: sizes at which the guards hold. Raises: LoweringError when the time is over, or for a size that
    is an endless expression.
    """
    fakes = Fakes({d: max(2, s) for d, s in example.items()})
    with fakes.mode:  # all values are on the CPU, wherever the weights are
        weights = {
            s.name: torch.empty_strided(w.shape, w.stride(), dtype=w.dtype)
            for s, w in zip(flat.program.weights, flat.weights)
        }
    with deadline.within(60 + 0.5 * len(flat.program.nodes)):
        return fakes, replay(flat.program, fakes, weights)
