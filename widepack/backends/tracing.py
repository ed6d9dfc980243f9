"""A flat program as torch's compilers take it: a graph with its weights as buffers, fake inputs with symbols for named dims, and what is assumed of those."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from ..ir.encoding import dtype_of
from ..capture.guards import always, arithmetic
from ..errors import LoweringError
from ..runtime.graph_module import graph_module
from ..spec.input_spec import parse_type
from .flat import Flat


@dataclass
class Traced:
    """module: weights are its buffers w0, w1, ... inputs: fake ones. symbols: torch's name of each dim."""

    module: fx.GraphModule
    inputs: list[torch.Tensor]
    shapes: ShapeEnv
    symbols: dict[str, str]

    def conditions(self) -> list[Any]:
        """What was taken for granted about sizes so far, but for what holds at all sizes from 2. Raises: LoweringError for what is no arithmetic over dims."""
        made: list[Any] = []
        for guard in self.shapes.guards:
            try:
                if _from_two(guard.expr):
                    continue
                expr = arithmetic(guard.expr, self.symbols)
            except ValueError as e:
                raise LoweringError(f"the compiler takes {guard.expr} for granted, which is no arithmetic over named dims") from e
            if isinstance(expr, list) and not always(expr) and expr not in made:
                made.append(expr)
        return made


def _from_two(condition: Any) -> bool:
    """Whether it holds at all sizes from 2, by itself or of one dim: `Ne(B, 1)`, `10*B > 10`."""
    if len(condition.free_symbols) != 1:
        return False
    (symbol,) = condition.free_symbols
    above = sympy.Symbol("n", integer=True, nonnegative=True)
    try:
        return sympy.simplify(condition.subs(symbol, above + 2)) is sympy.true
    except (TypeError, ValueError, ArithmeticError, AttributeError, AssertionError):
        return False


def traced(flat: Flat, example: Mapping[str, int], dims: Mapping[str, tuple[int, int | None, int]], device: torch.device) -> Traced:
    """example: a size of each dim, at least 2 where it is to hold for others too."""
    shapes = ShapeEnv(specialize_zero_one=False, duck_shape=False)
    mode = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True)
    sizes: dict[str, Any] = {}
    symbols: dict[str, str] = {}
    for name, (least, most, _) in dims.items():
        source = ConstantSource(name)
        symbol = shapes.create_symbol(example[name], source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None, do_not_specialize_zero_one=True)
        shapes.constrain_symbol_range(symbol, max(least, 1), sys.maxsize if most is None else most)
        sizes[name] = shapes.create_symintnode(symbol, hint=example[name], source=source)
        symbols[str(symbol)] = name
    module, holders = with_weights(flat, device)
    inputs: list[torch.Tensor] = []
    for node, slot in zip(holders, flat.program.inputs):
        name, parts = parse_type(slot.type)
        own = [d if isinstance(d, int) else sizes[d.letter] * d.factor for d in parts]
        with mode:
            inputs.append(torch.empty([*([flat.program.members] if slot.kind == "stacked" else []), *own], dtype=dtype_of(name), device=device))
        node.meta["val"] = inputs[-1]
    module.recompile()
    return Traced(module, inputs, shapes, symbols)


def with_weights(flat: Flat, device: torch.device) -> tuple[fx.GraphModule, list[fx.Node]]:
    """The program as a module that has its weights as buffers w0, w1, ..., and its placeholders, one an input."""
    module = graph_module(flat.program, device)
    holders = [n for n in module.graph.nodes if n.op == "placeholder"]
    for i, (node, weight) in enumerate(zip(holders, flat.weights)):
        module.register_buffer(f"w{i}", weight, persistent=False)
        with module.graph.inserting_before(node):
            node.replace_all_uses_with(module.graph.get_attr(f"w{i}"))
        module.graph.erase_node(node)
    module.recompile()
    return module, holders[len(flat.weights) :]
