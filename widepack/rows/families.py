"""Rules of row layouts by family: what most ops do with the rows of a batch.

| rule | what the op does | where the rows may be |
|---|---|---|
| `pointwise` | computes each number alone, of tensors that broadcast | in one dim of the result |
| `moved` | gives the dims of one tensor other places, or adds dims | anywhere |
| `along` | computes along the dims that its arguments name, or along all dims | in other dims |
| `over_dim` | the same with two tensors that broadcast | in other dims |
| `before_last` | computes with the last dims | before these |
| `in_first` | computes with all dims but the first | in the first |
| `of_all` | reads all numbers for each number of the result | nowhere |
"""

from __future__ import annotations

from collections.abc import Sequence

from .call import Call
from .layout import EVEN, Layout, RowAxis, RowNumbers

_REDUCES = "reduces over the rows"


def pointwise(call: Call) -> Layout:
    """An op whose result at a place depends on that place of its arguments, which are broadcast."""
    return call.several(aligned(call, call.first_result.dim()))


def aligned(call: Call, rank: int) -> Layout:
    """Returns the layout of arguments that are broadcast to a result of `rank` dims.

    Raises: MixesRows for arguments whose rows are in different dims.
    """
    found: RowAxis | None = None
    even = False
    for tensor, layout in call.tensors():
        if isinstance(layout, (RowNumbers, list)):
            call.unknown("computes with the number of the row")
        if layout is EVEN:
            even = True
        if isinstance(layout, RowAxis):
            here = layout.shifted(rank - tensor.dim())
            if found is not None and here != found:
                if here.dim != found.dim:
                    call.mixes("combines each row with all rows")
                call.unknown("combines rows in different orders")
            found = here
    return found or (EVEN if even else None)


def moved(call: Call) -> Layout:
    """Other places for the dims, more dims, or copies along dims of size 1."""
    layout = call.layout(call.first)
    return call.even() if layout is None else call.placed(layout)


def along(call: Call, why: str = "computes along the rows") -> Layout:
    """An op along the dims that its arguments name. The other dims stay apart."""
    layout = call.layout(call.first)
    kept_apart(call, layout, named_dims(call), why)
    for name in ("prepend", "append"):
        if call.given.get(name) is not None and call.layout(name) not in (layout, EVEN):
            call.unknown("joins rows with other values")
    return call.several(layout)


def reduction(call: Call) -> Layout:
    """A reduction over the dims that its arguments name; of two tensors, the larger or smaller number."""
    return pointwise(call) if "other" in call.given else along(call, _REDUCES)


def named_dims(call: Call) -> list[int] | None:
    """Returns the dims along which an op computes; None for all."""
    if "dim1" in call.given:
        return [call.dim("dim1"), call.dim("dim2")]
    dims = call.dims(next((n for n in ("dims", "dimension") if n in call.given), "dim"))
    if dims is None and call.given.get("s") is not None:  # a Fourier transform of the last dims
        dims = list(range(call.rank(call.first)))[-len(call.given["s"]) :]
    return dims


def kept_apart(call: Call, layout: Layout, dims: list[int] | None, why: str) -> None:
    """Checks that the rows of the first argument are in no dim of some; None for all dims.

    Raises: MixesRows if a dim has the rows; NoRule if their number matters.
    """
    if isinstance(layout, RowNumbers):
        call.unknown("computes with the numbers of the rows")
    if isinstance(layout, RowAxis) and (dims is None or layout.dim in dims):
        call.mixes(why)
    if layout is EVEN and (dims is None or set(call.batch_dims(call.first)) & set(dims)):
        verb = "reduces" if why == _REDUCES else "computes along"
        call.unknown(f"{verb} a dim whose size is the number of rows")


def over_dim(call: Call) -> Layout:
    """An op along `dim`, by default the last, of two tensors that are broadcast."""
    names = [n for n in ("x1", "x2", "x", "y", "self", "other") if n in call.given][:2]
    rank = max(map(call.rank, names))
    layout, dim = aligned(call, rank), int(call.given.get("dim", -1)) % rank
    for name in names:
        if dim - (rank - call.rank(name)) in call.even_dims(name):
            call.unknown(f"reduces a dim of its {name} whose size is the number of rows")
    if isinstance(layout, RowAxis) and layout.dim == dim:
        call.mixes(_REDUCES)
    return call.placed(layout)


def of_all(call: Call) -> Layout:
    """An op that reads all places of its arguments for each place of the result."""
    if any(isinstance(layout, RowAxis) for _, layout in call.tensors()):
        call.mixes("computes with all rows")
    return call.unknown("computes with a value of the batch") if call.reads_rows() else call.several(None)


def renorm(call: Call) -> Layout:
    """A norm of each place of a dim, over all other dims."""
    layout, dim = call.layout(call.first), call.dim("dim")
    if isinstance(layout, RowAxis) and layout.dim != dim:
        call.mixes("normalizes over the rows")
    call.apart(call.first, dims=[dim])
    return layout


def loss(call: Call) -> Layout:
    """A loss, of each place or reduced."""
    if call.get("reduction") == 0:
        return pointwise(call)
    if any(isinstance(layout, RowAxis) for _, layout in call.tensors()):
        call.mixes(_REDUCES)
    return call.unknown("reduces a value of the batch") if call.reads_rows() else None


def before_last(
    call: Call,
    names: Sequence[str] = (),
    *,
    many: int,
    why: str,
    is_mix: bool = False,
    fixed: Sequence[str] = (),
) -> Layout:
    """An op on the last dims of some arguments.

    Args:
        call: The call.
        names: The arguments; default the first.
        many: The number of the last dims.
        why: What the op does where these have the rows.
        is_mix: Whether it mixes the rows then. If not, that is not known.
        fixed: Arguments that may not depend on the rows.
    """
    call.fixed(*fixed)
    axes = []
    for name in names or [call.first]:
        axis, first = call.axis(name), call.rank(name) - many
        if axis is not None and axis.dim >= first:
            call.mixes(why) if is_mix else call.unknown(why)
        call.apart(name, dims=range(first))
        axes.append(axis)
    return call.several(agreed_or_even(call, axes))


def agreed_or_even(call: Call, axes: Sequence[RowAxis | None]) -> Layout:
    """Returns the one axis that arguments give, or the layout of a value without rows."""
    found = call.agreed(axes, call.unknown, "combines rows in different dims")
    return found or (EVEN if any(layout is EVEN for _, layout in call.tensors()) else None)


def in_first(call: Call, name: str, rank: int = 0, fixed: Sequence[str] = ()) -> Layout:
    """An op on all dims of an argument but the first.

    rank: the number of its dims if it has a batch; 0 for any. fixed: arguments that may not depend on the
    rows.
    """
    call.fixed(*fixed)
    call.apart(name, dims=[0])
    axis = call.axis(name)
    if axis is not None and (axis.dim != 0 or call.rank(name) != (rank or call.rank(name))):
        call.unknown("computes in the dim of the rows")
    return call.several(call.layout(name))
