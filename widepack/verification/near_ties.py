"""Finds the answers of a member whose decisions rounding may change.

A comparison, a rounding to whole numbers or an argmax decides. Where a number is as close to the other side
as its rounding error, both decisions are right: a near-tie. The member's program runs in float64, and at each
decision the numbers that are compared are moved by the bound of their own rounding error:

    margin = 4x the largest error of these numbers in the member's own dtype + 4 ulp of their rms

The own errors are those of the member with the decisions of float64, so an earlier near-tie is no error. Only
a decision whose margin in float64 is smaller can change. Where it does not, the answer stays that of float64.
Numbers that the member computes without an error have no margin, so nothing is decided otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from widepack_artifacts.program import Node, Program, substitute

from ..ir import ops
from ..ir.cast import raise_value, raised
from ..ir.encoding import decode
from ..ir.fake_values import CPU
from ..kernels.exact_norms import as_torch_computes
from ..runtime.graph_module import Loop
from ..runtime.walk import last_uses
from .root_mean_square import root_mean_square

DRAWS = 16  # of the directions in which numbers are moved
_JUMPS = frozenset(
    ("ceil", "fake_quantize_per_channel_affine", "fake_quantize_per_tensor_affine", "floor", "floor_divide")
) | {"fmod", "frac", "grid_sampler_2d", "grid_sampler_3d", "heaviside", "remainder", "round", "sgn"}
_JUMPS |= {"sign", "special_round", "trunc"}
"""Ops whose floating answers jump. Ops with whole numbers or truth values among their answers are found by
these.
"""
_ROUNDED_QUOTIENTS = ("aten.div.Tensor_mode", "aten.div.Scalar_mode")
_Step = Callable[[Node, Callable[..., Any], list[Any]], Any]
"""Gets a node, what computes it (of operands that a function changes, if one is given), and its operands:
positional ones, and a dict of the others. Returns the node's value.
"""


def answers(program: Program, weights: Sequence[Any], inputs: Sequence[Tensor]) -> list[list[Any]]:
    """Returns float64 answers of a member, in each of which near-ties are decided in another way.

    Args:
        program: The member program.
        weights: Its weights, in the order in which the program takes them.
        inputs: The inputs of a call.

    Returns:
        For each draw the outputs; nothing if the program decides nothing.
    """
    with torch.inference_mode():
        margins = _margins(program, weights, inputs)
        if not any(margins.values()):
            return []
        exact = raised(program)
        given = [raise_value(v) for v in (*weights, *inputs)]
        return [_with_other_decisions(exact, given, margins, seed) for seed in range(DRAWS)]


def _margins(program: Program, weights: Sequence[Any], inputs: Sequence[Tensor]) -> dict[str, float]:
    """Returns the margin of each node that decides, by its name."""
    decided: dict[str, Any] = {}
    operands: dict[str, list[Any]] = {}

    def note(node: Node, compute: Callable[[], Any], given: list[Any]) -> Any:
        value = compute()
        if _decides(node, value, given):
            decided[node.name], operands[node.name] = value, given
        return value

    _run_nodes(raised(program), [raise_value(v) for v in (*weights, *inputs)], note)
    margins: dict[str, float] = {}

    def as_decided(node: Node, compute: Callable[[], Any], given: list[Any]) -> Any:
        value = compute()
        if node.name not in decided:
            return value
        margins[node.name] = max(map(_margin, _floats(given), _floats(operands.pop(node.name))), default=0.0)
        return pytree.tree_map(
            lambda own, truth: truth.to(own.dtype) if isinstance(own, Tensor) else own,
            value,
            decided.pop(node.name),
        )

    with as_torch_computes():
        _run_nodes(program, [*weights, *inputs], as_decided)
    return margins


def _margin(own: Tensor, truth: Tensor) -> float:
    """Returns the bound of the rounding error of numbers that are compared; 0 if they have none."""
    if own.shape != truth.shape or own.numel() == 0:
        return 0.0
    finite = torch.isfinite(own) & torch.isfinite(truth)
    if not bool(finite.any()):
        return 0.0
    own, truth = own[finite], truth[finite]
    largest = float((own.to(truth.dtype) - truth).abs().max())
    eps = torch.finfo(own.dtype).eps
    return 4 * largest + 4 * eps * root_mean_square(truth) if largest else 0.0


def _with_other_decisions(
    program: Program, given: Sequence[Any], margins: Mapping[str, float], seed: int
) -> list[Any]:
    """Returns the outputs with the operands of each decision moved by their margin, up or down."""
    generator = torch.Generator().manual_seed(seed)

    def moved(node: Node, compute: Callable[..., Any], operands: list[Any]) -> Any:
        value = compute()
        margin = margins.get(node.name, 0.0)
        if not margin:
            return value

        def move(x: Any) -> Any:
            if not (isinstance(x, Tensor) and x.is_floating_point()):
                return x
            sign = torch.randint(2, x.shape, generator=generator, dtype=torch.int8)
            return x + margin * (2 * sign - 1).to(x.dtype)

        return pytree.tree_map(lambda a, b: _jump(a, b, 2 * margin), value, compute(move))

    return _run_nodes(program, given, moved)


def _jump(value: Any, other: Any, margin: float) -> Any:
    """Returns another decision where there is one. A floating number that only moved stays as it was."""
    if not isinstance(value, Tensor) or value.shape != other.shape or not value.is_floating_point():
        return other
    return torch.where((value - other).abs() <= margin, value, other)


def _decides(node: Node, value: Any, operands: Sequence[Any]) -> bool:
    """Returns whether a node turns floating numbers into something that does not change with them alone."""
    found = [v for v in pytree.tree_leaves(value) if isinstance(v, Tensor)]
    if node.body is not None or not _floats(operands) or node.op.endswith("view.dtype"):
        return False
    whole = any(not v.is_floating_point() and not v.is_complex() for v in found)
    name = node.op.split(".")[1] if "." in node.op else node.op
    return whole or name in _JUMPS or node.op in _ROUNDED_QUOTIENTS


def _floats(values: Any) -> list[Tensor]:
    return [v for v in pytree.tree_leaves(values) if isinstance(v, Tensor) and v.is_floating_point()]


def _run_nodes(program: Program, given: Sequence[Any], step: _Step) -> list[Any]:
    """Runs a program node by node, and returns its outputs.

    given: the weights, then the inputs. step: returns the value of each node.
    """
    slots = [*program.weights, *program.inputs]
    values: dict[str, Any] = {s.name: v for s, v in zip(slots, given)}
    for node, ended in zip(program.nodes, last_uses(program)):
        operands = list(decode(substitute((node.args, node.kwargs), values.__getitem__), CPU))
        function: Any = ops.function(node.op) if node.body is None else Loop(node.body, program.members, CPU)

        def compute(
            change: Callable[[Any], Any] | None = None, function: Any = function, operands: Any = operands
        ) -> Any:
            args, kwargs = operands if change is None else pytree.tree_map(change, operands)
            return function(*args, **kwargs)

        values[node.name] = step(node, compute, operands)
        for name in ended:
            values.pop(name, None)
    return [decode(substitute(o.value, values.__getitem__), CPU) for o in program.outputs]
