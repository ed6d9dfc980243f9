"""Joining tensors: cat, stack and the ops named after directions.

cat                       y[i] = x0[i], x1[i], ... one after the other along dim    x: [N, *s]
                          `channels_last`: where a tensor has its channels innermost in memory, in this order,
                          which the next convolution reads
stack                     y[i] = the tensors along a new dim                        y: [N, ..., K, ...]
hstack, vstack, dstack    cat along the second, first or third dim, after small ranks are raised
column_stack              cat along the second dim, vectors as columns
"""

from __future__ import annotations

from ..ir.values import Shared, Stacked, WideValue
from ..registry.families import along, shift, value_of
from ..registry.registry import strategy
from ..registry.samples import B, Draw, Sample, call, samples
from ..registry.writer import Writer, is_tensor, rank


@samples("cat")
def _cats(draw: Draw) -> list[Sample]:
    return [
        call([draw.normal(B, 3), draw.normal(B, 3)]),
        call([draw.normal(B, 3), draw.normal(B, 1), draw.normal(B, 2)], 1),
        call([draw.normal(2, 4), draw.normal(B, 4)], -2),
        call([draw.normal(0), draw.normal(B, 3)], 1),
        call([draw.normal(B, 3), draw.ints(0, 9, B, 2)], -1),
        call([draw.normal(B, 2, 3, 4), draw.normal(B, 3, 3, 4)], 1),
        call([draw.normal(B, 2, 2, 3, 1), draw.normal(B, 2, 2, 3, 1)], -4),
    ]


samples("stack")(
    lambda draw: (
        [call([draw.normal(B, 3), draw.normal(B, 3)], *d) for d in ((), (1,), (-1,), (2,))]
        + [call([draw.normal(), draw.normal()])]
    )
)
samples("hstack vstack dstack")(
    lambda draw: [
        call([draw.normal(*s), draw.normal(*t)])
        for s, t in (((4,), (4,)), ((B, 4), (B, 4)), ((), ()), ((B, 2, 6), (B, 2, 6)))
    ]
)


samples("column_stack")(
    lambda draw: [
        call([draw.normal(*s), draw.normal(*t)]) for s, t in (((B,), (B, 3)), ((4,), (4,)), ((), ()))
    ]
)


def _is_channels_last(x: WideValue) -> bool:
    """Whether the channels of all members lie side by side in memory, for each pixel."""
    if not isinstance(x, Stacked) or not x.packed:
        return False
    channels, stride = x.value.fake.shape[2], x.value.fake.stride(2)
    return type(stride) is int and stride == 1 and not (type(channels) is int and channels == 1)


def _joins_channels(w: Writer, tensors: list[WideValue], dim: int = 0) -> bool:
    values = [t for t in tensors if isinstance(t, (Shared, Stacked)) and is_tensor(t)]
    if len(values) < len(tensors) or len({rank(t) for t in values}) != 1 or rank(values[0]) not in (4, 5):
        return False
    return dim in (1, 1 - rank(values[0])) and any(map(_is_channels_last, values))


@strategy("cat", "channels_last", family="dim", when=_joins_channels)
def cat_channels(w: Writer, tensors: list[WideValue], dim: int = 0) -> WideValue:
    """joins channels in channels-last memory, so that a convolution reads the result without a copy"""
    spatial = rank(tensors[0]) - 2
    order = [1, *range(3, 3 + spatial), 0, 2]  # [N, B, C, *s] -> [B, *s, N, C]
    y = w.call("cat", [w.call("permute", w.stack(t), order) for t in tensors], -1)
    return Stacked(w.call("permute", y, [order.index(d) for d in range(len(order))]))


along("cat stack")


def _is_empty_vector(x: WideValue) -> bool:
    return is_tensor(x) and rank(x) == 1 and value_of(x).sizes[-1] == 0


def _some_empty(w: Writer, tensors: list[WideValue], dim: int = 0) -> bool:
    empty = [_is_empty_vector(t) for t in tensors]
    one_dtype = len({value_of(t).dtype for t in tensors}) == 1
    return (
        any(empty)
        and not all(empty)
        and one_dtype
        and len({rank(t) for t, n in zip(tensors, empty) if not n} - {1}) == 1
    )


@strategy("cat", "without_empty", family="dim", when=_some_empty)
def cat_rest(w: Writer, tensors: list[WideValue], dim: int = 0) -> WideValue:
    """leaves out empty tensors of one dim, which join tensors of any rank

    A key-value cache is such a tensor before its first keys.
    """
    rest = [w.stack(t) for t in tensors if not _is_empty_vector(t)]
    return Stacked(rest[0] if len(rest) == 1 else w.call("cat", rest, shift(dim)))


@strategy("hstack vstack dstack column_stack", "cat", family="shape")
def stacked(w: Writer, tensors: list[WideValue]) -> WideValue:
    """cat along the dim of the op's name, after small ranks are raised as the op raises them"""
    name = w.op.split(".")[1]
    least, dim = {"hstack": (1, 1), "vstack": (2, 0), "dstack": (3, 2), "column_stack": (2, 1)}[name]
    values = []
    for x in tensors:
        value = w.stack(x)
        behind = {"column_stack": 2 - rank(x), "dstack": int(0 < rank(x) < 3)}.get(name, 0)
        for _ in range(behind):
            value = w.call("unsqueeze", value, -1)
        values.append(w.align(Stacked(value), least))
    return Stacked(
        w.call("cat", values, 1 + (0 if name == "hstack" and max(map(rank, tensors)) <= 1 else dim))
    )
