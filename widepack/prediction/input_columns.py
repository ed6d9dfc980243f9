"""Reads the input of a model from columns of a table."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from ..errors import InputError, UsageError
from ..spec.input_spec import DimExpr
from .conversion import converted, refusal
from .table import ColumnType, RowBlock, Table, place


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
        # a list in row-major order, as answers with several dims are written
        return len(shape) == 1 and self.numbers is not None and shape[0] in (None, self.numbers)


@dataclass
class InputColumns:
    """An input, and the columns that it is read from.

    Attributes:
        input: The input.
        names: The columns: one with whole rows, or one for each number of a row.
        path: The file, for messages.
        shape: The shape of a row, once a block was read.
    """

    input: RowInput
    names: tuple[str, ...]
    path: Path
    shape: tuple[int, ...] | None = field(default=None, init=False)

    def check(self, table: Table) -> None:
        """Checks the types of the columns. Without types, values are checked as they are read. Raises:
        UsageError.
        """
        columns = table.columns
        if not table.typed and self.input.dtype.is_complex:
            raise UsageError(
                f"{self.path}: the input {self.input.name} is {self.input.type}, and CSV files have no "
                "complex numbers; give a .npy or .safetensors file"
            )
        for name in self.names:
            if table.typed and (why := refusal(columns[name], self.input.dtype)):
                raise UsageError(f"{self.path}: the column {name} {why} (input {self.input.name})")
        shapes = [columns[name].shape for name in self.names]
        if len(self.names) == 1 and self.input.fits(shapes[0]):
            return
        if listed := [n for n, shape in zip(self.names, shapes) if shape]:
            raise UsageError(
                f"{self.path}: the column {listed[0]} is {columns[listed[0]].text}, and the input "
                f"{self.input.name} is {self.input.type}: give one column with lists of this shape, or a "
                "column for each number"
            )
        count = len(self.names)
        if len(self.input.dims) == 1 and self.input.numbers is None:
            return
        if count != self.input.numbers:
            needed = "a list column" if self.input.numbers is None else f"{self.input.numbers} columns"
            raise UsageError(
                f"input {self.input.name} is {self.input.type}, which takes {needed}; {count} "
                f"{'column is' if count == 1 else 'columns are'} named: {some(self.names)}"
            )

    def read(self, block: RowBlock) -> Tensor:
        """Returns the rows of a block, `[rows, ...]`. Raises: InputError."""
        first = block.tensor(self.names[0])
        if len(self.names) == 1 and (first.dim() > 1 or not self.input.dims):
            found = self._converted(first, block, self.names[0])
        else:
            found = torch.empty(block.rows, len(self.names), dtype=self.input.dtype)
            for k, name in enumerate(self.names):
                found[:, k] = self._converted(block.tensor(name), block, name)
        if found.dim() - 1 != len(self.input.dims) or (
            self.input.numbers is not None and len(self.names) > 1
        ):
            found = self._reshaped(found, block)
        shape = tuple(found.shape[1:])
        if self.shape is None:
            self.shape = shape
        if shape != self.shape:
            raise InputError(
                f"{place(self.path, block.start, self.names[0])}: a row has the shape {list(shape)}, and the "
                f"rows before have {list(self.shape)}; give all rows one shape, for example by padding"
            )
        return found

    def _reshaped(self, values: Tensor, block: RowBlock) -> Tensor:
        """Returns lists as rows of several dims, row-major."""
        numbers = self.input.numbers
        if numbers is None or values[0:1].numel() not in (0, numbers):
            raise InputError(
                f"{place(self.path, block.start, self.names[0])}: a row has {list(values.shape[1:])} "
                f"numbers, and the input {self.input.name} is {self.input.type}"
            )
        return values.reshape(values.shape[0], *(d for d in self.input.dims if isinstance(d, int)))

    def _converted(self, values: Tensor, block: RowBlock, column: str) -> Tensor:
        return converted(values, self.input.dtype, lambda row: place(self.path, block.start + row, column))


def some(names: tuple[str, ...] | list[str], most: int = 8) -> str:
    """Returns names in one line; of many the first ones and the last one."""
    if len(names) <= most:
        return ", ".join(names) or "none"
    return f"{', '.join(names[: most - 2])}, ..., {names[-1]}"


def rows_of(table: Table, name: str) -> ColumnType:
    """Returns the type of a column. Raises: UsageError with similar names if there is none."""
    from difflib import get_close_matches

    if name in table.columns:
        return table.columns[name]
    near = get_close_matches(name, table.columns, n=1)
    hint = f"did you mean {near[0]}?" if near else f"its columns are {some(list(table.columns))}"
    raise UsageError(f"{table.path}: there is no column {name!r}; {hint}")
