"""Prepares a flat program for torch's compilers: weights as buffers, and fake inputs with symbols for named
dims.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from ..errors import LoweringError
from ..ir.fake_values import Fakes, replay
from ..ir.guards import always, arithmetic
from ..ir.tensor_type import parse_slot
from ..runtime.graph_module import graph_module
from ..spec.dtypes import dtype_of
from ..system import deadline
from .flat import Flat
from .index_flags import add_flags


def fake_values(flat: Flat, example: Mapping[str, int]) -> tuple[Fakes, dict[str, Any]]:
    """Computes the fake value of each weight, input and node of a flat program, by name.

    The program may be untrusted, so the time has a limit.

    example: sizes at which the guards hold. Raises: LoweringError when the time is over, or for a size that
    is an endless expression.
    """
    fakes = Fakes({d: max(2, s) for d, s in example.items()})
    with fakes.mode:  # all values are on the CPU, wherever the weights are
        weights = {
            s.name: torch.empty_strided(w.shape, w.stride(), dtype=w.dtype)
            for s, w in zip(flat.program.weights, flat.weights)
        }
    with deadline.within(60 + 0.5 * len(flat.program.nodes)):
        return fakes, replay(flat.program, fakes, weights)


@dataclass
class TracedGraph:
    """A graph with fake inputs.

    module: its buffers w0, w1, ... are the weights. symbols: the dim of each of torch's symbols.

    fixed: the size of each dim that is no symbol.
    """

    module: fx.GraphModule
    inputs: list[torch.Tensor]
    shapes: ShapeEnv
    symbols: dict[str, str]
    fixed: dict[str, int]

    def conditions(self) -> list[Any]:
        """The conditions on sizes that tracing assumed, without those that hold at all sizes of at least 2.

        Raises: LoweringError.
        """
        made: list[Any] = [["eq", dim, size] for dim, size in self.fixed.items()]
        for guard in self.shapes.guards:
            try:
                if _from_two(guard.expr):
                    continue
                expr = arithmetic(guard.expr, self.symbols)
            except ValueError as e:
                raise LoweringError(
                    f"the compiler assumes {guard.expr}, which is not arithmetic over named dims"
                ) from e
            if isinstance(expr, list) and not always(expr) and expr not in made:
                made.append(expr)
        return made


def _from_two(condition: Any) -> bool:
    """Whether a condition on one dim holds at all sizes of at least 2: `Ne(B, 1)`, `10*B > 10`."""
    if len(condition.free_symbols) != 1:
        return False
    (symbol,) = condition.free_symbols
    above = sympy.Symbol("n", integer=True, nonnegative=True)
    try:
        return sympy.simplify(condition.subs(symbol, above + 2)) is sympy.true
    except (TypeError, ValueError, ArithmeticError, AttributeError, AssertionError):
        return False


def traced(
    flat: Flat,
    example: Mapping[str, int],
    dims: Mapping[str, tuple[int, int | None, int]],
    device: torch.device,
    fixed: Collection[str] = (),
) -> TracedGraph:
    """Prepares a program.

    example: a size of each dim, at least 2 for a result that is valid at other sizes too. fixed: the dims
    that keep it.
    """
    shapes = ShapeEnv(specialize_zero_one=False, duck_shape=False)
    mode = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True)
    sizes: dict[str, Any] = {}
    symbols: dict[str, str] = {}
    for name, (least, most, _) in dims.items():
        if name in fixed:
            sizes[name] = example[name]
            continue
        source = ConstantSource(name)
        symbol = shapes.create_symbol(
            example[name],
            source,
            dynamic_dim=DimDynamic.DYNAMIC,
            constraint_dim=None,
            do_not_specialize_zero_one=True,
        )
        shapes.constrain_symbol_range(symbol, max(least, 1), sys.maxsize if most is None else most)
        sizes[name] = shapes.create_symintnode(symbol, hint=example[name], source=source)
        symbols[str(symbol)] = name
    module, holders = with_weights(flat, device, example)
    inputs: list[torch.Tensor] = []
    for node, slot in zip(holders, flat.program.inputs):
        type_ = parse_slot(slot.type)
        with mode:
            inputs.append(
                torch.empty(
                    [*([flat.program.members] if slot.kind == "stacked" else []), *type_.shape(sizes)],
                    dtype=dtype_of(type_.dtype),
                    device=device,
                )
            )
        node.meta["val"] = inputs[-1]
    module.recompile()
    return TracedGraph(module, inputs, shapes, symbols, {d: example[d] for d in fixed})


def with_weights(
    flat: Flat, device: torch.device, example: Mapping[str, int]
) -> tuple[fx.GraphModule, list[fx.Node]]:
    """The program as a module with its weights as buffers w0, w1, ..., and its placeholders, one for each
    input.

    A program that reads or writes at indices has one output more (`index_flags.py`).

    example: sizes at which the guards hold. Raises: LoweringError for sizes that are endless expressions.
    """
    program = add_flags(flat.program, fake_values(flat, example)[1])
    module = graph_module(program, device, checks="sizes")
    holders = [n for n in module.graph.nodes if n.op == "placeholder"]
    for i, (node, weight) in enumerate(zip(holders, flat.weights)):
        module.register_buffer(f"w{i}", weight, persistent=False)
        with module.graph.inserting_before(node):
            node.replace_all_uses_with(module.graph.get_attr(f"w{i}"))
        module.graph.erase_node(node)
    module.recompile()
    return module, holders[len(flat.weights) :]
