"""Lets a member's code read the values of its own tensors during an export.

A branch such as `if self.initted:`, an assert on a buffer or `range(self.steps.item())` depends on no
input. So if an export fails where a value is read, it is repeated, and every value that the member computes
from its own parameters, buffers and attributes alone is read from the member's real tensors. The program then
holds only for members of which the code reads the same: `Literal` says what was read, as an expression where
the format has one for it (`scale > 0`), else as the values of all tensors behind it.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from widepack_artifacts.literals import ARITY, CASTS, Expression, Literal, fits

from ...ir.torch_internals import is_traced, memory_id, without_modes
from ..explain import user_frame
from ..exported import state_tensors
from ..reachable import tensors_of

_READS = {
    "__bool__", "__int__", "__float__", "__index__", "__complex__", "__contains__", "__format__", "item",
    "tolist", "numpy", "equal", "allclose", "is_nonzero",
}  # fmt: skip
"""Functions that give a value of Python."""
_MADE = {"tensor", "as_tensor", "zeros", "ones", "full", "arange", "eye", "linspace"}
"""Functions without a tensor among their arguments, whose results may be read."""
_SAME = {Tensor.detach, Tensor.clone, Tensor.contiguous, torch.detach, torch.clone}
"""Functions whose result has the values of the tensor."""
_METHODS = {
    **{f"__{op}__": op for op in ("eq", "ne", "lt", "le", "gt", "ge")},
    "__and__": "bitwise_and",
    "__or__": "bitwise_or",
    "__invert__": "bitwise_not",
    "bool": "bool",
    "long": "int64",
    "float": "float32",
    "double": "float64",
}
_OPS = {
    **{getattr(torch, op): op for op in ARITY if op not in CASTS},
    **{getattr(Tensor, op): op for op in ARITY if op not in CASTS},
    **{getattr(Tensor, name): op for name, op in _METHODS.items()},
}
"""The functions that an expression has, and its names for them."""


@dataclass(frozen=True)
class _Followed:
    """The real value of a tensor of the export, and the names of the member's tensors behind it.

    expression: how it is computed from them; None if the format has no form for it.
    """

    tensor: Tensor
    names: frozenset[str]
    expression: Expression | None = None


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
        literals: What was read, by expression.
    """

    def __init__(self, module: nn.Module, inputs: Sequence[str] = ()) -> None:
        super().__init__()
        self.literals: dict[Expression, Literal] = {}
        self._module = module
        self._saved = frozenset(module.state_dict())
        self._own = {n: t for n, t in state_tensors(module).items() if n not in inputs}
        self._plain = {id(t): n for n, t in tensors_of(module)}
        self._names: dict[int, str] = {}
        # tensors stay alive, so ids are not used again
        self._seen: dict[int, tuple[Tensor, _Followed | None]] = {}

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
            self._note(self._read(name, args, values), values)
            return real
        result = func(*args, **named)
        self._follow(func, name, args, named, result, real, values)
        return result

    def _value(self, tensor: Tensor) -> _Followed | None:
        """Returns the real value of a tensor of the export; None if it depends on inputs."""
        seen = self._seen.get(id(tensor))
        if seen is None or seen[0] is not tensor:
            self._set(tensor, self._first(tensor))
            seen = self._seen[id(tensor)]
        return seen[1]

    def _first(self, tensor: Tensor) -> _Followed | None:
        """Returns the value of a tensor that is no result of the export."""
        if id(tensor) not in self._names:
            self._names = {id(t): n for n, t in state_tensors(self._module).items()}
        name = self._names.get(id(tensor), "")
        if name in self._own:
            return _Followed(_copy(self._own[name]), frozenset({name}), name)
        if id(tensor) in self._plain:
            plain = self._plain[id(tensor)]
            return _Followed(_copy(tensor), frozenset({plain}), plain)
        return None

    def _set(self, tensor: Tensor, value: _Followed | None) -> None:
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
        func: Callable[..., Any],
        name: str,
        args: Sequence[Any],
        named: Mapping[str, Any],
        result: Any,
        real: Any,
        values: Sequence[_Followed | None],
    ) -> None:
        """Notes the real values of the results of a function."""
        results = [v for v in pytree.tree_leaves(result) if isinstance(v, Tensor)]
        computed = [v for v in pytree.tree_leaves(real) if isinstance(v, Tensor)]
        if real is not None and len(results) == len(computed):
            names = frozenset(n for v in values if v is not None for n in v.names)
            expression = self._expression(func, args, named) if len(results) == 1 else None
            for tensor, value in zip(results, computed):
                self._set(tensor, _Followed(value, names, expression))
            if _writes(name, named):
                self._forget((args, named), known=True)
            return
        # `x[i] = y` is `set_item` during an export
        writing = ("__setitem__", "set_item", "__set__", "batch_norm", "instance_norm")
        if _writes(name, named) or name.partition(".")[0] in writing:
            self._forget((args, named))
        for tensor in results:
            self._set(tensor, None)

    def _forget(self, written: Any, known: bool = False) -> None:
        """Forgets the values of tensors that may have got values of inputs, and of their views.

        known: what was written is known: only the expressions are forgotten.
        """
        tensors = [v for v in pytree.tree_leaves(written) if isinstance(v, Tensor)]
        found = [value for t in tensors if (value := self._value(t)) is not None]
        places = {memory_id(v.tensor) for v in found}
        for key, (tensor, value) in list(self._seen.items()):
            if value is not None and memory_id(value.tensor) in places:
                self._seen[key] = tensor, replace(value, expression=None) if known else None

    def _expression(
        self, func: Callable[..., Any], args: Sequence[Any], named: Mapping[str, Any]
    ) -> Expression | None:
        """Returns the result of a function as an expression over the member's tensors, if there is one.

        An expression is over saved tensors only, or over others only: an artifact has the former.
        """
        values = [self._value(v) if isinstance(v, Tensor) else v for v in args]
        parts = [v.expression if isinstance(v, _Followed) else v for v in values]
        op = _OPS.get(func, "")
        if func in (Tensor.to, Tensor.type) and len(parts) == 2 and isinstance(parts[1], torch.dtype):
            op, parts = str(parts[1]).removeprefix("torch."), parts[:1]
        if func in _SAME and len(parts) == 1 and not named:
            return parts[0]
        if ARITY.get(op) != len(parts) or named or not all(map(_is_part, parts)):
            return None
        found = (op, *parts)
        saved = {n in self._saved for v in values if isinstance(v, _Followed) for n in v.names}
        sizes = {v.tensor.shape for v in values if isinstance(v, _Followed) and v.tensor.numel() != 1}
        return found if fits(found) and len(saved) == 1 and len(sizes) < 2 else None

    def _read(self, name: str, args: Sequence[Any], values: Sequence[_Followed | None]) -> Expression | None:
        """Returns what a function of this name reads, as an expression over the member's tensors."""
        found = values[0].expression if len(values) == 1 and values[0] is not None else None
        if name == "equal" and len({v.tensor.shape for v in values if v is not None}) == 1:
            found = self._expression(torch.eq, args, {})
            return found and ("all", found)
        return ("bool", found) if found is not None and name in ("__bool__", "is_nonzero") else found

    def _note(self, read: Expression | None, values: Sequence[_Followed | None]) -> None:
        """Notes what the code read: an expression, or else the values of all tensors behind it."""
        line = user_frame(traceback.extract_stack())
        names = sorted({n for v in values if v is not None for n in v.names})
        for one in names if read is None or not fits(read) else [read]:
            self.literals.setdefault(one, Literal(one, line))


def _writes(name: str, named: Mapping[str, Any]) -> bool:
    """Whether a function writes into one of its arguments, by its name."""
    op = name.partition(".")[0]  # an op of `torch.ops` has the name of its overload, too
    in_place = op.startswith("__i") if op.endswith("__") else op.endswith("_")
    return (in_place and op != "__invert__") or "out" in named


def _is_part(value: Any) -> bool:
    """Whether a value may be an argument of an expression."""
    if type(value) is int:
        return bool(abs(value) < 2**63)
    return isinstance(value, (str, tuple)) or (type(value) is float and math.isfinite(value))


def _copy(tensor: Tensor) -> Tensor:
    with without_modes(), torch.no_grad():
        return tensor.detach().clone()
