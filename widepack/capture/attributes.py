"""Lists the attributes of a member that are not tensors, as text by path: `blocks.0.drop_path.scale: 0.1`.

Members of one architecture should differ only in weights, which are followed by name. A number that
`__init__` draws, or that was pickled with one member, is no weight: it becomes a literal of the captured
program. This module lists all plain attributes. Only a comparison of programs can tell which of them matter
(`verification/same_program.py`).

| value of a plain attribute | becomes |
|---|---|
| number, text, None, dtype, device, range, slice, path, date, enum | its text: 1, 1.0 and True differ |
| list, tuple, dict, set, partial, config object, dataclass | a row for each item, or a hash for many |
| NumPy scalar or array, tensor, bytes of all kinds | its numbers, or a hash of them |
| function, class, method | its name, the values in its closure, and the object that it is bound to |
| module that is no submodule (in a plain list) | its attributes, and those of what it contains |
| hooks of forward | as functions, numbered in order |
| generator, lock, logger, module of Python | nothing |
| parameters, buffers, torch's own fields and other hooks of a module | nothing |

A tensor in a plain attribute may differ between members, and is followed as a weight. But code may read a
number from it (`int(self.limit)`, its shape).

The `repr` of an object is never used, because it may contain an address.
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
from torch import fx, nn

from widepack_artifacts.errors import some

from ..ir.torch_internals import submodules_of
from .reachable import CLOSED, LITERALS, closure, item_name, own_attributes

DEPTH = 12  # levels of lists, dicts and objects under an attribute
LONG = 64  # items of a list that have one row each
MOST = 20_000  # rows of a member
_FEW = 8  # a tensor of so many numbers is shown with its numbers
_HASHED_BYTES = 8 << 20  # of a long array's beginning, and as many of its end

_TORCH = frozenset(vars(nn.Module())) | {"_flat_weights", "_flat_weight_refs", "_all_weights"}
_GRAPH = {"_graph", "_lineno_map", "_prologue_start", "_tracer_cls", "_tracer_extras"}
"""What a GraphModule has of its graph, whose code is in its attribute `_code`, too."""
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_PLAIN = frozenset(LITERALS)
_PRINTED = (
    *(decimal.Decimal, fractions.Fraction, re.Pattern, uuid.UUID, pathlib.PurePath),
    *(datetime.date, datetime.time, datetime.timedelta),
)
_NOISE = {*CLOSED, "torch", "weakref", "random", "_random", "contextvars"}


class Difference(NamedTuple):
    """An attribute in which two modules differ. one, other: its text in each; empty where it is missing."""

    path: str
    one: str
    other: str


def attributes_of(module: nn.Module) -> dict[str, str]:
    """Returns every plain attribute of a module and of its submodules: path -> text.

    An object that submodules share (a config) has the path of the first.
    """
    walk = _AttributeWalk()
    for name, part in module.named_modules():
        walk.seen.add(id(part))
        for key, value in _user_attributes(part):
            walk.add(f"{name}.{key}" if name else key, value, DEPTH)
    return walk.rows


def texts_of(part: nn.Module, name: str | None, known: Iterable[nn.Module]) -> dict[str, str]:
    """Returns the rows of one attribute of a module, or of all its attributes if `name` is None.

    known: modules whose attributes are not followed.
    """
    walk = _AttributeWalk()
    walk.seen.update(map(id, known))
    for key, value in _user_attributes(part):
        if name in (None, key):
            count = len(walk.rows)
            walk.add(key, value, DEPTH)
            if len(walk.rows) == count:  # of a kind that has no rows
                walk.rows[key] = "there"
    return walk.rows


def texts_of_values(values: Iterable[tuple[str, Any]]) -> dict[str, str]:
    """Returns the rows of some values, each with its path."""
    walk = _AttributeWalk()
    for path, value in values:
        walk.add(path, value, DEPTH)
    return walk.rows


def _user_attributes(part: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields the attributes of a module that are not torch's, and its hooks of forward."""
    graph = isinstance(part, fx.GraphModule)
    for key, value in vars(part).items():
        if graph and key in _GRAPH:
            continue
        if key not in _TORCH:
            yield key, value
        elif key in _HOOKS and value:
            yield key, list(value.values())


def differences(one: Mapping[str, str], other: Mapping[str, str]) -> tuple[Difference, ...]:
    """Returns the attributes in which two modules differ: numbers first, texts are often names or paths."""
    if one == other:
        return ()
    rows = [
        Difference(p, one.get(p, ""), other.get(p, ""))
        for p in dict.fromkeys([*one, *other])
        if one.get(p) != other.get(p)
    ]
    return tuple(sorted(rows, key=lambda d: (d.one or d.other)[:1] in "'\""))


def in_words(rows: Sequence[Difference], one: str, other: str, most: int = 5) -> str:
    """Returns at most `most` differences as a text: `norm.eps: 1e-05 in member a, 1e-06 in member b`."""
    texts = [f"{d.path}: {_short(d.one)} in {one}, {_short(d.other)} in {other}" for d in rows]
    return some(texts, most, "; ")


def _short(text: str) -> str:
    return (
        "nothing" if not text else text if len(text) <= 300 else f"{text[:280]}... ({len(text)} characters)"
    )


def _rows_of(value: Any, depth: int) -> dict[str, str]:
    """Returns the rows of one value by itself."""
    inside = _AttributeWalk()
    inside.add("", value, depth)
    return inside.rows


class _AttributeWalk:
    """Collects the rows of attributes.

    rows: path -> text. seen: ids of modules and objects that have rows already. The module keeps all of them
    alive meanwhile, so no id is used twice.
    """

    def __init__(self) -> None:
        self.rows: dict[str, str] = {}
        self.seen: set[int] = set()

    def add(self, path: str, value: Any, depth: int) -> None:
        """Adds the rows of one value."""
        kind = type(value)
        package = kind.__module__.partition(".")[0]
        if len(self.rows) >= MOST:
            return
        if kind in _PLAIN:
            self.rows[path] = repr(value)
        elif isinstance(value, enum.Enum):
            self.rows[path] = f"{kind.__qualname__}.{value.name}"
        elif isinstance(value, torch.Tensor):
            self._tensor(path, value)
        elif package in _NOISE and not isinstance(value, (tuple, list, dict, nn.Module)):
            return
        elif isinstance(value, (bytearray, memoryview, array.array)):
            code = getattr(value, "typecode", getattr(value, "format", ""))
            self.rows[path] = f"{kind.__name__} {code!r} of {len(value)}, hash {_hash([bytes(value)])}"
        elif package == "numpy":
            self._array(path, value)
        elif isinstance(value, (int, float, complex, str, bytes)):  # of a class of the user
            base = next(b for b in (int, float, complex, str, bytes) if isinstance(value, b))
            self.rows[path] = f"{kind.__qualname__}({base.__repr__(value)})"
            self._attributes(path, value, depth)
        elif isinstance(value, _PRINTED):
            self.rows[path] = repr(value)
        elif isinstance(value, types.MethodType):
            self._function(path, value.__func__, depth)
            if not isinstance(value.__self__, nn.Module):
                self.add(f"{path}.self", value.__self__, depth - 1)
        elif isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
            self._function(path, value, depth)
        elif id(value) not in self.seen and not isinstance(value, types.ModuleType):
            self.seen.add(id(value))
            with contextlib.suppress(Exception):  # an object of the user may raise at any access
                self._container(path, value, depth)

    def _container(self, path: str, value: Any, depth: int) -> None:
        """Adds the rows of a value that contains other values."""
        if isinstance(value, functools.partial):
            self.add(f"{path}.func", value.func, depth - 1)
            self._items(path, [*enumerate(value.args), *value.keywords.items()], depth)
        elif isinstance(value, (list, tuple, deque)):
            names = getattr(value, "_fields", None) if isinstance(value, tuple) else None
            empty = "" if value else f"an empty {type(value).__name__}"
            self._items(path, list(zip(names or range(len(value)), value)), depth, empty)
            self._attributes(path, value, depth)
        elif isinstance(value, (dict, types.MappingProxyType)):
            items = [(item_name(k, i), v) for i, (k, v) in enumerate(value.items())]
            self._items(path, items, depth, "" if value else "an empty dict")
            if isinstance(value, defaultdict):
                self.add(f"{path}.default_factory", value.default_factory, depth - 1)
            self._attributes(path, value, depth)
        elif isinstance(value, (set, frozenset)):
            # an order of items that is the same in another module, whose items may have another hash
            plain = all(type(item) in _PLAIN for item in value)
            items = sorted(value, key=repr if plain else lambda item: repr(_rows_of(item, depth - 1)))
            self._items(path, list(enumerate(items)), depth, "" if value else "an empty set")
        else:
            self.rows[path] = f"a {type(value).__qualname__}"
            self._attributes(path, value, depth)

    def _attributes(self, path: str, value: Any, depth: int) -> None:
        """Adds the attributes of an object, from its slots and its dict."""
        module = isinstance(value, nn.Module)
        attributes = (
            {**dict(_user_attributes(value)), **submodules_of(value)} if module else own_attributes(value)
        )
        items = [(k, v) for k, v in attributes.items() if not k.endswith("__")]
        if items:
            self._items(path, items, depth)

    def _items(self, path: str, parts: Sequence[tuple[Any, Any]], depth: int, empty: str = "") -> None:
        """Adds a row for each item, or one with a hash for many. empty: the text if there are no items."""
        if empty:
            self.rows[path] = empty
        if depth <= 0:
            return
        if len(parts) <= LONG:
            for key, value in parts:
                self.add(f"{path}.{key}", value, depth - 1)
            return
        inside = _AttributeWalk()
        inside.seen = self.seen
        for key, value in parts:
            inside.add(f"{key}", value, depth - 1)
        digest = _hash(f"{k}={v};".encode() for k, v in inside.rows.items())
        self.rows[path] = f"{len(parts)} things, hash {digest}"

    def _function(self, path: str, value: Any, depth: int) -> None:
        """Adds the name of a function or class, and for a Python function its closure and defaults."""
        self.rows[path] = f"{value.__module__}.{value.__qualname__}"
        if isinstance(value, types.FunctionType) and id(value) not in self.seen and depth > 0:
            self.seen.add(id(value))
            defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
            for name, held in (*closure(value), *((f"default.{i}", d) for i, d in enumerate(defaults))):
                self.add(f"{path}.{name}", held, depth - 1)

    def _tensor(self, path: str, value: torch.Tensor) -> None:
        """Adds a tensor: its numbers if they are few, else its shape and a hash."""
        name = f"{str(value.dtype).partition('.')[2]}{list(value.shape)}"
        self.rows[path] = name
        plain = type(value) in (torch.Tensor, nn.Parameter) and value.layout == torch.strided
        if not plain or value.device.type != "cpu" or not value.numel():
            return
        if value.numel() <= _FEW:
            self.rows[path] = f"{name} {value.tolist()}"
            return
        flat = value.detach().resolve_conj().resolve_neg().reshape(-1)
        parts = [p.contiguous() for p in _ends(flat, flat.element_size())]
        digest = _hash(ctypes.string_at(p.data_ptr(), p.numel() * p.element_size()) for p in parts)
        self.rows[path] = f"tensor {name}, hash {digest}"

    def _array(self, path: str, value: Any) -> None:
        """Adds a NumPy scalar or array. NumPy is not imported here, because it may not be installed."""
        dtype, size = getattr(value, "dtype", None), getattr(value, "size", 0)
        if dtype is None or not hasattr(value, "tobytes") or dtype.hasobject:
            return
        if size <= 16:
            self.rows[path] = f"{dtype}({value.tolist()!r})"
        else:
            digest = _hash(p.tobytes() for p in _ends(value.reshape(-1), dtype.itemsize))
            self.rows[path] = f"{dtype}{list(value.shape)}, hash {digest}"


def _ends(flat: Any, item_bytes: int) -> list[Any]:
    """Returns what is hashed of a flat array: all of it, or its beginning and its end."""
    step = max(1, _HASHED_BYTES // item_bytes)
    return [flat] if len(flat) <= 2 * step else [flat[:step], flat[-step:]]


def _hash(parts: Iterable[bytes]) -> str:
    digest = hashlib.blake2b(digest_size=6)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
