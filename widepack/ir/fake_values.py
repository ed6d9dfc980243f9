"""Computes the shape and dtype of every node of a program on fake tensors, with named dims as symbols."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    compute_unbacked_bindings,
    free_unbacked_symbols,
)

from widepack_artifacts.program import Node, Program, Slot, substitute

from ..errors import LoweringError
from ..kernels.checks import CHECKS
from ..spec.dtypes import dtype_of
from ..system import deadline
from . import limits, ops, size_terms
from .encoding import decode
from .limits import recurrent_result
from .op_records import is_recurrent_layer
from .tensor_type import member_types, parse_slot
from .torch_internals import symbolic_expression
from .values import known

CPU = torch.device("cpu")
_MOST_REMEMBERED = 10_000
"""The most calls that torch may cache for fake tensors.

It never removes one by itself, each takes about 5 KB, and a service may load artifacts for months.
"""


def refuse_call(op: str, args: Any, kwargs: Any) -> None:
    """Checks an op of an untrusted program before it runs on values without memory.

    Raises: LoweringError for operands that are no numbers, for sizes of too many terms, and when the time is
    over.
    """
    if deadline.over():
        raise LoweringError(f"reading the program for all members takes too long: stopped at {op}")
    try:
        if op in ops.PYTHON:
            limits.refuse_operands(op, args)
    except limits.LimitExceeded as e:
        raise LoweringError(f"{op} {e}") from None
    if size_terms.reads_large(op, args, kwargs):
        raise LoweringError(
            f"{op} reads sizes that together are an expression of too many terms over the inputs' sizes: "
            "stopped there"
        )


class Fakes:
    """Makes fake tensors, with one symbol for each named dim.

    sizes: an example size of each dim, at least 2, at which the guards hold. static: use these sizes instead
    of symbols.
    """

    def __init__(self, sizes: Mapping[str, int], *, static: bool = False) -> None:
        if FakeTensorMode.cache_info().size > _MOST_REMEMBERED:
            FakeTensorMode.cache_clear()
        shapes = None if static else ShapeEnv(specialize_zero_one=True, duck_shape=False)
        self._known: dict[Any, Any] = {}
        self.mode = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True)
        self.dims: dict[str, Any] = dict(sizes)
        if shapes is not None:
            for name, size in sizes.items():
                source = ConstantSource(name)
                symbol = shapes.create_unspecified_symbol(size, source, dynamic_dim=DimDynamic.DYNAMIC)
                self.dims[name] = shapes.create_symintnode(symbol, hint=size, source=source)
            # torch's caches of facts about symbols keep the last few hundred objects of this class alive, and
            # each of them all its calls
            weakref.finalize(self, shapes.fake_tensor_cache.clear)

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        # the Python dispatcher lets composite ops accept symbolic sizes; in grad mode some ops choose other
        # kernels
        with torch.no_grad(), self.mode, enable_python_dispatcher():
            yield

    def tensor(self, type_: str, members: int = 0) -> torch.Tensor:
        """A fake tensor of a type such as `float32[B,3,32*H]`.

        members: the length of the member axis in front; 0 for none.
        """
        slot = parse_slot(type_)
        shape = slot.shape(self.dims)
        with self.on():
            return torch.empty(([members] if members else []) + shape, dtype=dtype_of(slot.dtype))

    def run(self, op: str, args: Any, kwargs: Any) -> Any:
        """The result of an op.

        Equal calls return one fake value: programs of a build repeat calls, and a call with symbols takes a
        millisecond.
        """
        untrusted = deadline.limited()
        if untrusted:
            refuse_call(op, args, kwargs)
        try:
            key = (op, _key(args), _key(kwargs))
            if key in self._known:
                return self._known[key]
        except TypeError:  # an argument that has no hash
            key = None
        with self.on():
            result = _result(op, args, kwargs)
        if untrusted and size_terms.has_large(result):
            raise LoweringError(
                f"{op} returns a size that is an expression of more than {size_terms.MOST_TERMS} terms over "
                "the inputs' sizes: stopped there"
            )
        if key is not None and not ops.of_values(op):
            self._known[key] = result
        return result

    def check(self) -> None:
        """Checks that every dim is still a symbol. Raises: LoweringError for a dim that an op fixed."""
        for name, dim in self.dims.items():
            if not isinstance(dim, int) and known(dim) is not None:
                raise LoweringError(
                    f"the dim {name} was fixed to {known(dim)} while the program was read: an op of this "
                    "model does not keep it dynamic"
                )


def _result(op: str, args: Any, kwargs: Any) -> Any:
    """The result of an op in fake mode."""
    if is_recurrent_layer(op) and op.endswith(".input") and op in CHECKS:
        CHECKS[op](*args, **kwargs)
        if (result := recurrent_result(op, args, kwargs)) is not None:
            return result
    return ops.checked(op)(*args, **kwargs)


def _key(value: Any) -> Any:
    """A key that is equal for arguments of equal fake results.

    Numbers of different types have different keys: True, 1 and 1.0 are equal in Python.
    """
    if isinstance(value, torch.Tensor):
        return value.dtype, _key(tuple(value.shape)), _key(value.stride()), value.is_conj(), value.is_neg()
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return type(value), symbolic_expression(value)
    if isinstance(value, (list, tuple)):
        return type(value), tuple(_key(v) for v in value)
    if isinstance(value, dict):
        return tuple((k, _key(v)) for k, v in value.items())
    return type(value), value


def slot_value(fakes: Fakes, slot: Slot, members: int) -> Any:
    """The fake value of a weight or an input: a tensor, `[N, ...]` if Stacked, a list of N if Ragged.

    The type `int` is a number.
    """
    if slot.kind == "ragged":
        parts = member_types(slot.type)
        return [2 + i if p == "int" else fakes.tensor(p) for i, p in enumerate(parts)]
    return fakes.tensor(slot.type, members if slot.kind == "stacked" else 0)


def replay(program: Program, fakes: Fakes, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The fake values of a member program or a wide one, by name.

    given: values of inputs that exist already.
    """
    given = given or {}
    values: dict[str, Any] = {}
    for slot in (*program.weights, *program.inputs):
        known = slot.name in given
        values[slot.name] = given[slot.name] if known else slot_value(fakes, slot, program.members)
    for node in program.nodes:
        values[node.name] = run_node(node, values, fakes, program.members)
    return values


def bind_sizes_of_data(nodes: Iterable[torch.fx.Node], fakes: Fakes) -> None:
    """Records at each node which sizes it makes that only values determine, in `unbacked_bindings`, as
    torch's tracing does.

    Tracing the graph again requires it. requires: fake values of `fakes` in `meta["val"]`.
    """
    shapes = fakes.mode.shape_env
    if shapes is None:
        return
    known: set[Any] = set()
    for node in nodes:
        new = [s for s in _free_of_data(node.meta["val"]) if s not in known]
        if not new:
            continue
        known.update(new)
        shapes.pending_fresh_unbacked_symbols[:] = new
        if bindings := compute_unbacked_bindings(shapes, node.meta["val"], peek=True):
            node.meta["unbacked_bindings"] = bindings
    shapes.pending_fresh_unbacked_symbols.clear()


def _free_of_data(value: Any) -> list[Any]:
    """The symbols in a node's value that only values determine."""
    parts = value if isinstance(value, (list, tuple)) else [value]
    return [
        s
        for part in parts
        if isinstance(part, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool))
        for s in free_unbacked_symbols(part)
    ]


class Shapes:
    """Fake values of a program and its rewrites by passes.

    A name always has one shape, so only new nodes run.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.fakes = Fakes(sizes)
        self.values: dict[str, Any] = {}

    def of(self, program: Program) -> dict[str, Any]:
        """The fake values of a program, by name."""
        for slot in (*program.weights, *program.inputs):
            if slot.name not in self.values:
                self.values[slot.name] = slot_value(self.fakes, slot, program.members)
        for node in program.nodes:
            self.add(node)
        return self.values

    def add(self, node: Node) -> None:
        """Adds the value of one node, whose arguments exist.

        Raises: LoweringError for a size that only values determine.
        """
        if node.name not in self.values:
            try:
                self.values[node.name] = run_node(node, self.values, self.fakes, 0)
            except (DynamicOutputShapeException, DataDependentOutputException) as e:
                raise LoweringError(
                    f"node {node.name} ({node.op}{f', from {node.source}' if node.source else ''}) returns "
                    "a result whose size depends on values, not on sizes: "
                    "members would differ in it; write it with a mask, or with a fixed number of results"
                ) from e


def run_node(node: Node, values: dict[str, Any], fakes: Fakes, members: int) -> Any:
    """Runs one node on fake values. The outputs of a loop get their member axis."""
    args = decode(substitute(node.args, values.__getitem__), CPU)
    if node.body is None:
        return fakes.run(node.op, args, decode(substitute(node.kwargs, values.__getitem__), CPU))
    one = {s.name: member_slice(fakes, a, s.kind, 0) for s, a in zip(node.body.inputs, args)}
    inner = replay(node.body, fakes, one)
    with fakes.on():
        outs = [substitute(o.value, inner.__getitem__) for o in node.body.outputs]
        return [
            torch.empty([members, *o.shape], dtype=o.dtype) if k.kind == "stacked" else [o] * members
            for o, k in zip(outs, node.body.outputs)
        ]


def member_slice(fakes: Fakes, value: Any, kind: str, i: int) -> Any:
    """Member i's part of a value. kind: of the value."""
    if kind == "shared":
        return value
    if kind == "ragged":
        return value[i]
    with fakes.on():
        return value[i]
