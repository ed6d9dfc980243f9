"""Lets a member's code read the values of its own tensors during an export.

A branch such as `if self.initted:`, an assert on a buffer or `range(self.steps.item())` depends on no
input. So
if an export fails where a value is read, it is repeated, and every value that the member computes from
its own
parameters, buffers and attributes alone is read from the member's real tensors. The program then holds for
members that have these tensors only: `Literal` names each of them.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ...ir.torch_internals import is_traced, memory_id, without_modes
from ..explain import user_frame
from ..module_tensors import tensors_of

_READS = {
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "__complex__",
    "__contains__",
    "__format__",
    "item",
    "tolist",
    "numpy",
    "equal",
    "allclose",
    "is_nonzero",
}
"""Functions that give a value of Python."""
_MADE = {"tensor", "as_tensor", "zeros", "ones", "full", "arange", "eye", "linspace"}
"""Functions without a tensor among their arguments, whose results may be read."""


@dataclass(frozen=True)
class Literal:
    """A tensor of a member whose value the program depends on. line: the user's line that reads it."""

    name: str
    line: str


@dataclass(frozen=True)
class _OwnValue:
    """The real value of a tensor of the export, and the names of the member's tensors behind it."""

    tensor: Tensor
    names: frozenset[str]


class _Random(Exception):
    """A value is drawn at random."""


class _NoDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's class has no types
    """Refuses random ops."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise _Random
        return func(*args, **(kwargs or {}))


class MemberValues(TorchFunctionMode):
    """Follows the values that depend on a member's own tensors alone, and lets them be read.

    Args:
        module: The member that is exported. Its tensors are real until the export begins.
        inputs: The names of its buffers that are states, which are inputs of the program.

    Attributes:
        literals: What was read, by name.
    """

    def __init__(self, module: nn.Module, inputs: Sequence[str] = ()) -> None:
        super().__init__()
        self.literals: dict[str, Literal] = {}
        self._module = module
        self._own = {n: t for n, t in _tensors(module).items() if n not in inputs}
        self._plain = {id(t): n for n, t in tensors_of(module)}
        self._names: dict[int, str] = {}
        self._seen: dict[
            int, tuple[Tensor, _OwnValue | None]
        ] = {}  # tensors stay alive, so ids are not used again

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if not is_traced():
            return func(*args, **named)
        flat = pytree.tree_leaves((args, named))
        tensors = [v for v in flat if isinstance(v, Tensor)]
        name = getattr(func, "__name__", "")
        values = [self._value(t) for t in tensors]
        known = all(v is not None for v in values) and (bool(tensors) or name in _MADE)
        known = known and not any(isinstance(v, (torch.SymInt, torch.SymFloat, torch.SymBool)) for v in flat)
        real = self._computed(func, args, named) if known else None
        if name in _READS and known and real is not None and not isinstance(real, Tensor):
            self._note(values)
            return real
        result = func(*args, **named)
        self._follow(name, args, named, result, real, values)
        return result

    def _value(self, tensor: Tensor) -> _OwnValue | None:
        """Returns the real value of a tensor of the export; None if it depends on inputs."""
        seen = self._seen.get(id(tensor))
        if seen is None or seen[0] is not tensor:
            self._set(tensor, self._first(tensor))
            seen = self._seen[id(tensor)]
        return seen[1]

    def _first(self, tensor: Tensor) -> _OwnValue | None:
        """Returns the value of a tensor that is no result of the export."""
        if id(tensor) not in self._names:
            self._names = {id(t): n for n, t in _tensors(self._module).items()}
        name = self._names.get(id(tensor), "")
        if name in self._own:
            return _OwnValue(_copy(self._own[name]), frozenset({name}))
        if id(tensor) in self._plain:
            return _OwnValue(_copy(tensor), frozenset({self._plain[id(tensor)]}))
        return None

    def _set(self, tensor: Tensor, value: _OwnValue | None) -> None:
        self._seen[id(tensor)] = tensor, value

    def _computed(self, func: Callable[..., Any], args: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Returns what a function gives for the real values; None if it fails or draws."""

        def real(v: Any) -> Any:
            value = self._value(v) if isinstance(v, Tensor) else None
            return v if value is None else value.tensor

        try:
            with without_modes(), _NoDraws(), torch.no_grad():  # type: ignore[no-untyped-call]
                given, more = pytree.tree_map(real, (list(args), dict(named)))
                return func(*given, **more)
        except Exception:  # noqa: BLE001  # the export raises it too, or the value is not read
            return None

    def _follow(
        self,
        name: str,
        args: Sequence[Any],
        named: Mapping[str, Any],
        result: Any,
        real: Any,
        values: Sequence[_OwnValue | None],
    ) -> None:
        """Notes the real values of the results of a function."""
        results = [v for v in pytree.tree_leaves(result) if isinstance(v, Tensor)]
        computed = [v for v in pytree.tree_leaves(real) if isinstance(v, Tensor)]
        if real is not None and len(results) == len(computed):
            names = frozenset(n for v in values if v is not None for n in v.names)
            for tensor, value in zip(results, computed):
                self._set(tensor, _OwnValue(value, names))
            return
        writes = (name.endswith("_") and not name.endswith("__")) or name.startswith("__i") or "out" in named
        if writes or name in ("__setitem__", "batch_norm", "instance_norm"):
            self._forget([v for v in pytree.tree_leaves((args, named)) if isinstance(v, Tensor)])
        for tensor in results:
            self._set(tensor, None)

    def _forget(self, written: Sequence[Tensor]) -> None:
        """Forgets the values of tensors that may have got values of inputs, and of their views."""
        found = [value for t in written if (value := self._value(t)) is not None]
        places = {memory_id(v.tensor) for v in found}
        for key, (tensor, value) in list(self._seen.items()):
            if value is not None and memory_id(value.tensor) in places:
                self._seen[key] = tensor, None

    def _note(self, values: Sequence[_OwnValue | None]) -> None:
        """Notes that the code read a value."""
        line = user_frame(traceback.extract_stack())
        for name in sorted({n for v in values if v is not None for n in v.names}):
            self.literals.setdefault(name, Literal(name, line))


def _copy(tensor: Tensor) -> Tensor:
    with without_modes(), torch.no_grad():
        return tensor.detach().clone()


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Returns the parameters and buffers of a module under all their names."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


@contextmanager
def values_read(values: MemberValues | None) -> Iterator[None]:
    """Lets an export inside a with block read a member's values, if `values` is given."""
    if values is None:
        yield
    else:
        with values:
            yield
