"""Estimates what one op takes from the sizes of its arguments and results: time, and memory beside its
result.

The estimate is an upper bound, coarse and the same on every machine. `walk.py` adds it up and refuses a
program that takes more than the artifact's files justify. Work is counted in nanoseconds of one core of a
server. The classes of ops are in `ir/op_traits.py`; an op in no class costs the same as a linear one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..ir import ops
from ..ir.limits import OBJECT, size, tensors
from ..ir.op_traits import READS_LITTLE, CostClass, cost_class
from ..ir.torch_internals import memory_id
from . import matrix_costs, numeric_costs, sequence_costs
from .cost_terms import Cost, Rule, count

CALL = 5_000.0
"""Nanoseconds that an op takes beside its numbers, for each tensor that it returns."""
NUMBER_OP = 1_000.0
"""Nanoseconds that one of Python's operators takes."""
_SLOW = 20.0
_SLOWEST = 500.0
_SERIES = 5_000.0
_WEIGHTS: Mapping[CostClass, float] = {
    "sort": 40.0,
    "slow": _SLOW,
    "fourier": _SLOW,
    "slowest": _SLOWEST,
    "series": _SERIES,
}
"""Nanoseconds for each number that is read or written; 1 for every other class without a rule."""

_RULES: Mapping[CostClass, Rule] = {
    "product": matrix_costs.product,
    "contraction": matrix_costs.contraction,
    "convolution": matrix_costs.convolution,
    "member convolutions": matrix_costs.member_convolutions,
    "attention": matrix_costs.attention,
    "grouped linear": matrix_costs.grouped_linear,
    "factored": matrix_costs.factored,
    "layer chain": matrix_costs.layer_chain,
    "bilinear": matrix_costs.bilinear,
    "recurrent": sequence_costs.recurrent_layer,
    "recurrent steps": sequence_costs.recurrent_steps_of_members,
    "ctc": sequence_costs.ctc,
    "pool": numeric_costs.pool,
    "pair": numeric_costs.pair,
    "distance": numeric_costs.distance,
    "cubic": numeric_costs.linear_algebra(0.5),
    "spectral": numeric_costs.linear_algebra(5.0),
    "window": numeric_costs.window,
    "multivariate gamma": numeric_costs.multivariate_gamma,
    "cell": sequence_costs.recurrent_cell,
    "bag": sequence_costs.bag,
    "class pairs": numeric_costs.class_pairs,
    "differences": numeric_costs.differences,
    "matrix power": matrix_costs.matrix_power,
}


def cost(op: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Cost:
    """The cost of an op for these arguments and this result. The tensors may be on the meta device."""
    if op in ops.PYTHON:
        return Cost(NUMBER_OP)
    name = op.rpartition(".")[0]
    kind = _class_of(name)
    rule = _RULES.get(kind)
    given = [*args, *kwargs.values()]
    calls = CALL * max(1, sum(1 for _ in tensors(result)))
    if rule is not None:
        work, room = rule(name, ops.bind(op, tuple(args), dict(kwargs)), result)
        return Cost(calls + work, room + _dense_copies(given))
    if ops.returns_view(op):
        return Cost(calls + _copied(given, result))
    little = name in READS_LITTLE
    numbers = count(result) + (0 if little else count(given))
    weight = _WEIGHTS.get(kind, 1.0)
    room = 6.0 * size([given, result]) if kind == "fourier" else 0.0 if little else float(size(given))
    return Cost(calls + weight * numbers, room + _dense_copies(given))


def _copied(given: Any, result: Any) -> int:
    """The numbers of a result that are not in the memory of an argument: `reshape` copies what has gaps."""
    known = {memory_id(t) for t in tensors(given)}
    return sum(t.numel() for t in tensors(result) if memory_id(t) not in known)


def _dense_copies(given: Any) -> float:
    """The bytes of arguments with gaps or repeated numbers, of which a kernel makes dense copies first."""
    return float(sum(t.numel() * t.element_size() + OBJECT for t in tensors(given) if not t.is_contiguous()))


def _class_of(name: str) -> CostClass:
    """The cost class of an op. An op of another library is linear, or a Fourier transform by its name."""
    return cost_class(name) or ("fourier" if name.startswith("aten.fft") or "_fft" in name else "linear")


def cost_by_values(op: str, result_bytes: float, given: Any) -> Cost:
    """The cost of an op whose result has at most this many bytes, where only values determine the size."""
    kind = cost_class(op.rpartition(".")[0])
    each = _SLOW
    if kind is not None:
        each = _SLOWEST if kind == "multivariate gamma" else max(_SLOW, _WEIGHTS.get(kind, _SLOW))
    return Cost(CALL + each * (result_bytes + size(given)), 4.0 * size(given))
