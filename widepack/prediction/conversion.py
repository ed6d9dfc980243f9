"""Converts the numbers of a table to the dtype of an input. Only floats are rounded; no other value changes.

| from \\ to | float | integer | bool |
|---|---|---|---|
| float | rounded to the nearest number; refused if a finite number becomes infinite | refused | refused |
| integer | exact, else refused | exact, else refused | refused |
| bool | 0 or 1 | 0 or 1 | as it is |

NaN and infinity are values.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import InputError
from ..spec.dtypes import dtype_name, dtype_of
from .table import ColumnType


def kind_of(dtype: torch.dtype) -> str:
    """Returns `complex`, `float`, `bool` or `integer`."""
    if dtype.is_complex:
        return "complex"
    return "float" if dtype.is_floating_point else "bool" if dtype == torch.bool else "integer"


def refusal(column: ColumnType, dtype: torch.dtype) -> str | None:
    """Returns why the values of a column cannot become values of a dtype; None if they can."""
    if column.dtype in ("", "text"):
        return f"is {column.text}, and the input takes numbers"
    source, target = kind_of(dtype_of(column.dtype)), kind_of(dtype)
    if target in ("float", "complex"):
        allowed = source != "complex" or target == "complex"
    else:
        allowed = source == target or (source, target) == ("bool", "integer")
    if allowed:
        return None
    return f"is {column.text}, and the input takes {dtype_name(dtype)}; convert the column in the file"


def converted(values: Tensor, dtype: torch.dtype, where: Callable[[int], str]) -> Tensor:
    """Returns values in another dtype.

    Args:
        values: `[rows, ...]`, of a column that `refusal` does not refuse.
        dtype: The dtype of the input.
        where: Returns the place of a row in the file, for messages.

    Raises:
        InputError: A value would change by more than rounding.
    """
    if values.dtype == dtype:
        return values
    if values.dtype in (torch.uint16, torch.uint32, torch.uint64):
        values = _signed(values, kind_of(dtype), where)
    found = values.to(dtype)
    name, source, target = dtype_name(dtype), kind_of(values.dtype), kind_of(dtype)
    if source == target == "integer":
        wrong = found.to(torch.int64) != values.to(torch.int64)
        _refuse(values, wrong, f"it is outside the range of {name}", where)
    elif target in ("float", "complex") and source != "bool":
        largest = torch.finfo(dtype).max
        above = f"it is above the largest number of {name}, {largest:.3g}"
        _refuse(values, torch.isinf(found) & torch.isfinite(values), above, where)
        if source == "integer":
            why = f"{name} has no such integer"
            way = "change the value, or store the column as float64 to have it rounded"
            _refuse(values, _inexact(values, found), why, where, way)
    return found


def _signed(values: Tensor, target: str, where: Callable[[int], str]) -> Tensor:
    """Returns unsigned integers as int64. torch compares only the small unsigned ones. Raises: InputError."""
    found = values.to(torch.int64)
    if values.dtype == torch.uint64 and bool((found < 0).any()):
        row = int((found < 0).nonzero()[0, 0])
        value = int(found[found < 0][0]) + 2**64
        way = "change the value, or store the column as float64 to have it rounded"
        raise InputError(
            f"{where(row)}: {value}: it is above the largest number of int64; "
            + (way if target in ("float", "complex") else "change the value")
        )
    return found


def _inexact(values: Tensor, found: Tensor) -> Tensor:
    """Returns where an integer is not exactly the float or complex number that it became."""
    found = found.real if found.dtype.is_complex else found
    limit = round(2 / torch.finfo(found.dtype).eps)  # every integer up to here is a float of this dtype
    wrong = torch.zeros_like(values, dtype=torch.bool)
    wide = values.to(torch.int64)
    large = (wide > limit) | (wide < -limit)
    if bool(large.any()):
        # Python compares an int with a float without rounding.
        pairs = zip(wide[large].tolist(), found[large].double().tolist())
        wrong[large] = torch.tensor([a != b for a, b in pairs])
    return wrong


def _refuse(
    values: Tensor, wrong: Tensor, why: str, where: Callable[[int], str], way: str = "change the value"
) -> None:
    """Raises: InputError that names the first wrong value, what is wrong with it, and the way out."""
    if bool(wrong.any()):
        at = wrong.nonzero()[0].tolist()
        raise InputError(f"{where(at[0])}: {values[tuple(at)].item()}: {why}; {way}")
