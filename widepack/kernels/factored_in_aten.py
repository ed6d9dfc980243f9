"""Writes the ops over factored weights (`factored.py`) in ATen ops."""

from __future__ import annotations

from widepack_artifacts.program import Node, Tag

from . import factored
from .node_list import NodeList


def factored_in_aten(node: Node, members: int) -> list[Node]:
    """Returns a `delta_linear` or `factored_weight` node as ATen nodes. members: N."""
    return _weight(node) if node.op == factored.WEIGHT else _linear(node, members)


def _weight(node: Node) -> list[Node]:
    new = NodeList(node)
    base, left, right, *scales = node.args
    dtype = Tag("dtype", "float64" if node.out.startswith("float64[") else "float32")
    wide = [
        new.add("aten._to_copy.default", value, suffix=name, dtype=dtype)
        for name, value in (("left", left), ("right", right), ("base", base))
    ]
    product = new.add("aten.mm.default", wide[0], wide[1], suffix="product")
    product = new.add("aten.reshape_as.default", product, wide[2], suffix="shaped")
    total = new.add("aten.add.Tensor", wide[2], product, suffix="sum")
    if scales and scales[0] is not None:
        scale = new.add("aten._to_copy.default", scales[0], suffix="scale", dtype=dtype)
        rows = new.add("aten.flatten.using_ints", total, 1, suffix="rows")
        scaled = new.add("aten.mul.Tensor", rows, scale, suffix="scaled")
        total = new.add("aten.reshape_as.default", scaled, wide[2], suffix="whole")
    new.add("aten.type_as.default", total, base, suffix="rounded")
    return new.named_as_the_node()


def _linear(node: Node, members: int) -> list[Node]:
    new = NodeList(node)
    x, base, left, right, bias = node.args
    product = new.add("aten.linear.default", x, base, suffix="base")
    rows = new.add("aten.expand.default", x, [members, -1, -1], suffix="rows")
    turned = new.add("aten.transpose.int", right, 1, 2, suffix="right")
    thin = new.add("aten.bmm.default", rows, turned, suffix="thin")
    turned = new.add("aten.transpose.int", left, 1, 2, suffix="left")
    if bias is None:
        delta = new.add("aten.bmm.default", thin, turned, suffix="delta")
    else:
        added = new.add("aten.unsqueeze.default", bias, 1, suffix="bias")
        delta = new.add("aten.baddbmm.default", added, thin, turned, suffix="delta")
    new.add("aten.add.Tensor", delta, product, suffix="sum")
    return new.named_as_the_node()
