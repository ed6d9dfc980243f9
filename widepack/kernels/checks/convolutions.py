"""Checks the numbers of torch's convolutions: oneDNN computes sizes with them, and divides by a stride."""

from __future__ import annotations

from typing import Any

import torch

from .require import LARGEST, OperandError


def convolution(input: Any, weight: Any, bias: Any = None, *numbers: Any, **named: Any) -> None:
    """Checks stride, padding, dilation, output padding and groups, in the order of the op."""
    for given in (*numbers, *named.values()):
        for value in given if isinstance(given, (list, tuple)) else (given,):
            if isinstance(value, int) and not isinstance(value, torch.SymInt) and not 0 <= value <= LARGEST:
                raise OperandError(f"a number of the convolution is {value}; 0 to {LARGEST} are possible")
