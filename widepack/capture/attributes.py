"""What a member's modules hold that is no tensor, as text by path: `blocks.0.drop_path.scale: 0.1`.

Members of one architecture differ in weights only, which are followed by name. A number that `__init__` draws, or that was pickled with one member, is none; it
becomes a literal of the program that is captured of another member. Here such attributes are found, whatever they are for: whether one matters, only the
programs can tell (alike.py).

| value of a plain attribute | becomes |
|---|---|
| a number, text, None, dtype, device, range, slice, path, date, enum | its text, which tells 1, 1.0 and True apart |
| list, tuple, dict, set; partial; config object, dataclass | a row for each thing in it, up to DEPTH levels; over LONG things one row with their hash |
| NumPy scalar or array, tensor, bytes of all kinds | its numbers, or a hash of them |
| function, class, method | its name, what its closure holds, and the object that it is bound to |
| module that is no part (in a plain list) | its attributes, and those of what is in it |
| hooks of forward | as functions, numbered in order |
| generator, lock, logger, module of Python; parameters, buffers, torch's own fields and other hooks of a module | nothing |

A tensor in a plain attribute is each member's own, and followed as a weight; but code may read a number out of it (`int(self.limit)`, its shape).

No object's own `repr` is asked, which may hold an address.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import datetime
import decimal
import enum
import fractions
import functools
import hashlib
import pathlib
import re
import types
import uuid
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

DEPTH = 12  # levels of lists, dicts and objects under an attribute
LONG = 64  # things of a list that have a row each
MOST = 20_000  # rows of a member
_FEW = 8  # numbers of a tensor that are shown
_HASHED_BYTES = 8 << 20  # of a long array's beginning, and of its end

_TORCH = frozenset(vars(nn.Module())) | {"_flat_weights", "_flat_weight_refs", "_all_weights"}
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_PLAIN = {type(None), bool, int, float, complex, str, bytes, range, slice, type(...), torch.dtype, torch.device, torch.layout, torch.memory_format}
_PRINTED = (decimal.Decimal, fractions.Fraction, datetime.date, datetime.time, datetime.timedelta, re.Pattern, uuid.UUID, pathlib.PurePath)
_NOISE = {"torch", "threading", "_thread", "logging", "weakref", "random", "_random", "_io", "io", "asyncio", "contextvars", "socket", "subprocess"}


class Difference(NamedTuple):
    """An attribute of two modules. one, other: its text in each; empty where a module has none."""

    path: str
    one: str
    other: str


def attributes_of(module: nn.Module) -> dict[str, str]:
    """Every plain attribute of a module and of its parts, path -> text. What parts share (a config) has the path of the first."""
    walk = _Walk()
    for name, part in module.named_modules():
        walk.seen.add(id(part))
        for key, value in _own(part):
            walk.add(f"{name}.{key}" if name else key, value, DEPTH)
    return walk.found


def texts_of(part: nn.Module, name: str | None, known: Iterable[nn.Module]) -> dict[str, str]:
    """The rows of one attribute of a part, none where it has none of this name; with no name of all of its attributes. known: modules whose own attributes are not followed."""
    walk = _Walk()
    walk.seen.update(map(id, known))
    for key, value in _own(part):
        if name in (None, key):
            rows = len(walk.found)
            walk.add(key, value, DEPTH)
            if len(walk.found) == rows:  # of a kind that has no rows
                walk.found[key] = "there"
    return walk.found


def _own(part: nn.Module) -> Iterator[tuple[str, Any]]:
    """The attributes of a module that are not torch's, and its hooks of forward."""
    for key, value in vars(part).items():
        if key not in _TORCH:
            yield key, value
        elif key in _HOOKS and value:
            yield key, list(value.values())


def differences(one: Mapping[str, str], other: Mapping[str, str]) -> tuple[Difference, ...]:
    """The attributes in which two modules differ; numbers before texts, which are names or places more often than not."""
    if one == other:
        return ()
    found = [Difference(p, one.get(p, ""), other.get(p, "")) for p in dict.fromkeys([*one, *other]) if one.get(p) != other.get(p)]
    return tuple(sorted(found, key=lambda d: (d.one or d.other)[:1] in "'\""))


def in_words(found: Sequence[Difference], one: str, other: str, most: int = 5) -> str:
    """`norm.eps: 1e-05 in member a, 1e-06 in member b`. most: how many are told."""
    rows = [f"{d.path}: {_short(d.one)} in {one}, {_short(d.other)} in {other}" for d in found[:most]]
    return "; ".join(rows) + (f"; and {len(found) - most} more" if len(found) > most else "")


def _short(text: str) -> str:
    return "nothing" if not text else text if len(text) <= 300 else f"{text[:280]}... ({len(text)} characters)"


class _Walk:
    """found: the rows so far. seen: ids of modules and objects that have their rows already; all of them are held by the module meanwhile."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}
        self.seen: set[int] = set()

    def add(self, path: str, value: Any, depth: int) -> None:
        """The rows of one value."""
        kind = type(value)
        if len(self.found) >= MOST:
            return
        if kind in _PLAIN:
            self.found[path] = repr(value)
        elif isinstance(value, enum.Enum):
            self.found[path] = f"{kind.__qualname__}.{value.name}"
        elif isinstance(value, torch.Tensor):
            self._tensor(path, value)
        elif kind.__module__.partition(".")[0] in _NOISE and not isinstance(value, (tuple, list, dict, nn.Module)):
            return
        elif isinstance(value, (bytearray, memoryview, array.array)):
            self.found[path] = f"{kind.__name__} of {len(value)}, hash {_hash([bytes(value)])}"
        elif kind.__module__.partition(".")[0] == "numpy":
            self._array(path, value)
        elif isinstance(value, (int, float, complex, str, bytes)):  # a class of the user's
            base = next(b for b in (int, float, complex, str, bytes) if isinstance(value, b))
            self.found[path] = f"{kind.__qualname__}({base.__repr__(value)})"
            self._held(path, value, depth)
        elif isinstance(value, _PRINTED):
            self.found[path] = repr(value)
        elif isinstance(value, types.MethodType):
            self._function(path, value.__func__, depth)
            if not isinstance(value.__self__, nn.Module):
                self.add(f"{path}.self", value.__self__, depth - 1)
        elif isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
            self._function(path, value, depth)
        elif id(value) not in self.seen and not isinstance(value, types.ModuleType):
            self.seen.add(id(value))
            with contextlib.suppress(Exception):  # an object of the user's may raise at any look
                self._parts(path, value, depth)

    def _parts(self, path: str, value: Any, depth: int) -> None:
        """What holds other values."""
        if isinstance(value, functools.partial):
            self.add(f"{path}.func", value.func, depth - 1)
            self._rows(path, [*enumerate(value.args), *value.keywords.items()], depth)
        elif isinstance(value, (list, tuple, deque)):
            names = getattr(value, "_fields", None) if isinstance(value, tuple) else None
            self._rows(path, list(zip(names or range(len(value)), value)), depth, "" if value else f"an empty {type(value).__name__}")
            self._held(path, value, depth)
        elif isinstance(value, (dict, types.MappingProxyType)):
            self._rows(path, [(_key(k, i), v) for i, (k, v) in enumerate(value.items())], depth, "" if value else "an empty dict")
            if isinstance(value, defaultdict):
                self.add(f"{path}.default_factory", value.default_factory, depth - 1)
            self._held(path, value, depth)
        elif isinstance(value, (set, frozenset)):
            self._rows(path, list(enumerate(sorted((v for v in value if type(v) in _PLAIN), key=repr))), depth, "" if value else "an empty set")
        else:
            self.found[path] = f"a {type(value).__qualname__}"
            self._held(path, value, depth)

    def _held(self, path: str, value: Any, depth: int) -> None:
        """What an object holds under names, in slots and in its dict."""
        slots = [_mangled(s, c) for c in type(value).__mro__ for s in _names(vars(c).get("__slots__", ()))]
        held = {**{s: getattr(value, s) for s in slots if hasattr(value, s)}, **getattr(value, "__dict__", {})}
        if isinstance(value, nn.Module):
            held = {**dict(_own(value)), **value._modules}
        rows = [(k, v) for k, v in held.items() if not k.endswith("__")]
        if rows:
            self._rows(path, rows, depth)

    def _rows(self, path: str, parts: Sequence[tuple[Any, Any]], depth: int, empty: str = "") -> None:
        if empty:
            self.found[path] = empty
        if depth <= 0:
            return
        if len(parts) <= LONG:
            for key, value in parts:
                self.add(f"{path}.{key}", value, depth - 1)
            return
        inside = _Walk()
        inside.seen = self.seen
        for key, value in parts:
            inside.add(f"{key}", value, depth - 1)
        self.found[path] = f"{len(parts)} things, hash {_hash(f'{k}={v};'.encode() for k, v in inside.found.items())}"

    def _function(self, path: str, value: Any, depth: int) -> None:
        """A function or class by name, and what a function of Python brings: its closure and its defaults."""
        self.found[path] = f"{value.__module__}.{value.__qualname__}"
        if isinstance(value, types.FunctionType) and id(value) not in self.seen and depth > 0:
            self.seen.add(id(value))
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or ()):
                with contextlib.suppress(ValueError):  # a cell that is still empty
                    self.add(f"{path}.{name}", cell.cell_contents, depth - 1)
            for i, default in enumerate((*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())):
                self.add(f"{path}.default.{i}", default, depth - 1)

    def _tensor(self, path: str, value: torch.Tensor) -> None:
        """A tensor: its numbers where they are few; else its shape and a hash."""
        name = f"{str(value.dtype).partition('.')[2]}{list(value.shape)}"
        self.found[path] = name
        if type(value) not in (torch.Tensor, nn.Parameter) or value.device.type != "cpu" or value.layout != torch.strided or not value.numel():
            return
        if value.numel() <= _FEW:
            self.found[path] = f"{name} {value.tolist()}"
            return
        flat = value.detach().resolve_conj().resolve_neg().reshape(-1)
        step = max(1, _HASHED_BYTES // flat.element_size())
        parts = [p.contiguous() for p in ([flat] if flat.numel() <= 2 * step else [flat[:step], flat[-step:]])]
        found = _hash(ctypes.string_at(p.data_ptr(), p.numel() * p.element_size()) for p in parts)
        self.found[path] = f"tensor {name}, hash {found}"

    def _array(self, path: str, value: Any) -> None:
        """A NumPy scalar or array. NumPy is not imported for it: who holds one has it."""
        dtype, size = getattr(value, "dtype", None), getattr(value, "size", 0)
        if dtype is None or not hasattr(value, "tobytes") or dtype.hasobject:
            return
        if size <= 16:
            self.found[path] = f"{dtype}({value.tolist()!r})"
        else:
            flat = value.reshape(-1)
            step = max(1, _HASHED_BYTES // dtype.itemsize)
            parts = [flat.tobytes()] if size <= 2 * step else [flat[:step].tobytes(), flat[-step:].tobytes()]
            self.found[path] = f"{dtype}{list(value.shape)}, hash {_hash(parts)}"


def _key(key: Any, number: int) -> str:
    """The name of a dict's row: its key as text, or the number of one that has none of its own."""
    if isinstance(key, str):
        return key
    plain = type(key) in _PLAIN or (type(key) is tuple and all(type(k) in _PLAIN for k in key))
    return repr(key) if plain else f"{type(key).__qualname__} {number}"


def _mangled(slot: str, owner: type) -> str:
    """A slot's name as Python keeps it."""
    return f"_{owner.__name__.lstrip('_')}{slot}" if slot.startswith("__") and not slot.endswith("__") else slot


def _names(slots: str | Iterable[str]) -> list[str]:
    return [slots] if isinstance(slots, str) else list(slots)


def _hash(parts: Iterable[bytes]) -> str:
    made = hashlib.blake2b(digest_size=6)
    for part in parts:
        made.update(part)
    return made.hexdigest()
