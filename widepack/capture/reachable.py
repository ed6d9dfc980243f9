"""Walks over all that can be reached from a module: attributes, containers, closures, partials, weakrefs.

| value | leads to |
|---|---|
| object, module | its attributes, from its dict and its slots |
| dict, list, tuple, set, deque, weak collection | its items |
| function | the values in its closure, defaults and attributes, and globals that its code reads |
| partial, bound method, built-in method | the function, its arguments, the object it is bound to |
| `weakref.ref`, `WeakMethod`, `weakref.proxy` | the object it refers to |
| instance of a class of the user | what the methods of the class have in closures and read from globals |

Classes, Python's modules and code are not entered.
"""

from __future__ import annotations

import dis
import functools
import types
import weakref
from collections import deque
from collections.abc import Collection, Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

How = Literal["strong", "weak", "class", "global"]
"""How a value is held: by a strong reference, by a weak one, by the object's class, or by a global name."""

ALL: tuple[How, ...] = ("strong", "weak", "class", "global")
STRONG: tuple[How, ...] = ("strong",)
ATOMS = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    range,
    slice,
    type(...),
    type(NotImplemented),
    type,
    types.ModuleType,
    types.CodeType,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Size,
)
"""Types whose values lead to nothing that a member can change."""

_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_MODULE_DICTS = ("_parameters", "_buffers", "_modules")
_MOST_GLOBAL = 1000  # items of a global container that is entered; registries of libraries have more
_PROXIES = weakref.ProxyTypes
_CLOSED = ("logging", "threading", "_thread", "asyncio", "socket", "subprocess", "concurrent", "_io", "io")
"""Modules of Python whose objects are not entered: they lead to all of the process."""


class HeldValue(NamedTuple):
    """One step from a value to another. name: as in a path; empty where the step adds nothing to it."""

    name: str
    value: Any
    how: How


class Reached(NamedTuple):
    """A value that was reached, and the path to it."""

    path: str
    value: Any


def walk(root: Any, follow: Collection[How] = ALL, stop: Collection[int] = ()) -> Iterator[Reached]:
    """Yields every value that can be reached, once, nearest first. It begins with the root.

    Args:
        root: Where the walk begins.
        follow: The kinds of steps that are made.
        stop: The ids of values that are not entered.
    """
    seen = {id(root)}
    waiting: deque[tuple[str, Any, bool]] = deque([("", root, False)])
    kept: list[Any] = []  # an id that is free again could belong to another value
    while waiting:
        path, value, listed = waiting.popleft()
        kept.append(value)
        yield Reached(path, value)
        if id(value) in stop:
            continue
        for edge in edges(value):
            if edge.how not in follow or id(edge.value) in seen or is_atom(edge.value):
                continue
            inside = (listed or edge.how == "global") and not isinstance(edge.value, nn.Module)
            if inside and not _of_interest(edge.value):
                continue
            seen.add(id(edge.value))
            name = f"{path}.{edge.name}" if path and edge.name else path or edge.name
            waiting.append((name, edge.value, inside))


def is_atom(value: Any) -> bool:
    """Whether a value leads to nothing that a member can change."""
    return type(value) not in _PROXIES and isinstance(value, ATOMS)


def edges(value: Any) -> list[HeldValue]:
    """Returns the steps that lead on from a value."""
    if is_atom(value) or type(value).__module__.partition(".")[0] in _CLOSED:
        return []
    if isinstance(value, types.FunctionType):
        return _of_function(value)
    if isinstance(value, types.MethodType):
        return [HeldValue("", value.__func__, "strong"), HeldValue("self", value.__self__, "strong")]
    if isinstance(value, (types.BuiltinFunctionType, types.MethodWrapperType)):
        return [] if _unbound(value) else [HeldValue("self", value.__self__, "strong")]
    if isinstance(value, types.CellType):
        return [HeldValue("", contents, "strong") for contents in _contents(value)]
    if type(value) in _PROXIES or isinstance(value, weakref.ref):
        target = target_of(value)
        return [] if target is None else [HeldValue("", target, "weak")]
    if isinstance(value, functools.partial):
        rows = [HeldValue("func", value.func, "strong"), *_items(enumerate(value.args))]
        return [*rows, *_items(value.keywords.items()), *_items(vars(value).items())]
    rows = _of_container(value)
    if isinstance(value, torch.Tensor):
        return [HeldValue(str(k), v, "strong") for k, v in vars(value).items()]
    return [*rows, *_attributes(value), *_of_class(value)]


def target_of(reference: Any) -> Any:
    """Returns what a weakref or a proxy refers to; None if that is gone."""
    if type(reference) not in _PROXIES:
        return reference()
    try:
        return reference.__init__.__self__
    except ReferenceError:
        return None


def _unbound(value: Any) -> bool:
    return value.__self__ is None or is_atom(value.__self__)


def _of_interest(value: Any) -> bool:
    """Whether a value behind a global name is looked at: a module, a tensor, or a container that is short."""
    if isinstance(value, _CONTAINERS):
        return len(value) <= _MOST_GLOBAL
    return isinstance(value, (nn.Module, torch.Tensor))


def _of_container(value: Any) -> list[HeldValue]:
    if isinstance(value, (dict, types.MappingProxyType)):
        keys = [HeldValue("key", k, "strong") for k in value if not isinstance(k, ATOMS)]
        return [*_items(value.items()), *keys]
    if isinstance(value, (list, tuple, deque, set, frozenset)):
        return _items(enumerate(value))
    return []


def _items(items: Any) -> list[HeldValue]:
    return [HeldValue(_name(k, i), v, "strong") for i, (k, v) in enumerate(list(items))]


def _name(key: Any, number: int) -> str:
    """Returns the name of an item: its key as text, or the type of the key and the item's number."""
    if isinstance(key, str):
        return key
    return repr(key) if is_atom(key) else f"{type(key).__qualname__} {number}"


def _attributes(value: Any) -> list[HeldValue]:
    """Returns the attributes of an object: from its dict and its slots."""
    found: dict[str, Any] = {}
    for cls in type(value).__mro__:
        slots = vars(cls).get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else tuple(slots):
            name = f"_{cls.__name__.lstrip('_')}{slot}" if slot[:2] == "__" != slot[-2:] else slot
            member = vars(cls).get(name)
            if isinstance(member, types.MemberDescriptorType):
                try:
                    found[name] = member.__get__(value)
                except AttributeError:
                    continue
    own = getattr(value, "__dict__", None)
    found.update(own if isinstance(own, dict) else {})
    if not isinstance(value, nn.Module):
        return [HeldValue(str(k), v, "strong") for k, v in found.items()]
    # hooks by their order: their keys count all hooks of the process
    hooks = [
        HeldValue(f"{k}.{i}", hook, "strong")
        for k, v in found.items()
        if k.endswith("_hooks") and isinstance(v, dict)
        for i, hook in enumerate(v.values())
    ]
    return [*hooks, *(HeldValue("" if k in _MODULE_DICTS else str(k), v, "strong") for k, v in found.items())]


def _contents(cell: types.CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # empty
        return []


def _of_function(function: types.FunctionType) -> list[HeldValue]:
    rows = [
        HeldValue(name, value, "strong")
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ())
        for value in _contents(cell)
    ]
    rows += [HeldValue(f"default.{i}", v, "strong") for i, v in enumerate(function.__defaults__ or ())]
    rows += _items((function.__kwdefaults__ or {}).items())
    rows += _items(vars(function).items())
    own = function.__globals__ if isinstance(function.__globals__, OwnGlobals) else {}
    rows += _items(own.items())
    return [*rows, *(HeldValue(n, v, "global") for n, v in globals_of(function).items() if n not in own)]


class OwnGlobals(dict[str, Any]):
    """The globals of a copied function: some names have other values, the others are the original's."""

    def __init__(self, own: dict[str, Any], original: dict[str, Any]) -> None:
        super().__init__(own)
        self._original = original

    def __missing__(self, name: str) -> Any:
        return self._original[name]

    def value_of(self, name: str) -> Any:
        """Returns the value of a name, or None."""
        return dict.get(self, name, self._original.get(name))


def globals_of(function: types.FunctionType) -> dict[str, Any]:
    """Returns the globals that the code of a function reads, as far as they may lead to a member."""
    if str(function.__module__).startswith("torch."):
        return {}
    known = function.__globals__
    value_of = known.value_of if isinstance(known, OwnGlobals) else known.get
    found = {n: value_of(n) for n in global_names(function.__code__)}
    return {n: v for n, v in found.items() if v is not None and _of_interest(v)}


@functools.lru_cache(maxsize=4096)
def global_names(code: types.CodeType) -> tuple[str, ...]:
    """Returns the names of the globals that code reads, also in the functions that it defines."""
    names = [str(i.argval) for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    inner = [n for c in code.co_consts if isinstance(c, types.CodeType) for n in global_names(c)]
    return tuple(dict.fromkeys([*names, *inner]))


def _of_class(value: Any) -> list[HeldValue]:
    """Returns what the methods of an object's class have in closures and read from globals."""
    if not isinstance(value, nn.Module) and "<locals>" not in type(value).__qualname__:
        return []
    rows: list[HeldValue] = []
    for name, function in class_functions(type(value)):
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            if variable != "__class__":
                rows += [HeldValue(f"{name}.{variable}", v, "class") for v in _contents(cell)]
        rows += [HeldValue(f"{name}.{n}", v, "global") for n, v in globals_of(function).items()]
    return rows


def class_functions(cls: type) -> list[tuple[str, types.FunctionType]]:
    """Returns the functions that a class of the user and its bases define, without those of torch."""
    found: list[tuple[str, types.FunctionType]] = []
    for base in cls.__mro__:
        if f"{base.__module__}.".startswith(("torch.", "builtins.", "collections.", "typing.", "abc.")):
            continue
        for name, value in vars(base).items():
            parts = (value, *(getattr(value, part, None) for part in ("__func__", "fget", "fset", "func")))
            found += [(name, part) for part in parts if isinstance(part, types.FunctionType)]
    return found
