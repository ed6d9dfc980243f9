"""Reads which member each row of a call is for."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import torch

from widepack_artifacts.errors import some

from ...errors import InputError
from ...ir.torch_internals import is_transformed
from ...spec.names import number_of
from ..input_values import is_array

_SHOWN = 3


def member_numbers(member: Any, names: Sequence[str], rows: int) -> list[int]:
    """Returns the number of the member of each row.

    Args:
        member: One number or name for each row: a tensor, an array, a list, a tuple or a range. A single
            number or name is for all rows.
        names: The members' names.
        rows: The number of rows.

    Returns:
        One number from 0 to N - 1 for each row.

    Raises:
        InputError: They are no members, or not one for each row.
        UsageError: A name is unknown.
    """
    if type(member) is list:
        member = member.copy()  # another thread may change the caller's
    member = _python_values(member, rows)
    if isinstance(member, (list, tuple, range)):
        if len(member) != rows:
            raise InputError(
                f"member has {len(member)} values, and the call has {rows} rows; route takes one member for "
                "each row"
            )
        whole = set(map(type, member)) <= {int}
        found = list(member) if whole else [_number(m, names) for m in member]
    elif isinstance(member, str) or _is_whole(member):
        found = [_number(member, names)] * rows
    else:
        raise InputError(
            f"member is {type(member).__name__}; route takes a number or a name for each row, as a list or a "
            "tensor"
        )
    if found and not 0 <= min(found) <= max(found) < len(names):
        wrong = dict.fromkeys(m for m in found if not 0 <= m < len(names))
        raise InputError(f"member contains {some(wrong, _SHOWN)}; the members are 0 to {len(names) - 1}")
    return found


def _python_values(member: Any, rows: int) -> Any:
    """Returns a tensor or an array as a number or a list. Raises: InputError."""
    if isinstance(member, torch.Tensor):
        kind = _without_rows(member)
        if kind or member.dim() > 1 or member.is_meta or not _counts(member.dtype):
            kind = kind or _short(member)
            where = " on the meta device, which has no values" if member.is_meta else ""
            raise InputError(
                f"member is {kind}{where}; route takes one whole number for each row, int64[{rows}]"
            )
        return member.tolist()
    return member.tolist() if is_array(member) and hasattr(member, "tolist") else member


def _without_rows(member: torch.Tensor) -> str:
    """Returns what a tensor is that has no numbers in rows; "" for any other."""
    if member.is_nested:
        return "a nested tensor"
    if member.is_quantized:
        return "a quantized tensor"
    if is_transformed(member):
        return "inside a transform of torch.func"
    return "a sparse tensor" if member.layout != torch.strided else ""


def _counts(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def _number(member: Any, names: Sequence[str]) -> int:
    """Returns the number of one member. Raises: InputError; UsageError."""
    value = _python_values(member, 1)
    if isinstance(value, str):
        return number_of(names, value)
    if _is_whole(value):
        return int(value)
    raise InputError(
        f"member contains {member!r:.60}; route takes whole numbers from 0 to {len(names) - 1}, or names"
    )


def _is_whole(member: Any) -> bool:
    return isinstance(member, numbers.Integral) and not isinstance(member, bool)


def _short(value: torch.Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
