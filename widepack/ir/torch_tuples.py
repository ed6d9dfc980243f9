"""Names and builds the named tuples of torch, which ops such as `x.max(1)` return.

They are not named tuples of Python: the fields are in `__match_args__`, and torch's `repr` names the op.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

TORCH_TUPLE = "torch.return_types."
"""What the name of a named tuple of torch begins with in a tree."""


def torch_fields(kind: type) -> tuple[str, ...] | None:
    """Returns the fields of a named tuple of torch; None for any other class."""
    known = kind.__module__ == torch.return_types.__name__ and issubclass(kind, tuple)
    return tuple(getattr(kind, "__match_args__", ())) or None if known else None


def torch_tuple(name: str, rows: Sequence[tuple[str, Any]]) -> tuple[Any, ...] | None:
    """Returns a named tuple of torch.

    Args:
        name: The name in a tree, for example `torch.return_types.max`. It may come from an untrusted file.
        rows: The fields and their values.

    Returns:
        The named tuple; None if this torch has none of this name with these fields.
    """
    if not name.startswith(TORCH_TUPLE):
        return None
    kind = vars(torch.return_types).get(name.removeprefix(TORCH_TUPLE))
    if not isinstance(kind, type) or torch_fields(kind) != tuple(k for k, _ in rows):
        return None
    made: tuple[Any, ...] = kind([v for _, v in rows])
    return made
