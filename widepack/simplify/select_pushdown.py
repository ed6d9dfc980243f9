"""Computes one position of a dim if only one is read: `select(op(x), d, i)` becomes `op'(select(x, d, i))`.

A classifier that reads one token of its last layer then computes that token alone.

1. The select moves before an op that treats all positions of dim `d` alike: pointwise ops, linear layers,
   norms, reshapes, transposes, slices.
2. Before an attention it stays at the queries: one query reads all keys and values.
3. It moves only if every reader of a value selects the same position, so that the whole value is not needed.
4. It moves as far as it can; equal selects then become one.

Requires: a functional member program, and the shapes of its values.

Leaves alone: ops that mix positions, causal attention, and moves whose result has another shape or dtype.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch

from widepack_artifacts.program import Node, Program, Ref, refs

from ..ir import ops
from ..ir.edit import drop_duplicates, readers, renamed, sweep, with_nodes
from ..ir.fake_values import Shapes
from ..ir.values import expression, known
from ..registry.registry import family_of

_SELECT = "aten.select.int"
Step = Callable[["Narrowing"], Any]
STEPS: dict[str, Step] = {}


@dataclass
class Narrowing:
    """One move of a select before the op that it reads.

    choice: the select, which reads `node` at `index` of `dim`.
    values: the fake values of the program, by name.
    new: the nodes that the move writes. A step returns the value that replaces the select, or None.
    """

    choice: Node
    node: Node
    dim: int
    index: int
    values: Mapping[str, Any]
    new: list[Node] = field(default_factory=list)

    @property
    def rank(self) -> int:
        """The rank of the node's value."""
        return int(self.values[self.node.name].ndim)

    @property
    def read(self) -> Any:
        """The value of the node's first argument."""
        return self.values[self.node.args[0].name]

    def add(self, op: str, *args: Any, name: str = "") -> Ref:
        """Adds a node. name: the first part of its name."""
        self.new.append(Node(self._free(name or f"{self.node.name}_at"), op, args, {}, "", self.node.source))
        return Ref(self.new[-1].name)

    def pick(self, value: Ref, dim: int, index: int | None = None) -> Ref:
        """Selects one position of a value that the node reads. index: default, that of the move."""
        return self.add(_SELECT, value, dim, self.index if index is None else index, name=f"{value.name}_at")

    def same(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Ref:
        """Adds the node's op with other arguments."""
        kwargs = self.node.kwargs if kwargs is None else kwargs
        name = self._free(f"{self.node.name}_at")
        self.new.append(replace(self.node, name=name, args=args, kwargs=kwargs, out=""))
        return Ref(self.new[-1].name)

    def _free(self, wish: str) -> str:
        """Returns a name that no value has."""
        taken = {n.name for n in self.new}
        names = (f"{wish}{k}" for k in itertools.count())
        return next(name for name in names if name not in self.values and name not in taken)


def narrow(program: Program, shapes: Shapes) -> Program:
    """Returns the program with selects of one position moved up as far as possible."""
    if not any(n.op == _SELECT for n in program.nodes):
        return program
    shapes.of(program)
    tried: set[str] = set()
    while True:
        move = _next(program, shapes, tried)
        if move is None:
            return drop_duplicates(program)  # equal selects
        moved, choices = move
        to = {name: Ref(moved.new[-1].name) for name in choices}
        kept: list[Node] = []
        for node in program.nodes:
            if node.name == choices[0]:
                kept += moved.new
            elif node.name not in to:  # the select itself is replaced by the moved op
                kept.append(renamed(node, to))
        program = sweep(with_nodes(program, kept, to))


def _runs(move: Narrowing, shapes: Shapes) -> bool:
    """Whether the move computes a value of the select's shape and dtype; else the move is undone."""
    try:
        for node in move.new:
            shapes.add(node)
    except (RuntimeError, IndexError, TypeError, ValueError):
        fits = False
    else:
        new, selected = shapes.values[move.new[-1].name], shapes.values[move.choice.name]
        fits = new.dtype == selected.dtype and [expression(s) for s in new.shape] == [
            expression(s) for s in selected.shape
        ]
    if not fits:
        for node in move.new:
            shapes.values.pop(node.name, None)
    return fits


def _next(program: Program, shapes: Shapes, tried: set[str]) -> tuple[Narrowing, list[str]] | None:
    """Returns the first select that can move, and the names of all selects equal to it."""
    values = shapes.values
    made_by = {n.name: n for n in program.nodes}
    readers_of = readers(program)
    outs = {r for o in program.outputs for r in refs(o.value)}
    for choice in program.nodes:
        if choice.op != _SELECT or choice.kwargs or choice.name in tried:
            continue
        source, *at = choice.args
        node = made_by.get(source.name) if isinstance(source, Ref) else None
        if node is None or node.body or node.name in outs or not all(isinstance(a, int) for a in at):
            continue
        alike = [
            n for n in readers_of[node.name] if n.op == _SELECT and n.args == choice.args and not n.kwargs
        ]
        if len(alike) < len(readers_of[node.name]) or not isinstance(values[node.name], torch.Tensor):
            continue
        new = Narrowing(choice, node, at[0] % values[node.name].ndim, at[1], values)
        step = _pointwise if family_of(node.op) == "pointwise" else STEPS.get(node.op)
        if step is not None and step(new) is not None and new.new and _runs(new, shapes):
            return new, [n.name for n in alike]
        tried.add(choice.name)
    return None


def _step(names: str) -> Callable[[Step], Step]:
    def add(step: Step) -> Step:
        STEPS.update(dict.fromkeys((f"aten.{n}" for n in names.split()), step))
        return step

    return add


def _pointwise(at: Narrowing) -> Any:
    """Selects in each tensor at its dim, counted from the last; a dim of size 1 serves all positions."""
    picks: dict[str, tuple[int, int]] = {}
    whole = known(at.values[at.node.name].shape[at.dim])
    for name in refs((at.node.args, at.node.kwargs)):
        value = at.values[name]
        dim = at.dim - (at.rank - value.ndim) if isinstance(value, torch.Tensor) else -1
        if dim >= 0 and value.ndim < 2:
            return None  # the select would be 0-dim, which changes type promotion
        if dim >= 0:
            picks[name] = dim, 0 if known(value.shape[dim]) == 1 and whole != 1 else at.index
    to = {name: at.pick(Ref(name), *p) for name, p in picks.items()}
    new = renamed(at.node, to)
    return at.same(new.args, {k: v for k, v in new.kwargs.items() if k != "memory_format"})


@_step("linear.default layer_norm.default rms_norm.default")
def _last_dims(at: Narrowing) -> Any:
    x, *rest = at.node.args
    last = 1 if at.node.op == "aten.linear.default" else len(rest[0])
    return at.same((at.pick(x, at.dim), *rest)) if at.dim < at.rank - last else None


@_step("transpose.int permute.default")
def _order(at: Narrowing) -> Any:
    order = list(range(at.rank))
    if at.node.op == "aten.permute.default":
        order = [d % at.rank for d in at.node.args[1]]
    else:
        a, b = (d % at.rank for d in at.node.args[1:3])
        order[a], order[b] = b, a
    source = order.pop(at.dim)
    left = [d - (d > source) for d in order]
    x = at.pick(at.node.args[0], source)
    return x if left == sorted(left) else at.add("aten.permute.default", x, left)


@_step("unsqueeze.default")
def _unsqueeze(at: Narrowing) -> Any:
    new = at.node.args[1] % at.rank
    if new == at.dim:
        return None
    return at.same((at.pick(at.node.args[0], at.dim - (at.dim > new)), new - (new > at.dim)))


@_step("squeeze.dim squeeze.dims")
def _squeeze(at: Narrowing) -> Any:
    dims = at.node.args[1]
    removed = sorted(d % at.read.ndim for d in (dims if isinstance(dims, (list, tuple)) else [dims]))
    if any(known(at.read.shape[d]) != 1 for d in removed):
        return None
    source = [d for d in range(at.read.ndim) if d not in removed][at.dim]
    return at.add("aten.squeeze.dims", at.pick(at.node.args[0], source), [d - (d > source) for d in removed])


@_step("unflatten.int")
def _unflatten(at: Narrowing) -> Any:
    parts = at.node.args[2]
    dim = at.node.args[1] % at.read.ndim
    if dim <= at.dim < dim + len(parts):
        return None
    source = at.dim if at.dim < dim else at.dim - len(parts) + 1
    return at.same((at.pick(at.node.args[0], source), dim - (source < dim), parts))


@_step("flatten.using_ints")
def _flatten(at: Narrowing) -> Any:
    first, last = (d % at.read.ndim for d in (*at.node.args[1:], *(0, -1)[len(at.node.args) - 1 :]))
    if at.dim == first:
        return None
    source = at.dim if at.dim < first else at.dim + last - first
    return at.same((at.pick(at.node.args[0], source), first - (source < first), last - (source < first)))


@_step("reshape.default")
def _reshape(at: Narrowing) -> Any:
    before = [expression(s) for s in at.read.shape]
    after = [expression(s) for s in at.values[at.node.name].shape]
    front = sympy.prod(after[: at.dim])
    for source, size in enumerate(before):
        if size == after[at.dim] and sympy.cancel(sympy.prod(before[:source]) - front) == 0:
            shape = [s for d, s in enumerate(at.node.args[1]) if d != at.dim]
            return at.same((at.pick(at.node.args[0], source), shape))
    return None


@_step("slice.Tensor")
def _slice(at: Narrowing) -> Any:
    bound = ops.bind(at.node.op, at.node.args, at.node.kwargs)
    dim, start, step = bound.get("dim", 0) % at.rank, bound.get("start") or 0, bound.get("step", 1)
    if dim != at.dim:
        rest = [bound.get("start"), bound.get("end"), step]
        return at.same((at.pick(bound["self"], at.dim), dim - (dim > at.dim), *rest), {})
    if not isinstance(start, int) or start < 0 or at.index < 0 or step != 1:
        return None
    return at.pick(bound["self"], dim, start + at.index)


@_step("scaled_dot_product_attention.default")
def _attention(at: Narrowing) -> Any:
    """Selects one query; keys and values stay whole."""
    bound = ops.bind(at.node.op, at.node.args, at.node.kwargs)
    query = at.values[bound["query"].name]
    if at.dim != at.rank - 2 or bound.get("is_causal"):
        return None
    if query.ndim != at.rank or known(query.shape[at.dim]) == 1:
        return None
    mask = bound.get("attn_mask")
    args = list(at.node.args)
    args[0] = at.add("aten.unsqueeze.default", at.pick(bound["query"], at.dim), at.dim)
    kwargs = dict(at.node.kwargs)
    if isinstance(mask, Ref):
        mask_value = at.values[mask.name]
        if mask_value.ndim >= 2 and known(mask_value.shape[-2]) != 1:
            rows = at.add("aten.unsqueeze.default", at.pick(mask, mask_value.ndim - 2), mask_value.ndim - 2)
            if "attn_mask" in kwargs:
                kwargs["attn_mask"] = rows
            else:
                args[3] = rows
    return at.pick(at.same(tuple(args), kwargs), at.dim, 0)
