"""Copies a module with the functions that it holds.

`copy.deepcopy` keeps functions, weakrefs and built-in methods as they are. So in its copy a hook, a lambda
or a patched forward still uses the original. Here a function whose closure, defaults or globals lead to what
is copied is copied too, and reads the copies.

| value | in the copy |
|---|---|
| function that holds what changes | a function with the same code, and copies of what it holds |
| class whose methods hold what changes, defined in a function | a class with copies of these methods |
| `weakref.ref`, `WeakMethod`, proxy, weak collection | one that refers to the copy |
| built-in method (`self.rows.append`) | the method of the copied object |
| `fx.GraphModule` | a module with a copy of the graph, and all attributes |
| tensor that autograd computed | a detached copy |
| view of a weight | a view of the copied weight |
| lock; `torch.Generator` | a new lock; a generator in the same state |
| what cannot be copied (a file, a Python module, a running generator) | the original |

Other values are copied by `copy.deepcopy`, which looks each one up in `CopyMemo` first.
"""

from __future__ import annotations

import contextlib
import copy
import dis
import functools
import threading
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import fx, nn

from ..capture.reachable import STRONG, OwnGlobals, edges, globals_of, is_atom, target_of, walk
from ..ir.torch_internals import memory_id

_LOCKS = {type(threading.Lock()): threading.Lock, type(threading.RLock()): threading.RLock}
_WEAK_COLLECTIONS = (weakref.WeakSet, weakref.WeakKeyDictionary, weakref.WeakValueDictionary)
_PLAIN_KINDS = (
    list,
    tuple,
    set,
    frozenset,
    dict,
    nn.Module,
    torch.Tensor,
    types.FunctionType,
    types.MethodType,
)
_LEFT_OUT = frozenset({"__dict__", "__weakref__", "_abc_impl", "__abstractmethods__"})
"""What `type` makes anew for each class."""

_WRAPPERS = (staticmethod, classmethod)


def copy_module(
    module: nn.Module, weights: Mapping[int, torch.Tensor], owned: Collection[int] = ()
) -> tuple[nn.Module, Mapping[int, Any]]:
    """Returns a copy of a module, and what was copied: the copy of each object by the object's id.

    Args:
        module: The module. It does not change.
        weights: What takes the place of its parameters and buffers, by their ids.
        owned: The ids of modules. A function that reads one of these by a global name gets a copy of it.
    """
    memo = CopyMemo(module, weights, {*owned, *map(id, module.modules())})
    result: nn.Module = copy.deepcopy(module, memo)
    memo.finish()
    for old in module.modules():
        for value in (*old.parameters(recurse=False), *old.buffers(recurse=False)):
            if vars(value):  # torch copies no attributes of a parameter
                vars(memo[id(value)]).update(copy.deepcopy(vars(value), memo))
    memo.finish()
    return result, memo


class CopyMemo(dict[Any, Any]):
    """The memo of a `copy.deepcopy`, which makes the copies that deepcopy would not make."""

    def __init__(self, root: Any, weights: Mapping[int, torch.Tensor], owned: Collection[int]) -> None:
        super().__init__(weights)
        self._makers: dict[int, Callable[[], Any]] = {}
        self._left: list[Callable[[], None]] = []  # what is filled in when all objects exist
        self._held = [r.value for r in walk(root, STRONG)]
        self._ids = set(map(id, self._held))
        self._add_classes({*owned, *weights})
        self._globals = {
            id(v): own for v in self._held if isinstance(v, types.FunctionType) and (own := _own(v, owned))
        }
        for function in self._globals:  # what these globals lead to is held by the copy, too
            for value in self._globals[function].values():
                self._held += [r.value for r in walk(value, STRONG) if id(r.value) not in self._ids]
                self._ids.update(map(id, self._held))
        self._plan_functions()
        by_memory: dict[int, list[torch.Tensor]] = {}
        for value in self._held:
            if id(value) in weights:
                by_memory.setdefault(memory_id(value), []).append(value)
        for value in self._held:
            self.update({id(e.value): e.value for e in edges(value) if isinstance(e.value, types.ModuleType)})
            if id(value) not in self and id(value) not in self._makers:
                self._plan(value, by_memory)

    def _add_classes(self, owned: Collection[int]) -> None:
        """Plans copies of the classes that hold parts of the module. What they lead to is held, too."""
        self._classes: dict[int, type] = {}
        new: list[type] = _classes_that_hold(self._held, owned)
        while new:
            self._classes.update({id(cls): cls for cls in new})
            before = len(self._held)
            for value in [v for cls in new for v in _class_values(cls)]:
                self._held += [r.value for r in walk(value, STRONG) if id(r.value) not in self._ids]
                self._ids.update(map(id, self._held))
            found = _classes_that_hold([*self._held[before:], *new], owned)
            new = [cls for cls in found if id(cls) not in self._classes]
        for cls in self._classes.values():
            self._makers[id(cls)] = functools.partial(self._class, cls)

    def get(self, key: Any, default: Any = None) -> Any:
        """Returns the copy of the object with this id; the default lets deepcopy make it."""
        if key in self:
            return self[key]
        maker = self._makers.pop(key, None)
        if maker is None:
            return default
        made = maker()
        return self.setdefault(key, made)

    def finish(self) -> None:
        """Fills closures, defaults and weak collections. More may come up meanwhile."""
        while self._left:
            self._left.pop()()

    def _copy(self, value: Any) -> Any:
        return copy.deepcopy(value, self)

    def _plan(self, value: Any, by_memory: Mapping[int, list[torch.Tensor]]) -> None:
        """Plans the copy of one value that deepcopy does not copy right."""
        make: Callable[[], Any] | None = None
        if isinstance(value, torch.Tensor):
            make = self._tensor(value, by_memory)
        elif type(value) in weakref.ProxyTypes or isinstance(value, weakref.ref):
            make = self._weak(value)
        elif isinstance(value, (types.BuiltinFunctionType, types.MethodWrapperType)):
            if not is_atom(value.__self__):
                make = lambda: getattr(self._copy(value.__self__), value.__name__)  # noqa: E731
        elif isinstance(value, types.MethodType):  # deepcopy would keep its function
            make = lambda: types.MethodType(self._copy(value.__func__), self._copy(value.__self__))  # noqa: E731
        elif isinstance(value, _WEAK_COLLECTIONS):
            make = lambda: self._weak_collection(value)  # noqa: E731
        elif isinstance(value, fx.GraphModule):
            make = lambda: self._graph_module(value)  # noqa: E731
        elif type(value) in _LOCKS:
            make = _LOCKS[type(value)]
        elif isinstance(value, torch.Generator):
            make = value.clone_state
        elif not _copyable(value):
            make = lambda: value  # noqa: E731
        if make is not None:
            self._makers[id(value)] = make

    def _tensor(
        self, value: torch.Tensor, by_memory: Mapping[int, list[torch.Tensor]]
    ) -> Callable[[], Any] | None:
        """Returns what copies a tensor; None for a tensor that deepcopy copies right."""
        if value.layout is torch.strided and type(value) is torch.Tensor:
            for weight in by_memory.get(memory_id(value), ()):
                target: torch.Tensor = self[id(weight)]
                if target.stride() == weight.stride() and is_view(value, weight):
                    offset = value.storage_offset() - weight.storage_offset() + target.storage_offset()
                    return lambda: target.detach().as_strided(value.size(), value.stride(), offset)
        return None if value.is_leaf else lambda: value.detach().clone()

    def _weak(self, value: Any) -> Callable[[], Any] | None:
        target = target_of(value)
        if isinstance(value, weakref.WeakMethod):
            owner = None if target is None else target.__self__
            return (
                (lambda: weakref.WeakMethod(self._copy(target))) if id(owner) in self._ids else lambda: value
            )
        if target is None or id(target) not in self._ids:  # nothing in the copy would keep its target alive
            return lambda: value
        make = weakref.proxy if type(value) in weakref.ProxyTypes else weakref.ref
        return lambda: make(self._copy(target))

    def _weak_collection(self, value: Any) -> Any:
        new = type(value)()

        def fill() -> None:
            if isinstance(value, weakref.WeakSet):
                new.update([self._copy_if_held(v) for v in value])
            else:
                new.update({self._copy_if_held(k): self._copy_if_held(v) for k, v in value.items()})

        self._left.append(fill)
        return new

    def _copy_if_held(self, value: Any) -> Any:
        return self._copy(value) if id(value) in self._ids else value

    def _graph_module(self, value: fx.GraphModule) -> Any:
        new = fx.GraphModule.__new__(type(value))
        self[id(value)] = new
        vars(new).update(self._copy(vars(value)))
        new.graph = vars(new)["_graph"]  # also compiles its forward
        return new

    # ---------------------------------------------------------------- functions

    def _plan_functions(self) -> None:
        """Plans copies of functions that lead to something that is copied, or that write to a closure."""
        functions = [v for v in self._held if isinstance(v, types.FunctionType)]
        chosen = {id(f) for f in functions if id(f) in self._globals or _writes_closure(f)}
        before = -1
        while len(chosen) > before:
            before = len(chosen)
            for f in functions:
                if any(not self._constant(e.value, chosen) for e in edges(f) if e.how == "strong"):
                    chosen.add(id(f))
        for f in functions:
            if id(f) in chosen:
                self._makers[id(f)] = functools.partial(self._function, f)

    def _constant(self, value: Any, chosen: Collection[int]) -> bool:
        """Whether a value is the same in the copy."""
        if isinstance(value, types.FunctionType):
            return id(value) not in chosen
        if isinstance(value, (tuple, frozenset)):
            return all(self._constant(v, chosen) for v in value)
        if isinstance(value, types.BuiltinFunctionType):
            return is_atom(value.__self__)
        if isinstance(value, type):
            return id(value) not in self._classes
        return is_atom(value)

    def _function(self, old: types.FunctionType) -> types.FunctionType:
        own = self._globals.get(id(old))
        copied: dict[str, Any] = {}
        namespace = OwnGlobals(copied, old.__globals__) if own else old.__globals__
        cells = tuple(map(self._cell, old.__closure__ or ()))
        new = types.FunctionType(old.__code__, namespace, old.__name__, None, cells or None)
        new.__qualname__, new.__module__, new.__doc__ = old.__qualname__, old.__module__, old.__doc__

        def fill() -> None:
            new.__defaults__ = self._copy(old.__defaults__)
            new.__kwdefaults__ = self._copy(old.__kwdefaults__)
            new.__annotations__ = old.__annotations__
            vars(new).update(self._copy(vars(old)))
            if own:
                namespace.update({name: self._copy(value) for name, value in own.items()})

        self._left.append(fill)
        return new

    def _class(self, old: type) -> type:
        new = _new_class(old, tuple(self._copy(base) for base in old.__bases__))
        self._left.append(lambda: _fill_class(new, old, self._copy))
        return new

    def _cell(self, old: types.CellType) -> types.CellType:
        if id(old) in self:
            cell: types.CellType = self[id(old)]
            return cell
        new = self[id(old)] = types.CellType()
        self._held.append(old)  # its id stays its own

        def fill() -> None:
            try:
                contents = old.cell_contents
            except ValueError:  # empty
                return
            new.cell_contents = self._copy(contents)

        self._left.append(fill)
        return new


def is_view(value: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the numbers of a tensor are numbers of a weight, in the same memory and dtype."""
    if memory_id(value) != memory_id(weight) or value.dtype != weight.dtype:
        return False
    (first, last), (start, end) = _extent(value), _extent(weight)
    return start <= first and last <= end


def _extent(value: torch.Tensor) -> tuple[int, int]:
    """Returns the places of the first and the last number of a tensor in its memory."""
    first = value.storage_offset()
    return int(first), int(first + sum((n - 1) * s for n, s in zip(value.shape, value.stride()) if n))


def _own(function: types.FunctionType, owned: Collection[int]) -> dict[str, Any]:
    """Returns the globals that a function reads and that lead to an owned module."""
    return {
        name: value
        for name, value in globals_of(function).items()
        if any(id(r.value) in owned for r in walk(value, STRONG))
    }


@functools.lru_cache(maxsize=4096)
def _stores(code: types.CodeType) -> frozenset[str]:
    """Returns the names of closure variables that code assigns to, also in the functions that it defines."""
    names = {str(i.argval) for i in dis.get_instructions(code) if i.opname in ("STORE_DEREF", "DELETE_DEREF")}
    return frozenset(names).union(*(_stores(c) for c in code.co_consts if isinstance(c, types.CodeType)))


def _writes_closure(function: types.FunctionType) -> bool:
    return bool(_stores(function.__code__) & set(function.__code__.co_freevars))


def _copyable(value: Any) -> bool:
    """Whether `copy.deepcopy` can copy a value. Files, generators and objects of C may refuse it."""
    if is_atom(value) or isinstance(value, _PLAIN_KINDS) or hasattr(type(value), "__deepcopy__"):
        return not isinstance(value, types.ModuleType)
    try:
        value.__reduce_ex__(4)
    except Exception:  # noqa: BLE001  # whatever the class raises
        return False
    return True


# ---------------------------------------------------------------- classes
# A class that is defined in a function may hold a module in the closures of its methods or in its body. Every
# instance reads that module, and so does a copied instance, unless its class is copied too.


def _classes_that_hold(values: Iterable[Any], owned: Collection[int]) -> list[type]:
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


def _class_values(cls: type) -> Iterator[Any]:
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
    for value in _class_values(cls):
        inner += _classes_in(value)
        read = globals_of(value).values() if isinstance(value, types.FunctionType) else ()
        for root in (value, *read):
            if any(id(r.value) in owned for r in walk(root, ("strong", "weak", "class"))):
                return True
    return any(_leads(other, owned, seen) for other in inner if id(other) not in seen)


def _new_class(old: type, bases: tuple[type, ...]) -> type:
    """Returns a class with the body of another one, which `_fill_class` replaces by copies."""
    slots = vars(old).get("__slots__", ())
    left_out = {*_LEFT_OUT, *((slots,) if isinstance(slots, str) else slots)}
    new = type(old)(old.__name__, bases, {k: v for k, v in vars(old).items() if k not in left_out})
    new.__qualname__ = old.__qualname__
    return new


def _fill_class(new: type, old: type, copied: Callable[[Any], Any]) -> None:
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
