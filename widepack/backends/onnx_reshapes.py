"""Replaces the computed sizes of reshapes in an ONNX model by constants.

`Reshape(x, Concat(Shape(x)[0:1], Shape(x)[1:2], ...))` becomes `Reshape(x, [0, 0, -1])`. With a dynamic batch
an exporter computes the sizes of every reshape at every call, node by node. In ONNX a 0 is the size of x at
this place, and one size may be -1, the remaining one. All other sizes must be numbers other than 0.
"""

from __future__ import annotations

from typing import Any

from .onnx_constants import constant, number, whole


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
            or whole(node, "allowzero")
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
            1, constant(model, f"{node.outputs[0].name}_sizes", [s for s in sizes if s is not None])
        )
        changed += 1
    return changed


def _size(part: Any, x: Any, place: int) -> int | None:
    """One size of a reshape: a number, 0 for the size of x at this place, or -1 for any other; None if ONNX
    cannot express it.
    """
    if part is None:
        return None
    fixed = number(part)
    if fixed is not None:
        return fixed if fixed > 0 else None
    node = part.producer()
    if node is not None and node.op_type == "Slice" and _is_shape_of(node.inputs[0], x):
        begin, end = (number(v) for v in node.inputs[1:3])
        if (begin, end) == (place, place + 1):
            return 0
    return -1


def _is_shape_of(value: Any, x: Any) -> bool:
    node = value.producer() if value is not None else None
    return (
        node is not None
        and node.op_type == "Shape"
        and node.inputs[0] is x
        and not whole(node, "start")
        and "end" not in node.attributes
    )
