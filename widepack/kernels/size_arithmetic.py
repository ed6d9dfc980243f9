"""Limits Python's operators to arithmetic on sizes. They would also repeat texts, and never end."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from .checks import OperandError

_NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)
_MOST = 2**63
_MOST_EXPONENT = 64


def limited(name: str, op: Callable[..., Any]) -> Callable[..., Any]:
    """Returns an operator that takes numbers of 64 bits and returns one.

    name: in messages. The operator raises OperandError for other operands, and for larger results.
    """

    def run(*args: Any) -> Any:
        for value in args:
            if not isinstance(value, _NUMBERS):
                raise OperandError(f"{name} reads {type(value).__name__}, which is not a number")
        if op is operator.pow and isinstance(args[1], int) and abs(args[1]) > _MOST_EXPONENT:
            raise OperandError(f"{name} has the exponent {args[1]}; at most {_MOST_EXPONENT} is allowed")
        result = op(*args)
        if isinstance(result, int) and abs(result) >= _MOST:
            raise OperandError(f"{name} gives a number of {result.bit_length()} bits; at most 63 are allowed")
        return result

    run.__name__ = name
    return run
