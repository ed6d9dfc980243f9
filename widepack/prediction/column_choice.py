"""Chooses the columns that inputs are read from, that name the member of each row, and that pass through.

The columns of an input are found in this order:

1. the columns that the user names for the input;
2. the column with the name of the input;
3. the columns with the names of the features that the artifact records, in whatever order the file has them;
4. for the only input that is left: the only column with rows of its shape, or all columns of numbers if they
   are exactly as many as a row has. Columns that are passed on by name, that name the member, that other
   inputs are read from, or that pandas marks as the index, do not count.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

from widepack_artifacts.errors import some

from ..errors import InputError, UsageError
from ..inference.feature_record import Features
from ..spec.dtypes import dtype_of
from ..spec.names import names_in, number_in, number_of
from .endings import ARROW
from .input_columns import InputColumns, RowInput, column_of, kind_of, refusal
from .table import TEXT, RowBlock, Table, place

_NUMBERED = re.compile(r"(.*?)([0-9]+)\Z", re.DOTALL)
_LOOKED_AT = 100  # rows
_NUMBER = re.compile(r"[+-]?[0-9]*,?[0-9]+([eE][+-]?[0-9]+)?\Z")
_DECIMAL_COMMA = re.compile(r"[+-]?[0-9]*,[0-9]+([eE][+-]?[0-9]+)?\Z")
_INDEX = re.compile(r"(__index_level_[0-9]+__)?\Z")
"""The columns in which pandas stores an index without a name. In a CSV file they have none either."""


def chosen_columns(
    table: Table,
    inputs: Sequence[RowInput],
    named: Mapping[str, Any],
    others: Collection[str],
    nan: bool = False,
    features: Features = MappingProxyType({}),
) -> tuple[list[InputColumns], list[str]]:
    """Returns the columns of each input, and a sentence for each choice that the user did not make.

    Args:
        table: The input file.
        inputs: The inputs of the model.
        named: For an input the columns that the user names: a text such as `f0..f63` or `a,b`, or a list.
        others: Columns that are no inputs unless they are named for one.
        nan: Whether a null in an input is NaN.
        features: The names of the numbers of a row that the artifact records, by input.

    Raises:
        UsageError: A name is unknown, a column does not fit, or several choices are possible.
    """
    known = [i.name for i in inputs]
    if unknown := [n for n in named if n not in known]:
        raise UsageError(f"the model has no input {unknown[0]!r}; its inputs are {some(known, 20)}")
    names: dict[str, tuple[str, ...]] = {}
    notes: list[str] = []
    for one in inputs:
        if one.name in named:
            names[one.name] = _named(table, one.name, named[one.name])
            notes += _compared(one, names[one.name], features.get(one.name, ()))
        elif one.name in table.columns and one.fits(table.columns[one.name].shape):
            names[one.name] = (one.name,)
        elif one.name in features and _has_features(table, one, features[one.name]):
            names[one.name] = features[one.name]
    left = [i for i in inputs if i.name not in names]
    if len(left) > 1:
        raise UsageError(
            f"{table.path}: the inputs {some([i.name for i in left])} have no column of their name and "
            f"shape; name the columns of each, for example inputs={{{left[0].name!r}: 'f0..f9'}} "
            f"(--input {left[0].name}=f0..f9)"
        )
    for one in left:
        columns_of_one = _automatic(
            table, one, {*others, *(n for of_input in names.values() for n in of_input)}
        )
        names[one.name] = columns_of_one
        shown = (
            f"the column {columns_of_one[0]}"
            if len(columns_of_one) == 1
            else f"{len(columns_of_one)} columns in the file's order: {some(columns_of_one)}"
        )
        notes.append(f"input {one.name} is read from {shown}")
    columns = [InputColumns(one, names[one.name], table.path, nan) for one in inputs]
    for each in columns:
        each.check(table)
    return columns, notes


def _compared(one: RowInput, names: tuple[str, ...], features: tuple[str, ...]) -> list[str]:
    """Compares the columns that the user names with the names in the artifact. Returns what to say.

    Raises: UsageError for the same names in another order.
    """
    if names == features or len(names) != len(features):
        return []
    if set(names) == set(features):
        raise UsageError(
            f"the columns of input {one.name} are {some(names)}, and the artifact has them in the order "
            f"{some(features)}; leave out inputs= (--input), to read them by name, or give them in this order"
        )
    return [f"input {one.name} is read from {some(names)}, which the artifact calls {some(features)}"]


def _has_features(table: Table, one: RowInput, features: tuple[str, ...]) -> bool:
    """Returns whether a table has the columns of an input; False if it has lists, or no names of its own.

    Raises: UsageError if columns are missing.
    """
    missing = [n for n in features if n not in table.columns]
    lists = any(t.shape and one.fits(t.shape) for t in table.columns.values())
    if not missing or (table.named and not lists):
        for name in missing:
            near = get_close_matches(name, table.columns, n=1)
            raise UsageError(
                f"{table.path}: there is no column {name!r}{f'; did you mean {near[0]}?' if near else ''}\n"
                f"By the artifact, the input {one.name} has the features {some(features)}, and the file has "
                f"the columns {some(list(table.columns))}.\n"
                f"Name other columns in this order with inputs= (--input {one.name}=...)"
            )
        return True
    return False


def _named(table: Table, name: str, words: Any) -> tuple[str, ...]:
    """Returns the columns that the user names. Raises: UsageError."""
    if isinstance(words, str):
        whole = words in table.columns
        parts = [words] if whole else names_in(words, f"the columns of input {name}")
        names = [n for part in parts for n in ([part] if part in table.columns else column_range(part))]
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
        column_of(table, column)
    return tuple(names)


def column_range(word: str) -> list[str]:
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


def _decimal_commas(table: Table, names: Sequence[str]) -> str:
    """Returns how to read decimal commas in text columns of a CSV file; "" if the first rows have none."""
    if table.typed or not names:
        return ""
    block = next(iter(table.blocks(names, {}, _LOOKED_AT)), None)
    for name in names if block is not None else ():
        cells = [str(c).strip() for c in block.values(name)[0] if str(c).strip()]  # type: ignore[union-attr]
        if any(map(_DECIMAL_COMMA.match, cells)) and all(map(_NUMBER.match, cells)):
            shown = next(c for c in cells if _DECIMAL_COMMA.match(c))
            return f"; column {name} has {shown!r}: give decimal=',' (--decimal ,) for decimal commas"
    return ""


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
    bools = [n for n, t in left.items() if t.is_number or (t.shape == () and t.dtype == "bool")]
    if one.numbers is not None and one.numbers in (len(numbers), len(bools)):
        choices.append(tuple(numbers if len(numbers) == one.numbers else bools))
    if len(choices) == 1:
        return choices[0]
    needs = "lists" if one.numbers is None else f"lists of its shape, or {one.numbers} columns of numbers"
    others = [f"{n or '(no name)'} ({t.text})" for n, t in left.items() if n not in numbers]
    why = (
        f"several choices fit: {'; '.join(some(c) for c in choices)}"
        if choices
        else f"it needs {needs}, and {len(numbers)} columns of numbers are left: {some(numbers) or 'none'}"
        + (f"; no numbers: {some(others, 4)}" if others else "")
        + _decimal_commas(table, [n for n, t in left.items() if t.dtype == TEXT])
    )
    raise UsageError(
        f"{table.path}: the columns of input {one.name} ({one.type}) are not clear: {why}.\n"
        f"{_naming(one, whole, numbers)}"
    )


def _naming(one: RowInput, whole: Sequence[str], numbers: Sequence[str]) -> str:
    """Returns how to name the columns of an input. whole, numbers: those with rows, and those of numbers."""
    way = "for example inputs={{{0!r}: {1!r}}} (--input {0}={1})"
    rest = "the columns that only pass through with ids= (--id)"
    if whole or one.numbers in (None, 1):
        return f"Name it, {way.format(one.name, next(iter([*whole, *numbers]), 'a'))}, or name {rest}"
    last = list(numbers[-(one.numbers or 0) :]) or ["a", "b"]
    span = ",".join(f'"{n}"' if "," in n else n for n in last[:2]) + ",..."
    ends = _NUMBERED.match(last[0]), _NUMBERED.match(last[-1])
    if ends[0] and ends[1] and ends[0][1] == ends[1][1] and int(ends[0][2]) < int(ends[1][2]):
        span = f"{last[0]}..{last[-1]}"
    return (
        f"Name them in the order of the model, {way.format(one.name, span)}. `widepack build --features` "
        "records their names, and no order counts then.\n"
        f"Only if the file has the order of the model: name {rest}"
    )


class MemberColumn:
    """The column that names the member of each row.

    Args:
        table: The input file.
        name: The column.
        members: The members' names.

    Raises:
        UsageError: There is no such column, or it holds neither texts nor integers.
    """

    def __init__(self, table: Table, name: str, members: Sequence[str]) -> None:
        type_ = column_of(table, name)
        whole = type_.dtype not in ("", TEXT) and kind_of(dtype_of(type_.dtype)) == "integer"
        # a column of CSV is read as text, whatever its first rows look like
        if type_.shape != () or not (whole or type_.dtype == TEXT or not table.typed):
            raise UsageError(
                f"{table.path}: the column {name} is {type_.text}; a member is named by its name or its "
                "number"
            )
        self.name, self._members, self._path = name, members, table.path

    def numbers(self, block: RowBlock) -> list[int]:
        """Returns the number of the member of each row. Raises: InputError for a value that is no member."""
        values, at = block.values(self.name)
        numbers = []
        for k, value in enumerate(values):
            try:
                # a text may be a number, since CSV files have texts only; a name goes first
                find = number_in if isinstance(value, str) else number_of
                numbers.append(find(self._members, value))
            except UsageError as e:
                row = int((at == k).nonzero()[0]) + block.start
                raise InputError(f"{place(self._path, row, self.name)}: {e}") from None
        return [numbers[k] for k in at.tolist()]


def passed_columns(
    table: Table, ids: Sequence[str] | None, inputs: Collection[str], suffix: str
) -> tuple[list[str], list[str]]:
    """Returns the columns that pass through, and a sentence about those that the output cannot hold.

    Args:
        table: The input file.
        ids: The columns that the user names; None for all that are no inputs.
        inputs: The columns that inputs are read from.
        suffix: The format of the output.

    Raises:
        UsageError: A named column does not exist, or the output cannot hold it.
    """
    names = checked_ids(table, ids)
    wanted = [n for n in table.columns if n not in inputs] if names is None else names
    if suffix in ARROW:
        return wanted, []
    holds = [n for n in wanted if suffix != ".npy" and _is_tensor(table, n)]
    lost = [n for n in wanted if n not in holds]
    if not lost:
        return holds, []
    why = "a .npy file has one array" if suffix == ".npy" else "a .safetensors file has numbers only"
    if names is not None:
        raise UsageError(f"the column {lost[0]} cannot pass through: {why}; write .parquet, .arrow or .csv")
    return holds, [f"not passed on: {some(lost)}, since {why}"]


def checked_ids(table: Table, ids: Any) -> list[str] | None:
    """Returns the named columns without repetitions. Raises: UsageError for one that does not exist."""
    if ids is None:
        return None
    if isinstance(ids, str):
        raise UsageError(f"ids={ids!r} is one text; give a list of columns, for example ids=[{ids!r}]")
    names = list(dict.fromkeys(ids))
    for name in names:
        column_of(table, name)
    return names


def _is_tensor(table: Table, name: str) -> bool:
    type_ = table.columns[name]
    exact = not type_.text.startswith("decimal")  # its digits would be rounded
    return table.typed and exact and type_.dtype not in ("", TEXT) and None not in type_.shape
