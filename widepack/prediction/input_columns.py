"""Reads the input of a model from columns of a table, and converts the numbers to the dtype of the input.

Only floats are rounded; no other value changes. NaN and infinity are values.

| from \\ to | float | integer | bool |
|---|---|---|---|
| float | rounded to the nearest number; refused if a finite number becomes infinite | refused | refused |
| integer | exact, else refused | exact, else refused | refused |
| bool | 0 or 1 | 0 or 1 | as it is |
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from difflib import get_close_matches
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from widepack_artifacts.errors import some

from ..errors import InputError, UsageError
from ..spec.dtypes import dtype_name, dtype_of
from ..spec.input_spec import DimExpr
from .table import TEXT, ColumnType, RowBlock, Table, place

_CHANGE = "change the value"
_CHANGE_OR_ROUND = f"{_CHANGE}, or store the column as float64 to have it rounded"


@dataclass(frozen=True)
class RowInput:
    """An input of the model, and what one row of it is.

    Attributes:
        name: The name of the input.
        type: Its type: `float32[B,8]`.
        dtype: Its dtype.
        dims: The sizes of a row: numbers and dims.
        row_dim: The dim of the rows.
    """

    name: str
    type: str
    dtype: torch.dtype
    dims: tuple[int | DimExpr, ...]
    row_dim: int

    @property
    def numbers(self) -> int | None:
        """How many numbers a row has; None if that is not fixed."""
        sizes = [d for d in self.dims if isinstance(d, int)]
        return prod(sizes) if len(sizes) == len(self.dims) else None

    def fits(self, shape: tuple[int | None, ...]) -> bool:
        """Returns whether the rows of one column can be rows of this input. shape: of a row of the column."""
        if len(shape) == len(self.dims):
            pairs = zip(shape, self.dims)
            return all(a is None or not isinstance(b, int) or a == b for a, b in pairs)
        if shape == ():
            return self.numbers == 1
        # a list in row-major order, as outputs with several dims are written
        return len(shape) == 1 and self.numbers is not None and shape[0] in (None, self.numbers)


@dataclass
class InputColumns:
    """An input, and the columns that it is read from.

    Attributes:
        input: The input.
        names: The columns: one with whole rows, or one for each number of a row.
        path: The file, for messages.
        nan: Whether a null is NaN; else it is refused.
        shape: The shape of a row, once a block was read.
    """

    input: RowInput
    names: tuple[str, ...]
    path: Path
    nan: bool = False
    shape: tuple[int, ...] | None = field(default=None, init=False)

    def check(self, table: Table) -> None:
        """Checks the types of the columns. Without types, values are checked as they are read. Raises:
        UsageError.
        """
        columns, name = table.columns, self.input.name
        if not table.typed and self.input.dtype.is_complex:
            raise UsageError(
                f"{self.path}: the input {name} is {self.input.type}, and CSV files have no complex numbers; "
                "give a .npy or .safetensors file"
            )
        for column in self.names:
            if table.typed and (why := refusal(columns[column], self.input.dtype)):
                raise UsageError(f"{self.path}: the column {column} {why} (input {name})")
        if len(self.names) == 1 and self.input.fits(columns[self.names[0]].shape):
            return
        if listed := [n for n in self.names if columns[n].shape]:
            raise UsageError(
                f"{self.path}: the column {listed[0]} is {columns[listed[0]].text}, and the input {name} is "
                f"{self.input.type}: give one column with lists of this shape, or a column for each number"
            )
        count = len(self.names)
        if len(self.input.dims) == 1 and self.input.numbers is None:
            return
        if count != self.input.numbers:
            needed = "a list column" if self.input.numbers is None else f"{self.input.numbers} columns"
            raise UsageError(
                f"input {name} is {self.input.type}, which takes {needed}; {count} "
                f"{'column is' if count == 1 else 'columns are'} named: {some(self.names)}"
            )

    def read(self, block: RowBlock) -> Tensor:
        """Returns the rows of a block, `[rows, ...]`. Raises: InputError."""
        numbers = self.input.numbers
        rows = first = self._converted(block, self.names[0])
        if len(self.names) > 1 or (first.dim() == 1 and self.input.dims):
            rows = torch.empty(block.rows, len(self.names), dtype=self.input.dtype)
            for k, name in enumerate(self.names):
                rows[:, k] = self._converted(block, name) if k else first
        where = place(self.path, block.start, self.names[0])
        if rows.dim() - 1 != len(self.input.dims) or (numbers is not None and len(self.names) > 1):
            if numbers is None or rows[0:1].numel() not in (0, numbers):
                raise InputError(
                    f"{where}: a row has {list(rows.shape[1:])} numbers, and the input {self.input.name} is "
                    f"{self.input.type}"
                )
            rows = rows.reshape(len(rows), *(d for d in self.input.dims if isinstance(d, int)))  # row-major
        shape = tuple(rows.shape[1:])
        if self.shape is None:
            self.shape = shape
        if shape != self.shape:
            raise InputError(
                f"{where}: a row has the shape {list(shape)}, and the rows before have {list(self.shape)}; "
                "give all rows one shape, for example by padding"
            )
        return rows

    def _converted(self, block: RowBlock, column: str) -> Tensor:
        """Returns a column in the dtype of the input. Raises: InputError, also for a null without `nan`."""
        values, missing = block.filled(column)
        dtype = self.input.dtype
        if missing is not None and not (self.nan and dtype.is_floating_point):
            at = int(missing.nonzero()[0, 0]) + block.start
            way_out = "give a value"
            if dtype.is_floating_point:
                way_out += ", or nulls='nan' (--nulls nan) for a model that takes NaN"
            raise InputError(f"{place(self.path, at, column)}: there is no value (null); {way_out}")
        rows = converted(values, dtype, lambda row: place(self.path, block.start + row, column))
        return rows if missing is None else rows.masked_fill(missing, math.nan)


def column_of(table: Table, name: str) -> ColumnType:
    """Returns the type of a column. Raises: UsageError with similar names if there is none."""
    if name in table.columns:
        return table.columns[name]
    near = get_close_matches(name, table.columns, n=1)
    hint = f"did you mean {near[0]}?" if near else f"its columns are {some(list(table.columns))}"
    raise UsageError(f"{table.path}: there is no column {name!r}; {hint}")


def kind_of(dtype: torch.dtype) -> str:
    """Returns `complex`, `float`, `bool` or `integer`."""
    if dtype.is_complex:
        return "complex"
    return "float" if dtype.is_floating_point else "bool" if dtype == torch.bool else "integer"


def refusal(column: ColumnType, dtype: torch.dtype) -> str | None:
    """Returns why the values of a column cannot become values of a dtype; None if they can."""
    if column.dtype in ("", TEXT):
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
    result = values.to(dtype)
    name, source, target = dtype_name(dtype), kind_of(values.dtype), kind_of(dtype)
    if source == target == "integer":
        # torch compares only small unsigned integers. Those of 2**63 and more are below 0 as int64.
        wide = values.to(torch.int64)
        wrong = (result.to(torch.int64) != wide) | ((wide < 0) & (torch.uint64 in (values.dtype, dtype)))
        _refuse(values, wrong, f"it is outside the range of {name}", where)
    elif target in ("float", "complex") and source != "bool":
        above = f"it is above the largest number of {name}, {torch.finfo(dtype).max:.3g}"
        _refuse(values, torch.isinf(result) & torch.isfinite(values), above, where)
        if source == "integer":
            why = f"{name} has no such integer"
            _refuse(values, _inexact(values, result), why, where, _CHANGE_OR_ROUND)
    return result


def _inexact(values: Tensor, result: Tensor) -> Tensor:
    """Returns where an integer is not exactly the float or complex number that it became."""
    result = result.real if result.dtype.is_complex else result
    limit = round(2 / torch.finfo(result.dtype).eps)  # every integer up to here is a float of this dtype
    wrong = torch.zeros_like(values, dtype=torch.bool)
    wide = values.to(torch.int64)
    least = 0 if values.dtype == torch.uint64 else -limit  # integers of 2**63 and more are below 0 as int64
    large = (wide > limit) | (wide < least)
    if bool(large.any()):
        # Python compares an int with a float without rounding.
        pairs = zip(values[large].tolist(), result[large].double().tolist())
        wrong[large] = torch.tensor([a != b for a, b in pairs])
    return wrong


def _refuse(
    values: Tensor, wrong: Tensor, why: str, where: Callable[[int], str], way_out: str = _CHANGE
) -> None:
    """Raises: InputError that names the first wrong value, what is wrong with it, and the way out."""
    if bool(wrong.any()):
        at = wrong.nonzero()[0].tolist()
        raise InputError(f"{where(at[0])}: {values[tuple(at)].item()}: {why}; {way_out}")
