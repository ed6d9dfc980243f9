"""Finds the writes of a program that may overwrite a value instead of copying it.

A program has no writes: `x[:, t] = h` is an op that copies x and replaces a part of the copy. A loop over T
steps copies x T times. Here a copy is left out where no node reads the old value any more, and where the
value is alone in its memory.

    x2 = select_scatter(x1, h, 1, t)      one write

    p = slice(x1, 1, 0, 4)
    q = select_scatter(p, h, 2, 0)
    x2 = slice_scatter(x1, q, 1, 0, 4)    one write into a part of a part

    p = reshape(select(x1, 1, 0), shape)
    q = select_scatter(p, h, 2, 0)
    x2 = select_scatter(x1, reshape(q, shape of the part), 1, 0)    the same, by way of a reshape
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from widepack_artifacts.program import Node, Program, Ref

from ..ir import ops
from ..ir.edit import uses
from .value_memory import ValueMemory

_MOST_VIEWS = 8


@dataclass(frozen=True)
class Write:
    """A write into a part of a value.

    Attributes:
        base: The value that is overwritten.
        source: The value that is written.
        views: The names of the ops that lead to the part, the outermost first.
        places: The arguments of each of them.
        inside: The names of the nodes that only this write reads, and that need not run.
    """

    base: Any
    source: Any
    views: tuple[str, ...]
    places: tuple[Place, ...]
    inside: tuple[str, ...]

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments of `write_part`."""
        return self.base, self.source, self.views, self.places


def in_place_writes(program: Program) -> tuple[dict[str, Write], frozenset[str]]:
    """Finds the nodes whose base may be overwritten.

    Returns: the writes by the names of their nodes, and the names of the nodes that only these read.
    """
    if not any(n.op in SCATTERS for n in program.nodes):
        return {}, frozenset()
    nodes = {n.name: n for n in program.nodes}
    numbers = {n.name: i for i, n in enumerate(program.nodes)}
    counts = uses(program)
    memory = ValueMemory(program)
    found: dict[str, Write] = {}
    for number, node in enumerate(program.nodes):
        if node.op not in SCATTERS:
            continue
        write = _write(node, nodes, counts)
        read = (write.source, write.places)
        first = min((numbers[name] for name in write.inside), default=number)
        base = write.base
        if isinstance(base, Ref) and memory.may_overwrite(base.name, read, first, number):
            found[node.name] = write
            memory.overwritten(node.name, base.name, number)
    return found, frozenset(name for write in found.values() for name in write.inside)


def _operands(node: Node) -> tuple[Any, Any]:
    """Returns the tensor of a view or scatter, and what a scatter writes. None: it is missing."""
    given = ops.bind(node.op, node.args, node.kwargs)
    return given.get("self"), given.get("src")


def _place(node: Node, first: int) -> Place:
    """Returns the arguments of a node after its tensors, by position, with defaults. first: their number."""
    given = ops.bind(node.op, node.args, node.kwargs)
    return tuple(given.get(name, default) for name, _, default in ops.arguments(node.op)[first:])


def _write(node: Node, nodes: Mapping[str, Node], counts: Mapping[str, int]) -> Write:
    """Returns the write of a scatter, with the scatters and reshapes that made what it writes."""
    base, source = _operands(node)
    views, places = [SCATTERS[node.op]], [_place(node, 2)]
    inside: list[str] = []
    while len(views) < _MOST_VIEWS:
        back = _made(source, nodes, RESHAPES)
        made = _made(_operands(back)[0] if back else source, nodes, SCATTERS)
        between = [n for n in (back, made) if n is not None]
        if made is None or any(counts[n.name] != 1 for n in between):
            break
        whole, written = _operands(made)
        if back is not None:
            reshaped = _made(whole, nodes, RESHAPES)
            if reshaped is None or not _leads_to(_operands(reshaped)[0], base, views, places, nodes):
                break
            views.append(reshaped.op)
            places.append(_place(reshaped, 1))
        elif not _leads_to(whole, base, views, places, nodes):
            break
        views.append(SCATTERS[made.op])
        places.append(_place(made, 2))
        inside += [n.name for n in between]
        source = written
    return Write(base, source, tuple(views), tuple(places), tuple(inside))


def _made(value: Any, nodes: Mapping[str, Node], by: Collection[str]) -> Node | None:
    """Returns the node that makes a value, if its op is one of `by`."""
    node = nodes.get(value.name) if isinstance(value, Ref) else None
    return node if node is not None and node.op in by else None


def _leads_to(
    part: Any, base: Any, views: Sequence[str], places: Sequence[Place], nodes: Mapping[str, Node]
) -> bool:
    """Returns whether a value is the part of `base` that these views lead to."""
    for view, place in zip(reversed(views), reversed(places)):
        made = _made(part, nodes, {view})
        if made is None or _place(made, 1) != place:
            return False
        part = _operands(made)[0]
    return bool(part == base)


SCATTERS = {
    "aten.select_scatter.default": "aten.select.int",
    "aten.slice_scatter.default": "aten.slice.Tensor",
}
"""The op that reads the part which each op writes. Both have the same arguments after the tensors."""

RESHAPES = frozenset({"aten.view.default", "aten.reshape.default"})
"""Ops that keep the order of the elements."""

Place = tuple[Any, ...]
"""The arguments of a view after its tensor, with their defaults."""

_FUNCTIONS = {name: ops.function(name) for name in (*SCATTERS, *SCATTERS.values())}
_SCATTER_OF = {view: scatter for scatter, view in SCATTERS.items()}


def write_part(
    base: torch.Tensor, source: torch.Tensor, views: Sequence[str], places: Sequence[Place]
) -> torch.Tensor:
    """Writes into a part of a tensor.

    base: no other value may be in its memory. source: what is written. views: the names of the ops that lead
    to the part, the outermost first. places: the arguments of each of them. With gradients, for a source of
    another shape, and where a reshape must copy, the ops that copy run.

    Returns: `base`, or a tensor with other memory.
    """
    plain = type(base) is torch.Tensor and type(source) is torch.Tensor and not torch.is_grad_enabled()
    parts = [base]
    for view, place in zip(views, places):
        part = parts[-1].reshape(*place) if view in RESHAPES else _FUNCTIONS[view](parts[-1], *place)
        plain = plain and (view not in RESHAPES or part.data_ptr() == parts[-1].data_ptr())
        parts.append(part)
    if plain and parts[-1].shape == source.shape:
        parts[-1].copy_(source)
        return base
    for view, place, part in zip(reversed(views), reversed(places), reversed(parts[:-1])):
        if view in RESHAPES:
            source = source.reshape(part.shape)
        else:
            source = _FUNCTIONS[_SCATTER_OF[view]](part, source, *place)
    return source
