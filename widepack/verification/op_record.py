"""Records what a module does in one call: each op with its literals, but without tensors, as torch's
dispatcher sees it.

Two members with inputs of one shape do the same, except for their weights. A number that differs is in one of
the two records, even if it changes no answer on these inputs. It may come from an attribute, a closure or a
global.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Operation = tuple[str, tuple[str, ...]]
"""The name of an op, and the texts of its literals."""

_PLAIN = {type(None), bool, int, float, complex, str, torch.dtype, torch.layout, torch.memory_format}
_RETURNS = "-> "  # before the number that an op returns to Python


class Recorded(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's class has no types
    """A mode that records the ops of a module's call, in order, in `operations`.

    A tensor that the code makes of Python numbers counts as a literal.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.lift_fresh.default:
            literals: tuple[str, ...] = (_numbers_text(args[0]),)
        else:
            literals = tuple(map(_text, [*args, *(kwargs or {}).items()]))
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._local_scalar_dense.default:  # the op has no other name
            literals = (*literals, f"{_RETURNS}{result!r}")  # a number that goes on in Python
        self.operations.append((str(func), literals))
        return result


def _numbers_text(value: torch.Tensor) -> str:
    """Returns the text of a tensor that is made of Python numbers; of a large one, its hash."""
    if value.numel() <= 1000:
        return repr(value.tolist())
    return f"{tuple(value.shape)} {hashlib.blake2b(repr(value.tolist()).encode()).hexdigest()[:12]}"


def _text(value: Any) -> str:
    """Returns the text of a literal. All tensors have one text, and so have all generators."""
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_text, value))})"
    return repr(value) if type(value) in _PLAIN else type(value).__name__


def first_difference(one: Sequence[Operation], other: Sequence[Operation]) -> tuple[int, str]:
    """Returns the number of the first operation that differs, and a text of both; (-1, "") if the records are
    equal.

    Records without values are compared first. A value differs by member, and would hide a literal that does.
    """
    for key in (_without_values, lambda operation: operation):
        for i, (a, b) in enumerate(zip(one, other)):
            if key(a) != key(b):
                return i, f"{_operation_text(a)} and {_operation_text(b)}"
    if len(one) != len(other):
        return min(len(one), len(other)), f"{len(one)} ops and {len(other)}"
    return -1, ""


def _without_values(operation: Operation) -> Operation:
    return operation[0], tuple(text for text in operation[1] if not text.startswith(_RETURNS))


def _operation_text(operation: Operation) -> str:
    return f"{operation[0]}({', '.join(operation[1])})"[:200]
