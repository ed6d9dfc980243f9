"""Walks over all that can be reached from a module: attributes, containers, closures, partials, weakrefs.

| value | leads to |
|---|---|
| object, module | its attributes, from its dict and its slots |
| dict, list, tuple, set, deque, weak collection | its items |
| function | the values in its closure, defaults and attributes, and globals that its code reads |
| partial, bound method, built-in method | the function, its arguments, the object it is bound to |
| `weakref.ref`, `WeakMethod`, `weakref.proxy` | the object it refers to |
| instance of a class of the user | what the methods of the class have in closures and read from globals |

Classes, Python's modules and code are not entered. `tensors_of` finds the tensors that a member holds outside
its parameters and buffers.
"""

from __future__ import annotations

import contextlib
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
LITERALS = (
    *(bool, int, float, complex, str, bytes, range, slice),
    *(type(None), type(...), type(NotImplemented)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
"""Types whose values have a `repr` that says all."""
ATOMS = (*LITERALS, type, types.ModuleType, types.CodeType, torch.Size)
"""Types whose values lead to nothing that a member can change."""

_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_MODULE_DICTS = ("_parameters", "_buffers", "_modules")
_MOST_GLOBAL = 1000  # items of a global container that is entered; registries of libraries have more
_PROXIES = weakref.ProxyTypes
CLOSED = ("logging", "threading", "_thread", "asyncio", "socket", "subprocess", "concurrent", "_io", "io")
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
    if is_atom(value) or type(value).__module__.partition(".")[0] in CLOSED:
        return []
    if isinstance(value, types.FunctionType):
        return _of_function(value)
    if isinstance(value, types.MethodType):
        return [HeldValue("", value.__func__, "strong"), HeldValue("self", value.__self__, "strong")]
    if isinstance(value, (types.BuiltinFunctionType, types.MethodWrapperType)):
        return [] if is_atom(value.__self__) else [HeldValue("self", value.__self__, "strong")]
    if isinstance(value, types.CellType):
        return [HeldValue("", contents, "strong") for contents in contents_of(value)]
    if type(value) in _PROXIES or isinstance(value, weakref.ref):
        target = target_of(value)
        return [] if target is None else [HeldValue("", target, "weak")]
    if isinstance(value, functools.partial):
        rows = [HeldValue("func", value.func, "strong"), *_items(enumerate(value.args))]
        return [*rows, *_items(value.keywords.items()), *_items(vars(value).items())]
    if isinstance(value, torch.Tensor):
        return [HeldValue(str(k), v, "strong") for k, v in vars(value).items()]
    return [*_of_container(value), *_attributes(value), *_of_class(value)]


def target_of(reference: Any) -> Any:
    """Returns what a weakref or a proxy refers to; None if that is gone."""
    if type(reference) not in _PROXIES:
        return reference()
    try:
        return reference.__init__.__self__
    except ReferenceError:
        return None


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
    return [HeldValue(item_name(k, i), v, "strong") for i, (k, v) in enumerate(list(items))]


def item_name(key: Any, number: int) -> str:
    """Returns the name of an item: its key as text, or the type of the key and the item's number."""
    if isinstance(key, str):
        return key
    plain = is_atom(key) or (type(key) is tuple and all(map(is_atom, key)))
    return repr(key) if plain else f"{type(key).__qualname__} {number}"


def own_attributes(value: Any) -> dict[str, Any]:
    """Returns the attributes of an object, from its slots and its dict."""
    found: dict[str, Any] = {}
    for cls in type(value).__mro__:
        slots = vars(cls).get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else tuple(slots):
            name = f"_{cls.__name__.lstrip('_')}{slot}" if slot[:2] == "__" != slot[-2:] else slot
            member = vars(cls).get(name)
            if isinstance(member, types.MemberDescriptorType):
                with contextlib.suppress(AttributeError):  # a slot without a value
                    found[name] = member.__get__(value)
    own = getattr(value, "__dict__", None)
    return found | (own if isinstance(own, dict) else {})


def _attributes(value: Any) -> list[HeldValue]:
    found = own_attributes(value)
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


def closure(function: types.FunctionType) -> list[tuple[str, Any]]:
    """Returns the names and values in the closure of a function."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or ())
    return [(name, value) for name, cell in cells for value in contents_of(cell)]


def contents_of(cell: types.CellType) -> list[Any]:
    """Returns what a cell of a closure holds; an empty list for an empty cell."""
    try:
        return [cell.cell_contents]
    except ValueError:  # empty
        return []


def _of_function(function: types.FunctionType) -> list[HeldValue]:
    rows = [HeldValue(name, value, "strong") for name, value in closure(function)]
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
        rows += [HeldValue(f"{name}.{n}", v, "class") for n, v in closure(function) if n != "__class__"]
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


_HELD: tuple[How, ...] = ("strong", "class")


def tensors_of(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Returns every tensor that a member holds in plain attributes, with its path.

    Also those in containers and objects there, in modules that are no submodules, in closures of functions
    and of the methods of its classes, and in arguments of partials.
    """
    rows: list[tuple[str, torch.Tensor]] = []
    parts = {id(part) for part in module.modules()}
    seen: set[int] = set()
    for name, part in module.named_modules():
        for edge in edges(part):
            if edge.how in _HELD and not _is_registered(edge, part):
                path = f"{name}.{edge.name}" if name else edge.name
                rows += _tensors_under(path, edge.value, parts, seen)
    return rows


def _is_registered(edge: HeldValue, part: nn.Module) -> bool:
    own = vars(part)
    return not edge.name and any(edge.value is own.get(key) for key in _MODULE_DICTS)


def _tensors_under(path: str, root: Any, parts: set[int], seen: set[int]) -> list[tuple[str, torch.Tensor]]:
    """Returns the tensors under one attribute. parts: the modules of the member. seen: what was entered."""
    if id(root) in parts or is_atom(root) or (id(root) in seen and not isinstance(root, torch.Tensor)):
        return []
    rows = []
    for reached in walk(root, _HELD, parts | seen):
        if isinstance(reached.value, torch.Tensor):
            rows.append((f"{path}.{reached.path}" if reached.path else path, reached.value))
        else:
            seen.add(id(reached.value))
    return rows


def same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are one value in memory. torch.export detaches constants, so `is` is not enough."""
    if a is b:
        return True
    address = _address(a)
    if address is None or address != _address(b):
        return False
    alike = a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride() and a.device == b.device
    return alike and a.numel() > 0


def _address(tensor: torch.Tensor) -> int | None:
    """Where a tensor is in memory. None for a tensor without memory, as a member keeps them of an export."""
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return None
