"""Rules of row layouts: ops on each number alone, sizes, and values without rows."""

from __future__ import annotations

import torch

from ..ir import ops
from .call import Call, Rule, named
from .layout import EVEN, Layout, RowAxis, RowNumbers

_POINTWISE = """
    __and__ __or__ __xor__ _conj _conj_physical _neg_view _prelu_kernel addcdiv addcmul alpha_dropout arctan2
    celu clamp clamp_max clamp_min complex conj conj_physical copy copysign dequantize divide dropout elu fill
    floor_divide gelu hardshrink hardsigmoid hardswish hardtanh imag isclose leaky_relu lerp log_sigmoid logit
    masked_fill mish multiply nan_to_num native_dropout polar positive real relu6 resolve_conj resolve_neg
    rrelu rsub selu silu softplus softshrink special_erf special_expm1 special_log1p subtract threshold
    true_divide where xlogy elu_backward gelu_backward hardswish_backward leaky_relu_backward mish_backward
    sigmoid_backward silu_backward softplus_backward tanh_backward threshold_backward
"""
_SAME_CONTENT = """
    zeros_like ones_like empty_like full_like new_zeros new_ones new_full new_empty zeros ones full empty
    scalar_tensor
"""


def pointwise(call: Call) -> Layout:
    """An op whose result at a place depends on that place of its arguments, which are broadcast."""
    return call.several(aligned(call, call.first_result.dim()))


def aligned(call: Call, rank: int) -> Layout:
    """Returns the layout of arguments that are broadcast to a result of `rank` dims.

    Raises: MixesRows for arguments whose rows are in different dims.
    """
    found: RowAxis | None = None
    even = False
    for tensor, layout in call.tensors():
        if isinstance(layout, (RowNumbers, list)):
            call.unknown("computes with the number of the row")
        if layout is EVEN:
            even = True
        if isinstance(layout, RowAxis):
            here = layout.shifted(rank - tensor.dim())
            if found is not None and here != found:
                if here.dim != found.dim:
                    call.mixes("combines each row with all rows")
                call.unknown("combines rows in different orders")
            found = here
    return found or (EVEN if even else None)


def _same_content(call: Call) -> Layout:
    """One number at all places."""
    if call.counts_rows("fill_value"):
        call.unknown("computes with the number of rows")
    return call.even()


def _arange(call: Call) -> Layout:
    if not call.counts_rows():
        return None
    start, step = call.given.get("start") or 0, call.given.get("step")
    if start != 0 or step not in (None, 1):
        call.unknown("counts to a number that depends on the number of rows")
    return RowNumbers(RowAxis(0))


def _prelu(call: Call) -> Layout:
    call.fixed("weight")
    axis = call.axis("self")
    if axis is not None and axis.dim == 1:
        call.unknown("its weight follows the rows")
    return call.layout("self")


def _cast(call: Call) -> Layout:
    """A copy, which keeps row numbers."""
    return call.layout("self") if "self" in call.given else call.layout("input")


RULES: dict[str, Rule] = {
    **named(_POINTWISE, pointwise),
    **named(_SAME_CONTENT, _same_content),
    **named(
        "_to_copy alias alias_copy clone contiguous detach lift lift_fresh lift_fresh_copy type_as", _cast
    ),
    "arange": _arange,
    "prelu": _prelu,
}


def is_pointwise(name: str) -> bool:
    """Returns whether torch says that an op is pointwise. name: of the op with its overload."""
    return torch.Tag.pointwise in getattr(ops.resolve(name), "tags", ())
