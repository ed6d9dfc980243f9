"""Other shapes for the same numbers: view, flatten, squeeze, expand and repeat.

view, reshape           y[i] = x[i] in another shape                     x: [N, *s]    y: [N, *size]
flatten, unflatten      dims joined into one, or one dim split
squeeze, unsqueeze      dims of size 1 removed or added
expand, repeat, tile    x[i] repeated along dims, without or with a copy
pixel_shuffle           [N, *, C*r*r, H, W] -> [N, *, C, H*r, W*r], and back

A view of a Stacked value is a `reshape`, because its memory may not be member-major. `squeeze` without dims
removes the dims that had size 1 when the member was captured; it never removes the member axis.
"""

from __future__ import annotations

from typing import Any

from ..ir.values import Shared, Stacked, WideValue
from ..registry.families import along, leading
from ..registry.registry import strategy
from ..registry.samples import B, call, samples
from ..registry.writer import Writer, put_shared, rank

samples("view _unsafe_view reshape")(
    lambda draw: (
        [call(draw.normal(B, 4, 6), s) for s in ([B, 24], [-1, 6], [B, 2, 2, 6], [-1], [1, B, 4, 6])]
        + [call(draw.normal(), [1, 1]), call(draw.normal(1), [])]
    )
)


samples("reshape_as")(
    lambda draw: [call(draw.normal(B, 4), draw.normal(2, B, 2)), call(draw.normal(1), draw.normal())]
)


samples("ravel atleast_1d")(lambda draw: [call(draw.normal(*s)) for s in ((B, 3), (4,), ())])
samples("flatten.using_ints")(
    lambda draw: (
        [call(draw.normal(B, 4, 6), *d) for d in ((), (0, 1), (1,), (1, -1), (-2, 2))] + [call(draw.normal())]
    )
)


samples("unflatten.int")(
    lambda draw: [call(draw.normal(B, 4, 6), d, s) for d, s in ((1, [2, 2]), (-1, [3, -1]), (0, [B, 1]))]
)


samples("unsqueeze")(
    lambda draw: [call(draw.normal(B, 3), d) for d in (0, 1, 2, -1, -3)] + [call(draw.normal(), 0)]
)


samples("squeeze.dim")(
    lambda draw: (
        [call(draw.normal(B, 1, 4), d) for d in (1, 0, -2)]
        + [call(draw.normal(1), 0), call(draw.normal(), 0)]
    )
)


samples("squeeze.dims")(lambda draw: [call(draw.normal(B, 1, 4, 1), d) for d in ([1], [1, -1], [0, 3])])


samples("squeeze")(lambda draw: [call(draw.normal(*s)) for s in ((B, 1, 4, 1), (1, 1), (B, 3), ())])
samples("expand")(
    lambda draw: (
        [
            call(draw.normal(*s), t)
            for s, t in (
                ((1, 3), [B, 3]),
                ((3,), [B, -1]),
                ((B, 1, 4), [-1, 3, -1]),
                ((), [B, 2]),
                ((4,), [2, B, 4]),
            )
        ]
        + [call(draw.normal(1, 3), [B, 3], implicit=True)]
    )
)


samples("expand_as")(
    lambda draw: [
        call(draw.normal(*a), draw.normal(*b)) for a, b in (((1, 3), (B, 3)), ((3,), (B, 3)), ((), (B, 2)))
    ]
)


samples("broadcast_tensors")(
    lambda draw: [
        call([draw.normal(B, 3), draw.normal(3)]),
        call([draw.normal(), draw.normal(B, 1), draw.ints(0, 9, 4)]),
    ]
)


samples("meshgrid")(
    lambda draw: [
        call([draw.normal(B), draw.normal(4)]),
        call([draw.normal(4), draw.normal(2), draw.normal(B)]),
    ]
)


samples("meshgrid.indexing")(
    lambda draw: [call([draw.normal(B), draw.normal(4)], indexing=i) for i in ("ij", "xy")]
)


samples("repeat")(
    lambda draw: (
        [call(draw.normal(B, 3), r) for r in ([1, 2], [2, 1, 3], [1, 1])] + [call(draw.normal(), [2, 3])]
    )
)


samples("tile")(
    lambda draw: (
        [call(draw.normal(B, 3), r) for r in ([2], [2, 1, 3], [1, 1], [])] + [call(draw.normal(), [2, 3])]
    )
)
samples("repeat_interleave.self_int")(
    lambda draw: [call(draw.normal(B, 4), 2, 0), call(draw.normal(B, 4), 3, -1), call(draw.normal(B, 4), 2)]
)


samples("pixel_shuffle")(
    lambda draw: [call(draw.normal(*s), 2) for s in ((B, 8, 2, 3), (4, 2, 3), (2, B, 4, 2, 3))]
)


samples("pixel_unshuffle")(lambda draw: [call(draw.normal(*s), 2) for s in ((B, 2, 4, 6), (2, 4, 2))])
along("unsqueeze squeeze.dim squeeze.dims unflatten.int flatten.using_ints")
along("repeat_interleave.self_int", needs="dim")
leading("pixel_shuffle pixel_unshuffle")


@strategy("view _unsafe_view reshape", "shape", family="shape")
def view(w: Writer, x: Stacked, size: list[Any]) -> WideValue:
    """puts N before the size"""
    return Stacked(w.call("reshape", x.value, [w.members, *put_shared(size)]))


@strategy("reshape_as", "shape", family="shape")
def reshape_as(w: Writer, x: WideValue, other: WideValue) -> WideValue:
    """takes the sizes of the other value"""
    if isinstance(x, Stacked):
        return Stacked(w.call("reshape", x.value, [w.members, *w.sizes(other)]))
    return Shared(w.call("reshape", x.value, w.sizes(other)))  # type: ignore[union-attr]


@strategy("ravel", "shape", family="shape")
def ravel(w: Writer, x: Stacked) -> WideValue:
    """flattens the member's dims into one"""
    return Stacked(
        w.call("flatten.using_ints", x.value, 1, -1) if x.rank else w.call("unsqueeze", x.value, 1)
    )


@strategy("atleast_1d", "shape", family="shape")
def atleast_1d(w: Writer, x: Stacked) -> WideValue:
    """a number becomes a vector"""
    return x if x.rank else Stacked(w.call("unsqueeze", x.value, 1))


@strategy("squeeze", "dims", family="dim")
def squeeze(w: Writer, x: Stacked) -> Any:
    """drops the dims that were 1 when the member was captured; the member axis never"""
    ones = [d for d, s in enumerate(x.value.sizes) if s == 1 and d > 0]
    return Stacked(w.call("squeeze.dims", x.value, ones)) if ones else x


@strategy("expand", "shape", family="shape")
def expand(w: Writer, x: Stacked, size: list[Any], *, implicit: bool = False) -> WideValue:
    """puts N before the size"""
    return Stacked(w.call("expand", w.align(x, len(size)), [w.members, *put_shared(size)]))


@strategy("expand_as", "shape", family="shape")
def expand_as(w: Writer, x: WideValue, other: WideValue) -> WideValue:
    """takes the sizes of the other value"""
    sizes = w.sizes(other)
    if isinstance(x, Stacked):
        return Stacked(w.call("expand", w.align(x, len(sizes)), [w.members, *sizes]))
    return Shared(w.call("expand", x.value, sizes))  # type: ignore[union-attr]


@strategy("broadcast_tensors", "expand", family="shape")
def broadcast_tensors(w: Writer, tensors: list[WideValue]) -> Any:
    """expands every tensor to the common shape"""
    top = max(map(rank, tensors))
    out = w.call("broadcast_tensors", [w.align(Stacked(w.stack(x)), top) for x in tensors])
    return w.stacked(out)


@strategy(
    "meshgrid meshgrid.indexing",
    "expand",
    family="shape",
    when=lambda w, tensors, **_: all(rank(t) == 1 for t in tensors),
)
def meshgrid(w: Writer, tensors: list[WideValue], *, indexing: str = "ij") -> Any:
    """puts every vector along another dim, and expands it along the rest"""
    order = list(range(len(tensors)))
    if indexing == "xy" and len(tensors) > 1:
        order[:2] = [1, 0]
    sizes = [w.sizes(tensors[order.index(d)])[0] for d in range(len(tensors))]
    out = []
    for k, x in enumerate(tensors):
        value = w.stack(x)
        for d in range(len(tensors)):
            if d != order[k]:
                value = w.call("unsqueeze", value, 1 + d)
        out.append(Stacked(w.call("expand", value, [w.members, *sizes])))
    return tuple(out)


@strategy("repeat", "shape", family="shape")
def repeat(w: Writer, x: Stacked, repeats: list[Any]) -> WideValue:
    """puts 1 before the repeats"""
    return Stacked(w.call("repeat", w.align(x, len(repeats)), [1, *put_shared(repeats)]))


@strategy("tile", "shape", family="shape")
def tile(w: Writer, x: Stacked, dims: list[Any]) -> WideValue:
    """puts 1 before the repeats, which may be fewer than the dims"""
    repeats = [*(1 for _ in range(x.rank - len(dims))), *put_shared(dims)]
    return Stacked(w.call("repeat", w.align(x, len(repeats)), [1, *repeats]))
