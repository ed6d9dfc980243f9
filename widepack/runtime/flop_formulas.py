"""Provides the FLOP of each op: a formula for each class of costs, torch's formulas, and those of users.

One multiply-add is two FLOP. Sizes may be symbols, so a formula only adds and multiplies them. torch's own
formulas are read from `torch.utils.flop_counter` at every call, so that what a user registers there counts
too. `op_costs.py` makes times of the same formulas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ..errors import UsageError
from ..ir import ops
from ..ir.limits import tensors
from ..ir.op_records import RECORDS
from ..ir.torch_internals import is_overload, packet_of
from ..ir.values import known

FlopFormula = Callable[..., Any]
"""Takes an op's arguments, and its result as `out_val`, and returns a number of FLOP."""


def formula(op: Any) -> Callable[[FlopFormula], FlopFormula]:
    """Returns a decorator that makes a function the FLOP formula of an op, and allows the op in this process.

    The op then counts as one kernel. The function takes the op's arguments and its result as `out_val`.

    Args:
        op: The op: `"mylib::op"`, `"mylib::op.overload"`, or the object that `torch.library.custom_op`
            returns. The formula holds for all overloads.

    Returns:
        A decorator that returns the function unchanged.

    Raises:
        UsageError: `op` is not an op, it writes into its inputs, or it has a formula already.

    Example:
        >>> @torch.library.custom_op("mylib::scaled", mutates_args=())
        ... def scaled(x: torch.Tensor) -> torch.Tensor:
        ...     return x * 2
        >>> @formula(scaled)
        ... def scaled_flop(x, *, out_val):
        ...     return 2 * x.numel()
    """
    (full,) = ops.allow([op])
    name = _without_overload(full)
    if (other := own_formula(full)) is not None:
        file = other.__code__.co_filename
        raise UsageError(f"{name} has a FLOP formula already, in {file}. Give one formula for each op.")

    def put(function: FlopFormula) -> FlopFormula:
        _OTHERS[name] = function
        return function

    return put


def own_formula(op: str) -> FlopFormula | None:
    """Returns the formula of an op that counts as one kernel, whatever torch implements it by. op: as
    programs name it.
    """
    name = _without_overload(op)
    kind = RECORDS[name].cost if name in RECORDS else ""
    if name in _OTHERS or not (kind in _ONE_KERNEL or name in _COUNTED):
        return _OTHERS.get(name)

    def flop(*args: Any, out_val: Any, **kwargs: Any) -> Any:
        return FORMULAS[kind](name, ops.bind(op, args, kwargs), out_val)

    return flop


def kernel_formula(op: Any) -> FlopFormula | None:
    """Returns the formula of a kernel that torch dispatches; None if it has none."""
    if not is_overload(op):
        return None
    from torch.utils.flop_counter import flop_registry  # imports Triton, and a load needs no formulas

    return own_formula(ops.name_of(op)) or flop_registry.get(packet_of(op))


def _without_overload(op: str) -> str:
    return ".".join(op.split(".")[:2])


def _product(name: str, given: Mapping[str, Any], out: Tensor) -> Any:
    """Each number of the result takes a sum. What is added to a product comes first, a bias last."""
    a, b = [t for key, t in given.items() if isinstance(t, Tensor) and key != "bias"][-2:]
    if a.dim() == b.dim() == 1 and out.dim() == 2:  # outer products
        return 2 * out.numel()
    summed = a.shape[0] if a.dim() == b.dim() == 3 and out.dim() == 2 else 1  # addbmm adds its batch up
    return 2 * out.numel() * summed * a.shape[-1]


def _convolution(name: str, given: Mapping[str, Any], out: Tensor) -> Any:
    """Each number of the result, or of a transposed convolution's input, meets one filter."""
    transposed = "transpose" in name or given.get("transposed")
    places = given.get("input", given.get("self")) if transposed else out
    return 2 * places.numel() * math.prod(given["weight"].shape[1:])


def _member_convolutions(name: str, given: Mapping[str, Any], out: Tensor) -> Any:
    """The same for each member. x is [N or 1, B, C, *s], weight [N, O, C / g, *k]."""
    x, weight = given["x"], given["weight"]
    transposed = given.get("output_padding") is not None
    places = weight.shape[0] * math.prod(x.shape[1:]) if transposed else out.numel()
    return 2 * places * math.prod(weight.shape[2:])


def _attention(name: str, given: Mapping[str, Any], out: Any) -> Any:
    """Two products. A mask or `is_causal` skips nothing, as in torch's formula."""
    query, key, value = given["query"], given["key"], given["value"]
    return 2 * math.prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _grouped_linear(name: str, given: Mapping[str, Any], out: Tensor) -> Any:
    """Each row of x [*, R, I] times a matrix of its member; in layers of experts, times that of an expert."""
    x = given["x"]
    rows = x.shape[:-1] if "index" in given else out.shape[:-1]
    return 2 * math.prod(rows) * x.shape[-1] * out.shape[-1]


def _factored(name: str, given: Mapping[str, Any], out: Tensor) -> Any:
    """The product of both thin factors; of a layer the products of x [N or 1, R, I] with base and factors."""
    left, right, x = given["left"], given["right"], given.get("x")
    if x is None:
        return 2 * left.numel() * right.shape[-1]
    return 2 * x.shape[1] * (x.shape[0] * given["base"].numel() + left.numel() + right.numel())


def _layer_chain(name: str, given: Mapping[str, Any], out: Tensor) -> Any:
    """Each row of x [N or 1, R, I] times the weights [N, O, I] of every layer, for all members."""
    return sum(2 * given["x"].shape[1] * math.prod(w.shape) for w in given["weights"])


def _bilinear(name: str, given: Mapping[str, Any], out: Any) -> Any:
    """One multiply-add for each product of three, over the sizes that the three broadcast to."""
    if name == "aten.bilinear":
        return 2 * math.prod(given["input1"].shape[:-1]) * given["weight"].numel()
    sizes = [_expanded(given[f"i{k}"], given[f"expand{k}"]) for k in (1, 2, 3)]
    return 2 * math.prod(next((d for d in dims if known(d) != 1), 1) for dims in zip(*sizes))


def _expanded(tensor: Tensor, at: Any) -> list[Any]:
    sizes = list(tensor.shape)
    for dim in sorted(at):
        sizes.insert(dim, 1)
    return sizes


def _recurrent_layer(name: str, given: Mapping[str, Any], out: Any) -> Any:
    """Every weight matrix once for each step of each sample. The input is [T, B, I] or [B, T, I]."""
    x = given.get("input", given.get("data"))
    return sum(2 * w.numel() for w in given["params"] if w.dim() == 2) * math.prod(x.shape[:-1])


def _recurrent_steps(name: str, given: Mapping[str, Any], out: Any) -> Any:
    """The same for all members. x is [N or 1, T, B, I]."""
    weights = tensors([given.get(key) for key in ("w_x", "w_h", "w_p", "weights")])
    return sum(2 * w.numel() for w in weights) * math.prod(given["x"].shape[1:3])


def _grouped_mm(x: Tensor, weight: Tensor, *args: Any, out_val: Tensor, **kwargs: Any) -> Any:
    """Each row of x [R, K] times the matrix of its group in weight [G, K, O]; or x [G, R, K] as it is."""
    return 2 * math.prod(x.shape) * out_val.shape[-1]


FORMULAS: dict[str, Callable[[str, Mapping[str, Any], Any], Any]] = {
    "product": _product,
    "convolution": _convolution,
    "member convolutions": _member_convolutions,
    "attention": _attention,
    "grouped linear": _grouped_linear,
    "factored": _factored,
    "layer chain": _layer_chain,
    "bilinear": _bilinear,
    "recurrent": _recurrent_layer,
    "recurrent steps": _recurrent_steps,
}
"""The FLOP of each class: from the op's name without overload, its arguments by name, and its result."""
_ONE_KERNEL = frozenset(FORMULAS) - {"product", "convolution"}
"""The classes of ops that count as one kernel. torch's counter has formulas for the kernels of all others."""
_COUNTED = frozenset({"aten.mv", "aten.dot", "aten.vdot", "aten.addmv", "widepack.convolution"})
"""Ops of the other classes that torch has no formula for."""
_OTHERS: dict[str, FlopFormula] = {
    "aten._grouped_mm": _grouped_mm,
    "transformers.grouped_mm_fallback": _grouped_mm,
}
"""The formulas of ops that programs do not have, and of users."""
