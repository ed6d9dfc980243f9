"""Rules of row layouts: other shapes, joins, parts, copies, and values that are made of sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from .call import Call
from .layout import EVEN, Layout, RowAxis, RowNumbers, axis_of, places_of_a_row

_LARGE_BATCH = 2**40


def kept(layout: Layout, change: Callable[[RowAxis], RowAxis]) -> Layout:
    """Returns a layout with a changed axis. Row numbers stay row numbers."""
    if isinstance(layout, RowNumbers):
        return RowNumbers(change(layout.axis))
    return change(layout) if isinstance(layout, RowAxis) else layout


def axis_of_even(call: Call, name: str) -> RowAxis:
    """Returns an axis of an argument that does not change along its dim of the batch.

    Raises: NoRule if it has several such dims.
    """
    name = call.given[name].name
    symbolic, value = call.batch.symbolic[name], call.batch.values[name]
    dims = call.batch.dims(symbolic)
    if len(dims) != 1:
        call.unknown("has several dims of the batch")
    times = int(value.shape[dims[0]]) // call.rows
    if times * call.rows != value.shape[dims[0]] or not call.batch.is_multiple(symbolic.shape[dims[0]]):
        call.unknown("has a size that is no multiple of the number of rows")
    return RowAxis(dims[0], 1, times)


def reshape(call: Call) -> Layout:
    """Another shape over the same order of numbers."""
    layout = call.layout("self")
    if call.node.op == "aten.view.dtype":
        return _as_dtype(call, layout)
    if layout is None:
        return call.unknown("spreads a value over the rows") if call.result_dims() else None
    if layout is EVEN:
        layout = axis_of_even(call, "self")
    assert isinstance(layout, (RowAxis, RowNumbers))
    axis = layout.axis if isinstance(layout, RowNumbers) else layout
    found = axis_of(call.result.shape, places_of_a_row(call.shape("self"), axis), call.rows)
    if found is None:
        call.unknown("spreads the rows over several dims")
    return RowNumbers(found) if isinstance(layout, RowNumbers) else found


def _as_dtype(call: Call, layout: Layout) -> Layout:
    """The same memory as another dtype: only the last dim may get another size."""
    if isinstance(layout, RowNumbers):
        call.unknown("changes the type of the number of the row")
    last = call.rank("self") - 1
    if last in call.even_dims("self") or (isinstance(layout, RowAxis) and layout.dim == last):
        call.unknown("changes the number of places of the rows")
    return layout


def squeeze(call: Call) -> Layout:
    """Without dims of size 1."""
    dims = call.dims("dim")
    if call.batch.least < 2 and any(dims is None or d in dims for d in call.batch_dims("self")):
        call.unknown("has no dim of the rows in a batch of 1")
    return call.placed(call.layout("self"))


def broadcast(call: Call) -> Layout:
    """Several values with copies of each along dims, so that all have one shape."""
    layouts = [layout for _, layout in call.tensors()]
    return [call.even(i) if x is None else call.placed(x, i) for i, x in enumerate(layouts)]


def repeat(call: Call) -> Layout:
    """Copies along dims: of a row with itself, or of a value for each row."""
    layout, shape = call.layout("self"), call.shape("self")
    more = len(call.result.shape) - len(shape)
    if layout is EVEN:
        before = [d + more for d in call.even_dims("self")]
        return EVEN if call.result_dims() == before else call.unknown("repeats a value by rows")
    if layout is None:
        dims = call.result_dims()
        if not dims:
            return None
        old = [1] * more + shape
        if all(old[d] == 1 for d in dims):
            return EVEN
        if len(dims) > 1:
            call.unknown("repeats a value along several dims of the batch")
        return RowAxis(dims[0], 1, old[dims[0]])
    axis = (layout.axis if isinstance(layout, RowNumbers) else call.axis("self")) or RowAxis(0)
    times = int(call.result.shape[axis.dim + more]) // shape[axis.dim]
    return kept(layout, lambda a: replace(a, dim=a.dim + more, before=a.before * times))


def repeat_interleave(call: Call) -> Layout:
    """Copies of each place after itself."""
    layout = call.layout("self")
    if isinstance(call.get("repeats"), torch.Tensor):
        return _repeat_by_numbers(call, layout)
    if call.given.get("dim") is None:
        if layout is None and not call.result_dims():
            return None
        if not isinstance(layout, (RowAxis, RowNumbers)):
            call.unknown("repeats a value along the rows")
        times = int(call.get("repeats"))
        places = places_of_a_row(
            call.shape("self"), layout.axis if isinstance(layout, RowNumbers) else layout
        )
        found = axis_of(call.result.shape, places * times, call.rows)
        return kept(layout, lambda axis: found) if found else call.unknown("repeats the rows")
    dim, times = call.dim("dim"), call.get("repeats")
    if times == 0:
        call.unknown("repeats no place")
    if layout is None:
        return RowAxis(dim, call.shape("self")[dim], 1) if call.result_dims() else None
    if layout is EVEN:
        return EVEN if not call.counts_rows() else call.unknown("repeats by the number of rows")
    return kept(layout, lambda a: replace(a, after=a.after * int(times)) if a.dim == dim else a)


def _repeat_by_numbers(call: Call, layout: Layout) -> Layout:
    """Copies of each place after itself, as many as a tensor says."""
    call.fixed("repeats")
    in_rows = isinstance(layout, RowAxis) and (call.given.get("dim") is None or layout.dim == call.dim("dim"))
    if in_rows or layout is EVEN or call.counts_rows():
        call.unknown("repeats the rows by numbers of a tensor")
    return layout


def select(call: Call) -> Layout:
    """One place of a dim."""
    layout = call.layout("self")
    if call.counts_rows("index"):
        call.unknown("takes a place that depends on the number of rows")
    if isinstance(layout, RowAxis) and layout.dim == call.dim("dim"):
        call.mixes("takes one of the rows for all")
    return call.even() if layout is EVEN else call.placed(layout)


def part(call: Call) -> Layout:
    """Some places of a dim."""
    dim, layout = call.dim("dim"), call.layout("self")
    own = layout.axis if isinstance(layout, RowNumbers) else layout
    in_rows = isinstance(own, RowAxis) and own.dim == dim
    if "end" in call.given and call.is_whole(dim):
        return layout
    if in_rows or isinstance(layout, RowNumbers):
        if isinstance(own, RowAxis) and own.plain and isinstance(layout, RowAxis):
            call.mixes("takes some of the rows")
        call.unknown("takes some places of the rows")
    if call.counts_rows():
        call.unknown("takes places that depend on the number of rows")
    if not _is_fixed(call, dim):
        _whole_batch(call, dim)
    return call.even() if layout is EVEN else layout


def _is_fixed(call: Call, dim: int) -> bool:
    """Returns whether a slice of a dim has the same number of places in every batch that the program gets."""
    if "end" not in call.given or dim not in call.even_dims("self"):
        return False
    places = slice(call.get("start"), call.get("end"), call.get("step"))
    times = axis_of_even(call, "self").after
    batches = (call.batch.least, call.rows, _LARGE_BATCH)
    return len({len(range(*places.indices(times * b))) for b in batches}) == 1


def _whole_batch(call: Call, dim: int) -> None:
    """Checks that a dim whose parts are taken is none of the batch. Raises: NoRule.

    A small batch may have fewer places than a part takes. So the sizes of its parts depend on the number of
    rows, also where that is no expression of it.
    """
    if dim in call.even_dims("self"):
        call.unknown("takes a part of a dim whose size is the number of rows")


def parts(call: Call) -> Layout:
    """A list of parts along a dim."""
    dim, layout = call.dim("dim"), call.layout("self")
    if not isinstance(layout, RowAxis) or layout.dim != dim:
        if call.counts_rows():
            call.unknown("splits by the number of rows")
        _whole_batch(call, dim)
        return call.several(layout)
    step = call.rows * layout.after
    if layout.plain or any(int(r.shape[dim]) % step for r in call.result):
        call.mixes("splits the rows")
    return [RowAxis(dim, int(r.shape[dim]) // step, layout.after) for r in call.result]


def cat(call: Call) -> Layout:
    """One value after the other along a dim."""
    tensors = [(t, layout) for t, layout in call.tensors() if tuple(t.shape) != (0,)]
    dim = int(call.get("dim")) % call.result.dim()
    axes = [layout for _, layout in tensors if isinstance(layout, RowAxis)]
    if any(isinstance(layout, RowNumbers) for _, layout in tensors):
        call.unknown("joins numbers of rows")
    if not axes:
        if dim in call.result_dims():
            call.unknown("joins values along the batch")
        return call.even() if any(x is EVEN for _, x in tensors) else None
    if all(a.dim == dim for a in axes):
        if len(axes) < len(tensors) or len({a.after for a in axes}) > 1:
            call.unknown("joins rows with other values")
        return replace(axes[0], before=sum(a.before for a in axes))
    return call.agreed(axes, call.mixes, "joins rows that are in different dims")


def stack(call: Call) -> Layout:
    """Values along a new dim."""
    layouts = [layout for _, layout in call.tensors()]
    if any(isinstance(x, RowNumbers) for x in layouts):
        call.unknown("joins numbers of rows")
    found = call.agreed(layouts, call.mixes, "joins rows that are in different dims")
    return call.placed(found) if found else call.even()


def pad(call: Call) -> Layout:
    """Places at the ends of the last dims. Also a mode that repeats what is there."""
    layout = call.layout("self")
    widths = [int(w) for w in call.get("pad" if "pad" in call.given else "padding")]
    rank = call.rank("self")
    padded = {rank - 1 - i // 2 for i, width in enumerate(widths) if width}
    if isinstance(layout, RowNumbers) or (isinstance(layout, RowAxis) and layout.dim in padded):
        call.unknown("pads the dim of the rows")
    call.apart("self", dims=[d for d in range(rank) if d not in padded])
    return layout


def getitem(call: Call) -> Layout:
    """A part of a list."""
    found: Any = call.layouts[call.node.args[0].name]
    at = call.node.args[1]
    if isinstance(found, list) and isinstance(at, int):
        part: Layout = found[at]
        return part
    return call.unknown("takes a part that depends on the rows")


def same_content(call: Call) -> Layout:
    """One number at all places."""
    if call.counts_rows("fill_value", "s"):
        call.unknown("computes with the number of rows")
    return call.even()


def arange(call: Call) -> Layout:
    if not call.counts_rows():
        return None
    start, step = call.given.get("start") or 0, call.given.get("step")
    if start != 0 or step not in (None, 1):
        call.unknown("counts to a number that depends on the number of rows")
    return RowNumbers(RowAxis(0))


def cast(call: Call) -> Layout:
    """A copy, which keeps row numbers."""
    return call.layout("self") if "self" in call.given else call.layout("input")
