"""Finds the shortest decimal numbers that read back as the same numbers of type float32.

Nine digits are enough for every float32, and a decimal number of up to six digits is found with six. A
number of p digits is k / 10^s with a whole number k. Both are exact in float64 for s up to 22, so their
quotient is the float64 that a JSON writer prints with these digits.
"""

from __future__ import annotations

from array import array

import torch

_POWERS = torch.tensor([float(f"1e{k}") for k in range(20)], dtype=torch.float64)
_SMALLEST, _LARGEST = 1e-14, 1e6
"""Between them 10^s is exact for up to nine digits."""
_NORMAL = 2.0**-126
_FEW = 32
"""Up to so many numbers a loop takes less time than torch."""


def shortest(value: torch.Tensor) -> list[float]:
    """Returns numbers as numbers of Python, which JSON has in their shortest form.

    Args:
        value: `[n]`, finite, on the CPU. Only float32 is changed.
    """
    if value.dtype != torch.float32:
        return list(value.tolist())
    if value.numel() <= _FEW:
        return [_of_text(v) for v in value.tolist()]
    exact = value.double()
    size = exact.abs()
    inside = (size >= _SMALLEST) & (size < _LARGEST)
    power = _POWERS[(5 - size.clamp(_SMALLEST, _LARGEST / 2).log10().floor()).long().clamp(0, 19)] * 1e3
    found = (exact * power).round() / power  # 9 digits
    for _ in range(3):
        power = power / 10
        shorter = (exact * power).round() / power
        found = torch.where(shorter.float() == value, shorter, found)
    inside &= found.float() == value
    numbers: list[float] = torch.where(inside, found, exact).tolist()
    for k in (~inside).nonzero().flatten().tolist():
        numbers[k] = _of_text(numbers[k])
    return numbers


def _of_text(value: float) -> float:
    """Returns the same for one number of any size."""
    found = float(f"{value:.9g}")
    for digits in (8, 7, 6) if abs(value) >= _NORMAL else range(8, 0, -1):
        shorter = float(f"{value:.{digits}g}")
        if array("f", (shorter,))[0] != value:
            break
        found = shorter
    return found
