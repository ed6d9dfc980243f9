"""Rules of row layouts: matrix products, attention and distances."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from widepack_artifacts.program import Ref

from .call import Call, Rule, named
from .layout import EVEN, Layout, RowAxis
from .shapes import axis_of_even_value


def agreed(call: Call, found: Sequence[RowAxis | None], rank: int) -> Layout:
    """Returns the one axis of a result that arguments give. Raises: MixesRows if they give several."""
    axes = [a for a in found if a is not None]
    if any(a != axes[0] for a in axes):
        if any(a.dim != axes[0].dim for a in axes):
            call.mixes("multiplies each row with all rows")
        call.unknown("multiplies rows in different orders")
    if axes:
        return axes[0] if axes[0].dim < rank else call.unknown()
    return call.even()


def _left(call: Call, axis: RowAxis | None, rank: int, other: int, result: int) -> RowAxis | None:
    """The axis of the left factor in the result. rank, other, result: numbers of dims."""
    if axis is None:
        return None
    if axis.dim == rank - 1:
        call.mixes("multiplies over the rows")
    if axis.dim == rank - 2:
        return RowAxis(result - (1 if other == 1 else 2), axis.before, axis.after)
    return axis.shifted(result - rank + (1 if other == 1 else 0))


def _right(call: Call, axis: RowAxis | None, rank: int, other: int, result: int) -> RowAxis | None:
    """The axis of the right factor in the result."""
    if axis is None:
        return None
    if rank == 1 or axis.dim == rank - 2:
        call.mixes("multiplies over the rows")
    if axis.dim == rank - 1:
        return RowAxis(result - 1, axis.before, axis.after)
    return axis.shifted(result - rank + (1 if other == 1 else 0))


def _no_even_inside(call: Call, *names: str, last: int = 2) -> None:
    """Checks that no factor has a dim of the batch among its last dims. Raises: NoRule."""
    for name in names:
        call.apart(name, dims=range(call.rank(name) - last))


def matmul(call: Call) -> Layout:
    """A product of two factors, of matrices or vectors, in several dims of a batch."""
    first, second = (("self", "mat2"), ("self", "other"), ("self", "vec"))[
        1 if "other" in call.given else 2 if "vec" in call.given else 0
    ]
    if "tensor" in call.given:
        second = "tensor"
    return _product(call, first, second)


def _product(call: Call, first: str, second: str) -> Layout:
    a, b, result = call.rank(first), call.rank(second), call.result.dim()
    call.apart(first, dims=range(a - 1))
    call.apart(second, dims=[d for d in range(b) if d != max(0, b - 2)])
    return agreed(
        call,
        [
            _left(call, call.axis(first), a, b, result),
            _right(call, call.axis(second), b, a, result),
        ],
        result,
    )


def added_product(call: Call) -> Layout:
    """`self + first @ second`."""
    first, second = next(
        p for p in (("mat1", "mat2"), ("batch1", "batch2"), ("mat", "vec")) if p[0] in call.given
    )
    layout = _product(call, first, second)
    own = call.axis("self")
    result = call.result.dim()
    axes = [
        own.shifted(result - call.rank("self")) if own else None,
        layout if isinstance(layout, RowAxis) else None,
    ]
    return agreed(call, axes, result)


def linear(call: Call) -> Layout:
    """A linear layer, over the last dim."""
    call.fixed("weight", "bias")
    axis = call.axis("input")
    if axis is not None and axis.dim == call.rank("input") - 1:
        call.mixes("multiplies over the rows")
    _no_even_inside(call, "input", last=1)
    return call.layout("input")


def bilinear(call: Call) -> Layout:
    """A bilinear layer, over the last dims of two inputs."""
    call.fixed("weight", "bias")
    axes = [call.axis("input1"), call.axis("input2")]
    for axis, name in zip(axes, ("input1", "input2")):
        if axis is not None and axis.dim == call.rank(name) - 1:
            call.mixes("multiplies over the rows")
        _no_even_inside(call, name, last=1)
    return agreed(call, axes, call.result.dim())


def einsum(call: Call) -> Layout:
    """A sum of products: the letter of the rows stays, and is the same in all factors."""
    tensors = [(t, n) for t, n in zip(call.tensors(), _names(call.given["tensors"]), strict=True)]
    factors, result = _letters(str(call.get("equation")), [t.dim() for (t, _), _ in tensors])
    axes: list[RowAxis | None] = []
    for letters, ((_, layout), name) in zip(factors, tensors):
        if layout is EVEN:
            layout = axis_of_even_value(call, name)
            if letters[layout.dim] not in result:
                call.unknown("multiplies a value of the batch")
        if isinstance(layout, RowAxis):
            letter = letters[layout.dim]
            if letter not in result:
                call.mixes("multiplies over the rows")
            if letters.count(letter) > 1:
                call.mixes("takes the diagonal of the rows")
            axes.append(RowAxis(result.index(letter), layout.before, layout.after))
        elif layout is not None:
            call.unknown("multiplies the number of the row")
    return agreed(call, axes, len(result))


def _names(tensors: Sequence[Ref]) -> list[str]:
    return [t.name for t in tensors]


def _letters(equation: str, ranks: Sequence[int]) -> tuple[list[list[str]], list[str]]:
    """Returns the letters of each factor and of the result. Dims of `...` have numbers, the last is 0."""
    left, arrow, right = equation.replace(" ", "").partition("->")

    def spelled(text: str, dims: int) -> list[str]:
        before, dots, after = text.partition("...")
        return [*before, *map(str, reversed(range(dims if dots else 0))), *after]

    texts = left.split(",")
    widths = [rank - len(text.replace("...", "")) for text, rank in zip(texts, ranks, strict=True)]
    widest = max([w for w, text in zip(widths, texts) if "..." in text], default=0)
    factors = [spelled(text, width) for text, width in zip(texts, widths)]
    if arrow:
        return factors, spelled(right, widest)
    used = [letter for factor in factors for letter in factor if letter.isalpha()]
    dots = list(map(str, reversed(range(widest))))
    return factors, [*dots, *sorted(letter for letter in set(used) if used.count(letter) == 1)]


def tensordot(call: Call) -> Layout:
    """A product over some dims of each factor; the other dims of both follow each other."""
    axes: list[RowAxis | None] = []
    before = 0
    for name, dims in (("self", "dims_self"), ("other", "dims_other")):
        call.apart(name, dims=())
        rank, axis = call.rank(name), call.axis(name)
        gone = {int(d) % rank for d in call.get(dims)}
        if axis is not None:
            if axis.dim in gone:
                call.mixes("multiplies over the rows")
            axes.append(axis.shifted(before - sum(d < axis.dim for d in gone)))
        before = rank - len(gone)
    return agreed(call, axes, call.result.dim())


def attention(call: Call) -> Layout:
    """Attention of queries `[..., L, E]` to keys and values `[..., S, E]`."""
    rank = call.first_result.dim()
    axes: list[RowAxis | None] = []
    if call.get("enable_gqa"):
        heads = [(a, call.rank(n)) for n in ("query", "key", "value") if (a := call.axis(n)) is not None]
        if any(a.dim >= own - 3 for a, own in heads):
            call.unknown("shares keys between rows")
        for name in ("query", "key", "value"):
            _no_even_inside(call, name, last=3)
    for name in ("query", "key", "value"):
        axis, own = call.axis(name), call.rank(name)
        if axis is not None and (axis.dim == own - 1 or (axis.dim == own - 2 and name != "query")):
            call.mixes("attends to the rows")
        if axis is not None and axis.dim == own - 2 and call.get("is_causal"):
            call.mixes("attends to earlier rows")
        _no_even_inside(call, name)
        axes.append(axis.shifted(rank - own) if axis else None)
    for name in ("attn_mask", "attn_bias"):
        axis = call.axis(name)
        if axis is not None:
            own = call.rank(name)
            if axis.dim == own - 1:
                call.mixes("attends to the rows")
            axes.append(axis.shifted(rank - own))
        if name in call.given and isinstance(call.get(name), torch.Tensor):
            _no_even_inside(call, name, last=1)
    found = call.several(agreed(call, axes, rank))
    if not isinstance(found, list):
        return found
    # the last results are states of random generators, without the dims of the queries
    return [x if part.dim() >= rank - 1 else None for x, part in zip(found, call.result)]


def cdist(call: Call) -> Layout:
    """Distances of all pairs of vectors of two sets."""
    _no_even_inside(call, "x1", "x2")
    rank, axes = call.result.dim(), []
    for name, place in (("x1", rank - 2), ("x2", rank - 1)):
        axis, own = call.axis(name), call.rank(name)
        if axis is None:
            continue
        if axis.dim == own - 1:
            call.mixes("measures distances over the rows")
        axes.append(
            RowAxis(place, axis.before, axis.after) if axis.dim == own - 2 else axis.shifted(rank - own)
        )
    return agreed(call, axes, rank)


RULES: dict[str, Rule] = {
    **named("mm matmul bmm mv", matmul),
    **named("addmm baddbmm addmv", added_product),
    "linear": linear,
    "bilinear": bilinear,
    "einsum": einsum,
    "tensordot": tensordot,
    **named(
        "scaled_dot_product_attention _scaled_dot_product_flash_attention_for_cpu"
        " _scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention",
        attention,
    ),
    **named("cdist _cdist_forward _euclidean_dist", cdist),
}
