"""Lets `int(x)` and `float(x)` of a tensor be numbers of the program, as `x.item()` is.

Python wants an object of class `int` from `int(x)`, so torch cannot return a number that it traces. Where an
export fails at such a line, the names `int` and `float` of that file's module are replaced, and the export is
repeated. Other modules keep them.
"""

from __future__ import annotations

import builtins
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..explain import is_infrastructure, is_of_data

Names = dict[str, Any]  # the global names of a module


class _Kind(type):
    """The class of `_Int` and `_Float`: their instances are those of the class that they replace."""

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, cls._replaced())

    def __subclasscheck__(cls, other: type) -> bool:
        return issubclass(other, cls._replaced())

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls._replaced(), name)

    def __eq__(cls, other: object) -> bool:
        return other is cls._replaced() or other is cls

    def __hash__(cls) -> int:
        return hash(cls._replaced())

    def _replaced(cls) -> type:
        kind: type = vars(builtins)[cls.__name__]
        return kind


def _int(x: Any = 0, *more: Any, **named: Any) -> Any:
    if isinstance(x, Tensor):
        return x.to(torch.int64).item()
    traced = isinstance(x, (torch.SymInt, torch.SymFloat))
    return torch.sym_int(x) if traced else int(x, *more, **named)  # type: ignore[no-untyped-call]


def _float(x: Any = 0.0) -> Any:
    if isinstance(x, Tensor):
        return x.to(torch.float64).item()
    traced = isinstance(x, (torch.SymInt, torch.SymFloat))
    return torch.sym_float(x) if traced else float(x)  # type: ignore[no-untyped-call]


_REPLACEMENTS = {
    "int": _Kind("int", (), {"__new__": lambda _, *args, **named: _int(*args, **named)}),
    "float": _Kind("float", (), {"__new__": lambda _, *args, **named: _float(*args, **named)}),
}


def conversions(error: Exception | None) -> Names | None:
    """Returns the names of the module at whose line an export failed, if the line's function uses `int` or
    `float`. None for other errors.
    """
    if error is None or not is_of_data(error):
        return None
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    users = [frame for frame in frames if not is_infrastructure(frame.f_code.co_filename)]
    if not users or not set(_REPLACEMENTS) & set(users[-1].f_code.co_names):
        return None
    return users[-1].f_globals


@contextmanager
def numbers_kept(modules: Iterable[Names]) -> Iterator[None]:
    """Replaces `int` and `float` in modules, inside a with block. A module's own functions of these names
    stay.
    """
    added = [(names, name) for names in modules for name in _REPLACEMENTS if name not in names]
    for names, name in added:
        names[name] = _REPLACEMENTS[name]
    try:
        yield
    finally:
        for names, name in added:
            del names[name]
