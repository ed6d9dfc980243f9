"""Checks the numbers of torch's convolutions: oneDNN computes sizes with them, and divides by a stride."""

from __future__ import annotations

from typing import Any

from .require import LARGEST, OperandError


def convolution(input: Any, weight: Any, bias: Any = None, *numbers: Any, **named: Any) -> None:
    """Checks stride, padding, dilation, output padding and groups, in the order of the op."""
    for given in (*numbers, *named.values()):
        for value in given if isinstance(given, (list, tuple)) else (given,):
            if type(value) is int and not 0 <= value <= LARGEST:  # not bool, and not torch's SymInt
                raise OperandError(f"a number of the convolution is {value}; 0 to {LARGEST} are possible")
