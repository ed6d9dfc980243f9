"""Counts pairs of rows and columns that are below a line, below stairs, or below both, by closed formulas.

Rows x and columns y are counted from 0. A line and stairs bound the columns of each row:

    line      y < x + offset
    stairs    y < height * ((x + start) // width) + offset

All numbers are sympy expressions over the dims, except the width and the height of a step. A bound h of the
columns grows with the row. So rows before some row have no pair, rows from some other row on have a pair with
every column, and the rows between are a sum of h without any minimum or maximum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy
from torch.utils._sympy.functions import FloorDiv, PythonMod


@dataclass(frozen=True)
class Stairs:
    """Stairs as above. width: the rows of a step. height: its columns."""

    width: int
    height: int
    start: Any
    offset: Any


def pairs_below(rows: Any, columns: Any, line: Any, stairs: Stairs | None) -> Any:
    """Counts the pairs below a line and below stairs.

    Args:
        rows: The number of rows.
        columns: The number of columns.
        line: The offset of the line; None for no line.
        stairs: The stairs; None for none. With a line, a step has as many rows as columns.

    Returns:
        A sympy expression.
    """
    if line is not None and stairs is not None:
        corner = stairs.offset - line + stairs.start  # the row of a step at which the line crosses the stairs
        if at_least(corner, stairs.width - 1):
            stairs = None
        elif at_least(0, corner):
            line = None
    if stairs is not None:
        first, last = stairs.start, sympy.expand(stairs.start + rows)
        if line is None:
            return _below_stairs(last, columns, stairs) - _below_stairs(first, columns, stairs)
        slope = sympy.expand(line - stairs.start)
        return _below_both(last, columns, slope, stairs) - _below_both(first, columns, slope, stairs)
    if line is not None:
        return _below_line(rows + line - 1, columns) - _below_line(line - 1, columns)
    return rows * columns


def at_least(a: Any, b: Any) -> bool:
    """Whether `a >= b` is shown. What sympy would think about for seconds is not."""
    difference = sympy.expand(a - b)
    nested = any(len(p.atoms(sympy.Max, sympy.Min)) > 1 for p in difference.atoms(FloorDiv, PythonMod))
    return not nested and bool(difference.is_nonnegative)


def _below_line(last: Any, columns: Any) -> Any:
    """Returns the sum of min(columns, u) over u from 1 to `last`."""
    return _triangle(last) - _triangle(last - columns)


def _below_stairs(end: Any, columns: Any, stairs: Stairs) -> Any:
    """Returns the sum of the stairs, between 0 and the columns, over all z = x + start below `end`."""
    width, height, offset = stairs.width, stairs.height, stairs.offset
    steps = _divided(end, width)
    first = -_divided(offset, height)  # the first step that is not below 0
    full = sympy.expand(columns - offset + height)  # the first step above all columns, times the height
    if width == height:
        under = _divided(_smaller(end, full), width)
    else:
        under = _smaller(steps, _divided(full, height))
    last = _larger(first, under)
    whole = height * (last * (last - 1) - first * (first - 1)) / 2 + offset * (last - first)
    whole += columns * (steps - under)
    return width * whole + _rest(end, width) * _last_step(end, columns, stairs)


def _last_step(end: Any, columns: Any, stairs: Stairs) -> Any:
    """Returns the height of the stairs at `end`, between 0 and the columns."""
    width, height, offset = stairs.width, stairs.height, stairs.offset
    found = height * _divided(end, width) + offset
    if width == height and at_least(end - width + 1 + offset, columns):
        return columns
    if not (width == height and at_least(columns, end + offset)):
        return _larger(_smaller(found, columns), sympy.Integer(0))
    return end - _rest(end, width) + offset if at_least(found, 0) else _larger(found, sympy.Integer(0))


def _below_both(end: Any, columns: Any, line: Any, stairs: Stairs) -> Any:
    """Returns the sum of min(z + line, the stairs), between 0 and the columns, over all z below `end`."""
    size, offset = stairs.width, stairs.offset
    corner = sympy.expand(offset - line)

    def up_to(z: Any) -> Any:
        """The sum from 0 on and below z, without bounds; for a negative z minus that from z on."""
        steps = _divided(z, size)
        return z * (z - 1) / 2 + line * z - steps * over(sympy.Integer(size)) - over(_rest(z, size))

    def over(rows: Any) -> Any:
        """How far the line is over the stairs, as a sum over the first rows of a step."""
        return _triangle(rows - 1 - corner) - _triangle(-1 - corner)

    first = _larger(-line, -size * _divided(offset, size))
    by_stairs = sympy.expand(columns - offset + size)
    if at_least(columns - line, end) or at_least(by_stairs - size + 1, end):
        under = end
    else:
        under = _smaller(end, _larger(columns - line, size * _divided(by_stairs, size)))
    return up_to(_larger(first, under)) - up_to(first) + columns * (end - under)


def _triangle(n: Any) -> Any:
    positive = _larger(sympy.Integer(0), n)
    return positive * (positive + 1) / 2


def _smaller(a: Any, b: Any) -> Any:
    return a if at_least(b, a) else b if at_least(a, b) else sympy.Min(*_expanded(a, b), evaluate=False)


def _larger(a: Any, b: Any) -> Any:
    return a if at_least(a, b) else b if at_least(b, a) else sympy.Max(*_expanded(a, b), evaluate=False)


def _expanded(*numbers: Any) -> list[Any]:
    """Returns numbers in a form that sympy keeps.

    Minima, maxima and what divides them are made without evaluation, which would compare them for seconds.
    """
    return [sympy.expand(n) for n in numbers]


def _divided(a: Any, by: int) -> Any:
    """Returns `a // by`."""
    return FloorDiv(a, by, evaluate=not a.has(sympy.Max, sympy.Min))


def _rest(a: Any, by: int) -> Any:
    """Returns `a % by`."""
    return PythonMod(a, by, evaluate=not a.has(sympy.Max, sympy.Min))
