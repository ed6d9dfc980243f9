"""Shapes, indices and values made from shapes.

A view of a Stacked value is a `reshape`: its memory need not be member-major. Sizes of a Stacked value, and what is made of sizes alone
(`zeros_like`, `new_ones`), are the same for all members: Shared.
"""

from __future__ import annotations

from typing import Any

import torch

from ..registry.registry import strategy
from ..registry.samples import B, Draw, Sample, bits, call, samples, unary
from ..ir.values import Shared, Stacked, Value, Wide
from ..registry.writer import Writer, put_shared, rank


@strategy("view _unsafe_view reshape", "shape", family="shape")
def view(w: Writer, x: Stacked, size: list[Any]) -> Wide:
    """N in front of the size"""
    return Stacked(w.call("reshape", x.value, [w.members, *put_shared(size)]))


@strategy("expand", "shape", family="shape")
def expand(w: Writer, x: Stacked, size: list[Any], *, implicit: bool = False) -> Wide:
    """N in front of the size"""
    return Stacked(w.call("expand", w.align(x, len(size)), [w.members, *put_shared(size)]))


@strategy("repeat", "shape", family="shape")
def repeat(w: Writer, x: Stacked, repeats: list[Any]) -> Wide:
    """1 in front of the repeats"""
    return Stacked(w.call("repeat", w.align(x, len(repeats)), [1, *put_shared(repeats)]))


@strategy("tile", "shape", family="shape")
def tile(w: Writer, x: Stacked, dims: list[Any]) -> Wide:
    """1 in front of the repeats, which may be fewer than the dims"""
    repeats = [*(1 for _ in range(x.rank - len(dims))), *put_shared(dims)]
    return Stacked(w.call("repeat", w.align(x, len(repeats)), [1, *repeats]))


@strategy("ravel", "shape", family="shape")
def ravel(w: Writer, x: Stacked) -> Wide:
    """the member's dims flattened into one"""
    return Stacked(w.call("flatten.using_ints", x.value, 1, -1) if x.rank else w.call("unsqueeze", x.value, 1))


@strategy("atleast_1d", "shape", family="shape")
def atleast_1d(w: Writer, x: Stacked) -> Wide:
    """a number becomes a vector"""
    return x if x.rank else Stacked(w.call("unsqueeze", x.value, 1))


@strategy("hstack vstack dstack column_stack", "cat", family="shape")
def stacked(w: Writer, tensors: list[Wide]) -> Wide:
    """joined along the dim that the op's name says, with the dims that it gives to smaller ones"""
    name = w.op.split(".")[1]
    least, dim = {"hstack": (1, 1), "vstack": (2, 0), "dstack": (3, 2), "column_stack": (2, 1)}[name]
    values = []
    for x in tensors:
        value = w.stack(x)
        behind = {"column_stack": 2 - rank(x), "dstack": int(0 < rank(x) < 3)}.get(name, 0)
        for _ in range(behind):
            value = w.call("unsqueeze", value, -1)
        values.append(w.align(Stacked(value), least))
    return Stacked(w.call("cat", values, 1 + (0 if name == "hstack" and max(map(rank, tensors)) <= 1 else dim)))


@strategy("expand_as", "shape", family="shape")
def expand_as(w: Writer, x: Wide, other: Wide) -> Wide:
    """the other's sizes"""
    sizes = w.sizes(other)
    if isinstance(x, Stacked):
        return Stacked(w.call("expand", w.align(x, len(sizes)), [w.members, *sizes]))
    return Shared(w.call("expand", x.value, sizes))  # type: ignore[union-attr]


@strategy("reshape_as", "shape", family="shape")
def reshape_as(w: Writer, x: Wide, other: Wide) -> Wide:
    """the other's sizes"""
    if isinstance(x, Stacked):
        return Stacked(w.call("reshape", x.value, [w.members, *w.sizes(other)]))
    return Shared(w.call("reshape", x.value, w.sizes(other)))  # type: ignore[union-attr]


@strategy("type_as", "cast", family="shape")
def type_as(w: Writer, x: Wide, other: Wide) -> Wide:
    """the other's dtype"""
    value = w.call("_to_copy", x.value, dtype=other.value.dtype)  # type: ignore[union-attr]
    return Stacked(value) if isinstance(x, Stacked) else Shared(value)


@strategy("meshgrid meshgrid.indexing", "expand", family="shape", when=lambda w, tensors, **_: all(rank(t) == 1 for t in tensors))
def meshgrid(w: Writer, tensors: list[Wide], *, indexing: str = "ij") -> Any:
    """every vector along its own dim, expanded along the others"""
    order = list(range(len(tensors)))
    if indexing == "xy" and len(tensors) > 1:
        order[:2] = [1, 0]
    sizes = [w.sizes(tensors[order.index(d)])[0] for d in range(len(tensors))]
    made = []
    for k, x in enumerate(tensors):
        value = w.stack(x)
        for d in range(len(tensors)):
            if d != order[k]:
                value = w.call("unsqueeze", value, 1 + d)
        made.append(Stacked(w.call("expand", value, [w.members, *sizes])))
    return tuple(made)


@strategy("permute", "shape", family="shape")
def permute(w: Writer, x: Stacked, dims: list[int]) -> Wide:
    """the member axis stays in front"""
    return Stacked(w.call("permute", x.value, [0, *(1 + d % x.rank for d in dims)]))


@strategy("t numpy_T", "shape", family="shape")
def t(w: Writer, x: Stacked) -> Wide:
    """the member's dims turned round"""
    return Stacked(w.call("permute", x.value, [0, *range(x.rank, 0, -1)]))


@strategy("sym_size.int", "shape", family="shape")
def sym_size(w: Writer, x: Stacked, dim: int) -> Wide:
    """the member's size: the same for all"""
    return Shared(w.call("sym_size.int", x.value, 1 + dim % x.rank))


@strategy("sym_numel", "shape", family="shape")
def sym_numel(w: Writer, x: Stacked) -> Wide:
    """the member's number of elements: the same for all"""
    return Shared(w.call("operator.floordiv", w.call("sym_numel", x.value), w.members))


_LIKE = {
    "zeros_like": "new_zeros",
    "ones_like": "new_ones",
    "empty_like": "new_zeros",
}  # what `empty` holds means nothing; zeros are the same on every run


@strategy("zeros_like ones_like empty_like", "sizes", family="shape")
def like(w: Writer, x: Stacked, *, dtype: torch.dtype | None = None, **_: Any) -> Wide:
    """made from sizes alone: Shared"""
    return Shared(w.call(_LIKE[w.op.split(".")[1]], x.value, w.sizes(x), dtype=dtype))


@strategy("full_like", "sizes", family="shape")
def full_like(w: Writer, x: Stacked, fill: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Wide:
    """made from sizes alone: Shared"""
    return Shared(w.call("new_full", x.value, w.sizes(x), put_shared(fill), dtype=dtype or x.value.dtype))


@strategy("new_zeros new_ones new_full new_empty", "sizes", family="shape")
def new(w: Writer, x: Stacked, size: list[Any], *args: Any, dtype: torch.dtype | None = None, **_: Any) -> Wide:
    """made from sizes alone: Shared"""
    op = "new_zeros" if "new_empty" in w.op else w.op
    return Shared(w.call(op, x.value, put_shared(size), *put_shared(args), dtype=dtype or x.value.dtype))


@strategy("broadcast_tensors", "expand", family="shape")
def broadcast_tensors(w: Writer, tensors: list[Wide]) -> Any:
    """every tensor expanded to the sizes of all"""
    top = max(map(rank, tensors))
    made = w.call("broadcast_tensors", [w.align(Stacked(w.stack(x)), top) for x in tensors])
    return w.stacked(made)


@strategy("fill.Tensor", "expand", family="shape")
def fill_tensor(w: Writer, x: Wide, value: Wide) -> Wide:
    """the number expanded to the sizes, in the dtype of what it is written over"""
    filled: Wide = copy(w, x, value)
    return filled


@strategy("fill.Scalar", "sizes", family="shape")
def fill(w: Writer, x: Stacked, value: Any) -> Wide:
    """made from sizes alone: Shared"""
    return Shared(w.call("new_full", x.value, w.sizes(x), put_shared(value), dtype=x.value.dtype))


@strategy("copy", "expand", family="shape")
def copy(w: Writer, x: Wide, source: Wide, non_blocking: bool = False) -> Wide:
    """the source, in the shape and dtype of what it is copied over"""
    dtype = x.value.dtype  # type: ignore[union-attr]
    if isinstance(source, Stacked):
        value = w.call("expand", w.align(source, rank(x)), [w.members, *w.sizes(x)])
        return Stacked(w.call("_to_copy", value, dtype=dtype) if value.dtype != dtype else value)
    value = w.call("expand", source.value, w.sizes(x))  # type: ignore[union-attr]
    return Shared(w.call("_to_copy", value, dtype=dtype) if value.dtype != dtype else value)


@strategy("index_select", "index_select", family="index", when=lambda w, x, dim, index: isinstance(index, Shared) and rank(x) > 0)
def index_select(w: Writer, x: Stacked, dim: int, index: Shared) -> Wide:
    """Shared indices: the dim shifted"""
    return Stacked(w.call("index_select", x.value, 1 + dim % x.rank, index.value))


def _adjacent(indices: list[Any]) -> bool:
    at = [i for i, v in enumerate(indices) if v is not None]
    return at == list(range(at[0], at[-1] + 1))


def _plain_index(w: Writer, x: Wide, indices: list[Any]) -> bool:
    given = [i for i in indices if i is not None]
    shared = all(isinstance(i, Shared) for i in given)
    return shared and isinstance(x, Stacked) and _adjacent(indices)


@strategy("index.Tensor", "shared", family="index", when=_plain_index)
def index_shared(w: Writer, x: Stacked, indices: list[Any]) -> Wide:
    """Shared indices: one more None in front"""
    return Stacked(w.call("index.Tensor", x.value, [None, *put_shared(indices)]))


def _own_index(w: Writer, x: Wide, indices: list[Any]) -> bool:
    given = [i for i in indices if i is not None]
    return all(i.value.dtype not in (torch.bool, torch.uint8) for i in given) and _adjacent(indices)


@strategy("index.Tensor", "members", family="index", when=_own_index)
def index_own(w: Writer, x: Wide, indices: list[Any]) -> Wide:
    """indices of their own: the members' numbers are one more index tensor"""
    given = [i for i in indices if i is not None]
    top = max(map(rank, given))
    device_of: Value = given[0].value
    numbers = w.call("arange", w.members, dtype=torch.int64, device=device_of.held.device)
    for _ in range(top):
        numbers = w.call("unsqueeze", numbers, -1)  # [N, 1, ..., 1]
    ready = [i if i is None else w.align(i, top) if isinstance(i, Stacked) else i.value for i in indices]
    first = next(i for i, v in enumerate(indices) if v is not None)
    y = w.call("index.Tensor", w.stack(x), [numbers, *ready])
    if first == 0:
        return Stacked(y)
    # the index tensors are not adjacent any more (N comes first, dims that are not indexed lie between): their dims come out in front
    dims = list(range(1 + top, 1 + top + first))  # the dims before the first index
    order = [0, *dims, *range(1, 1 + top), *range(1 + top + first, y.ndim)]
    return Stacked(w.call("permute", y, order))


samples("view _unsafe_view reshape")(
    lambda draw: (
        [call(draw.normal(B, 4, 6), s) for s in ([B, 24], [-1, 6], [B, 2, 2, 6], [-1], [1, B, 4, 6])]
        + [call(draw.normal(), [1, 1]), call(draw.normal(1), [])]
    )
)
samples("expand")(
    lambda draw: (
        [call(draw.normal(*s), t) for s, t in (((1, 3), [B, 3]), ((3,), [B, -1]), ((B, 1, 4), [-1, 3, -1]), ((), [B, 2]), ((4,), [2, B, 4]))]
        + [call(draw.normal(1, 3), [B, 3], implicit=True)]
    )
)
samples("repeat")(lambda draw: [call(draw.normal(B, 3), r) for r in ([1, 2], [2, 1, 3], [1, 1])] + [call(draw.normal(), [2, 3])])
samples("tile")(lambda draw: [call(draw.normal(B, 3), r) for r in ([2], [2, 1, 3], [1, 1], [])] + [call(draw.normal(), [2, 3])])
samples("ravel atleast_1d")(lambda draw: [call(draw.normal(*s)) for s in ((B, 3), (4,), ())])
samples("hstack vstack dstack")(
    lambda draw: [call([draw.normal(*s), draw.normal(*t)]) for s, t in (((4,), (4,)), ((B, 4), (B, 4)), ((), ()), ((B, 2, 6), (B, 2, 6)))]
)
samples("column_stack")(lambda draw: [call([draw.normal(*s), draw.normal(*t)]) for s, t in (((B,), (B, 3)), ((4,), (4,)), ((), ()))])
samples("expand_as")(lambda draw: [call(draw.normal(*a), draw.normal(*b)) for a, b in (((1, 3), (B, 3)), ((3,), (B, 3)), ((), (B, 2)))])
samples("reshape_as")(lambda draw: [call(draw.normal(B, 4), draw.normal(2, B, 2)), call(draw.normal(1), draw.normal())])
samples("type_as")(lambda draw: [call(draw.normal(B, 3), draw.ints(0, 3, 2)), call(draw.ints(0, 9, B), draw.normal(dtype=torch.float64))])
samples("meshgrid")(lambda draw: [call([draw.normal(B), draw.normal(4)]), call([draw.normal(4), draw.normal(2), draw.normal(B)])])
samples("meshgrid.indexing")(lambda draw: [call([draw.normal(B), draw.normal(4)], indexing=i) for i in ("ij", "xy")])
samples("permute")(lambda draw: [call(draw.normal(B, 3, 4), d) for d in ([2, 0, 1], [0, -1, 1], [-3, -2, -1])] + [call(draw.normal(), [])])
samples("t")(lambda draw: [call(draw.normal(B, 3)), call(draw.normal(3)), call(draw.normal())])
samples("numpy_T")(lambda draw: [call(draw.normal(B, 3))])
samples("sym_size.int")(lambda draw: [call(draw.normal(B, 3, 4), d) for d in (0, 1, -1, -3)])
samples("sym_numel")(unary)


@samples("zeros_like ones_like empty_like")
def _likes(draw: Draw) -> list[Sample]:
    return [*unary(draw), *bits(draw), call(draw.normal(B, 3), dtype=torch.int64), call(draw.normal(B, 3, 4), memory_format=torch.preserve_format)]


samples("full_like")(
    lambda draw: [call(draw.normal(B, 3), 0.5), call(draw.ints(0, 9, B, 3), 2), call(draw.normal(), 1, dtype=torch.int64), call(draw.bools(B), True)]
)
samples("fill.Tensor")(lambda draw: [call(draw.normal(*s), v) for s in ((B, 3), ()) for v in (draw.normal(), draw.ints(0, 9))])
samples("broadcast_tensors")(lambda draw: [call([draw.normal(B, 3), draw.normal(3)]), call([draw.normal(), draw.normal(B, 1), draw.ints(0, 9, 4)])])
samples("fill.Scalar")(lambda draw: [call(draw.normal(B, 3), 0.5), call(draw.ints(0, 9, B, 3), 2), call(draw.normal(), 1)])
samples("new_zeros new_ones new_empty")(
    lambda draw: [call(draw.normal(B, 3), [2, B]), call(draw.normal(), []), call(draw.normal(3), [4], dtype=torch.int64)]
)
samples("new_full")(lambda draw: [call(draw.normal(B, 3), [2, B], 0.5), call(draw.ints(0, 9), [], 3), call(draw.normal(3), [4], 1, dtype=torch.bool)])
samples("copy")(
    lambda draw: (
        [call(draw.normal(*a), draw.normal(*b)) for a, b in (((B, 3), (B, 3)), ((B, 3), (3,)), ((B, 3), ()), ((), ()))]
        + [call(draw.ints(0, 9, B, 3), draw.normal(3)), call(draw.normal(B, 3), draw.normal(3, dtype=torch.float64))]
    )
)


@samples("index_select")
def _index_selects(draw: Draw) -> list[Sample]:
    x = draw.normal(B, 4, 6)
    return [
        call(x, 0, draw.ints(0, B, 3)),
        call(x, 1, draw.ints(0, 4, 7)),
        call(x, -1, draw.ints(0, 6, 2)),
        call(x, -1, draw.ints(0, 6)),
        call(draw.normal(4), 0, draw.ints(0, 4, 2)),
        call(draw.normal(), 0, draw.ints(0, 1, 1)),
    ]


@samples("index.Tensor")
def _indices(draw: Draw) -> list[Sample]:
    x = draw.normal(B, 4, 6, 3)

    def ids(high: int, *shape: int) -> torch.Tensor:
        return draw.ints(-high, high, *shape)

    mask = torch.tensor([True, False, True, True])  # of one number of hits whatever the seed: else the result is Ragged
    return [
        call(x, [ids(B, 2)]),
        call(x, [ids(B, 2), ids(4, 2)]),
        call(x, [ids(B, 2, 1), ids(4, 7)]),
        call(x, [None, ids(4, 2)]),
        call(x, [None, ids(4, 2), ids(6, 2)]),
        call(x, [None, ids(4, 2, 7)]),
        call(x, [None, None, ids(6, 7)]),
        call(x, [None, ids(4), ids(6, 2)]),
        call(x, [ids(B)]),
        call(x, [None, ids(4)]),
        call(x, [ids(B, 2), None, ids(6, 2)]),
        call(x, [None, ids(4, 2), None, ids(3, 2)]),
        call(x, [None, ids(4, 2), None]),
        call(x, [None, mask]),
        call(x, [None, mask, ids(6, 3)]),
        call(x, [ids(B, 2).to(torch.int32)]),
    ]
