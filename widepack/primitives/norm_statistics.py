"""Layer norms that give their mean and deviation, which their derivatives read.

native_layer_norm    y[i] = (x[i] - mean) * rstd * weight[i] + bias[i]; mean, rstd        x, y: [N, *, D]

| op | strategy | how |
|---|---|---|
| native_layer_norm | `fused` | one norm over all rows; Stacked scale and shift in one more kernel |
"""

from __future__ import annotations

from collections.abc import Sequence

from ..ir.values import Stacked, WideValue
from ..registry.registry import strategy
from ..registry.samples import B, Draw, Sample, call, samples
from ..registry.writer import Writer, put_shared, rank
from .norm import affine


@strategy("native_layer_norm", "fused", family="norm")
def native_layer_norm(
    w: Writer,
    x: WideValue,
    shape: Sequence[int],
    weight: WideValue | None,
    bias: WideValue | None,
    eps: float,
) -> tuple[WideValue, ...]:
    """one layer norm over all members' rows; Stacked scale and shift in one more kernel"""
    plain = not isinstance(weight, Stacked) and not isinstance(bias, Stacked)
    parameters = (put_shared(weight), put_shared(bias)) if plain else (None, None)
    norm = w.call("native_layer_norm", w.stack(x), shape, *parameters, eps)
    y, mean, rstd = (w.call("operator.getitem", norm, i) for i in range(3))
    return Stacked(y if plain else affine(w, y, weight, bias, rank(x))), Stacked(mean), Stacked(rstd)


@samples("native_layer_norm")
def _norms(draw: Draw) -> list[Sample]:
    p = [draw.normal(4) for _ in range(2)]
    return [
        call(draw.normal(B, 3, 4), [4], *p, 1e-5),
        call(draw.normal(B, 4), [4], None, None, 1e-5),
        call(draw.normal(B, 3, 4), [3, 4], draw.normal(3, 4), draw.normal(3, 4), 1e-3),
        call(draw.normal(B, 4), [4], p[0], None, 1e-5),
    ]
