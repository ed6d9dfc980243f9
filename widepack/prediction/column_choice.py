"""Chooses the columns that each input of a model is read from.

In this order:

1. the columns that the user names for the input;
2. the column with the name of the input;
3. for the only input that is left: the only column with rows of its shape, or all columns of numbers if they
   are exactly as many as a row has. Columns that are passed on by name, that name the member, that other
   inputs are read from, or that pandas marks as the index, do not count.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ..errors import UsageError
from .conversion import refusal
from .input_columns import InputColumns, RowInput, rows_of, some
from .table import Table

_NUMBERED = re.compile(r"(.*?)([0-9]+)\Z", re.DOTALL)
_INDEX = re.compile(r"(__index_level_[0-9]+__)?\Z")
"""The columns in which pandas stores an index without a name. In a CSV file they have none either."""


def chosen_columns(
    table: Table, inputs: Sequence[RowInput], named: Mapping[str, Any], others: Collection[str]
) -> tuple[list[InputColumns], list[str]]:
    """Returns the columns of each input, and a sentence for each choice that the user did not make.

    Args:
        table: The input file.
        inputs: The inputs of the model.
        named: For an input the columns that the user names: a text such as `f0..f63` or `a,b`, or a list.
        others: Columns that are no inputs unless they are named for one.

    Raises:
        UsageError: A name is unknown, a column does not fit, or several choices are possible.
    """
    known = [i.name for i in inputs]
    if unknown := [n for n in named if n not in known]:
        raise UsageError(f"the model has no input {unknown[0]!r}; its inputs are {some(known, 20)}")
    found: dict[str, InputColumns] = {}
    notes: list[str] = []
    for one in inputs:
        if one.name in named:
            found[one.name] = InputColumns(one, _named(table, one.name, named[one.name]), table.path)
        elif one.name in table.columns and one.fits(table.columns[one.name].shape):
            found[one.name] = InputColumns(one, (one.name,), table.path)
    left = [i for i in inputs if i.name not in found]
    if len(left) > 1:
        raise UsageError(
            f"{table.path}: the inputs {some([i.name for i in left])} have no column of their name and "
            f"shape; name the columns of each, for example inputs={{{left[0].name!r}: 'f0..f9'}} "
            f"(--input {left[0].name}=f0..f9)"
        )
    if left:
        used = {*others, *(n for c in found.values() for n in c.names)}
        found[left[0].name] = InputColumns(left[0], _automatic(table, left[0], used), table.path)
        notes.append(f"input {left[0].name} is read from {_counted(found[left[0].name].names)}")
    for columns in found.values():
        columns.check(table)
    return [found[i.name] for i in inputs], notes


def _counted(names: tuple[str, ...]) -> str:
    return f"the column {names[0]}" if len(names) == 1 else f"{len(names)} columns: {some(names)}"


def _named(table: Table, name: str, words: Any) -> tuple[str, ...]:
    """Returns the columns that the user names. Raises: UsageError."""
    if isinstance(words, str):
        names = (
            [words] if words in table.columns else [n for w in words.split(",") for n in _range(w.strip())]
        )
    elif isinstance(words, Sequence) and all(isinstance(w, str) for w in words):
        names = list(words)
    else:
        raise UsageError(
            f"the columns of input {name} are {words!r:.60}; give a text such as 'f0..f63', or a list of "
            "names"
        )
    if not names or "" in names:
        raise UsageError(f"input {name}: no column is named; write {name}=f0..f63 or {name}=a,b,c")
    if len(set(names)) != len(names):
        twice = next(n for n in names if names.count(n) > 1)
        raise UsageError(f"input {name}: the column {twice} is named twice")
    for column in names:
        rows_of(table, column)
    return tuple(names)


def _range(word: str) -> list[str]:
    """Returns the names of `f0..f63`. Raises: UsageError."""
    first, dots, last = word.partition("..")
    if not dots:
        return [word]
    a, b = _NUMBERED.match(first), _NUMBERED.match(last)
    if a is None or b is None or a[1] != b[1] or int(a[2]) > int(b[2]) or int(b[2]) - int(a[2]) > 1_000_000:
        raise UsageError(
            f"{word!r} is not a range of columns; write the first and the last name with their numbers, "
            "such as f0..f63"
        )
    # f00..f63 counts f00, f01: the first number has leading zeros
    width = len(a[2]) if len(a[2]) == len(b[2]) else 0
    return [f"{a[1]}{n:0{width}d}" for n in range(int(a[2]), int(b[2]) + 1)]


def _automatic(table: Table, one: RowInput, used: Collection[str]) -> tuple[str, ...]:
    """Returns the only possible columns of an input. Raises: UsageError if there are none, or several."""
    left = {
        n: t
        for n, t in table.columns.items()
        if n not in used and n not in table.index and not _INDEX.match(n)
    }
    whole = [n for n, t in left.items() if t.shape and one.fits(t.shape) and refusal(t, one.dtype) is None]
    numbers = [n for n, t in left.items() if t.is_number]
    choices: list[tuple[str, ...]] = [(n,) for n in whole]
    if one.numbers is not None and len(numbers) == one.numbers:
        choices.append(tuple(numbers))
    if len(choices) == 1:
        return choices[0]
    needs = "lists" if one.numbers is None else f"lists of its shape, or {one.numbers} columns of numbers"
    others = [f"{n or '(no name)'} ({t.text})" for n, t in left.items() if n not in numbers]
    why = (
        f"several choices fit: {'; '.join(some(list(c)) for c in choices)}"
        if choices
        else f"it needs {needs}, and {len(numbers)} columns of numbers are left: {some(numbers)}"
        + (f"; no numbers: {some(others, 4)}" if others else "")
    )
    raise UsageError(
        f"{table.path}: the columns of input {one.name} ({one.type}) are not clear: {why}.\n"
        f"Name them, for example inputs={{{one.name!r}: 'f0..f63'}} (--input {one.name}=f0..f63), or name "
        "the columns that only pass through with ids= (--id)"
    )
