"""Rows that nothing reads are not computed: `select(op(x), d, i)` becomes `op'(select(x, d, i))`.

A classifier that reads one token of its last layer pays for that token alone, and not for all of them: the choice moves up through every op that treats the
positions of dim `d` alike, as far as the attention that mixes them, whose queries it then thins out. It moves only where every reader of a value chooses
the same position of it, so that the whole value is never needed beside its part.
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
from ..ir.edit import readers, renamed, sweep, with_nodes
from ..registry.registry import REGISTRY
from ..ir.fake_values import Shapes
from ..ir.values import expression, known

_SELECT = "aten.select.int"
Step = Callable[["Narrowing"], Any]
STEPS: dict[str, Step] = {}


@dataclass
class Narrowing:
    """One move: `choice` reads `node` at `index` of `dim`. made: the nodes that the move writes. Rules give what stands in the choice's place, or None."""

    choice: Node
    node: Node
    dim: int
    index: int
    values: Mapping[str, Any]
    made: list[Node] = field(default_factory=list)

    @property
    def rank(self) -> int:
        """Of the node's value."""
        return int(self.values[self.node.name].ndim)

    @property
    def read(self) -> Any:
        """The value that the node reads first."""
        return self.values[self.node.args[0].name]

    def add(self, op: str, *args: Any, name: str = "") -> Ref:
        self.made.append(Node(self._free(name or f"{self.node.name}_at"), op, args, {}, "", self.node.source))
        return Ref(self.made[-1].name)

    def pick(self, value: Ref, dim: int, index: int | None = None) -> Ref:
        """One position of what the node reads."""
        return self.add(_SELECT, value, dim, self.index if index is None else index, name=f"{value.name}_at")

    def same(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Ref:
        """The node's op again on other arguments."""
        self.made.append(
            replace(self.node, name=self._free(f"{self.node.name}_at"), args=args, kwargs=self.node.kwargs if kwargs is None else kwargs, out="")
        )
        return Ref(self.made[-1].name)

    def _free(self, wish: str) -> str:
        """A name that no value has."""
        taken = {n.name for n in self.made}
        return next(name for k in itertools.count() if (name := f"{wish}{k}") not in self.values and name not in taken)


def narrow(program: Program, shapes: Shapes) -> Program:
    """The program with choices of one position moved up as far as they go."""
    if not any(n.op == _SELECT for n in program.nodes):
        return program
    shapes.of(program)
    tried: set[str] = set()
    while True:
        move = _next(program, shapes, tried)
        if move is None:
            return _once(program)
        moved, choices = move
        to = {name: Ref(moved.made[-1].name) for name in choices}
        kept: list[Node] = []
        for node in program.nodes:
            if node.name == choices[0]:
                kept += moved.made
            elif node.name not in to:  # what takes the choices' place is named after the op that it is
                kept.append(renamed(node, to))
        program = sweep(with_nodes(program, kept, to))


def _runs(move: Narrowing, shapes: Shapes) -> bool:
    """Whether the move gives a value of the choice's shape and dtype; one that it does not is not made."""
    try:
        for node in move.made:
            shapes.add(node)
    except (RuntimeError, IndexError, TypeError, ValueError):
        fits = False
    else:
        made, wanted = shapes.values[move.made[-1].name], shapes.values[move.choice.name]
        fits = made.dtype == wanted.dtype and [expression(s) for s in made.shape] == [expression(s) for s in wanted.shape]
    if not fits:
        for node in move.made:
            shapes.values.pop(node.name, None)
    return fits


def _next(program: Program, shapes: Shapes, tried: set[str]) -> tuple[Narrowing, list[str]] | None:
    """The first choice that can move, and the names of all choices that it stands for."""
    values = shapes.values
    made_by = {n.name: n for n in program.nodes}
    by = readers(program)
    outs = {r for o in program.outputs for r in refs(o.value)}
    for choice in program.nodes:
        if choice.op != _SELECT or choice.kwargs or choice.name in tried or not isinstance(choice.args[0], Ref):
            continue
        node = made_by.get(choice.args[0].name)
        if node is None or node.body or node.name in outs or not all(isinstance(a, int) for a in choice.args[1:]):
            continue
        alike = [n for n in by[node.name] if n.op == _SELECT and n.args == choice.args and not n.kwargs]
        if len(alike) < len(by[node.name]) or not isinstance(values[node.name], torch.Tensor):
            continue
        made = Narrowing(choice, node, choice.args[1] % values[node.name].ndim, choice.args[2], values)
        step = _pointwise if node.op in REGISTRY and REGISTRY[node.op].family == "pointwise" else STEPS.get(node.op)
        if step is not None and step(made) is not None and made.made and _runs(made, shapes):
            return made, [n.name for n in alike]
        tried.add(choice.name)
    return None


def _once(program: Program) -> Program:
    """Equal choices made once."""
    seen: dict[Any, str] = {}
    to: dict[str, Any] = {}
    kept = []
    for node in program.nodes:
        node = renamed(node, to)
        if node.op == _SELECT and not node.kwargs and all(isinstance(a, (Ref, int)) for a in node.args):
            first = seen.setdefault(node.args, node.name)
            if first != node.name:
                to[node.name] = Ref(first)
                continue
        kept.append(node)
    return with_nodes(program, kept, to)


def _step(names: str) -> Callable[[Step], Step]:
    def add(step: Step) -> Step:
        STEPS.update(dict.fromkeys((f"aten.{n}" for n in names.split()), step))
        return step

    return add


def _pointwise(at: Narrowing) -> Any:
    """Each tensor at its own dim, counted from the last; one of size 1 is spread over all positions."""
    picks: dict[str, tuple[int, int] | None] = {}
    whole = known(at.values[at.node.name].shape[at.dim])
    for name in refs((at.node.args, at.node.kwargs)):
        value = at.values[name]
        dim = at.dim - (at.rank - value.ndim) if isinstance(value, torch.Tensor) else -1
        if dim >= 0 and value.ndim < 2:
            return None  # a tensor without dims would take another part in type promotion
        picks[name] = None if dim < 0 else (dim, 0 if known(value.shape[dim]) == 1 and whole != 1 else at.index)
    to = {name: at.pick(Ref(name), *p) for name, p in picks.items() if p}
    made = renamed(at.node, to)
    return at.same(made.args, {k: v for k, v in made.kwargs.items() if k != "memory_format"})


@_step("linear.default")
def _linear(at: Narrowing) -> Any:
    x = at.node.args[0]
    return at.same((at.pick(x, at.dim), *at.node.args[1:])) if at.dim < at.rank - 1 else None


@_step("layer_norm.default rms_norm.default")
def _norm(at: Narrowing) -> Any:
    return at.same((at.pick(at.node.args[0], at.dim), *at.node.args[1:])) if at.dim < at.rank - len(at.node.args[1]) else None


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
    asked = at.node.args[1]
    gone = sorted(d % at.read.ndim for d in (asked if isinstance(asked, (list, tuple)) else [asked]))
    if any(known(at.read.shape[d]) != 1 for d in gone):
        return None
    source = [d for d in range(at.read.ndim) if d not in gone][at.dim]
    return at.add("aten.squeeze.dims", at.pick(at.node.args[0], source), [d - (d > source) for d in gone])


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
    given = ops.bind(at.node.op, at.node.args, at.node.kwargs)
    dim, start, step = given.get("dim", 0) % at.rank, given.get("start") or 0, given.get("step", 1)
    if dim != at.dim:
        rest = [given.get("start"), given.get("end"), step]
        return at.same((at.pick(given["self"], at.dim), dim - (dim > at.dim), *rest), {})
    if not isinstance(start, int) or start < 0 or at.index < 0 or step != 1:
        return None
    return at.pick(given["self"], dim, start + at.index)


@_step("scaled_dot_product_attention.default")
def _attention(at: Narrowing) -> Any:
    """One query: the keys and values stay whole."""
    given = ops.bind(at.node.op, at.node.args, at.node.kwargs)
    query = at.values[given["query"].name]
    if at.dim != at.rank - 2 or given.get("is_causal") or query.ndim != at.rank or known(query.shape[at.dim]) == 1:
        return None
    mask = given.get("attn_mask")
    args = list(at.node.args)
    args[0] = at.add("aten.unsqueeze.default", at.pick(given["query"], at.dim), at.dim)
    kwargs = dict(at.node.kwargs)
    if isinstance(mask, Ref):
        held = at.values[mask.name]
        if held.ndim >= 2 and known(held.shape[-2]) != 1:
            rows = at.add("aten.unsqueeze.default", at.pick(mask, held.ndim - 2), held.ndim - 2)
            if "attn_mask" in kwargs:
                kwargs["attn_mask"] = rows
            else:
                args[3] = rows
    return at.pick(at.same(tuple(args), kwargs), at.dim, 0)
