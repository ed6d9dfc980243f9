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
        return f"is {column.text}, which is not numeric"
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
        values = _signed(values, where)
    found = values.to(dtype)
    source, target = kind_of(values.dtype), kind_of(dtype)
    if source == "integer" and target == "float":
        wrong = _inexact(values, found)
    elif source == "integer" and target == "integer":
        wrong = found.to(torch.int64) != values.to(torch.int64)
    elif source == target == "float" and torch.finfo(dtype).max < torch.finfo(values.dtype).max:
        wrong = torch.isinf(found) & torch.isfinite(values)
    else:
        return found
    _refuse(values, wrong, f"{dtype_name(dtype)} cannot represent it", where)
    return found


def _signed(values: Tensor, where: Callable[[int], str]) -> Tensor:
    """Returns unsigned integers as int64. torch compares only the small unsigned ones. Raises: InputError."""
    found = values.to(torch.int64)
    if values.dtype == torch.uint64:
        _refuse(found, found < 0, "it is above the largest number of int64", where, unsigned=True)
    return found


def _inexact(values: Tensor, found: Tensor) -> Tensor:
    """Returns where an integer is not exactly the float that it became."""
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
    values: Tensor, wrong: Tensor, why: str, where: Callable[[int], str], unsigned: bool = False
) -> None:
    """Raises: InputError that names the first wrong value."""
    if not bool(wrong.any()):
        return
    at = wrong.nonzero()[0].tolist()
    value = values[tuple(at)].item()
    raise InputError(
        f"{where(at[0])}: {value + 2**64 if unsigned else value}: {why}; change the value, or store the "
        "column as float64 to have it rounded"
    )
