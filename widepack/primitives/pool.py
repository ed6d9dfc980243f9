"""Pooling, padding and resampling.

pool, resample    y[i] = op(x[i])       x: [N, B, C, *s] or [N, C, *s]    y: [N, B, C, *s'] or [N, C, *s']
pad               y[i] = pad(x[i])      x: [N, *s]    y: [N, *s']
prelu             y[i] = x[i] where x[i] > 0, else weight[i] * x[i]       weight: [N, C] or [N, 1]

All ops treat every sample alike, so members fold into the batch. Most treat every channel alike too, so
channel-packed memory is used as it is.
"""

from __future__ import annotations

from typing import Any

import torch

from ..ir.values import Shared, Stacked, WideValue
from ..registry.families import fold
from ..registry.registry import strategy
from ..registry.samples import B, Draw, Make, Sample, call, samples
from ..registry.writer import Writer, put_shared, rank

for _dims in (1, 2, 3):
    _n = f"{_dims}d"
    fold(
        f"max_pool{_n} avg_pool{_n} adaptive_avg_pool{_n} adaptive_max_pool{_n}",
        _dims,
        channels=True,
        family="pool",
    )
    fold(f"max_pool{_n}_with_indices", _dims, channels=True, family="pool") if _dims > 1 else None
for _op, _dims in (
    ("nearest1d", 1),
    ("nearest2d", 2),
    ("nearest3d", 3),
    ("linear1d", 1),
    ("bilinear2d", 2),
    ("bicubic2d", 2),
    ("trilinear3d", 3),
):
    fold(f"upsample_{_op}.vec", _dims, channels=True, family="resample")
fold("_upsample_bilinear2d_aa.vec _upsample_bicubic2d_aa.vec", 2, channels=True, family="resample")
for _dims in (1, 2, 3):
    fold(f"_upsample_nearest_exact{_dims}d.vec", _dims, channels=True, family="resample")
fold("upsample_nearest1d upsample_linear1d _upsample_nearest_exact1d", 1, channels=True, family="resample")
fold(
    "upsample_nearest2d upsample_bilinear2d upsample_bicubic2d _upsample_nearest_exact2d "
    "_upsample_bilinear2d_aa _upsample_bicubic2d_aa",
    2,
    channels=True,
    family="resample",
)
fold("upsample_nearest3d upsample_trilinear3d _upsample_nearest_exact3d", 3, channels=True, family="resample")
fold("max_pool1d_with_indices", 1, channels=True, family="pool")
fold("im2col", 2, family="resample")
fold("col2im", 1, family="resample")
fold("channel_shuffle", -1, family="resample")  # `[B, C, *]` of any rank, always with a batch


@strategy(
    "pad",
    "trailing",
    family="pad",
    when=lambda w, x, pad, mode="constant", value=None: isinstance(x, Stacked) and mode == "constant",
)
def constant(
    w: Writer, x: Stacked, pad: list[Any], mode: str = "constant", value: float | None = None
) -> WideValue:
    """pads trailing dims with a constant: the member axis is one more leading dim"""
    return Stacked(w.call("pad", x.value, put_shared(pad), mode, value))


@strategy(
    "pad",
    "fold",
    family="pad",
    when=lambda w, x, pad, *_, **__: isinstance(x, Stacked) and rank(x) == len(pad) // 2 + 2,
)
def reflected(
    w: Writer, x: Stacked, pad: list[Any], mode: str = "constant", value: float | None = None
) -> Any:
    """folds members into the batch, or into the channels where memory is channel-packed"""
    if x.packed:
        return w.unpack(w.call("pad", w.pack(x), put_shared(pad), mode, value))
    return w.unfold(w.call("pad", w.fold(x), put_shared(pad), mode, value), x)


@strategy("constant_pad_nd", "trailing", family="pad", when=lambda w, x, *_, **__: isinstance(x, Stacked))
def constant_nd(w: Writer, x: Stacked, pad: list[Any], value: float = 0) -> WideValue:
    """pads trailing dims with a constant: the member axis is one more leading dim"""
    return Stacked(w.call("constant_pad_nd", x.value, put_shared(pad), value))


@strategy(
    "grid_sampler",
    "packed",
    family="resample",
    when=lambda w, x, grid, *_: isinstance(x, Stacked) and isinstance(grid, Shared),
)
def sampled_packed(w: Writer, x: Stacked, grid: Shared, *rest: Any) -> Any:
    """for a Shared grid: the channels of all members side by side"""
    return w.unpack(w.call("grid_sampler", w.pack(x), grid.value, *rest))


@strategy("grid_sampler", "fold", family="resample")
def sampled(w: Writer, x: WideValue, grid: WideValue, *rest: Any) -> Any:
    """folds members into the batch"""
    stacked = Stacked(w.stack(grid))
    return w.unfold(w.call("grid_sampler", w.fold(Stacked(w.stack(x))), w.fold(stacked), *rest), stacked)


@strategy("affine_grid_generator", "fold", family="resample")
def affine_grid(w: Writer, theta: Stacked, size: list[Any], corners: bool) -> Any:
    """folds members into the batch"""
    batch, *rest = put_shared(size)
    many = batch * w.members if isinstance(batch, int) else w.call("operator.mul", batch, w.members)
    return w.unfold(w.call("affine_grid_generator", w.fold(theta), [many, *rest], corners), theta)


@strategy("fractional_max_pool2d", "fold", family="pool", when=lambda w, x, *_: rank(x) == 4)
@strategy("fractional_max_pool3d", "fold", family="pool", when=lambda w, x, *_: rank(x) == 5)
def pooled_at(w: Writer, x: WideValue, kernel: list[Any], size: list[Any], at: WideValue) -> Any:
    """folds members into the batch: the numbers that place the windows are for each sample and channel"""
    stacked = x if isinstance(x, Stacked) else Stacked(w.stack(x))
    places = w.call("slice.Tensor", w.stack(at), 1, 0, w.sizes(stacked)[0])  # there may be more than samples
    y = w.call(w.op, w.fold(stacked), put_shared(kernel), put_shared(size), w.fold(Stacked(places)))
    return w.unfold(y, stacked)


@strategy("max_unpool2d", "fold", family="pool", when=lambda w, x, at, size: rank(x) == 4)
@strategy("max_unpool3d", "fold", family="pool", when=lambda w, x, at, *_: rank(x) == 5)
def unpooled(w: Writer, x: WideValue, at: WideValue, *sizes: Any) -> Any:
    """folds members into the batch: the op counts positions within a channel"""
    stacked = Stacked(w.stack(x))
    return w.unfold(w.call(w.op, w.fold(stacked), w.fold(Stacked(w.stack(at))), *put_shared(sizes)), stacked)


@strategy("prelu", "packed", family="norm", when=lambda w, x, weight: rank(x) >= 2 and rank(weight) == 1)
def prelu(w: Writer, x: WideValue, weight: WideValue) -> WideValue:
    """one slope for each channel, the channels of all members side by side"""
    stacked = x if isinstance(x, Stacked) else Stacked(w.stack(x))
    slopes = w.stack(weight)  # [N, C] or [N, 1]
    channels = w.sizes(stacked)[1]
    if slopes.sizes[1] == 1 and channels != 1:
        slopes = w.call("expand", slopes, [-1, channels])
    return w.unpack(w.call("prelu", w.pack(stacked), w.call("flatten.using_ints", slopes, 0, 1)))  # type: ignore[no-any-return]


def _planes(spatial: int, *calls: tuple[tuple[Any, ...], dict[str, Any]], unbatched: bool = True) -> Make:
    """Returns samples: each call's arguments after `[B, C, *s]` and, if the op takes it, `[C, *s]`."""

    def make(draw: Draw) -> list[Sample]:
        s = (8, 6, 6)[:spatial]
        shapes = [(B, 4, *s), *([(4, *s)] if unbatched else [])]
        return [call(draw.normal(*shape), *args, **kwargs) for shape in shapes for args, kwargs in calls]

    return make


for _dims in (1, 2, 3):
    _n = f"{_dims}d"
    _k, _1 = [2] * _dims, [1] * _dims
    samples(f"max_pool{_n}")(
        _planes(_dims, call(_k), call([3] * _dims, _k, _1), call([3] * _dims, _1, _1, _k, True))
    )
    samples(f"avg_pool{_n}")(_planes(_dims, call(_k), call([3] * _dims, _k, _1, True, False)))
    samples(f"adaptive_avg_pool{_n} adaptive_max_pool{_n}")(_planes(_dims, call(_1), call([3] * _dims)))
    if _dims > 1:
        samples(f"max_pool{_n}_with_indices")(_planes(_dims, call(_k), call([3] * _dims, _k, _1)))
for _op, _dims in (("nearest1d", 1), ("nearest2d", 2), ("nearest3d", 3)):
    samples(f"upsample_{_op}.vec")(
        _planes(_dims, call([9] * _dims, None), call(None, [2.0] * _dims), unbatched=False)
    )
for _op, _dims in (
    ("upsample_linear1d", 1),
    ("upsample_bilinear2d", 2),
    ("upsample_bicubic2d", 2),
    ("upsample_trilinear3d", 3),
    ("_upsample_bilinear2d_aa", 2),
    ("_upsample_bicubic2d_aa", 2),
):
    samples(f"{_op}.vec")(
        _planes(
            _dims,
            call([9] * _dims, True, None),
            call(None, False, [1.5] * _dims),
            call([3] * _dims, False, None),
            unbatched=False,
        )
    )
for _dims in (1, 2, 3):
    samples(f"_upsample_nearest_exact{_dims}d.vec")(
        _planes(_dims, call([9] * _dims, None), call(None, [2.0] * _dims), unbatched=False)
    )
samples("upsample_nearest1d _upsample_nearest_exact1d")(_planes(1, call([9]), unbatched=False))
samples("upsample_nearest2d _upsample_nearest_exact2d")(_planes(2, call([9, 7]), unbatched=False))
samples("upsample_nearest3d _upsample_nearest_exact3d")(_planes(3, call([9, 7, 4]), unbatched=False))
samples("upsample_linear1d")(_planes(1, call([9], True), call([9], False, 1.125), unbatched=False))
samples("upsample_bilinear2d upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa")(
    _planes(2, call([9, 7], True), call([9, 9], False, 1.5, 1.5), unbatched=False)
)
samples("upsample_trilinear3d")(_planes(3, call([9, 7, 4], True), unbatched=False))
samples("max_pool1d_with_indices")(_planes(1, call([2]), call([3], [2], [1])))
samples("col2im")(
    lambda draw: [call(draw.normal(*s, 16, 12), [4, 5], [2, 2], [1, 1], [0, 0], [1, 1]) for s in ((B,), ())]
)
samples("grid_sampler")(
    lambda draw: [
        call(draw.normal(B, 4, 6, 7), draw.uniform(-1.2, 1.2, B, 3, 2, 2), m, p, c)
        for m, p, c in ((0, 0, False), (1, 1, True), (2, 2, False))
    ]
)
samples("affine_grid_generator")(
    lambda draw: [call(draw.normal(B, 2, 3), [B, 4, 6, 7], c) for c in (True, False)]
)


@samples("max_unpool2d")
def _unpools(draw: Draw) -> list[Sample]:
    at = torch.tensor([[0, 3], [9, 10]]).expand(B, 4, 2, 2)
    return [call(draw.normal(B, 4, 2, 2), at.contiguous(), [4, 4])]


samples("max_unpool3d")(
    lambda draw: [
        call(
            draw.normal(B, 4, 1, 2, 2),
            torch.tensor([[[0, 3], [9, 10]]]).expand(B, 4, 1, 2, 2).contiguous(),
            [2, 4, 4],
            [2, 2, 2],
            [0, 0, 0],
        )
    ]
)
for _dims in (2, 3):
    samples(f"fractional_max_pool{_dims}d")(
        lambda draw, dims=_dims: [  # type: ignore[misc]
            call(draw.normal(*shape), [2] * dims, [3] * dims, draw.uniform(0, 1, count, 4, dims))
            for shape, count in (((B, 4, *(8, 7, 6)[:dims]), B), ((4, *(8, 7, 6)[:dims]), 1))
        ]
    )
samples("im2col")(_planes(2, call([2, 2], [1, 1], [0, 0], [1, 1]), call([3, 2], [2, 1], [1, 0], [2, 1])))
samples("channel_shuffle")(lambda draw: [call(draw.normal(B, 4, *s), 2) for s in ((3, 2), (3,), (3, 2, 2))])


@samples("pad")
def _pads(draw: Draw) -> list[Sample]:
    constant = [
        call(draw.normal(*s), p)
        for s, p in (
            ((B, 3, 4), [1, 2]),
            ((B, 3, 4, 6), [1, 0, -1, 2]),
            ((4,), [1, 1]),
            ((B, 3), [0, 1, 2, 0]),
        )
    ]
    modes = [
        call(draw.normal(*s), p, m)
        for m in ("reflect", "replicate", "circular")
        for s, p in (
            ((B, 3, 4), [1, 2]),
            ((3, 4), [1, 2]),
            ((B, 3, 4, 6), [1, 2, 1, 0]),
            ((3, 4, 6), [1, 2, 1, 0]),
        )
    ]
    return [
        *constant,
        call(draw.normal(B, 3, 4), [1, 2], "constant", 0.5),
        call(draw.normal(B, 3, 4), [1, 2], mode="reflect"),
        *modes,
    ]


samples("constant_pad_nd")(
    lambda draw: [
        call(draw.normal(B, 3, 4), [1, 2]),
        call(draw.normal(B, 3, 4), [1, -1, 0, 2], float("-inf")),
        call(draw.ints(0, 9, 4), [1, 1], 7),
    ]
)
samples("prelu")(
    lambda draw: [
        *(call(draw.normal(*s), draw.normal(p)) for s in ((B, 4), (B, 4, 3), (B, 4, 3, 2)) for p in (1, 4)),
        call(draw.normal(B, 1, 3), draw.normal(1)),
        call(draw.normal(4), draw.normal(1)),
        call(draw.normal(B, 4), draw.normal()),
    ]
)
