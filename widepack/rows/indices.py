"""Rules of row layouts: ops that read or write at indices."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from widepack_artifacts.program import Ref

from .call import Call
from .layout import EVEN, Layout, RowAxis, RowNumbers
from .shapes import axis_of_even

_MASKS = (torch.bool, torch.uint8)


def embedding(call: Call) -> Layout:
    """Rows of a table, one for each index."""
    call.fixed("weight")
    return _no_numbers(call, call.layout("indices"))


def one_hot(call: Call) -> Layout:
    """A vector of classes for each index."""
    return _no_numbers(call, call.layout("self"))


def _no_numbers(call: Call, layout: Layout) -> Layout:
    if isinstance(layout, (RowNumbers, list)):
        call.unknown("looks up the number of the row")
    return layout


def _dim(call: Call) -> int:
    return call.dim("dim") if call.rank("self") else 0


def gather(call: Call) -> Layout:
    """A value at each index, along a dim. In the other dims a place is read by its number."""
    name, dim = "index" if "index" in call.given else "indices", _dim(call)
    if call.given.get("dim") is None:
        call.unknown("looks up places of the whole value")
    table, index = call.axis("self"), call.axis(name)
    if table is not None and table.dim == dim:
        call.mixes("looks up values in all rows")
    if table is not None and index is not None and table != index:
        call.mixes("looks up values of other rows")
    broadcast = call.node.op.startswith("aten.take_along_dim")
    ours, theirs = call.batch_sizes("self"), call.batch_sizes(name)
    if dim in call.even_dims("self"):
        call.unknown("looks up a value of the batch")
    for d in {*ours, *theirs} - {dim}:
        other = name if d in ours else "self"
        one = d not in ours or d not in theirs
        if ours.get(d) != theirs.get(d) and not (one and broadcast and call.shape(other)[d] == 1):
            call.unknown("looks up places by the number of the row")
    return table or index or call.even()


def scatter(call: Call) -> Layout:
    """Values written at indices along a dim. In the other dims a place is written by its number."""
    names = [n for n in ("self", "index", "src") if isinstance(call.given.get(n), Ref)]
    axes = [call.axis(n) for n in names]
    if any(a is not None and a.dim == _dim(call) for a in axes):
        call.mixes("writes into all rows")
    found = call.agreed(axes, call.mixes, "writes into other rows")
    sizes = [call.batch_sizes(n) for n in names]
    if any(s != sizes[0] or _dim(call) in s for s in sizes):
        call.unknown("writes at places by the number of the row")
    call.fixed("value")
    return found or call.even()


def index_select(call: Call) -> Layout:
    """Places of a dim by a list of indices."""
    table, index = call.axis("self"), call.axis("index")
    dim = _dim(call)
    if call.layout("self") is EVEN:
        call.unknown("looks up a value of the batch")
    if table is not None and table.dim == dim:
        call.mixes("looks up rows by number")
    if table is not None and index is not None:
        call.mixes("looks up places for all rows in each row")
    if index is not None:
        return RowAxis(dim, index.before, index.after)
    return table if table is not None else call.even()


def index_write(call: Call) -> Layout:
    """Values written at indices of a dim, the same in each row."""
    call.fixed("index")
    call.apart("self", dims=[d for d in range(call.rank("self")) if d != _dim(call)])
    axes = [call.axis(n) for n in ("self", "source", "value") if isinstance(call.given.get(n), Ref)]
    return _written(call, axes, _dim(call))


def _written(call: Call, axes: Sequence[RowAxis | None], dim: int) -> Layout:
    """Returns the layout of a value into a dim of which values are written, from the axes of both."""
    why = "writes into the dim of the rows"
    found = call.agreed(axes, call.unknown, why)
    if found is not None and found.dim == dim:
        call.unknown(why)
    return found or call.even()


def part_write(call: Call) -> Layout:
    """A part of a dim that is replaced by another value."""
    own, dim, source = call.axis("self"), call.dim("dim"), call.axis("src")
    if "end" in call.given and call.is_whole(dim):
        return call.layout("src")
    call.apart("self", dims=[d for d in range(call.rank("self")) if d != dim])
    if call.node.op.startswith("aten.select_scatter") and source is not None:
        source = source.shifted(1 if dim <= source.dim else 0)
    return _written(call, [own, source], dim)


def index(call: Call) -> Layout:
    """`x[i, j]` with tensors in the place of some dims."""
    given = list(call.given["indices"])
    if any(i is not None and call.batch.values[i.name].dtype in _MASKS for i in given):
        call.unknown("has a size that depends on values")
    taken = [d for d, i in enumerate(given) if i is not None]
    layouts: list[Layout] = [call.layouts[given[d].name] for d in taken]
    ranks = [call.batch.values[given[d].name].dim() for d in taken]
    rank = max(ranks)
    together = taken == list(range(taken[0], taken[-1] + 1))
    front = taken[0] if together else 0
    table = call.axis("self") if not isinstance(call.layout("self"), RowNumbers) else call.unknown()
    own = None
    if call.layout("self") is EVEN:
        table = axis_of_even(call, "self")
        if table.dim not in taken:
            return call.even() if all(x is None for x in layouts) else call.unknown("looks up the batch")
    if table is not None and table.dim in taken:
        place = taken.index(table.dim)
        numbers = layouts[place]
        if isinstance(numbers, RowNumbers) and table.plain and numbers.axis.plain:
            own = numbers.axis.shifted(rank - ranks[place])
            layouts[place] = None
        elif isinstance(numbers, RowNumbers):
            call.unknown("looks up copies of rows")
        elif call.layout("self") is not EVEN:
            call.mixes("looks up rows by number")
    axes = [
        layout.shifted(rank - own_rank)
        for layout, own_rank in zip(layouts, ranks)
        if isinstance(layout, RowAxis)
    ]
    if any(isinstance(layout, RowNumbers) for layout in layouts):
        call.unknown("looks up the number of the row")
    found = call.agreed([own, *axes], call.mixes, "looks up values of other rows")
    if table is not None and table.dim not in taken:
        if found:
            call.mixes("looks up places for all rows in each row")
        before = sum(d not in taken for d in range(table.dim))
        return RowAxis(
            before + (rank if not together or table.dim > taken[0] else 0), table.before, table.after
        )
    return found.shifted(front) if found else call.even()


def index_put(call: Call) -> Layout:
    """`x[mask] = number`, where the mask has the dims of the value."""
    given = list(call.given["indices"])
    mask = given[0]
    if len(given) != 1 or mask is None or call.batch.values[mask.name].dtype not in _MASKS:
        call.unknown("writes at indices")
    if call.layout("values") is not None or call.get("values").numel() != 1:
        call.unknown("writes values at a mask")
    own, other = call.axis("self"), call.layouts[mask.name]
    found = call.agreed([own, other], call.mixes, "writes into other rows")
    if other is not None and not isinstance(other, RowAxis) and other is not EVEN:
        call.unknown("computes with the number of the row")
    return found or call.even()


def membership(call: Call) -> Layout:
    """Whether each value is in a set, or where it would be in a sorted list."""
    names = ("elements", "test_elements") if "elements" in call.given else ("self", "sorted_sequence")
    if call.given.get("assume_unique"):
        call.unknown("compares the rows where two values of them are equal")
    call.fixed(*[n for n in ("test_elements", "sorted_sequence", "boundaries", "sorter") if n in call.given])
    return _no_numbers(call, call.layout(names[0]))
