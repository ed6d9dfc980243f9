"""Finds the writes of a program that may overwrite a value instead of copying it.

A program has no writes: `x[:, t] = h` is an op that copies x and replaces a part of the copy. A loop over T
steps copies x T times. Here a copy is left out where no node reads the old value any more, and where the
value is alone in its memory.

    x2 = select_scatter(x1, h, 1, t)      one write

    p = slice(x1, 1, 0, 4)
    q = select_scatter(p, h, 2, 0)
    x2 = slice_scatter(x1, q, 1, 0, 4)    one write into a part of a part
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from widepack_artifacts.program import Node, Program, Ref, refs

from ..ir import ops
from ..ir.edit import uses

_SCATTERS = {
    "aten.select_scatter.default": "aten.select.int",
    "aten.slice_scatter.default": "aten.slice.Tensor",
}
"""The op that reads the part which each op writes. Both have the same arguments after the tensors."""

_OUTSIDE = frozenset({""})
_MOST_MEMORIES = 8
_MOST_VIEWS = 8

Place = tuple[Any, ...]
"""The arguments of a `select` or `slice` after its tensor, with their defaults."""


@dataclass(frozen=True)
class Write:
    """A write into a part of a value.

    Attributes:
        base: The value that is overwritten.
        source: The value that is written.
        views: The names of the ops that lead to the part, the outermost first.
        places: The arguments of each of them.
    """

    base: Any
    source: Any
    views: tuple[str, ...]
    places: tuple[Place, ...]

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments of `write`."""
        return self.base, self.source, self.views, self.places


def in_place_writes(program: Program) -> tuple[dict[str, Write], frozenset[str]]:
    """Finds the nodes whose base may be overwritten.

    Returns: the writes by the names of their nodes, and the names of the nodes that only these read.
    """
    if not any(n.op in _SCATTERS for n in program.nodes):
        return {}, frozenset()
    nodes = {n.name: n for n in program.nodes}
    counts = uses(program)
    memory = _Memory(program)
    found: dict[str, Write] = {}
    inner: set[str] = set()
    for number, node in enumerate(program.nodes):
        if node.op not in _SCATTERS:
            continue
        written = _write(node, nodes, counts)
        base = written.base
        if not isinstance(base, Ref) or not memory.may_overwrite(base.name, number, written):
            continue
        found[node.name] = written
        memory.overwritten(node.name, base.name)
        inner |= _between(node, nodes, len(written.views) - 1)
    return found, frozenset(inner)


def write(
    base: torch.Tensor, source: torch.Tensor, views: Sequence[str], places: Sequence[Place]
) -> torch.Tensor:
    """Writes into a part of a tensor.

    base: no other value may be in its memory. source, views, places: see `Write`. With gradients, and for a
    source of another shape, the ops that copy run.

    Returns: `base`, or a tensor with other memory.
    """
    parts = [base]
    for view, place in zip(views, places):
        parts.append(_view(view)(parts[-1], *place))
    if (
        torch.is_grad_enabled()
        or parts[-1].shape != source.shape
        or type(base) is not torch.Tensor
        or type(source) is not torch.Tensor
    ):
        for view, place, part in zip(reversed(views), reversed(places), reversed(parts[:-1])):
            source = _scatter(view)(part, source, *place)
        return source
    parts[-1].copy_(source)
    return base


_FUNCTIONS = {name: ops.resolve(name) for pair in _SCATTERS.items() for name in pair}
_SCATTER_OF = {view: scatter for scatter, view in _SCATTERS.items()}


def _view(name: str) -> Any:
    return _FUNCTIONS[name]


def _scatter(name: str) -> Any:
    return _FUNCTIONS[_SCATTER_OF[name]]


def _operands(node: Node) -> tuple[Any, Any]:
    """Returns the tensor of a view or scatter, and what a scatter writes. None: it is missing."""
    given = ops.bind(node.op, node.args, node.kwargs)
    return given.get("self"), given.get("src")


def _place(node: Node, first: int) -> Place:
    """Returns the arguments of a node after its tensors, by position, with defaults. first: their number."""
    given = ops.bind(node.op, node.args, node.kwargs)
    return tuple(given.get(name, default) for name, _, default in ops.arguments(node.op)[first:])


def _write(node: Node, nodes: Mapping[str, Node], counts: Mapping[str, int]) -> Write:
    """Returns the write of a scatter, with the scatters that made what it writes."""
    base, source = _operands(node)
    views, places = [_SCATTERS[node.op]], [_place(node, 2)]
    while len(views) < _MOST_VIEWS and isinstance(source, Ref):
        made = nodes.get(source.name)
        if made is None or made.op not in _SCATTERS:
            break
        whole, inside = _operands(made)
        part = nodes.get(whole.name) if isinstance(whole, Ref) else None
        same = (
            counts[made.name] == 1
            and part is not None
            and part.op == views[-1]
            and _place(part, 1) == places[-1]
            and _leads_to(part, base, views[:-1], places[:-1], nodes)
        )
        if not same:
            break
        views.append(_SCATTERS[made.op])
        places.append(_place(made, 2))
        source = inside
    return Write(base, source, tuple(views), tuple(places))


def _leads_to(
    part: Node, base: Any, views: Sequence[str], places: Sequence[Place], nodes: Mapping[str, Node]
) -> bool:
    """Returns whether a view is a part of `base`, reached by these views."""
    read = _operands(part)[0]
    for view, place in zip(reversed(views), reversed(places)):
        made = nodes.get(read.name) if isinstance(read, Ref) else None
        if made is None or made.op != view or _place(made, 1) != place:
            return False
        read = _operands(made)[0]
    return bool(read == base)


def _between(node: Node, nodes: Mapping[str, Node], count: int) -> set[str]:
    """Returns the names of the scatters inside a write."""
    found: set[str] = set()
    for _ in range(count):
        node = nodes[_operands(node)[1].name]
        found.add(node.name)
    return found


class _Memory:
    """Which values of a program may share memory, and where each memory is read for the last time.

    A memory has the name of the node that makes it. The name "" is that of memory from outside.
    """

    def __init__(self, program: Program) -> None:
        self._of: dict[str, frozenset[str]] = {}
        self._last: dict[str, int] = {}
        self._now: dict[str, str] = {}  # for a memory that a write replaced by another, that other one
        for slot in (*program.weights, *program.inputs):
            self._of[slot.name] = _OUTSIDE
        for number, node in enumerate(program.nodes):
            read = self._read((node.args, node.kwargs), number)
            if _is_number(node):
                self._of[node.name] = frozenset()
            else:
                self._of[node.name] = frozenset({node.name}) if _makes_memory(node) else read
        for output in program.outputs:
            self._read(output.value, len(program.nodes))

    def _read(self, value: Any, number: int) -> frozenset[str]:
        """Counts what node `number` reads. Returns the memories that its results may be in."""
        found: set[str] = set()
        for name in refs(value):
            found |= self._of[name]
        for memory in found:
            self._last[memory] = number
        if len(found) <= _MOST_MEMORIES:
            return frozenset(found)
        for memory in found:  # too many to follow: none of them is overwritten
            self._of[memory] = _OUTSIDE
        return _OUTSIDE

    def may_overwrite(self, base: str, number: int, written: Write) -> bool:
        """Returns whether node `number` is the last that reads the memory of `base`.

        The memory must be that of `base` alone, and not a view: in an expanded value many places are one.
        """
        memories = self._of[base]
        if memories != {base}:
            return False
        memory = self._current(next(iter(memories)))
        if self._of[memory] & _OUTSIDE:
            return False
        sources = {self._current(m) for r in refs((written.source, written.places)) for m in self._of[r] if m}
        return self._last[memory] == number and memory not in sources

    def overwritten(self, node: str, base: str) -> None:
        """The value of `node`, and what views it, is now in the memory of `base`."""
        memory = self._current(next(iter(self._of[base])))
        self._now[node] = memory
        if self._of[node] & _OUTSIDE:
            self._of[memory] = _OUTSIDE
        self._last[memory] = max(self._last.get(node, 0), self._last[memory])

    def _current(self, memory: str) -> str:
        while memory in self._now:
            memory = self._now[memory]
        return memory


def _makes_memory(node: Node) -> bool:
    """Returns whether the results of a node have memory of their own, whatever its arguments are.

    An op that torch implements by other ops may return an argument, as dropout does outside of training.
    """
    if node.body is not None or node.op in ops.PYTHON or node.op.startswith("widepack."):
        return False
    return not ops.may_view(node.op) and not ops.is_composite(node.op)


def _is_number(node: Node) -> bool:
    """Returns whether the result of a node is a number, which has no memory."""
    return node.op.startswith("aten.sym_") or (node.op in ops.PYTHON and node.op != "operator.getitem")
