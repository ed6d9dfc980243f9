"""Compares the classes of modules by what they do: their names, bases and code.

A factory that defines its class makes a new class at every call. `torch.fx` makes one for each GraphModule,
and torch's parametrizations for each module. Such classes of one code are one class.

Two classes of one code may have other values in their bodies and closures. `class_differences` lists these.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

from torch import fx, nn

from ..capture.attributes import Difference, differences, texts_of_values
from ..capture.reachable import class_functions, edges

_OWN = {"__dict__", "__weakref__", "__module__", "__qualname__", "__doc__", "__firstlineno__"}


def same_class(one: type, other: type) -> bool:
    """Returns whether two classes have one name, the same bases and the same code."""
    return one is other or not other_code(one, other)


def other_code(one: type, other: type) -> str:
    """Returns in words where two classes have other code; an empty text if they have the same."""
    if one is other:
        return ""
    if (one.__module__, one.__qualname__) != (other.__module__, other.__qualname__):
        return "another name"
    if len(one.__bases__) != len(other.__bases__):
        return "other bases"
    for a, b in zip(one.__bases__, other.__bases__):
        if why := other_code(a, b):
            return f"a base {b.__qualname__} that has {why}"
    ours, theirs = _own_code(one), _own_code(other)
    for name in dict.fromkeys([*ours, *theirs]):
        if ours.get(name) != theirs.get(name):
            return f"other code in {name}"
    return ""


def _own_code(cls: type) -> dict[str, Any]:
    """Returns the code of the functions of one class, without lines."""
    if issubclass(cls, fx.GraphModule):  # its forward is text that torch has compiled
        return {}
    names = vars(cls)
    return {n: _code(f.__code__) for n, f in class_functions(cls) if n in names}


def _code(code: types.CodeType) -> tuple[Any, ...]:
    """Returns what code does: two codes that do the same at other lines are equal."""
    constants = tuple(
        _code(c) if isinstance(c, types.CodeType) else (type(c).__name__, repr(c)) for c in code.co_consts
    )
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    return code.co_code, constants, names, code.co_argcount, code.co_kwonlyargcount, code.co_flags


def class_differences(one: nn.Module, other: nn.Module) -> tuple[Difference, ...]:
    """Returns what the classes of two modules' parts have in their bodies, closures and graphs, and differs.

    Only parts whose classes are two objects are compared.
    """
    parts = dict(other.named_modules(remove_duplicate=False))
    found: list[Difference] = []
    for path, part in one.named_modules(remove_duplicate=False):
        theirs = parts.get(path)
        if theirs is None or type(part) is type(theirs):
            continue
        prefix = f"{path}." if path else ""
        if isinstance(part, fx.GraphModule) and isinstance(theirs, fx.GraphModule):
            texts = {f"{prefix}_code": repr(part.code)}, {f"{prefix}_code": repr(theirs.code)}
        else:
            texts = _texts(prefix, part), _texts(prefix, theirs)
        found += differences(*texts)
    return tuple(found)


def _texts(prefix: str, part: nn.Module) -> dict[str, str]:
    return texts_of_values([(f"{prefix}{name}", value) for name, value in _values(part)])


def _values(part: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields what the class of a part has in its body and in the closures of its functions."""
    for base in type(part).__mro__:
        if base.__module__.startswith("torch.") or base is object:
            continue
        for name, value in vars(base).items():
            if (
                name not in _OWN
                and not name.startswith("_abc_")
                and not isinstance(value, types.FunctionType)
            ):
                yield name, value
    yield from ((e.name, e.value) for e in edges(part) if e.how == "class")
