"""Rewrites places that a number in a tensor names: `table[domain]`, where `domain` is a tensor without dims.

torch.export reads the number (`.item()`), and refuses to write to such a place beside slices. A read number
cannot be one call for all members, so they would run one after the other from there on. The program looks the
place up instead. The answers are the same, also for places from the end and places that do not exist.

| as exported | instead |
|---|---|
| `x[:, k] = v` in the member's code | `x[:, k[None]] = v.unsqueeze(1)`, while the member is exported |
| `select(x, d, k.item())` | `index(x, [..., k[None]]).select(d, 0)` |
| `select_scatter(x, v, d, k.item())` | `index_put(x, [..., k[None]], v.unsqueeze(d))` |
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from ...ir.torch_internals import aten_packet
from ..exported import put_in_place, reached

_ATEN = torch.ops.aten
_TO_COPY = aten_packet("_to_copy").default
_READS = (aten_packet("_local_scalar_dense").default, _ATEN.item.default)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)
_INDEX_DTYPES = _INTEGERS[:2]  # what an index may be


def look_up_places(exported: torch.export.ExportedProgram) -> None:
    """Rewrites a functional exported program in place. A number that other nodes read stays."""
    graph = exported.graph_module.graph
    for node in list(graph.nodes):
        dim_at = {_ATEN.select.int: 1, _ATEN.select_scatter.default: 2}.get(node.target, 0)
        if not dim_at or len(node.args) <= dim_at + 1:
            continue
        number = node.args[dim_at + 1]
        if not isinstance(number, fx.Node) or number.target not in _READS:
            continue
        place: Any = number.args[0]
        if place.meta["val"].dtype not in _INTEGERS:
            continue
        put_in_place(exported, node, _look_up(graph, node, place, dim_at))
        _remove_unread(graph, number)
    exported.graph_module.recompile()


def _look_up(graph: fx.Graph, node: fx.Node, place: fx.Node, dim_at: int) -> fx.Node:
    """Adds the look-up for a select or select_scatter. place: the tensor with the number. dim_at: where the
    dim is.
    """
    args: tuple[Any, ...] = node.args
    x, dim = args[0], args[dim_at] % args[0].meta["val"].ndim
    with graph.inserting_before(node):
        index = _call(graph, node, _ATEN.reshape.default, place, [1])
        if index.meta["val"].dtype not in _INDEX_DTYPES:
            index = _call(graph, node, _TO_COPY, index, dtype=torch.int64)
        places = [*[None] * dim, index]
        if dim_at == 1:
            row = _call(graph, node, _ATEN.index.Tensor, x, places)
            return _call(graph, node, _ATEN.select.int, row, dim, 0)
        values = _call(graph, node, _ATEN.unsqueeze.default, args[1], dim)
        return _call(graph, node, _ATEN.index_put.default, x, places, values)


def set_item(x: Tensor, index: Any, value: Any) -> None:
    """`x[index] = value`, where one place may be a number in a tensor beside slices and numbers.

    Other indices are passed on unchanged.
    """
    items = list(index) if isinstance(index, tuple) else [index]
    numbers = [isinstance(i, Tensor) and i.ndim == 0 and i.dtype in _INTEGERS for i in items]
    plain = (isinstance(i, (slice, int, torch.SymInt)) and not isinstance(i, bool) for i in items)
    if numbers.count(True) == 1 and all(map(operator.or_, numbers, plain)):
        at = numbers.index(True)
        items[at] = items[at].reshape(1).long()
        # dims of the value that are behind this place
        behind = x.ndim - at - 1 - sum(not isinstance(item, slice) for item in items[at + 1 :])
        if isinstance(value, Tensor) and value.ndim > behind:
            value = value.unsqueeze(value.ndim - behind)
        index = tuple(items)
    _SET_ITEM(x, index, value)


_SET_ITEM = Tensor.__setitem__


def _call(graph: fx.Graph, like: fx.Node, op: Any, *args: Any, **more: Any) -> fx.Node:
    """Adds a node with the source line of another node, and computes its fake value."""
    node = graph.call_function(op, args, more)
    node.meta.update({k: v for k, v in like.meta.items() if k in ("stack_trace", "nn_module_stack")})
    with like.meta["val"].fake_mode:
        node.meta["val"] = op(*fx.node.map_arg(args, lambda n: n.meta["val"]), **more)
    return node


def _remove_unread(graph: fx.Graph, number: fx.Node) -> None:
    """Removes a number and the checks of its range, if nothing else reads it.

    A look-up refuses a place outside of the tensor itself.
    """
    removable = {*reached(number, lambda n: n.users)}
    if any(
        n.op == "output" or isinstance(n.meta.get("val"), torch.Tensor) for n in removable if n is not number
    ):
        return
    for node in reversed(list(graph.nodes)):
        if node in removable:
            graph.erase_node(node)
