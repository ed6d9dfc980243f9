"""What a module does in one call: every op with its literals, tensors aside, as torch's dispatcher sees it.

Two members on inputs of one shape do the same, but for their weights: whatever number differs, wherever it comes from (an attribute, a closure, a global), is in
the record of one of them, also where it changes no answer on these inputs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Did = tuple[str, tuple[str, ...]]
_PLAIN = {type(None), bool, int, float, complex, str, torch.dtype, torch.layout, torch.memory_format}


class Recorded(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's class has no types
    """A mode under which a module is called; `did`: (op, its literals as text) in order. A tensor made of Python numbers counts as a literal."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.did: list[Did] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        flat = [*args, *(kwargs or {}).items()]
        if func is torch.ops.aten.lift_fresh.default:
            literals: tuple[str, ...] = (_numbers(args[0]),)
        else:
            literals = tuple(map(_text, flat))
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._local_scalar_dense.default:
            literals = (*literals, f"-> {made!r}")  # a number that goes on in Python
        self.did.append((str(func), literals))
        return made


def _numbers(value: torch.Tensor) -> str:
    """A tensor made of Python numbers as text, or the hash of many."""
    return (
        repr(value.tolist()) if value.numel() <= 1000 else f"{tuple(value.shape)} {hashlib.blake2b(repr(value.tolist()).encode()).hexdigest()[:12]}"
    )


def _text(value: Any) -> str:
    """A literal as text; tensors are all one, and so is what has no text of its own (a generator)."""
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_text, value))})"
    return repr(value) if type(value) in _PLAIN else type(value).__name__


def first_difference(one: Sequence[Did], other: Sequence[Did]) -> tuple[int, str]:
    """Where two records part, and what is done there in words: in the first, in the other; (-1, "") where they are equal."""
    for same in (_without_values, lambda did: did):  # values that differ by member must not hide a literal that does
        for i, (a, b) in enumerate(zip(one, other)):
            if same(a) != same(b):
                return i, f"{_call(a)} and {_call(b)}"
    if len(one) != len(other):
        return min(len(one), len(other)), f"{len(one)} ops and {len(other)}"
    return -1, ""


def _without_values(did: Did) -> Did:
    return did[0], tuple(text for text in did[1] if not text.startswith("-> "))


def _call(did: Did) -> str:
    return f"{did[0]}({', '.join(did[1])})"[:200]
