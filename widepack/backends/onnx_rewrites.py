"""Rewrites an ONNX model to few nodes: each node takes microseconds in a session.

**Reshapes.** `Reshape(x, Concat(Shape(x)[0:1], Shape(x)[1:2], ...))` becomes `Reshape(x, [0, 0, -1])`. With a
dynamic batch an exporter computes the sizes of every reshape at every call, node by node. In ONNX a 0 is the
size of x at this place, and one size may be -1, the remaining one. All other sizes must be numbers other than
0.

**Members.** A loop that is written out selects each member from `[N, B, ...]` and stacks N answers with 3N
nodes. If the sizes behind the first two dims are numbers, member i's part of `[N, B, ...]` is the i-th piece
of `[N*B, ...]`:

    Gather(x, 0), Gather(x, 1), ...               -> Split(Reshape(x, [-1, ...]), [B, B, ...])
    Concat(Unsqueeze(y0, 0), Unsqueeze(y1, 0), .) -> Reshape(Concat(y0, y1, ...), [N, -1, ...])
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def simplify_reshapes(model: Any) -> int:
    """Rewrites the reshapes of an onnx_ir model.

    Returns: how many. Nodes that nothing reads any more stay in the model.
    """
    changed = 0
    for node in list(model.graph):
        if (
            node.op_type != "Reshape"
            or node.domain not in ("", "ai.onnx")
            or len(node.inputs) != 2
            or _whole(node, "allowzero")
        ):
            continue
        x, shape = node.inputs
        made = shape.producer() if shape is not None else None
        out = node.outputs[0].shape
        if (
            x is None
            or made is None
            or made.op_type != "Concat"
            or out is None
            or len(out) != len(made.inputs)
        ):
            continue  # if there are as many parts as dims, each part is one number
        sizes = [_size(part, x, place) for place, part in enumerate(made.inputs)]
        if any(s is None for s in sizes) or sizes.count(-1) > 1:
            continue
        node.replace_input_with(
            1, constant(model.graph, f"{node.outputs[0].name}_sizes", [s for s in sizes if s is not None])
        )
        changed += 1
    return changed


def _size(part: Any, x: Any, place: int) -> int | None:
    """One size of a reshape: a number, 0 for the size of x at this place, or -1 for any other; None if ONNX
    cannot express it.
    """
    if part is None:
        return None
    fixed = _number(part)
    if fixed is not None:
        return fixed if fixed > 0 else None
    node = part.producer()
    if node is not None and node.op_type == "Slice" and _is_shape_of(node.inputs[0], x):
        begin, end = (_number(v) for v in node.inputs[1:3])
        if (begin, end) == (place, place + 1):
            return 0
    return -1


def _is_shape_of(value: Any, x: Any) -> bool:
    node = value.producer() if value is not None else None
    return (
        node is not None
        and node.op_type == "Shape"
        and node.inputs[0] is x
        and not _whole(node, "start")
        and "end" not in node.attributes
    )


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
        elif node.op_type == "Concat" and _whole(node, "axis") == 0:
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
        "Reshape", [x, constant(model.graph, f"{x.name}_sizes", [-1, *rest])], name=f"{x.name}_flat"
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
        return constant(model.graph, f"{x.name}_rows", [x.shape[1]] * count), []
    rows = onnx_ir.node("Shape", [x], {"start": 1, "end": 2}, name=f"{x.name}_rows")
    each = onnx_ir.node(
        "Expand",
        [rows.outputs[0], constant(model.graph, f"{x.name}_count", [count])],
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
    if not plain or node.inputs[0] is not x or _whole(node, "axis"):
        return None
    index = node.inputs[1]
    return _number(index) if index is not None and index.shape is not None and len(index.shape) == 0 else None


def _concat(model: Any, node: Any) -> bool:
    """Joins members before they get the member axis instead of after. False if not all parts allow it."""
    import onnx_ir

    given = [v.producer() if v is not None else None for v in node.inputs]
    if len(given) < 2 or not all(
        g is not None and g.op_type == "Unsqueeze" and _numbers(g.inputs[1]) == [0] for g in given
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
    sizes = constant(model.graph, f"{out.name}_sizes", [len(parts), first, *rest])
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


def _numbers(value: Any) -> list[Any] | None:
    """The numbers of a constant, flat; None for a value that is not constant."""
    import onnx_ir

    tensor = onnx_ir.convenience.get_const_tensor(value) if value is not None else None
    return None if tensor is None else list(tensor.numpy().ravel().tolist())


def _number(value: Any) -> int | None:
    """The number of a constant of one number; None for any other value."""
    found = _numbers(value)
    return int(found[0]) if found is not None and len(found) == 1 else None


def _whole(node: Any, name: str) -> int:
    """An integer attribute of a node; 0 if it is absent."""
    return int(node.attributes[name].value) if name in node.attributes else 0


def constant(graph: Any, name: str, sizes: Sequence[int] | int) -> Any:
    """Adds a constant of sizes, or of one number, to a graph.

    name: is extended if another initialiser has it, which would be lost.
    """
    import onnx_ir

    while name in graph.initializers:
        name += "_"
    value = onnx_ir.Value(name=name, const_value=onnx_ir.tensor(sizes, dtype=onnx_ir.DataType.INT64))
    value.shape = onnx_ir.Shape([] if isinstance(sizes, int) else [len(sizes)])
    value.dtype = onnx_ir.DataType.INT64
    graph.initializers[name] = value
    return value
