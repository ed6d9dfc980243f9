"""Defines a row of the weights table of a build."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from widepack_artifacts.weight_table import Weight


@dataclass(frozen=True)
class WeightRow:
    """A row of the weights table. value(i): returns member i's tensor."""

    weight: Weight
    value: Callable[[int], torch.Tensor]
