"""Pooling, padding, resampling: every sample alike, and most of them every channel alike."""

from __future__ import annotations

from typing import Any

from ..families import fold
from ..registry import strategy
from ..values import Stacked, Wide
from ..writer import Writer, put_shared, rank

for _dims in (1, 2, 3):
    _n = f"{_dims}d"
    fold(f"max_pool{_n} avg_pool{_n} adaptive_avg_pool{_n} adaptive_max_pool{_n}", _dims, channels=True, family="pool")
    fold(f"max_pool{_n}_with_indices", _dims, channels=True, family="pool") if _dims > 1 else None
for _op, _dims in (("nearest1d", 1), ("nearest2d", 2), ("nearest3d", 3), ("linear1d", 1), ("bilinear2d", 2), ("bicubic2d", 2), ("trilinear3d", 3)):
    fold(f"upsample_{_op}.vec", _dims, channels=True, family="resample")
fold("_upsample_bilinear2d_aa.vec _upsample_bicubic2d_aa.vec", 2, channels=True, family="resample")
fold("im2col", 2, family="resample")
fold("channel_shuffle", 2, family="resample")


@strategy("pad", "trailing", family="pad", when=lambda w, x, pad, mode="constant", value=None: isinstance(x, Stacked) and mode == "constant")
def constant(w: Writer, x: Stacked, pad: list[Any], mode: str = "constant", value: float | None = None) -> Wide:
    """a constant is put around trailing dims: the member axis is one more leading dim"""
    return Stacked(w.call("pad", x.value, put_shared(pad), mode, value), x.packed)


@strategy("pad", "fold", family="pad", when=lambda w, x, pad, *a: isinstance(x, Stacked) and rank(x) == len(pad) // 2 + 2)
def reflected(w: Writer, x: Stacked, pad: list[Any], mode: str = "constant", value: float | None = None) -> Any:
    """members folded into the batch, or into the channels where memory is channel-packed"""
    if x.packed:
        return w.unpack(w.call("pad", w.pack(x), put_shared(pad), mode, value))
    return w.unfold(w.call("pad", w.fold(x), put_shared(pad), mode, value), x)


@strategy("constant_pad_nd", "trailing", family="pad", when=lambda w, x, *a: isinstance(x, Stacked))
def constant_nd(w: Writer, x: Stacked, pad: list[Any], value: float = 0) -> Wide:
    """a constant is put around trailing dims"""
    return Stacked(w.call("constant_pad_nd", x.value, put_shared(pad), value), x.packed)


@strategy("prelu", "packed", family="norm", when=lambda w, x, weight: rank(x) >= 2)
def prelu(w: Writer, x: Wide, weight: Wide) -> Wide:
    """one slope a channel, the channels of all members side by side"""
    stacked = x if isinstance(x, Stacked) else Stacked(w.stack(x))
    slopes = w.stack(weight)  # [N, C] or [N, 1]
    channels = w.sizes(stacked)[1]
    if slopes.sizes[1] == 1 and channels != 1:
        slopes = w.call("expand", slopes, [-1, channels])
    return w.unpack(w.call("prelu", w.pack(stacked), w.call("flatten.using_ints", slopes, 0, 1)))  # type: ignore[no-any-return]
