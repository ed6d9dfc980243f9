"""Fourier transforms, and views between real and complex numbers.

fft_*              y[i] = the transform of x[i] along dims of the schema    x: [N, *s]    y: [N, *t]
stft, istft        x: [N, B, L] or [N, L]    y: [N, B, F, T] or [N, F, T], and back
view_as_complex    x: [N, *s, 2]    y: [N, *s]; view_as_real is its inverse
"""

from __future__ import annotations

from typing import Any

import torch

from ..ir.values import Stacked, WideValue
from ..registry.families import along, fold, leading
from ..registry.registry import strategy
from ..registry.samples import B, Draw, Sample, call, samples
from ..registry.writer import Writer, is_tensor, put_shared

_MANY = "fft_fftn fft_ifftn fft_rfftn fft_irfftn"


@strategy(
    _MANY,
    "last",
    family="fft",
    when=lambda w, x, s=None, dim=None, norm=None: isinstance(x, Stacked) and dim is None,
)
def last(
    w: Writer, x: Stacked, s: list[Any] | None = None, dim: None = None, norm: str | None = None
) -> WideValue:
    """without dims: the last dims, as many as there are sizes, or all dims of the member"""
    return Stacked(
        w.call(w.op, x.value, put_shared(s), list(range(-(x.rank if s is None else len(s)), 0)), norm)
    )


along(
    "fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2",
    family="fft",
)
along(_MANY, needs="dim", family="fft")
along("fft_fftshift fft_ifftshift", all_dims="dim", empty=False, family="fft")
fold("stft", 0, family="fft")
fold("istft", 1, family="fft")
leading("view_as_real", family="fft")


@strategy("view_as_complex view.dtype", "leading", family="fft", when=lambda w, x, *_: is_tensor(x))
def viewed(w: Writer, x: Stacked, *dtype: Any) -> WideValue:
    """makes the memory contiguous, then views the last dim as the other dtype"""
    return Stacked(w.call(w.op, w.call("contiguous", x.value), *dtype))


def _lines(draw: Draw) -> list[Sample]:
    x = draw.normal(B, 4, 6)
    return [
        call(x),
        call(x, 5, 0),
        call(x, None, 1, "ortho"),
        call(x, 8, -1, "forward"),
        call(draw.normal(6)),
    ]


samples("fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft")(_lines)
samples("fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2")(
    lambda draw: [
        call(draw.normal(B, 4, 6)),
        call(draw.normal(B, 4, 6), [4, 7], [0, 1]),
        call(draw.normal(4, 6), None, [-1, -2], "ortho"),
    ]
)
samples(_MANY)(
    lambda draw: [
        call(draw.normal(2, 4, 6)),
        call(draw.normal(B, 4, 6), [3, 8]),
        call(draw.normal(B, 4, 6), [6], [1], "ortho"),
        call(draw.normal(B, 4, 6), None, [-1, 0]),
    ]
)
samples("fft_fftshift fft_ifftshift")(
    lambda draw: [call(draw.normal(B, 4, 7), *d) for d in ((), ([1],), ([-1, 0],))]
)
samples("stft")(
    lambda draw: [
        call(draw.normal(*s), 8, 4, 6, w, False, True, True)
        for s, w in (((B, 24), draw.uniform(0.5, 1, 6)), ((24,), draw.uniform(0.5, 1, 6)), ((B, 24), None))
    ]
)
samples("istft")(
    lambda draw: [
        call(draw.complex(*s), 8, 4, 8, None, True, False, True, n)
        for s in ((B, 5, 7), (5, 7))
        for n in (None, 21)
    ]
)
samples("view_as_real")(lambda draw: [call(draw.complex(B, 4)), call(draw.complex())])
samples("view_as_complex")(lambda draw: [call(draw.normal(B, 4, 2)), call(draw.normal(2))])


@samples("view.dtype")
def _views(draw: Draw) -> list[Sample]:
    return [
        call(draw.normal(B, 4), torch.int32),
        call(draw.complex(B, 4), torch.float32),
        call(draw.normal(B, 4), torch.complex64),
    ]
