"""Provides the FLOP formula of each op: torch's, widepack's own, and those of users.

A formula takes the op's arguments and its result as `out_val`, and returns a number of FLOP; one multiply-add
is two. Sizes may be symbols, so a formula only adds and multiplies them. torch's own formulas are read from
`torch.utils.flop_counter` at every call, so that what a user registers there counts too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import flop_registry

from ..errors import UsageError
from ..ir import ops
from ..ir.torch_internals import is_overload, packet_of
from ..ir.values import known

FlopFormula = Callable[..., Any]

PACKED = ("widepack.linear", "widepack.convolution", "widepack.streamed_linear")
"""widepack's layers over packed weights, for which torch has no formula."""
_STEPS = {
    "widepack.rnn_steps": 2,
    "widepack.gru_steps": 2,
    "widepack.lstm_steps": 3,
    "widepack.packed_lstm": 3,
    "widepack.rnn_training": 2,
    "widepack.gru_training": 2,
    "widepack.lstm_training": 3,
}  # widepack's own ops of recurrent layers, and the first argument that is a weight


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
    if name in _OWN:
        file = _OWN[name].__code__.co_filename
        raise UsageError(f"{name} has a FLOP formula already, in {file}. Give one formula for each op.")

    def put(function: FlopFormula) -> FlopFormula:
        _OWN[name] = function
        return function

    return put


def own_formula(op: str) -> FlopFormula | None:
    """Returns the formula of an op that counts as one kernel, whatever torch implements it by. op: as
    programs name it.
    """
    return _OWN.get(_without_overload(op))


def kernel_formula(op: Any) -> FlopFormula | None:
    """Returns the formula of a kernel that torch dispatches; None if it has none."""
    if not is_overload(op):
        return None
    return own_formula(ops.name_of(op)) or flop_registry.get(packet_of(op))


def packed_flop(op: str, x: Sequence[Any], weight: Sequence[Any], made: Sequence[Any]) -> Any:
    """Returns the FLOP of a layer over packed weights, from sizes.

    A linear layer's x is [N, R, I] and its weight [N * O, I, 1, 1], or [N, I, O] where it is streamed. A
    convolution's weight is [O, C / g, *k].
    """
    if _without_overload(op) in (PACKED[0], PACKED[2]):
        return 2 * x[1] * math.prod(weight)
    return 2 * math.prod(made) * math.prod(weight[1:])


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in arguments or results, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from tensors_in(part)


def _without_overload(op: str) -> str:
    return ".".join(op.split(".")[:2])


def _attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, out_val: Any, **kwargs: Any) -> Any:
    """Two products. A mask or `is_causal` skips nothing, as in torch's formula."""
    return 2 * math.prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _recurrent_layer(x: Tensor, *args: Any, out_val: Any, **kwargs: Any) -> Any:
    """Every weight matrix once for each step of each sample. x is [T, B, I] or [B, T, I]."""
    steps = math.prod(x.shape[:-1])
    lists = [a for a in args if isinstance(a, (tuple, list))]
    matrices = [t for t in tensors_in(lists) if t.dim() == 2]  # states are [layers, B, width]
    return sum(2 * w.numel() * steps for w in matrices)


def _recurrent_steps(first_weight: int) -> FlopFormula:
    def flop(x: Tensor, *args: Any, out_val: Any, **kwargs: Any) -> Any:
        """x is [N or 1, T, B, I]; weights are [N, *, *] or a list of N's; biases have a dim less."""
        steps = math.prod(x.shape[1:3])
        weights = [t for t in args[first_weight - 1 :] if isinstance(t, Tensor) and t.dim() == 3]
        weights += [t for a in args if isinstance(a, (list, tuple)) for t in tensors_in(a)]
        return sum(2 * w.numel() * steps for w in weights)

    return flop


def _packed(op: str) -> FlopFormula:
    def flop(x: Tensor, weight: Tensor, *args: Any, out_val: Tensor, **kwargs: Any) -> Any:
        return packed_flop(op, x.shape, weight.shape, out_val.shape)

    return flop


def _grouped(x: Tensor, weight: Tensor, *args: Any, out_val: Tensor, **kwargs: Any) -> Any:
    """Each row of x [R, K] times the matrix of its group in weight [G, K, O]; or x [G, R, K] as it is."""
    return 2 * math.prod(x.shape) * out_val.shape[-1]


def _trilinear(first: Tensor, second: Tensor, third: Tensor, *args: Any, out_val: Any, **kwargs: Any) -> Any:
    """One multiply-add for each product of three, over the sizes that the three broadcast to."""
    sizes = [_expanded(t, at) for t, at in zip((first, second, third), args)]
    return 2 * math.prod(next((d for d in dims if known(d) != 1), 1) for dims in zip(*sizes))


def _expanded(tensor: Tensor, at: Sequence[int]) -> list[Any]:
    sizes = list(tensor.shape)
    for dim in sorted(at):
        sizes.insert(dim, 1)
    return sizes


def _bilinear(first: Tensor, second: Tensor, weight: Tensor, *args: Any, out_val: Any) -> Any:
    """One multiply-add for each weight [O, I, J] and each sample."""
    return 2 * math.prod(first.shape[:-1]) * weight.numel()


def _factored_weight(base: Tensor, left: Tensor, right: Tensor, *scale: Any, out_val: Any) -> Any:
    return 2 * left.numel() * right.shape[-1]


def _delta_linear(x: Tensor, base: Tensor, left: Tensor, right: Tensor, *args: Any, out_val: Tensor) -> Any:
    """The product with the base for the rows of x, and the products with the thin factors of each member."""
    return 2 * x.shape[0] * x.shape[1] * base.numel() + 2 * x.shape[1] * (left.numel() + right.numel())


def _products(x: Tensor, weight: Tensor, bias: Tensor | None, *, out_val: Tensor) -> Any:
    return 2 * math.prod(out_val.shape) * weight.shape[-1]


def _mlp_chain(x: Tensor, weights: Sequence[Tensor], *args: Any, out_val: Tensor) -> Any:
    """Each row of x [N or 1, R, I] times the weights [N, O, I] of every layer, for all members."""
    return sum(2 * x.shape[1] * math.prod(w.shape) for w in weights)


def _member_convs(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: int,
    output_padding: Any = None,
    *,
    out_val: Tensor,
) -> Any:
    """Each number of the result, or of a transposed convolution's input for each member, meets one filter."""
    places = math.prod(out_val.shape) if output_padding is None else weight.shape[0] * math.prod(x.shape[1:])
    return 2 * places * math.prod(weight.shape[2:])


def _int8_linear(x: Tensor, *args: Any, out_val: Tensor) -> Any:
    return 2 * out_val.numel() * x.shape[-1]


def _expert_linear(x: Tensor, weight: Tensor, index: Tensor, few: bool = False, *, out_val: Tensor) -> Any:
    """Each row of x [*, I] times the matrix of one expert, of I inputs and O outputs."""
    return 2 * math.prod(x.shape) * out_val.shape[-1]


def _matrix_vector(matrix: Tensor, vector: Tensor, *, out_val: Any) -> Any:
    return 2 * matrix.numel()


def _added_vector(start: Tensor, matrix: Tensor, vector: Tensor, *, out_val: Any, **scales: Any) -> Any:
    return 2 * matrix.numel()


_OWN: dict[str, FlopFormula] = {
    "aten.scaled_dot_product_attention": _attention,
    "aten._scaled_dot_product_flash_attention_for_cpu": _attention,
    "widepack.masked_attention": _attention,
    "aten.mv": _matrix_vector,
    "aten.dot": _matrix_vector,
    "aten.vdot": _matrix_vector,
    "aten.addmv": _added_vector,
    "aten._trilinear": _trilinear,
    "aten.bilinear": _bilinear,
    "widepack.factored_weight": _factored_weight,
    "widepack.delta_linear": _delta_linear,
    "widepack.member_convs": _member_convs,
    "widepack.member_products": _products,
    "widepack.int8_linear": _int8_linear,
    "widepack.mlp_chain": _mlp_chain,
    "widepack.expert_linear": _expert_linear,
    "widepack.expert_mm": _expert_linear,
    "widepack.grouped_experts": _expert_linear,
    "aten._grouped_mm": _grouped,
    "transformers.grouped_mm_fallback": _grouped,
    **{f"aten.{name}": _recurrent_layer for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
    **{name: _recurrent_steps(first) for name, first in _STEPS.items()},
    **{name: _packed(name) for name in PACKED},
}
