"""Reads the targets of validation data from a column, and checks that they fit the answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError, UsageError
from ..prediction.input_columns import rows_of, some
from ..prediction.table import TEXT, Table, place

_ROWS = 2**12  # that are read at a time


def checked_classes(classes: Any, of: str | None) -> list[str] | None:
    """Returns the names of the classes; None if targets are numbers. Raises: UsageError."""
    if classes is None:
        return None
    if of is None:
        raise UsageError("classes= is for targets that are classes; give of='softmax' or of='probabilities'")
    if isinstance(classes, str):
        classes = [name.strip() for name in classes.split(",")]
    if not isinstance(classes, Sequence):
        raise UsageError(f"classes={classes!r:.40} is no list of names, in the order of the answers")
    names = [str(name) for name in classes]
    if not names or len(set(names)) != len(names):
        raise UsageError(
            f"classes={some(names, 20)} does not name each class once, in the order of the answers"
        )
    return names


def read_targets(table: Table, column: str, classes: Sequence[str] | None) -> Tensor:
    """Reads the targets.

    Args:
        table: The file.
        column: Its column.
        classes: The name of each class, in the order of the answers: targets are read as names. None: they
            are numbers.

    Returns: [R, ...], in a dtype of torch that the file has; float64 for a CSV file. With `classes` int64.

    Raises:
        UsageError: There is no such column, or it holds neither numbers nor names of classes.
        InputError: A row has no target, or no valid one.
    """
    type_ = rows_of(table, column)
    if classes is not None and (
        type_.shape or not (type_.dtype == TEXT or not table.typed or _whole(type_.dtype))
    ):
        raise UsageError(
            f"{table.path}: the column {column} is {type_.text}, and classes= names the classes of texts or "
            "whole numbers; leave classes= out"
        )
    if classes is None and type_.dtype in ("", TEXT):
        raise UsageError(
            f"{table.path}: the targets in column {column} are {type_.text}; targets must be numbers: for "
            "classes 0 to C-1.\nFor names of classes give classes= (--classes), in the order of the members' "
            "answers: classes='cat,dog'"
        )
    parts = []
    for block in table.blocks([column], {} if classes is not None else {column: torch.float64}, _ROWS):
        if classes is None:
            parts.append(block.tensor(column))
            continue
        values, at = block.values(column)
        numbers = [_class_of(table, column, classes, v, at == k, block.start) for k, v in enumerate(values)]
        parts.append(torch.tensor(numbers, dtype=torch.int64)[at])
    for part in parts:
        if part.shape[1:] != parts[0].shape[1:]:
            raise InputError(f"{table.path}: the targets in column {column} are lists of several lengths")
    found = torch.cat(parts)
    return found.long() if found.dtype in (torch.uint16, torch.uint32, torch.uint64) else found


def _whole(dtype: str) -> bool:
    return dtype.startswith(("int", "uint", "bool"))


def _class_of(table: Table, column: str, classes: Sequence[str], value: Any, rows: Tensor, start: int) -> int:
    """Returns the number of a class. rows: where the value is. Raises: InputError for an unknown name."""
    name = str(value)
    if name in classes:
        return classes.index(name)
    raise InputError(
        f"{place(table.path, start + int(rows.nonzero()[0]), column)}: {name[:60]!r} is none of the classes "
        f"{some(list(classes))}"
    )


def checked_targets(targets: Tensor, predictions: Tensor, classes: bool) -> Tensor:
    """Returns the targets in the dtype that a loss takes.

    Args:
        targets: [R, ...].
        predictions: [N, R, ...].
        classes: Whether they are classes.

    Raises:
        UsageError: Their shape or their numbers do not fit the predictions.
    """
    expected = list(predictions.shape[1:])
    if targets.is_complex():
        raise UsageError("the targets are complex numbers, which no metric takes")
    if targets.is_floating_point() and not bool((finite := targets.isfinite()).all()):
        row = int((~finite).nonzero()[0, 0])
        raise UsageError(
            f"the target of row {row} (the first row is 0) is {targets[~finite][0].item()}; give a number in "
            "every row, or leave the row out"
        )
    if not classes:
        if list(targets.shape) != expected and targets.numel() == predictions[0].numel():
            targets = targets.reshape(expected)
        if list(targets.shape) != expected:
            raise UsageError(f"the targets have the shape {list(targets.shape)}, the answers {expected}")
        return targets
    count = expected.pop(1)
    if list(targets.shape) != expected:
        raise UsageError(
            f"the targets have the shape {list(targets.shape)}; classes of these answers have {expected}"
        )
    whole = targets.long()
    wrong = (whole != targets) | (whole < 0) | (whole >= count)
    if bool(wrong.any()):
        raise UsageError(
            f"the targets are not all whole numbers from 0 to {count - 1}: row {int(wrong.nonzero()[0, 0])} "
            f"(the first row is 0) has {targets[wrong][0].item()}.\nIf other numbers name the classes, give "
            "classes= (--classes), in the order of the members' answers: classes='3,5,7'"
        )
    return whole
