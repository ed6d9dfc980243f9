"""Chooses the columns that pass through to the output."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from ..errors import UsageError
from .formats import ARROW
from .input_columns import rows_of, some
from .table import TEXT, Table


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
        rows_of(table, name)
    return names


def _is_tensor(table: Table, name: str) -> bool:
    type_ = table.columns[name]
    exact = not type_.text.startswith("decimal")  # its digits would be rounded
    return table.typed and exact and type_.dtype not in ("", TEXT) and None not in type_.shape
