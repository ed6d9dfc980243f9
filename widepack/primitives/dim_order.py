"""Dims and positions in another order: transpose, permute, flip, roll and rot90.

transpose, permute, movedim    y[i] = x[i] with its dims in another order    x: [N, *s]
flip, roll, rot90              y[i] = x[i] with positions along dims moved   x, y: [N, *s]

The member axis stays at dim 0.
"""

from __future__ import annotations

from typing import Any

from ..ir.values import Stacked, WideValue
from ..registry.families import along
from ..registry.registry import strategy
from ..registry.samples import B, call, samples
from ..registry.writer import Writer

samples("transpose.int movedim.int")(
    lambda draw: [call(draw.normal(B, 4, 6), a, b) for a, b in ((0, 1), (1, -1), (-3, 2))]
)


samples("movedim.intlist")(
    lambda draw: [call(draw.normal(B, 4, 6), a, b) for a, b in (([0, 1], [1, 2]), ([-1], [0]))]
)


samples("swapdims swapaxes")(lambda draw: [call(draw.normal(B, 4, 6), a, b) for a, b in ((0, 1), (1, -1))])
samples("permute")(
    lambda draw: (
        [call(draw.normal(B, 3, 4), d) for d in ([2, 0, 1], [0, -1, 1], [-3, -2, -1])]
        + [call(draw.normal(), [])]
    )
)


samples("t")(lambda draw: [call(draw.normal(B, 3)), call(draw.normal(3)), call(draw.normal())])


samples("numpy_T")(lambda draw: [call(draw.normal(B, 3))])
samples("flip")(lambda draw: [call(draw.normal(B, 3, 4), d) for d in ([0], [1, -1], [0, 1, 2])])


samples("roll")(
    lambda draw: [
        call(draw.normal(B, 4), *a) for a in (([1], [0]), ([1, -1], [0, 1]), ([2], [-1]), ([1],), ([2], []))
    ]
)


samples("rot90")(lambda draw: [call(draw.normal(B, 4, 6), *a) for a in ((), (2, [1, 2]), (3, [-1, 0]))])
along("transpose.int movedim.int movedim.intlist swapdims flip rot90")
along("roll", needs="dims")


@strategy("swapaxes", "shifted", family="dim")
def swapaxes(w: Writer, x: Stacked, axis0: int, axis1: int) -> Any:
    """moves the dims of the schema by one, for the member axis"""
    return Stacked(w.call("transpose.int", x.value, 1 + axis0 % x.rank, 1 + axis1 % x.rank))


@strategy("permute", "shape", family="shape")
def permute(w: Writer, x: Stacked, dims: list[int]) -> WideValue:
    """permutes the member's dims; the member axis stays at dim 0"""
    return Stacked(w.call("permute", x.value, [0, *(1 + d % x.rank for d in dims)]))


@strategy("t numpy_T", "shape", family="shape")
def t(w: Writer, x: Stacked) -> WideValue:
    """the member's dims in reverse order"""
    return Stacked(w.call("permute", x.value, [0, *range(x.rank, 0, -1)]))
