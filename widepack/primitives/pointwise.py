"""Pointwise ops: every operand has the shape of the result, or broadcasts to it.

    y[i] = op(a[i], b[i], ...)    a, b: [N, *s] or [*s]    y: [N, *s]

`type_as`, `copy`, `fill`, `prelu` and `masked_scatter` are not pointwise: sizes.py, pool.py and scatter.py
have them.
"""

from __future__ import annotations

from typing import Any

import torch

from ..ir.values import Stacked, WideValue
from ..registry.families import broadcast, identity, pointwise
from ..registry.registry import strategy
from ..registry.samples import (
    B,
    Draw,
    Sample,
    binary,
    binary_bits,
    binary_bools,
    binary_mixed,
    bits,
    call,
    complexes,
    integers,
    samples,
    unary,
    with_scalar,
)
from ..registry.writer import Writer

identity(
    "clone contiguous alias alias_copy resolve_conj resolve_neg lift_fresh lift_fresh_copy lift positive"
)


@strategy("clamp.Tensor", "pointwise", family="pointwise")
def clamp(w: Writer, x: WideValue, min: WideValue | None = None, max: WideValue | None = None) -> Any:
    """broadcasts behind the member axis; expands a Shared input first

    torch has no derivative for an input that is smaller than a bound.
    """
    ready = iter(broadcast(w, [v for v in (Stacked(w.stack(x)), min, max) if v is not None]))
    bounded = next(ready)
    return w.stacked(
        w.call("clamp.Tensor", bounded, *(None if v is None else next(ready) for v in (min, max)))
    )


pointwise("""
    abs acos acosh angle asin asinh atan atanh bitwise_not ceil conj_physical cos cosh deg2rad digamma
    erf erfc erfinv exp exp2 expm1 floor frac i0 isfinite isinf isnan
    lgamma log log10 log1p log2 log_sigmoid logical_not logit nan_to_num neg rad2deg reciprocal round
    round.decimals rsqrt sgn sigmoid sign signbit sin sinc sinh special_erf
    special_expm1 special_log1p sqrt square tan tanh trunc real imag
    celu elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu mish relu relu6 selu silu
    softplus softshrink threshold
    elu_backward hardswish_backward leaky_relu_backward mish_backward sigmoid_backward
    silu_backward softplus_backward tanh_backward threshold_backward
    add.Tensor add.Scalar sub.Tensor sub.Scalar rsub.Tensor rsub.Scalar mul.Tensor mul.Scalar
    div.Tensor div.Scalar div.Tensor_mode div.Scalar_mode true_divide.Tensor
    multiply.Tensor subtract.Tensor divide.Tensor floor_divide floor_divide.Scalar fmod.Tensor
    fmod.Scalar remainder.Tensor remainder.Scalar
    pow.Tensor_Tensor pow.Tensor_Scalar pow.Scalar atan2 arctan2 hypot copysign.Tensor fmax fmin
    maximum minimum max.other min.other heaviside logaddexp logaddexp2 xlogy.Tensor
    addcdiv addcmul lerp.Tensor lerp.Scalar clamp clamp_max clamp_max.Tensor clamp_min
    clamp_min.Tensor complex polar
    bitwise_and.Tensor bitwise_and.Scalar bitwise_or.Tensor bitwise_or.Scalar bitwise_xor.Tensor
    bitwise_left_shift.Tensor bitwise_right_shift.Tensor
    __and__.Tensor __and__.Scalar __or__.Tensor __or__.Scalar __xor__.Tensor logical_and logical_or
    logical_xor
    eq.Tensor eq.Scalar ne.Tensor ne.Scalar lt.Tensor lt.Scalar le.Tensor le.Scalar gt.Tensor
    gt.Scalar ge.Tensor ge.Scalar
    conj mvlgamma polygamma special_i0e
    gcd lcm nextafter igamma igammac isposinf isneginf isclose copysign.Scalar remainder.Scalar_Tensor
    xlogy.Scalar_Self xlogy.Scalar_Other
    bitwise_xor.Scalar bitwise_and.Scalar_Tensor bitwise_or.Scalar_Tensor bitwise_xor.Scalar_Tensor
    bitwise_left_shift.Tensor_Scalar bitwise_right_shift.Tensor_Scalar
    special_xlog1py special_xlog1py.self_scalar special_xlog1py.other_scalar special_zeta
    special_ndtri special_log_ndtr special_entr special_erfcx special_i1 special_i1e
    special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1 special_modified_bessel_i0
    special_modified_bessel_i1 special_modified_bessel_k0
    special_modified_bessel_k1 special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1
    special_spherical_bessel_j0 special_airy_ai
    frexp.Tensor isin.Tensor_Scalar _prelu_kernel detach
    where.self where.ScalarOther where.ScalarSelf where.Scalar masked_fill.Scalar _to_copy
""")


@strategy("gelu_backward", "stacked", family="pointwise")
def gelu_backward(w: Writer, gradient: WideValue, x: WideValue, approximate: str = "none") -> Any:
    """behind the member axis; both operands get all members, because oneDNN's kernel does not broadcast"""
    return w.stacked(w.call("gelu_backward", w.stack(gradient), w.stack(x), approximate=approximate))


samples("gelu_backward")(
    lambda draw: [
        call(draw.normal(B, 3, 4), draw.normal(B, 3, 4), approximate=approximate)
        for approximate in ("none", "tanh")
    ]
)


@strategy("masked_fill.Tensor", "where", family="pointwise")
def masked_fill(w: Writer, x: WideValue, mask: WideValue, value: WideValue) -> Any:
    """as `where`: a Stacked fill value has a dim, and masked_fill takes only 0-dim values"""
    a, m, v = broadcast(w, [x, mask, value])
    return w.stacked(w.call("where.self", m, w.call("_to_copy", v, dtype=a.dtype), a))


samples("""
    acos acosh asin asinh atan atanh ceil cos cosh deg2rad digamma erf erfc erfinv exp exp2 expm1
    floor frac i0 lgamma log log10 log1p log2 log_sigmoid logit nan_to_num
    rad2deg reciprocal round rsqrt sigmoid sin sinc sinh special_erf special_expm1 special_log1p sqrt
    tan tanh trunc
    celu elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu mish relu relu6 selu silu
    softplus softshrink
    alias alias_copy resolve_conj resolve_neg detach special_i0e lift_fresh lift_fresh_copy lift
    positive
""")(unary)
samples("""
    isposinf isneginf special_ndtri special_log_ndtr special_entr special_erfcx special_i1 special_i1e
    special_bessel_j0 special_bessel_j1 special_bessel_y0
    special_bessel_y1 special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0
    special_modified_bessel_k1 special_scaled_modified_bessel_k0
    special_scaled_modified_bessel_k1 special_spherical_bessel_j0 special_airy_ai frexp.Tensor
""")(unary)
samples("hardswish_backward mish_backward sigmoid_backward silu_backward tanh_backward")(binary)
samples("elu_backward")(lambda draw: [call(a, 1.0, 1.0, 1.0, False, b) for (a, b), _ in binary(draw)])
samples("leaky_relu_backward")(lambda draw: [call(a, b, 0.1, False) for (a, b), _ in binary(draw)])
samples("softplus_backward")(lambda draw: [call(a, b, 2.0, 20.0) for (a, b), _ in binary(draw)])
samples("threshold_backward")(lambda draw: [call(a, b, 0.1) for (a, b), _ in binary(draw)])
samples("nextafter isclose special_xlog1py _prelu_kernel")(binary)
samples("gcd lcm")(binary_bits)
samples("igamma igammac special_zeta")(
    lambda draw: [call(*(a.abs() + 1.1 for a in args)) for args, _ in binary(draw)]
)
samples("copysign.Scalar xlogy.Scalar_Other special_xlog1py.other_scalar")(with_scalar(0.7))
samples("remainder.Scalar_Tensor xlogy.Scalar_Self special_xlog1py.self_scalar")(
    lambda draw: [
        call(1.7, draw.uniform(0.5, 3, B, 3, 4)),
        call(1.7, draw.uniform(0.5, 3)),
        call(2, draw.ints(1, 9, B, 2)),
    ]
)
samples(
    "bitwise_xor.Scalar bitwise_left_shift.Tensor_Scalar bitwise_right_shift.Tensor_Scalar isin.Tensor_Scalar"
)(with_scalar(2, whole=True))
samples("bitwise_and.Scalar_Tensor bitwise_or.Scalar_Tensor bitwise_xor.Scalar_Tensor")(
    lambda draw: [call(6, draw.ints(0, 9, B, 3)), call(6, draw.ints(0, 9))]
)
samples("abs neg sign square isnan isinf isfinite logical_not signbit")(
    lambda draw: [*unary(draw), *integers(draw)]
)
samples("sgn angle conj_physical")(lambda draw: [*unary(draw), *complexes(draw)])
samples("real imag conj")(complexes)
samples("polygamma")(lambda draw: [call(1, draw.uniform(1, 3, B, 4)), call(2, draw.uniform(1, 3))])
samples("mvlgamma")(lambda draw: [call(draw.uniform(3, 5, B, 4), 2)])
samples("bitwise_not")(bits)
samples("round.decimals")(with_scalar(decimals=1))
samples("threshold")(with_scalar(0.1, 0.2))
samples("clone contiguous")(
    lambda draw: [*unary(draw), call(draw.normal(B, 3, 4), memory_format=torch.contiguous_format)]
)

samples("add.Tensor sub.Tensor rsub.Tensor")(
    lambda draw: [*binary_mixed(draw), call(draw.normal(B, 3), draw.normal(3), alpha=0.5)]
)
samples("subtract.Tensor")(binary_mixed)
samples("""
    mul.Tensor multiply.Tensor div.Tensor true_divide.Tensor divide.Tensor floor_divide fmod.Tensor
    remainder.Tensor pow.Tensor_Tensor
    eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor maximum minimum max.other min.other
    fmax fmin
""")(binary_mixed)
samples(
    "atan2 arctan2 hypot copysign.Tensor heaviside logaddexp logaddexp2 xlogy.Tensor complex polar "
    "clamp_max.Tensor clamp_min.Tensor"
)(binary)
samples("bitwise_left_shift.Tensor bitwise_right_shift.Tensor")(binary_bits)
samples(
    "bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor __and__.Tensor __or__.Tensor __xor__.Tensor "
    "logical_and logical_or logical_xor"
)(binary_bools)
samples("div.Tensor_mode")(
    lambda draw: [
        call(*args, rounding_mode=mode)
        for mode, (args, _) in zip((None, "floor", "trunc", "floor", None, "trunc"), binary(draw))
    ]
)
samples("div.Scalar_mode")(with_scalar(0.7, rounding_mode="floor"))
samples("add.Scalar sub.Scalar rsub.Scalar")(with_scalar(1.5, 2))
samples(
    "mul.Scalar div.Scalar floor_divide.Scalar fmod.Scalar remainder.Scalar pow.Tensor_Scalar "
    "clamp_max clamp_min"
)(with_scalar(0.7))
samples("eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar")(with_scalar(4, whole=True))
samples("bitwise_and.Scalar bitwise_or.Scalar __and__.Scalar __or__.Scalar")(with_scalar(6, whole=True))
samples("pow.Scalar")(lambda draw: [call(2.0, draw.normal(B, 3)), call(1.5, draw.normal())])
samples("clamp")(with_scalar(-0.5, 0.5))
samples("clamp.Tensor")(
    lambda draw: [
        call(draw.normal(B, 3), draw.normal(3), None),
        call(draw.normal(B, 3), draw.normal(), draw.uniform(2, 3, 3)),
        call(draw.normal(3), max=draw.normal(B, 3)),
    ]
)
samples("lerp.Scalar")(lambda draw: [call(*args, 0.3) for args, _ in binary(draw)])
samples("_to_copy")(
    lambda draw: [
        call(draw.normal(B, 3, 4), dtype=torch.float64),
        call(draw.ints(0, 9), dtype=torch.float32),
        call(draw.normal(B, 3), dtype=torch.int32),
    ]
)


@samples("addcmul addcdiv lerp.Tensor")
def _three(draw: Draw) -> list[Sample]:
    shapes = [
        ((B, 3, 4), (B, 3, 4), (4,)),
        ((4,), (B, 3, 4), (3, 1)),
        ((B, 3), (B, 3), ()),
        ((), (B, 3), (3,)),
    ]
    return [call(draw.normal(*a), draw.normal(*b), draw.uniform(0.5, 2, *c)) for a, b, c in shapes]


@samples("where.self")
def _where(draw: Draw) -> list[Sample]:
    shapes = [
        ((B, 3, 4), (B, 3, 4), (4,)),
        ((B, 1), (3,), ()),
        ((), (B, 3), (3,)),
        ((), (), ()),
        ((B, 1, 4), (), (3, 1)),
    ]
    double = torch.float64
    return [
        *(call(draw.bools(*c), draw.normal(*a), draw.normal(*b)) for c, a, b in shapes),
        call(draw.bools(B, 3), draw.normal(B, 3), draw.normal(dtype=double)),
        call(draw.bools(), draw.normal(B, 3), draw.normal(dtype=double)),
        call(draw.bools(B, 3), draw.ints(0, 9), draw.normal(3)),
    ]


samples("where.ScalarOther")(
    lambda draw: [
        call(draw.bools(B, 3), draw.normal(B, 3), 0.5),
        call(draw.bools(), draw.normal(3), -1.0),
        call(draw.bools(B, 3), draw.normal(), 0.5),
    ]
)
samples("where.ScalarSelf")(
    lambda draw: [
        call(draw.bools(B, 3), 0.5, draw.normal(B, 3)),
        call(draw.bools(), -1.0, draw.normal(3)),
        call(draw.bools(B, 3), 0.5, draw.normal()),
    ]
)
samples("where.Scalar")(lambda draw: [call(draw.bools(B, 3), 0.5, 2.0), call(draw.bools(), 1.0, 0.0)])
samples("masked_fill.Scalar")(
    lambda draw: [
        call(draw.normal(B, 3), draw.bools(B, 3), float("-inf")),
        call(draw.normal(B, 3, 4), draw.bools(3, 1), 0.5),
        call(draw.normal(B, 3), draw.bools(), 0.5),
    ]
)
samples("masked_fill.Tensor")(
    lambda draw: [
        call(draw.normal(B, 3), draw.bools(B, 3), draw.normal()),
        call(draw.normal(B, 3, 4), draw.bools(3, 1), draw.normal(dtype=torch.float64)),
        call(draw.normal(B, 3), draw.bools(), draw.normal()),
    ]
)
