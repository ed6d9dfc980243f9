"""Ops that broadcast: `y[i] = op(a[i], b[i], ...)`, all of one shape or broadcast to it.

`type_as`, `copy`, `fill`, `prelu` and `masked_scatter` look alike and are not: they have rules of their own, or none.
"""

from __future__ import annotations

from typing import Any

from ..families import broadcast, identity, pointwise
from ..registry import strategy
from ..values import Wide
from ..writer import Writer

identity("clone contiguous alias detach lift_fresh lift_fresh_copy lift positive dropout feature_dropout alpha_dropout")
pointwise("""
    abs acos acosh angle asin asinh atan atanh bitwise_not ceil conj_physical cos cosh deg2rad digamma erf erfc erfinv exp exp2 expm1 floor frac i0 isfinite isinf isnan
    lgamma log log10 log1p log2 log_sigmoid logical_not logit nan_to_num neg rad2deg reciprocal round round.decimals rsqrt sgn sigmoid sign signbit sin sinc sinh special_erf
    special_expm1 special_log1p sqrt square tan tanh trunc real imag
    celu elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu mish relu relu6 selu silu softplus softshrink threshold
    add.Tensor add.Scalar sub.Tensor sub.Scalar rsub.Tensor rsub.Scalar mul.Tensor mul.Scalar div.Tensor div.Scalar div.Tensor_mode div.Scalar_mode true_divide.Tensor
    multiply.Tensor subtract.Tensor divide.Tensor floor_divide floor_divide.Scalar fmod.Tensor fmod.Scalar remainder.Tensor remainder.Scalar
    pow.Tensor_Tensor pow.Tensor_Scalar pow.Scalar atan2 arctan2 hypot copysign.Tensor fmax fmin maximum minimum heaviside logaddexp logaddexp2 xlogy.Tensor
    addcdiv addcmul lerp.Tensor lerp.Scalar clamp clamp.Tensor clamp_max clamp_max.Tensor clamp_min clamp_min.Tensor complex polar
    bitwise_and.Tensor bitwise_and.Scalar bitwise_or.Tensor bitwise_or.Scalar bitwise_xor.Tensor bitwise_left_shift.Tensor bitwise_right_shift.Tensor
    __and__.Tensor __and__.Scalar __or__.Tensor __or__.Scalar __xor__.Tensor logical_and logical_or logical_xor
    eq.Tensor eq.Scalar ne.Tensor ne.Scalar lt.Tensor lt.Scalar le.Tensor le.Scalar gt.Tensor gt.Scalar ge.Tensor ge.Scalar
    where.self where.ScalarOther where.ScalarSelf where.Scalar masked_fill.Scalar _to_copy
""")


@strategy("masked_fill.Tensor", "where", family="pointwise")
def masked_fill(w: Writer, x: Wide, mask: Wide, value: Wide) -> Any:
    """a fill value that differs by member is no 0-dim tensor any more: `where` takes it"""
    a, m, v = broadcast(w, [x, mask, value])
    return w.stacked(w.call("where.self", m, w.call("_to_copy", v, dtype=a.dtype), a))
