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

import copy
import dis
import functools
import threading
import types
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import fx, nn

from ..capture.reachable import STRONG, OwnGlobals, edges, globals_of, is_atom, target_of, walk
from ..ir.torch_internals import memory_id
from . import local_classes

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
        new: list[type] = local_classes.classes_that_hold(self._held, owned)
        while new:
            self._classes.update({id(cls): cls for cls in new})
            before = len(self._held)
            for value in [v for cls in new for v in local_classes.values_of(cls)]:
                self._held += [r.value for r in walk(value, STRONG) if id(r.value) not in self._ids]
                self._ids.update(map(id, self._held))
            found = local_classes.classes_that_hold([*self._held[before:], *new], owned)
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
        new = local_classes.new_class(old, tuple(self._copy(base) for base in old.__bases__))
        self._left.append(lambda: local_classes.fill(new, old, self._copy))
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
