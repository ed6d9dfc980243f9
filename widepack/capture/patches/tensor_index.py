"""A place that a number of a tensor's own names: `table[domain]`, where `domain` is a tensor without dims.

torch.export reads the number for that (`.item()`), and does not take one that is written to beside slices; what is read stops whatever is one call for all members: from there on they run one after the other. The program
looks the place up instead, and says the same, places from the end and places that do not exist included.

| as exported | instead |
|---|---|
| `x[:, k] = v` in the member's code | `x[:, k[None]] = v.unsqueeze(1)`, while an export runs |
| `select(x, d, k.item())` | `index(x, [..., k[None]]).select(d, 0)` |
| `select_scatter(x, v, d, k.item())` | `index_put(x, [..., k[None]], v.unsqueeze(d))` |
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

_ATEN = torch.ops.aten
_READS = (_ATEN._local_scalar_dense.default, _ATEN.item.default)
_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8)


def look_up_places(exported: torch.export.ExportedProgram) -> None:
    """Rewrite a functional export in place. A number that is read for something else too is still read."""
    graph = exported.graph_module.graph
    for node in list(graph.nodes):
        dim_at = {_ATEN.select.int: 1, _ATEN.select_scatter.default: 2}.get(node.target, 0)
        if not dim_at or len(node.args) <= dim_at + 1:
            continue
        args: tuple[Any, ...] = node.args
        x, dim, number = args[0], args[dim_at], args[dim_at + 1]
        if not isinstance(number, fx.Node) or number.target not in _READS:
            continue
        held: Any = number.args[0]
        if held.meta["val"].dtype not in _WHOLE:
            continue
        dim %= x.meta["val"].ndim
        with graph.inserting_before(node):
            at = _call(graph, node, _ATEN.reshape.default, held, [1])
            if at.meta["val"].dtype not in _WHOLE[:2]:
                at = _call(graph, node, _ATEN._to_copy.default, at, dtype=torch.int64)
            places = [*[None] * dim, at]
            if dim_at == 1:
                new = _call(graph, node, _ATEN.select.int, _call(graph, node, _ATEN.index.Tensor, x, places), dim, 0)
            else:
                new = _call(graph, node, _ATEN.index_put.default, x, places, _call(graph, node, _ATEN.unsqueeze.default, args[1], dim))
        node.replace_all_uses_with(new)
        exported.graph_signature.replace_all_uses(node.name, new.name)
        graph.erase_node(node)
        _forget(graph, number)
    exported.graph_module.recompile()


def set_item(x: Tensor, index: Any, value: Any) -> None:
    """`x[index] = value` with a place that is a number in a tensor, beside slices and numbers; else as it stands."""
    items = list(index) if isinstance(index, tuple) else [index]
    numbers = [i for i, item in enumerate(items) if isinstance(item, Tensor) and item.ndim == 0 and item.dtype in _WHOLE]
    plain = all(isinstance(item, (slice, int, torch.SymInt)) and not isinstance(item, bool) for i, item in enumerate(items) if i not in numbers)
    if len(numbers) == 1 and plain:
        (at,) = numbers
        items[at] = items[at].reshape(1).long()
        behind = x.ndim - at - 1 - sum(not isinstance(item, slice) for item in items[at + 1 :])  # dims of the value that are behind this place
        if isinstance(value, Tensor) and value.ndim > behind:
            value = value.unsqueeze(value.ndim - behind)
        index = tuple(items)
    SET_ITEM(x, index, value)


SET_ITEM = Tensor.__setitem__


def _call(graph: fx.Graph, like: fx.Node, op: Any, *args: Any, **more: Any) -> fx.Node:
    """A node, with what an export knows of its value, from the line of another."""
    made = graph.call_function(op, args, more)
    made.meta.update({k: v for k, v in like.meta.items() if k in ("stack_trace", "nn_module_stack")})
    with like.meta["val"].fake_mode:
        made.meta["val"] = op(*fx.node.map_arg(args, lambda n: n.meta["val"]), **more)
    return made


def _forget(graph: fx.Graph, number: fx.Node) -> None:
    """Take out a number and the questions about its range, where nothing else reads it; a look-up refuses what lies outside by itself."""
    waiting, found = [number], {number}
    while waiting:
        for user in waiting.pop().users:
            if user.op == "output" or isinstance(user.meta.get("val"), torch.Tensor):
                return
            if user not in found:
                found.add(user)
                waiting.append(user)
    for node in reversed(list(graph.nodes)):
        if node in found:
            graph.erase_node(node)
