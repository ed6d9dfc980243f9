"""Normalization layers.

layer_norm, rms_norm    y[i] = (x[i] - mean) / std * weight[i] + bias[i], trailing dims     x, y: [N, *, D]
batch_norm              the same for each channel over the batch                      x, y: [N, B, C, *]
group_norm              the same for each group of channels                           x, y: [N, B, C, *]
instance_norm           the same for each channel of each sample                      x, y: [N, B, C, *]
_weight_norm            y[i] = v[i] * (g[i] / |v[i]|), the norm over all dims of a weight but one
renorm                  slices with a norm above a bound are scaled down to the bound

| op | strategy | how |
|---|---|---|
| layer_norm, rms_norm | `fused` | one norm over all rows; Stacked scale and shift in one more kernel |
| batch_norm (eval) | `scale_shift` | y = x * scale + shift; the prologue computes both in float64, once |
| batch_norm | `fused` | one batch norm over [B, N*C, *], the statistics of all members side by side |
| group_norm | `packed` | N*G groups over [B, N*C, *], where x is channel-packed |
| group_norm | `fold` | members folded into the batch, then scale and shift |
| group_norm | `fused` | as `packed`, where x has to be packed first |
| instance_norm | `fused` | one instance norm over the channels of all members side by side |
"""

from __future__ import annotations

from typing import Any

import torch

from ..ir.values import Shared, Stacked, Value, WideValue
from ..registry.registry import register, strategy
from ..registry.samples import B, Draw, Sample, call, samples
from ..registry.writer import Writer, put_shared, rank


def affine(
    w: Writer, y: Value, weight: WideValue | None, bias: WideValue | None, rank_: int, trailing: int = 0
) -> Value:
    """Computes `y * weight + bias`.

    The parameters are `[N, *p]` or `[*p]`. They get `trailing` dims of size 1 at the end, and are aligned to
    the member rank `rank_`.
    """

    def ready(p: WideValue | None) -> Value | None:
        if p is None:
            return None
        value: Value = p.value  # type: ignore[union-attr]
        for _ in range(trailing):
            value = w.call("unsqueeze", value, -1)
        return w.align(Stacked(value), rank_) if isinstance(p, Stacked) else value

    scale, shift = ready(weight), ready(bias)
    if scale is None:
        out = y if shift is None else w.call("add.Tensor", y, shift)
    else:
        out = w.call("mul.Tensor", y, scale) if shift is None else w.call("addcmul", shift, y, scale)
    # parameters may have a wider dtype than y
    return out if out.dtype == y.dtype else w.call("_to_copy", out, dtype=y.dtype)


@strategy("layer_norm", "fused", family="norm")
def layer_norm(
    w: Writer,
    x: WideValue,
    shape: list[int],
    weight: WideValue | None = None,
    bias: WideValue | None = None,
    eps: float = 1e-5,
    cudnn: bool = True,
) -> WideValue:
    """one layer norm over all members' rows; Stacked scale and shift in one more kernel"""
    if not isinstance(weight, Stacked) and not isinstance(bias, Stacked):
        return Stacked(w.call("layer_norm", x.value, shape, put_shared(weight), put_shared(bias), eps))  # type: ignore[union-attr]
    y = w.call("layer_norm", x.value, shape, None, None, eps)  # type: ignore[union-attr]
    return Stacked(affine(w, y, weight, bias, rank(x)))


@strategy("rms_norm", "fused", family="norm")
def rms_norm(
    w: Writer, x: WideValue, shape: list[int], weight: WideValue | None = None, eps: float | None = None
) -> WideValue:
    """one RMS norm over all members' rows; a Stacked scale in one more kernel"""
    if not isinstance(weight, Stacked):
        return Stacked(w.call("rms_norm", x.value, shape, put_shared(weight), eps))  # type: ignore[union-attr]
    return Stacked(affine(w, w.call("rms_norm", x.value, shape, None, eps), weight, None, rank(x)))  # type: ignore[union-attr]


def scale_and_shift(
    w: Writer,
    weight: WideValue | None,
    bias: WideValue | None,
    mean: WideValue,
    var: WideValue,
    eps: float,
    dtype: torch.dtype,
) -> tuple[WideValue, WideValue]:
    """Computes one scale and one shift from statistics and parameters `[C]` of a batch norm.

    It computes in float64 and rounds once.
    """

    def double(p: WideValue) -> Value:
        return w.call("_to_copy", p.value, dtype=torch.float64)  # type: ignore[union-attr]

    many = any(isinstance(p, Stacked) for p in (weight, bias, mean, var))
    scale = w.call("rsqrt", w.call("add.Scalar", double(var), eps))
    if weight is not None:
        scale = w.call("mul.Tensor", double(weight), scale)
    shift = w.call("neg", w.call("mul.Tensor", double(mean), scale))
    if bias is not None:
        shift = w.call("add.Tensor", double(bias), shift)

    def wrap(value: Value) -> WideValue:
        value = w.call("_to_copy", value, dtype=dtype)
        return Stacked(value) if many and value.ndim == 2 else Shared(value)

    return wrap(scale), wrap(shift)


@strategy("_native_batch_norm_legit_no_training", "scale_shift", family="norm")
def batch_norm(
    w: Writer,
    x: WideValue,
    weight: WideValue | None,
    bias: WideValue | None,
    mean: WideValue,
    var: WideValue,
    momentum: float,
    eps: float,
) -> Any:
    """y = x * scale + shift; the prologue computes both"""
    scale, shift = scale_and_shift(w, weight, bias, mean, var, eps, x.value.dtype)  # type: ignore[union-attr]
    y = affine(w, x.value, scale, shift, rank(x), trailing=rank(x) - 2)  # type: ignore[union-attr]
    return Stacked(y), _no_statistics(w, mean), _no_statistics(w, mean)


@strategy(
    "_native_batch_norm_legit_no_training", "fused", family="norm", when=lambda w, x, *rest: rank(x) >= 2
)
def batch_norm_fused(
    w: Writer,
    x: WideValue,
    weight: WideValue | None,
    bias: WideValue | None,
    mean: WideValue,
    var: WideValue,
    momentum: float,
    eps: float,
) -> Any:
    """one batch norm over the channels of all members side by side"""
    packed = w.pack(x if isinstance(x, Stacked) else Stacked(w.stack(x)))
    y = w.call(
        "_native_batch_norm_legit_no_training",
        packed,
        *(_flat(w, p) for p in (weight, bias, mean, var)),
        momentum,
        eps,
    )
    out = w.unpack(w.call("operator.getitem", y, 0))
    return out, _no_statistics(w, mean), _no_statistics(w, mean)


def _no_statistics(w: Writer, mean: WideValue) -> Stacked:
    """Returns what batch norm gives as statistics of the batch if it has none: no numbers of each member."""
    return Stacked(w.call("new_zeros", w.stack(mean), [w.members, 0]))


@strategy("_native_batch_norm_legit_functional", "fused", family="norm")
def batch_norm_training(
    w: Writer,
    x: WideValue,
    weight: WideValue | None,
    bias: WideValue | None,
    mean: WideValue,
    var: WideValue,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """one batch norm over the channels and running statistics of all members side by side"""
    packed = w.pack(x if isinstance(x, Stacked) else Stacked(w.stack(x)))
    out = w.call(
        "_native_batch_norm_legit_functional",
        packed,
        *(_flat(w, p) for p in (weight, bias, mean, var)),
        training,
        momentum,
        eps,
    )
    y, *statistics = (w.call("operator.getitem", out, i) for i in range(5))
    return w.unpack(y), *(Stacked(w.call("unflatten.int", s, 0, [w.members, -1])) for s in statistics)


@strategy("_native_batch_norm_legit.no_stats", "fused", family="norm")
def batch_norm_of_batch(
    w: Writer,
    x: WideValue,
    weight: WideValue | None,
    bias: WideValue | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """one batch norm with statistics of the batch, over the channels of all members side by side"""
    packed = w.pack(x if isinstance(x, Stacked) else Stacked(w.stack(x)))
    y = w.call(
        "_native_batch_norm_legit.no_stats", packed, _flat(w, weight), _flat(w, bias), training, momentum, eps
    )
    out, *statistics = (w.call("operator.getitem", y, i) for i in range(3))
    return w.unpack(out), *(Stacked(w.call("unflatten.int", s, 0, [w.members, -1])) for s in statistics)


def _flat(w: Writer, p: WideValue | None) -> Value | None:
    return None if p is None else w.call("flatten.using_ints", w.stack(p), 0, 1)


def _is_packed(w: Writer, x: WideValue, *args: Any, **kwargs: Any) -> bool:
    return isinstance(x, Stacked) and x.packed


@strategy("group_norm", "packed", family="norm", when=_is_packed)
def group_norm_packed(
    w: Writer,
    x: WideValue,
    groups: int,
    weight: WideValue | None = None,
    bias: WideValue | None = None,
    eps: float = 1e-5,
    cudnn: bool = True,
) -> WideValue:
    """N*G groups over [B, N*C, *]: one kernel with scale and shift"""
    packed = w.pack(x if isinstance(x, Stacked) else Stacked(w.stack(x)))
    y = w.call("group_norm", packed, groups * w.members, _flat(w, weight), _flat(w, bias), eps)
    return w.unpack(y)  # type: ignore[no-any-return]


@strategy("group_norm", "fold", family="norm")
def group_norm(
    w: Writer,
    x: WideValue,
    groups: int,
    weight: WideValue | None = None,
    bias: WideValue | None = None,
    eps: float = 1e-5,
    cudnn: bool = True,
) -> WideValue:
    """folds members into the batch; Stacked scale and shift in one more kernel"""
    separate = isinstance(weight, Stacked) or isinstance(bias, Stacked)
    params = (None, None) if separate else (put_shared(weight), put_shared(bias))
    if isinstance(x, Stacked):
        y = w.unfold(w.call("group_norm", w.fold(x), groups, *params, eps), x).value
    else:
        y = w.call("group_norm", x.value, groups, *params, eps)  # type: ignore[union-attr]
    return Stacked(affine(w, y, weight, bias, rank(x), trailing=rank(x) - 2) if separate else y)


register(
    "group_norm",
    "fused",
    group_norm_packed,
    family="norm",
    when=lambda w, x, *args, **kwargs: not _is_packed(w, x),
)


@strategy("instance_norm", "fused", family="norm")
def instance_norm(
    w: Writer,
    x: WideValue,
    weight: WideValue | None,
    bias: WideValue | None,
    mean: WideValue | None,
    var: WideValue | None,
    *rest: Any,
) -> WideValue:
    """one instance norm over the channels of all members side by side"""
    packed = w.pack(x if isinstance(x, Stacked) else Stacked(w.stack(x)))
    return w.unpack(w.call("instance_norm", packed, *(_flat(w, p) for p in (weight, bias, mean, var)), *rest))  # type: ignore[no-any-return]


@strategy("_weight_norm", "norm", family="norm")
def weight_norm(w: Writer, v: WideValue, g: WideValue, dim: int = 0) -> WideValue:
    """one norm over all dims but one, for the weights of all members"""
    value = w.stack(v)
    dims = [d + 1 for d in range(rank(v)) if dim == -1 or d != dim % rank(v)]
    norm = w.call("linalg_vector_norm", value, 2, dims, dim != -1)
    length = w.stack(g)
    if dim == -1:  # one norm for the whole weight
        length = w.call("reshape", length, [w.members, *(1 for _ in range(rank(v)))])
        norm = w.call("reshape", norm, [w.members, *(1 for _ in range(rank(v)))])
    return Stacked(w.call("mul.Tensor", value, w.call("div.Tensor", length, norm)))


@strategy("renorm", "norm", family="norm")
def renorm(w: Writer, x: Stacked, p: float, dim: int, most: float) -> WideValue:
    """one norm of every slice along the dim, for all members"""
    norm = w.call("linalg_vector_norm", x.value, p, [d + 1 for d in range(x.rank) if d != dim % x.rank], True)
    scale = w.call("mul.Scalar", w.call("reciprocal", w.call("add.Scalar", norm, 1e-7)), most)
    return Stacked(
        w.call(
            "mul.Tensor", x.value, w.call("where.ScalarOther", w.call("gt.Scalar", norm, most), scale, 1.0)
        )
    )


samples("_weight_norm")(
    lambda draw: [
        call(draw.normal(4, 6), draw.normal(4, 1)),
        call(draw.normal(4, 6, 2), draw.normal(1, 6, 1), 1),
        call(draw.normal(4, 6), draw.normal(), -1),
    ]
)
samples("renorm")(
    lambda draw: [
        call(draw.normal(B, 4), 2, 0, 1.0),
        call(draw.normal(B, 4, 6), 1, -1, 5.0),
        call(draw.normal(B, 4), 2.0, 1, 9.0),
    ]
)


@samples("layer_norm")
def _layer_norms(draw: Draw) -> list[Sample]:
    p = [draw.normal(4) for _ in range(2)]
    return [
        call(draw.normal(B, 3, 4), [4], *p),
        call(draw.normal(B, 4), [4]),
        call(draw.normal(B, 3, 4), [3, 4], draw.normal(3, 4), draw.normal(3, 4), 1e-3),
        call(draw.normal(B, 4), [4], p[0], None),
        call(draw.normal(B, 4), [4], None, p[1]),
        call(draw.normal(4), [4], *p),
    ]


@samples("rms_norm")
def _rms_norms(draw: Draw) -> list[Sample]:
    return [
        call(draw.normal(B, 3, 4), [4], draw.normal(4)),
        call(draw.normal(B, 4), [4]),
        call(draw.normal(B, 3, 4), [3, 4], draw.normal(3, 4), 1e-3),
        call(draw.normal(4), [4], draw.normal(4)),
    ]


@samples("_native_batch_norm_legit_no_training")
def _batch_norms(draw: Draw) -> list[Sample]:
    def statistics() -> tuple[Any, Any]:
        return draw.normal(4), draw.uniform(0.5, 2, 4)

    return [
        call(draw.normal(B, 4), draw.normal(4), draw.normal(4), *statistics(), 0.1, 1e-5),
        call(draw.normal(B, 4, 3), None, None, *statistics(), 0.1, 1e-3),
        call(draw.normal(B, 4, 3, 2), draw.normal(4), draw.normal(4), *statistics(), 0.1, 1e-5),
        call(draw.normal(B, 4, 3, 2), draw.normal(4), None, *statistics(), 0.1, 1e-5),
        call(draw.normal(B, 4, 3, 2, 2), draw.normal(4), draw.normal(4), *statistics(), 0.1, 1e-5),
    ]


@samples("_native_batch_norm_legit_functional")
def _batch_norms_training(draw: Draw) -> list[Sample]:
    return [call(*args[:5], True, *args[5:]) for args, _ in _batch_norms(draw)]


@samples("_native_batch_norm_legit.no_stats")
def _batch_norms_of_batch(draw: Draw) -> list[Sample]:
    shapes = [(B, 4), (B, 4, 3), (B, 4, 3, 2)]
    return [
        call(draw.normal(*s), *p, True, 0.1, 1e-5)
        for s in shapes
        for p in ((draw.normal(4), draw.normal(4)), (None, None))
    ]


@samples("group_norm")
def _group_norms(draw: Draw) -> list[Sample]:
    shapes = [(B, 4), (B, 4, 3), (B, 4, 3, 2)]
    out = [call(draw.normal(*s), 2, *p) for s in shapes for p in ((draw.normal(4), draw.normal(4)), ())]
    return [
        *out,
        call(draw.normal(B, 4, 3), 4, draw.normal(4), None, 1e-3),
        call(draw.normal(B, 4, 3), 1, None, draw.normal(4)),
    ]


@samples("instance_norm")
def _instance_norms(draw: Draw) -> list[Sample]:
    tail = (0.1, 1e-5, False)
    return [
        call(draw.normal(B, 4, 3, 2), draw.normal(4), draw.normal(4), None, None, True, *tail),
        call(draw.normal(B, 4, 3), None, None, None, None, True, *tail),
        call(
            draw.normal(B, 4, 3),
            draw.normal(4),
            draw.normal(4),
            draw.normal(4),
            draw.uniform(0.5, 2, 4),
            False,
            *tail,
        ),
    ]
