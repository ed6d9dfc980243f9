"""Finds ops by name and answers questions about them from their schemas.

`aten.linear.default` is `torch.ops.aten.linear.default`, `operator.mul` is Python's. Only names of the
format's allow-list, names that a service adds with `allow_ops`, and the ops of int8 weights, which no file
may contain, are looked up: a name from a file reaches `getattr` only after that check.

| look-up | returns |
|---|---|
| `resolve` | the op |
| `function` | what a graph calls for the op: behind checks of its operands, if a caller wants them |
| `direct` | the same, or a function of torch's public API that takes less time for each call |
| `checked` | the op behind all its checks, as torch's dispatcher and fake tensors need it |
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any, Literal, cast

import torch
from torch.nn import functional

from widepack_artifacts.opset import EXTRA, allowed

from ..errors import ArtifactError, UsageError
from ..kernels import experts as experts  # these modules define ops
from ..kernels import factored as factored
from ..kernels import grouped_experts as grouped_experts
from ..kernels import int8 as int8
from ..kernels import masked as masked
from ..kernels import member_convs as member_convs
from ..kernels import member_products as member_products
from ..kernels import mlp_chain as mlp_chain
from ..kernels import packed as packed
from ..kernels import recurrent as recurrent
from ..kernels import recurrent_training as recurrent_training
from ..kernels import sequences as sequences
from ..kernels import streamed as streamed
from ..kernels.checks import CHECKS, OF_VALUES
from ..kernels.library import FUNCTIONS
from ..kernels.pooling import max_pool2d
from ..kernels.replacements import REPLACEMENTS, limited
from ..kernels.traced_ops import opaque, traced_op
from .torch_internals import base_name, can_decompose, is_overload, overload_behind, overload_name, schema_of

Op = Callable[..., Any]

_OPERATORS = "getitem add sub mul floordiv mod neg truediv pow eq ne lt le gt ge"
_OF_SIZES = "sym_max sym_min sym_float sym_int sym_not sym_ite"
PYTHON: dict[str, Op] = {
    **{f"operator.{name}": getattr(operator, name) for name in _OPERATORS.split()},
    **{f"torch.{name}": getattr(torch, name) for name in _OF_SIZES.split()},
    "math.ceil": lambda x: -(-x // 1),
}
_NAMES = {op: name for name, op in PYTHON.items()}
_LIMITED = {name: limited(name, op) for name, op in PYTHON.items() if op is not operator.getitem}
_DIMS = {
    "dim", "dims", "dim0", "dim1", "dim2", "start_dim", "end_dim", "axis", "source", "destination",
    "dimension",
}  # fmt: skip
_TRAINING = ("train", "training")
_CHANCES = ("dropout_p", "dropout", "p")


@cache
def resolve(name: str) -> Op:
    """The op of this name.

    Raises: ArtifactError if it is not allowed, or this version of torch does not have it.
    """
    if name in PYTHON:
        return PYTHON[name]
    if not (allowed(name) or name in int8.OPS) or name == "loop":
        place = ", or not allowed at this place" if name == "loop" else ""
        raise ArtifactError(f"the op {name!r} is not on the list of allowed ops{place}")
    space, op, overload = name.split(".")
    try:
        return getattr(getattr(getattr(torch.ops, space), op), overload)  # type: ignore[no-any-return]
    except AttributeError as e:
        if name in EXTRA:
            raise ArtifactError(
                f"the op {name!r} does not exist; import the library that defines it first"
            ) from e
        raise ArtifactError(
            f"torch {torch.__version__} has no op {name!r}; load the artifact with the version of torch "
            "that wrote it, or a newer one"
        ) from e


_NAME = re.compile(r"(\w+)(?:::|\.)(\w+)(?:\.(\w+))?\Z", re.ASCII)


def library_name(op: Any) -> str:
    """The name in programs of an op of another library: `mylib::op`, `mylib::op.overload` or the op itself is
    `mylib.op.default`.

    Raises: UsageError.
    """
    op = overload_behind(op)
    if is_overload(op):
        return name_of(op)
    found = _NAME.match(op) if isinstance(op, str) else None
    if found is None or found[1] in ("operator", "torch", "math", "widepack"):
        raise UsageError(
            f"{op!r} does not name an op of a library; write it as torch.library does: 'mylib::op' or "
            "'mylib::op.overload'"
        )
    return f"{found[1]}.{found[2]}.{found[3] or 'default'}"


def allow(some: Iterable[Any]) -> frozenset[str]:
    """Allows programs of this process to use ops of other libraries.

    Returns: their names in programs. Raises: UsageError for an op that does not exist, or that writes into
    its arguments.
    """
    if isinstance(some, str):
        raise UsageError(f"allow_ops={some!r} is one name; give a list: [{some!r}]")
    names = frozenset(map(library_name, some))
    for name in names:
        space, op, overload = name.split(".")
        found = getattr(getattr(getattr(torch.ops, space), op, None), overload, None)
        if found is None:
            raise UsageError(
                f"the op {space}::{op}.{overload} does not exist; import the library that defines it first"
            )
        if schema_of(found).is_mutable:
            raise UsageError(
                f"{space}::{op}.{overload} writes into its arguments; ops of programs return new values: "
                f"{schema_of(found)}"
            )
    EXTRA.update(names)
    return names


def full_name(op: str) -> str:
    """`linear` as `aten.linear.default`, `max.dim` as `aten.max.dim`.

    Full names and Python's operators stay.
    """
    if op.startswith(("operator.", "torch.", "math.")) or op.count(".") == 2:
        return op
    return f"aten.{op}" if "." in op else f"aten.{op}.default"


def full_names(words: str) -> frozenset[str]:
    """The full names of several ops: `linear max.dim` as `aten.linear.default`, `aten.max.dim`."""
    return frozenset(map(full_name, words.split()))


Checks = Literal["all", "sizes", "none"]
"""Which checks of operands run before an op.

With "sizes" each function is an op, so that no compiler reads the Python inside: code that is traced keeps
what such a check finds as conditions on the sizes of a call.
"""


def function(name: str, checks: Checks = "all") -> Op:
    """The function that a graph calls: the op, or for widepack's ops the Python function, which is faster
    than torch's dispatcher.

    checks: with "none", a compiler that traces the function meets one op, also where a Python function
    replaces the op. Raises: as `resolve`.
    """
    if checks == "sizes":
        op = resolve(name)
        if name in CHECKS and name not in OF_VALUES:
            return cast(Op, traced_op("checked", op, _with_check(name)))
        return cast(Op, traced_op("replaced", op, REPLACEMENTS[name])) if name in REPLACEMENTS else op
    if name in FUNCTIONS:
        return FUNCTIONS[name]
    return checked(name) if checks == "all" else _untraced(name)


@cache
def _untraced(name: str) -> Op:
    """Returns the op without checks; if a function replaces it, one that compilers take for an op."""
    op = resolve(name)
    return opaque("replaced", op, REPLACEMENTS[name]) if name in REPLACEMENTS else op


def checked(name: str) -> Op:
    """The op; for an op that crashes on wrong arguments, a function that refuses them.

    Raises: as `resolve`.
    """
    if name in _LIMITED:
        return _LIMITED[name]
    return _with_check(name) if name in CHECKS else REPLACEMENTS.get(name) or resolve(name)


@cache
def _with_check(name: str, direct: bool = False) -> Op:
    """Returns the op behind its check. direct: the function of `DIRECT` in place of the op."""
    check, op = CHECKS[name], DIRECT[name] if direct else REPLACEMENTS.get(name) or resolve(name)

    def run(*args: Any, **kwargs: Any) -> Any:
        check(*args, **kwargs)
        return op(*args, **kwargs)

    run.__name__ = name
    return run


DIRECT: dict[str, Op] = {
    **{
        name: getattr(torch, name.split(".")[1])
        for name in full_names(
            "abs add.Tensor addmm amax baddbmm bmm cat clamp conv1d conv2d conv3d cos div.Tensor embedding "
            "exp layer_norm log matmul mm mul.Tensor neg permute pow.Tensor_Scalar relu reshape rsqrt "
            "select.int sigmoid sin split.Tensor sqrt squeeze.dim sub.Tensor sum.dim_IntList tanh "
            "transpose.int unsqueeze where.self"
        )
    },
    "aten.expand.default": torch.Tensor.expand,
    "aten.gelu.default": functional.gelu,
    "aten.linear.default": functional.linear,
    "aten.max_pool2d.default": max_pool2d,
    "aten.view.default": torch.Tensor.view,
}
"""Functions that compute what an op computes, in less time: of torch's public API, and `max_pool2d`.

A call of `torch.ops.aten.add.Tensor` takes about one microsecond more than one of `torch.add`: its arguments
are read by the op's schema. Only code that runs now uses these functions. Code that is traced uses the ops.
"""
_DIRECT_KEYWORDS = frozenset({"alpha", "beta", "approximate", "dtype"})
"""The keywords whose names are those of the ops' schemas."""


def direct(name: str, keywords: Collection[str]) -> Op:
    """The function that a graph calls for an op, as `function`, with less time for each call.

    keywords: the names of its keyword arguments. The op itself takes other ones. Raises: as `resolve`.
    """
    if name not in DIRECT or name in REPLACEMENTS or not _DIRECT_KEYWORDS.issuperset(keywords):
        return function(name)
    resolve(name)
    return _with_check(name, direct=True) if name in CHECKS else DIRECT[name]


_UNDECLARED = full_names("_unsafe_view dequantize.self lift unsafe_split.Tensor unsafe_split_with_sizes")
"""Ops that return an argument, or a view of one, although their schema does not say so."""


@cache
def may_view(name: str) -> bool:
    """Whether a result of the op may share the memory of an argument."""
    op = resolve(name)
    return name in _UNDECLARED or (
        is_overload(op) and any(r.alias_info is not None for r in schema_of(op).returns)
    )


@cache
def returns_view(name: str) -> bool:
    """Whether the op's schema says that a result is a view of an argument and writes nothing."""
    schema = schema_of(resolve(name))
    return schema is not None and any(
        r.alias_info is not None and not r.alias_info.is_write for r in schema.returns
    )


@cache
def only_views(name: str) -> bool:
    """Whether the op never allocates memory, whatever the strides: a view that torch does not implement by
    other ops.
    """
    op = resolve(name)
    return is_overload(op) and may_view(name) and op.is_view and not can_decompose(op)


@cache
def is_composite(name: str) -> bool:
    """Whether torch implements the op by other ops, so that a result may be an argument itself."""
    op = resolve(name)
    return not is_overload(op) or can_decompose(op)


def name_of(op: Any) -> str:
    """The name of an op in programs, whether the format knows it or not."""
    if op in _NAMES:
        return _NAMES[op]
    if is_overload(op):
        return f"{op.namespace}.{base_name(op)}.{overload_name(op)}"
    return f"{getattr(op, '__module__', '')}.{getattr(op, '__name__', op)}"


@cache
def arguments(name: str) -> tuple[tuple[str, str, Any], ...]:
    """The name, type and default of each argument by the op's schema; empty for Python's operators."""
    op = resolve(name)
    if not is_overload(op):
        return ()
    return tuple(
        (a.name, str(a.type), a.default_value if a.has_default_value() else None)
        for a in schema_of(op).arguments
    )


@cache
def enumerations(name: str) -> frozenset[str]:
    """The names of the arguments that are a dtype, a layout or a memory format: torch accepts any number
    there, and crashes.
    """
    return _arguments_of(name, "ScalarType", "Layout", "MemoryFormat")


@cache
def devices(name: str) -> frozenset[str]:
    """The names of the arguments that are a device."""
    return _arguments_of(name, "Device")


def _arguments_of(name: str, *types: str) -> frozenset[str]:
    """The names of the arguments whose type in the schema contains one of these texts."""
    op = resolve(name)
    if not is_overload(op):
        return frozenset()
    return frozenset(a.name for a in schema_of(op).arguments if any(t in str(a.real_type) for t in types))


def bind(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by the names of the schema, in its order, without defaults."""
    names = [a[0] for a in arguments(name)]
    given = {**dict(zip(names, args)), **kwargs}
    return {**{n: given[n] for n in names if n in given}, **given} if kwargs else given


@cache
def dim_arguments(name: str) -> tuple[str, ...]:
    """The names of the arguments that are numbers of dims."""
    return tuple(a for a, type_, _ in arguments(name) if a in _DIMS and ("int" in type_ or "Int" in type_))


_UNTAGGED = {"aten.repeat_interleave.self_Tensor", "aten.where.default", "aten.nonzero_numpy.default"}


@cache
def of_values(name: str) -> bool:
    """Whether values determine a number that the op returns, or the size of its result.

    Two equal calls then have different symbols for their sizes.
    """
    if name in _UNTAGGED:
        return True
    tags = getattr(resolve(name), "tags", ())
    return torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags


def pure(name: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] = MappingProxyType({})) -> bool:
    """Whether this call writes nothing and draws no random numbers, also by arguments that switch dropout
    off.
    """
    if _pure(name):
        return True
    if _writes(name):
        return False
    given = {a: default for a, _, default in arguments(name)} | bind(name, tuple(args), dict(kwargs))
    return any(given.get(a) is False for a in _TRAINING) or any(
        isinstance(p := given.get(a), (int, float)) and p == 0 for a in _CHANCES
    )


def repeats(name: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] = MappingProxyType({})) -> bool:
    """Whether two equal calls may become one: the op is pure, and sizes determine the size of its result."""
    return pure(name, args, kwargs) and not of_values(name)


@cache
def _pure(name: str) -> bool:
    op = resolve(name)
    return not is_overload(op) or (
        not schema_of(op).is_mutable and torch.Tag.nondeterministic_seeded not in op.tags
    )


@cache
def _writes(name: str) -> bool:
    op = resolve(name)
    return is_overload(op) and schema_of(op).is_mutable
