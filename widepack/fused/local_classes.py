"""Finds classes whose methods hold parts of a module, and makes classes of their code that hold its copies.

A class that is defined in a function may hold a module in the closures of its methods or in its body. Every
instance reads that module, and so does a copied instance, unless its class is copied too.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from ..capture.reachable import globals_of, is_atom, walk

_LEFT_OUT = frozenset({"__dict__", "__weakref__", "_abc_impl", "__abstractmethods__"})
"""What `type` makes anew for each class."""

_WRAPPERS = (staticmethod, classmethod)


def classes_that_hold(values: Iterable[Any], owned: Collection[int]) -> list[type]:
    """Returns the classes that have to be copied with their instances.

    Args:
        values: Objects. Their classes are examined, with the bases.
        owned: The ids of modules and weights.

    Returns:
        the classes that were defined in a function and lead to one of `owned`, and the classes that inherit
        from them. None of a family whose bases act on every new subclass (`__init_subclass__`).
    """
    found: dict[int, type] = {}
    for cls in {id(c): c for v in values for c in (type(v), *_classes_in(v))}.values():
        holding = [base for base in cls.__mro__ if _is_local(base) and _leads(base, owned, set())]
        if holding and not any("__init_subclass__" in vars(base) for base in _of_user(cls)):
            found.update({id(k): k for k in cls.__mro__ if any(issubclass(k, base) for base in holding)})
    return list(found.values())


def _is_local(cls: type) -> bool:
    return "<locals>" in cls.__qualname__


def _of_user(cls: type) -> list[type]:
    return [base for base in cls.__mro__ if base.__module__.partition(".")[0] not in ("torch", "builtins")]


def _classes_in(value: Any) -> list[type]:
    """Returns the classes that a function holds, or that are in the body of a class."""
    if isinstance(value, types.FunctionType):
        found = [*_contents(value), *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    else:
        found = list(vars(value).values()) if isinstance(value, type) else []
    return [cls for cls in found if isinstance(cls, type) and _is_local(cls)]


def _contents(function: types.FunctionType) -> list[Any]:
    """Returns the values in a function's closure."""
    found = []
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # it is empty
            found.append(cell.cell_contents)
    return found


def values_of(cls: type) -> Iterator[Any]:
    """Yields what the body of a class holds: its functions, also those of properties, and other values."""
    for value in vars(cls).values():
        if isinstance(value, _WRAPPERS):
            yield value.__func__
        elif isinstance(value, property):
            yield from (f for f in (value.fget, value.fset, value.fdel) if f is not None)
        elif isinstance(value, functools.cached_property):
            yield value.func
        elif not is_atom(value) and not isinstance(value, types.MemberDescriptorType):
            yield value


def _leads(cls: type, owned: Collection[int], seen: set[int]) -> bool:
    """Whether what a class holds, or its functions read from globals, leads to a module.

    seen: the ids of classes that were asked already.
    """
    seen.add(id(cls))
    inner = _classes_in(cls)
    for value in values_of(cls):
        inner += _classes_in(value)
        read = globals_of(value).values() if isinstance(value, types.FunctionType) else ()
        for root in (value, *read):
            if any(id(r.value) in owned for r in walk(root, ("strong", "weak", "class"))):
                return True
    return any(_leads(other, owned, seen) for other in inner if id(other) not in seen)


def new_class(old: type, bases: tuple[type, ...]) -> type:
    """Returns a class with the body of another one, which `fill` replaces by copies."""
    slots = vars(old).get("__slots__", ())
    left_out = {*_LEFT_OUT, *((slots,) if isinstance(slots, str) else slots)}
    new = type(old)(old.__name__, bases, {k: v for k, v in vars(old).items() if k not in left_out})
    new.__qualname__ = old.__qualname__
    return new


def fill(new: type, old: type, copied: Callable[[Any], Any]) -> None:
    """Gives a new class the copies of what the old one holds. copied: returns the copy of a value."""
    for name, value in _replaced(vars(old), copied).items():
        setattr(new, name, value)


def _replaced(body: Mapping[str, Any], copied: Callable[[Any], Any]) -> dict[str, Any]:
    """Returns the values of a body whose copies are other objects."""
    found: dict[str, Any] = {}
    for name, value in body.items():
        if name in _LEFT_OUT or isinstance(value, types.MemberDescriptorType):
            continue
        if is_atom(value) and not isinstance(value, type):
            continue
        if isinstance(value, _WRAPPERS):
            new: Any = type(value)(copied(value.__func__))
        elif isinstance(value, property):
            get, put, remove = (
                None if f is None else copied(f) for f in (value.fget, value.fset, value.fdel)
            )
            new = type(value)(get, put, remove, value.__doc__)
        elif isinstance(value, functools.cached_property):
            new = functools.cached_property(copied(value.func))
            new.__set_name__(None, name)
        else:
            new = copied(value)
        if new is not value:
            found[name] = new
    return found
