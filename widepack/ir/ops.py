"""Names of ops and the ops themselves.

`aten.linear.default` <-> `torch.ops.aten.linear.default`, `operator.mul` <-> `operator.mul`. Only names of the format's allow-list (and those that a
service adds itself with `allow_ops`) are looked up: a name from a file never reaches `getattr` before that check.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any

import torch

from widepack_artifacts.opset import EXTRA, allowed

from ..kernels import packed  # defines widepack's own ops, with all that it imports
from ..errors import ArtifactError, UsageError
from ..kernels.library import FUNCTIONS

Op = Callable[..., Any]

PYTHON: dict[str, Op] = {
    "operator.getitem": operator.getitem,
    "operator.add": operator.add,
    "operator.sub": operator.sub,
    "operator.mul": operator.mul,
    "operator.floordiv": operator.floordiv,
    "operator.mod": operator.mod,
    "operator.neg": operator.neg,
    "operator.truediv": operator.truediv,
    "operator.pow": operator.pow,
    "operator.eq": operator.eq,
    "operator.ne": operator.ne,
    "operator.lt": operator.lt,
    "operator.le": operator.le,
    "operator.gt": operator.gt,
    "operator.ge": operator.ge,
    "math.ceil": lambda x: -(-x // 1),
    "torch.sym_max": torch.sym_max,
    "torch.sym_min": torch.sym_min,
    "torch.sym_float": torch.sym_float,
    "torch.sym_int": torch.sym_int,
    "torch.sym_not": torch.sym_not,
    "torch.sym_ite": torch.sym_ite,
}
_NAMES = {op: name for name, op in PYTHON.items()}
_DIMS = {"dim", "dims", "dim0", "dim1", "start_dim", "end_dim", "axis", "source", "destination", "dimension", "dim2"}
_TRAINING = ("train", "training")
_CHANCES = ("dropout_p", "dropout", "p")


@cache
def resolve(name: str) -> Op:
    """The op of this name. Raises: ArtifactError when it is not on the list, or this torch does not have it."""
    if name in PYTHON:
        known: Op = PYTHON[name]
        return known
    if not allowed(name) or name == "loop":
        raise ArtifactError(f"the op {name!r} is not on the list of allowed ops{', or stands where none of its kind may' if name == 'loop' else ''}")
    space, op, overload = name.split(".")
    try:
        return getattr(getattr(getattr(torch.ops, space), op), overload)  # type: ignore[no-any-return]
    except AttributeError as e:
        if name in EXTRA:
            raise ArtifactError(f"there is no op {name!r} here; import the library that defines it first") from e
        raise ArtifactError(f"torch {torch.__version__} has no op {name!r}; load the artifact with the torch that wrote it, or a newer one") from e


_NAME = re.compile(r"(\w+)(?:::|\.)(\w+)(?:\.(\w+))?\Z", re.ASCII)


def library_name(op: Any) -> str:
    """The name in programs of an op of others: `mylib::op`, `mylib::op.overload`, or the op itself -> `mylib.op.default`. Raises: UsageError for what is none."""
    op = getattr(op, "_opoverload", op)  # of what torch.library.custom_op gives
    if isinstance(op, torch._ops.OpOverload):
        return name_of(op)
    found = _NAME.match(op) if isinstance(op, str) else None
    if found is None or found[1] in ("operator", "torch", "math", "widepack"):
        raise UsageError(f"{op!r} names no op of a library; give it as torch.library has it: 'mylib::op', or 'mylib::op.overload'")
    return f"{found[1]}.{found[2]}.{found[3] or 'default'}"


def allow(some: Iterable[Any]) -> frozenset[str]:
    """Let programs of this process ask for ops of others. Returns: their names in programs. Raises: UsageError for what is no op here, or writes into what it is given."""
    if isinstance(some, str):
        raise UsageError(f"allow_ops={some!r} is one name; give a list: [{some!r}]")
    names = frozenset(map(library_name, some))
    for name in names:
        space, op, overload = name.split(".")
        found = getattr(getattr(getattr(torch.ops, space), op, None), overload, None)
        if found is None:
            raise UsageError(f"there is no op {space}::{op}.{overload} here; import the library that defines it first")
        if found._schema.is_mutable:
            raise UsageError(f"{space}::{op}.{overload} writes into what it is given; ops of programs give new values: {found._schema}")
    EXTRA.update(names)
    return names


def function(name: str) -> Op:
    """What the flat graph calls: the op, or of widepack's own ops the Python function behind it, which a call through torch's dispatcher reaches later.

    Raises: as `resolve`.
    """
    return FUNCTIONS.get(name) or checked(name)


def checked(name: str) -> Op:
    """The op, or in the place of one that crashes on wrong arguments one that refuses them. Raises: as `resolve`."""
    return _CHECKED.get(name) or resolve(name)


@cache
def may_view(name: str) -> bool:
    """Whether its schema says that a result may look at the memory of an argument."""
    op = resolve(name)
    return isinstance(op, torch._ops.OpOverload) and any(r.alias_info is not None for r in op._schema.returns)


@cache
def only_views(name: str) -> bool:
    """Whether it makes no memory, whatever strides its arguments have: a view that torch itself does not put together of other ops."""
    op = resolve(name)
    return isinstance(op, torch._ops.OpOverload) and may_view(name) and op.is_view and not op._can_decompose()


def _alias(x: torch.Tensor, size: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """`aten._reshape_alias`, which looks at no memory, by an op that refuses what lies outside of the tensor's."""
    return torch.as_strided(x, size, stride)


def _stack(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """`aten._stack`, which takes tensors to be there and of one size, by the op that looks."""
    return torch.stack(list(tensors), dim)


_CHECKED: dict[str, Op] = {"aten._reshape_alias.default": _alias, "aten._stack.default": _stack}


def name_of(op: Any) -> str:
    """The name under which an op is written, known to the format or not."""
    if op in _NAMES:
        return _NAMES[op]
    if isinstance(op, torch._ops.OpOverload):
        return f"{op.namespace}.{op._schema.name.split('::')[1]}.{op._overloadname}"
    return f"{getattr(op, '__module__', '')}.{getattr(op, '__name__', op)}"


@cache
def arguments(name: str) -> tuple[tuple[str, str, Any], ...]:
    """(name, type, default) of the op's arguments by its schema; empty for Python's operators."""
    op = resolve(name)
    if not isinstance(op, torch._ops.OpOverload):
        return ()
    return tuple((a.name, str(a.type), a.default_value if a.has_default_value() else None) for a in op._schema.arguments)


@cache
def enumerations(name: str) -> frozenset[str]:
    """The names of those arguments that are a dtype, a layout or a memory format: torch takes any number there, and reads memory with it."""
    op = resolve(name)
    if not isinstance(op, torch._ops.OpOverload):
        return frozenset()
    return frozenset(a.name for a in op._schema.arguments if any(k in str(a.real_type) for k in ("ScalarType", "Layout", "MemoryFormat")))


def bind(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by their schema's names, defaults left out."""
    names = [a[0] for a in arguments(name)]
    return {**dict(zip(names, args)), **kwargs}


@cache
def dim_arguments(name: str) -> tuple[str, ...]:
    """The names of those arguments that number dims."""
    return tuple(a for a, type_, _ in arguments(name) if a in _DIMS and ("int" in type_ or "Int" in type_))


_UNTAGGED = {"aten.repeat_interleave.self_Tensor", "aten.where.default", "aten.nonzero_numpy.default"}


@cache
def of_values(name: str) -> bool:
    """Whether values tell the op's result, or the size of it: a number that is read, the places where something holds. Of two equal calls each has a size of its own."""
    if name in _UNTAGGED:
        return True
    tags = getattr(resolve(name), "tags", ())
    return torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags


def pure(name: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] = MappingProxyType({})) -> bool:
    """Whether this call writes to nothing and draws no random numbers; an op that could drop out does not where it is told not to."""
    if _pure(name):
        return True
    if _writes(name):
        return False
    given = {a: default for a, _, default in arguments(name)} | bind(name, tuple(args), dict(kwargs))
    return any(given.get(a) is False for a in _TRAINING) or any(isinstance(p := given.get(a), (int, float)) and p == 0 for a in _CHANCES)


def repeats(name: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] = MappingProxyType({})) -> bool:
    """Whether two equal calls are one: the op is pure, and the size of its result is not data."""
    return pure(name, args, kwargs) and not of_values(name)


@cache
def _pure(name: str) -> bool:
    op = resolve(name)
    return not isinstance(op, torch._ops.OpOverload) or (not op._schema.is_mutable and torch.Tag.nondeterministic_seeded not in op.tags)


@cache
def _writes(name: str) -> bool:
    op = resolve(name)
    return isinstance(op, torch._ops.OpOverload) and op._schema.is_mutable
