"""Replaces the weights of linear layers in a wide program by int8 weights.

    bmm(x, transpose(W, 1, 2))                     ->  int8_linear(x, int8(W), scales(W), None)
    baddbmm(unsqueeze(b, 1), x, transpose(W, 1, 2))  ->  int8_linear(x, int8(W), scales(W), b)

W is a float32 value `[N, O, I]` that depends on weights alone. It is quantized once, when the program is
bound (`runtime/prologue.py`). Products inside of loops, and products with few weights, stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from widepack_artifacts.program import Node, Program, Ref

from ..errors import LoweringError
from ..ir import ops
from ..ir.edit import sweep
from ..ir.fake_values import Fakes, replay
from ..ir.kinds import weights_only
from ..ir.tensor_type import tensor_type
from ..kernels import int8
from ..planning.batch_growth import growth

_PRODUCTS = {
    "aten.bmm.default": ("self", "mat2"),
    "aten.baddbmm.default": ("batch1", "batch2"),
    "aten.matmul.default": ("self", "other"),
}
_TURN, _ADD = "aten.transpose.int", "aten.add.Tensor"


@dataclass(frozen=True)
class _Product:
    """A product of all members' rows with a weight.

    node: The node. x: The rows `[N, R, I]`. weight: `[N, I, O]`. added: What is added to the product, or
    None. sizes: N, I, O.
    """

    node: Node
    x: Ref
    weight: Ref
    added: Ref | None
    sizes: tuple[int, ...]


class Int8Program:
    """A wide program over int8 weights.

    Args:
        program: A wide program.
        least: The number of weights of all members from which a layer gets int8 weights.

    Attributes:
        program: The program with int8 weights.
        layers: The nodes of the member program whose weights are int8, each once.
    """

    def __init__(self, program: Program, least: int) -> None:
        self._nodes = {n.name: n for n in program.nodes}
        self._types = _types(program)
        self._taken = {s.name for s in (*program.weights, *program.inputs)} | set(self._nodes)
        self._quantized: dict[str, tuple[Ref, Ref]] = {}
        early, nodes, layers = weights_only(program), list[Node](), list[str]()
        for node in program.nodes:
            product = self._product(node, early, program.members)
            if product is None or math.prod(product.sizes) < least:
                nodes.append(node)
                continue
            nodes += self._replaced(product)
            layers.append(node.member or node.name)
        self.layers = tuple(dict.fromkeys(layers))
        self.program = sweep(replace(program, nodes=tuple(nodes))) if layers else program

    def _product(self, node: Node, early: set[str], members: int) -> _Product | None:
        """Returns a node as a product with a weight; None if it is another node."""
        names = _PRODUCTS.get(node.op)
        if names is None or node.name in early:
            return None
        given = ops.bind(node.op, node.args, node.kwargs)
        x, weight = (given[name] for name in names)
        if any(given.get(name, 1) != 1 for name in ("beta", "alpha")):
            return None
        if not isinstance(x, Ref) or not isinstance(weight, Ref) or weight.name not in early:
            return None
        rows, matrix = (self._types.get(v.name) for v in (x, weight))
        if rows is None or matrix is None or (len(rows), len(matrix)) != (3, 3) or x.name in early:
            return None
        sizes = tuple(s for s in matrix if isinstance(s, int))
        if len(sizes) != 3 or matrix[0] != members or rows[0] != members:
            return None
        added = given.get("self") if node.op == "aten.baddbmm.default" else None
        return _Product(node, x, weight, added, sizes)

    def _replaced(self, product: _Product) -> Iterator[Node]:
        """Yields the nodes of the product with int8 weights."""
        node, (members, _, outputs) = product.node, product.sizes
        if product.weight.name not in self._quantized:
            yield from self._quantize(product)
        weight, scales = self._quantized[product.weight.name]
        bias = self._bias(product.added, [members, outputs])
        plain = product.added is None or bias is not None
        linear = self._node(node, int8.LINEAR, product.x, weight, scales, bias, out=node.out)
        yield replace(linear, name=node.name) if plain else linear
        if not plain:
            yield replace(node, op=_ADD, args=(Ref(linear.name), product.added), kwargs={})

    def _quantize(self, product: _Product) -> Iterator[Node]:
        """Yields the nodes that quantize a weight, and keeps their values."""
        node, (members, inputs, outputs) = product.node, product.sizes
        turned = self._node(node, _TURN, product.weight, 1, 2, out=f"float32[{members},{outputs},{inputs}]")
        scales = self._node(node, int8.SCALES, Ref(turned.name), out=f"float32[{members},{outputs}]")
        table = f"uint8[{members * inputs},{outputs + int8.TAIL}]"
        weight = self._node(node, int8.WEIGHT, Ref(turned.name), Ref(scales.name), out=table)
        self._quantized[product.weight.name] = Ref(weight.name), Ref(scales.name)
        yield from (turned, scales, weight)

    def _bias(self, added: Ref | None, sizes: list[int]) -> Ref | None:
        """Returns a bias `[N, O]` that is added to each row; None for anything else that is added."""
        node = self._nodes.get(added.name) if added is not None else None
        if node is None or node.op != "aten.unsqueeze.default" or node.args[1:] != (1,):
            return None
        bias = node.args[0]
        sizes_of_bias = self._types.get(bias.name) if isinstance(bias, Ref) else None
        return bias if sizes_of_bias is not None and list(sizes_of_bias) == sizes else None

    def _node(self, like: Node, op: str, *args: object, out: str) -> Node:
        """Returns a node with a new name, of the same line of the user's code as another one."""
        number = next(k for k in range(len(self._taken) + 1) if f"{like.name}_int8_{k}" not in self._taken)
        name = f"{like.name}_int8_{number}"
        self._taken.add(name)
        return Node(name, op, args, {}, out, like.source, like.member)

    def largest_batch(self, sizes: Mapping[str, int], batch: str, rows: int) -> int | None:
        """Returns the largest batch at which a member's layers read at most `rows` rows, on average over the
        int8 weights. None means every batch, and 0 none.

        sizes: an example size of each dim. batch: the dim of the batch, or "".
        """
        try:
            grows = growth(self._rows, sizes, batch)
        except LoweringError:
            return 0
        return 0 if grows is None else grows.largest(rows)

    def _rows(self, sizes: Mapping[str, int]) -> float:
        """Returns the rows of a member that a layer reads, on average over the int8 weights."""
        values = replay(self.program, Fakes(sizes, static=True))
        layers = [n for n in self.program.nodes if n.op == int8.LINEAR]
        counts = [int(values[n.args[1].name].numel()) for n in layers]
        rows = [int(values[n.name].shape[1]) for n in layers]
        return sum(c * r for c, r in zip(counts, rows)) / max(1, sum(counts))


def _types(program: Program) -> dict[str, tuple[object, ...]]:
    """Returns the sizes of the float32 values of a wide program, by name."""
    sizes: dict[str, tuple[object, ...]] = {}
    for slot in (*program.weights, *program.inputs):
        type_ = tensor_type(slot.type) if slot.kind != "ragged" else None
        if type_ is not None and type_.dtype == "float32":
            sizes[slot.name] = ((program.members,) if slot.kind == "stacked" else ()) + type_.sizes
    for node in program.nodes:
        type_ = tensor_type(node.out)
        if type_ is not None and type_.dtype == "float32":
            sizes[node.name] = type_.sizes
    return sizes
