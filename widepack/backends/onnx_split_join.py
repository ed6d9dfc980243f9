"""Splits values by member, and joins members, with few nodes of an ONNX model: each node takes microseconds
in a session.

A loop that is written out selects each member from `[N, B, ...]` and stacks N answers with 3N nodes. If the
sizes behind the first two dims are numbers, member i's part of `[N, B, ...]` is the i-th piece of `[N*B,
...]`:

    Gather(x, 0), Gather(x, 1), ...               -> Split(Reshape(x, [-1, ...]), [B, B, ...])
    Concat(Unsqueeze(y0, 0), Unsqueeze(y1, 0), .) -> Reshape(Concat(y0, y1, ...), [N, -1, ...])
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .onnx_constants import constant, number, numbers, whole


def join_members(model: Any, weights: Iterable[Any] = ()) -> int:
    """Rewrites an onnx_ir model.

    weights: values that stay as they are, as a session reads a member's part of them in place. Returns: the
    number of rewritten values. Nodes that nothing reads any more stay in the model.
    """
    changed = 0
    seen = {id(w) for w in weights}
    for node in list(model.graph):
        if node.domain not in ("", "ai.onnx"):
            continue
        if node.op_type == "Gather" and id(node.inputs[0]) not in seen:
            seen.add(id(node.inputs[0]))
            changed += _split(model, node, node.inputs[0])
        elif node.op_type == "Concat" and whole(node, "axis") == 0:
            changed += _concat(model, node)
    return changed


def _split(model: Any, before: Any, x: Any) -> bool:
    """Splits a value into all members at once, before the first node that selects one.

    False if it is read in another way.
    """
    import onnx_ir

    if (
        x is None
        or x.is_initializer()
        or x.shape is None
        or len(x.shape) < 2
        or not isinstance(x.shape[0], int)
    ):
        return False
    rest = _fixed(x.shape[2:])
    taken = [(use.node, i) for use in x.uses() if (i := _member(use.node, x, model.graph)) is not None]
    count = x.shape[0]
    if rest is None or count < 2 or {i for _, i in taken} != set(range(count)):
        return False
    flat = onnx_ir.node(
        "Reshape", [x, constant(model, f"{x.name}_sizes", [-1, *rest])], name=f"{x.name}_flat"
    )
    # not by `num_outputs`: ONNX Runtime computes its sizes in float32, and refuses zero rows
    sizes, made = _rows_of_each(model, x, count)
    pieces = onnx_ir.node(
        "Split", [flat.outputs[0], sizes], {"axis": 0}, num_outputs=count, name=f"{x.name}_members"
    )
    for value, name in (
        (flat.outputs[0], f"{x.name}_flat"),
        *((v, f"{x.name}_{i}") for i, v in enumerate(pieces.outputs)),
    ):
        value.name, value.dtype = f"{name}_of_members", x.dtype
    model.graph.insert_before(before, [flat, *made, pieces])
    for node, i in taken:
        pieces.outputs[i].shape = node.outputs[0].shape
        onnx_ir.convenience.replace_all_uses_with(node.outputs[0], pieces.outputs[i])
    return True


def _rows_of_each(model: Any, x: Any, count: int) -> tuple[Any, list[Any]]:
    """`[B] * N`, and the nodes that compute it if B is not a number."""
    import onnx_ir

    if isinstance(x.shape[1], int):
        return constant(model, f"{x.name}_rows", [x.shape[1]] * count), []
    rows = onnx_ir.node("Shape", [x], {"start": 1, "end": 2}, name=f"{x.name}_rows")
    each = onnx_ir.node(
        "Expand",
        [rows.outputs[0], constant(model, f"{x.name}_count", [count])],
        name=f"{x.name}_rows_of_each",
    )
    for node in (rows, each):
        node.outputs[0].name, node.outputs[0].dtype = f"{node.name}_of_members", onnx_ir.DataType.INT64
    return each.outputs[0], [rows, each]


def _member(node: Any, x: Any, graph: Any) -> int | None:
    """The member of a value that a node selects; None for any other node, and for a node whose result is an
    output.
    """
    plain = (
        node.op_type == "Gather"
        and node.domain in ("", "ai.onnx")
        and node.graph is graph
        and not node.outputs[0].is_graph_output()
    )
    if not plain or node.inputs[0] is not x or whole(node, "axis"):
        return None
    index = node.inputs[1]
    return number(index) if index is not None and index.shape is not None and len(index.shape) == 0 else None


def _concat(model: Any, node: Any) -> bool:
    """Joins members before they get the member axis instead of after. False if not all parts allow it."""
    import onnx_ir

    given = [v.producer() if v is not None else None for v in node.inputs]
    if len(given) < 2 or not all(
        g is not None and g.op_type == "Unsqueeze" and numbers(g.inputs[1]) == [0] for g in given
    ):
        return False
    parts = [g.inputs[0] for g in given if g is not None]
    shape = parts[0].shape
    rest = _fixed(shape[1:]) if shape is not None and len(shape) else None
    if shape is None or rest is None or any(p.shape != shape for p in parts):
        return False
    (out,) = node.outputs
    joined = onnx_ir.node("Concat", parts, {"axis": 0}, name=f"{out.name}_joined")
    joined.outputs[0].name, joined.outputs[0].dtype = f"{out.name}_joined", out.dtype
    first = shape[0] if isinstance(shape[0], int) and shape[0] > 0 else -1
    sizes = constant(model, f"{out.name}_sizes", [len(parts), first, *rest])
    shaped = onnx_ir.node("Reshape", [joined.outputs[0], sizes], name=node.name)
    onnx_ir.convenience.replace_nodes_and_values(
        model.graph, node, [node], [joined, shaped], [out], shaped.outputs
    )
    return True


def _fixed(dims: Sequence[Any]) -> list[int] | None:
    """The sizes if all are numbers other than 0, else None."""
    return (
        [d for d in dims if isinstance(d, int)] if all(isinstance(d, int) and d > 0 for d in dims) else None
    )
