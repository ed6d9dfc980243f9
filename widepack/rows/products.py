"""Rules of row layouts: matrix products, attention and distances.

Each is a sum of products: dims have letters, as in `einsum`, and what is summed over is not in the result.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from widepack_artifacts.program import Ref

from .call import Call
from .families import before_last
from .layout import EVEN, Layout, RowAxis

Letters = list[str]
_OVER = "multiplies over the rows"


def multiplied(
    call: Call, factors: Sequence[tuple[Ref, Letters]], result: Letters, why: str = _OVER
) -> Layout:
    """A sum of products of several factors.

    Args:
        call: The call.
        factors: Each factor with a letter for each of its dims.
        result: The letters of the result.
        why: What the op does if the rows are in a dim that is summed over.
    """
    axes = []
    for ref, letters in factors:
        layout = call.layouts[ref.name]
        if layout is EVEN:
            dims = call.batch.dims(call.batch.symbolic[ref.name])
            if any(letters[d] not in result for d in dims):
                call.unknown("sums over a dim whose size is the number of rows")
        elif isinstance(layout, RowAxis):
            letter = letters[layout.dim]
            if letter not in result:
                call.mixes(why)
            if letters.count(letter) > 1:
                call.mixes("takes the diagonal of the rows")
            axes.append(RowAxis(result.index(letter), layout.before, layout.after))
        elif layout is not None:
            call.unknown("multiplies the number of the row")
    if any(a != axes[0] for a in axes):
        if any(a.dim != axes[0].dim for a in axes):
            call.mixes("multiplies each row with all rows")
        call.unknown("multiplies rows in different orders")
    return axes[0] if axes else call.even()


def _batch(rank: int) -> Letters:
    """Returns letters for the first dims of a factor, which broadcast: the last of them is 0."""
    return [str(n) for n in reversed(range(rank))]


def _factor(call: Call, name: str, last: str) -> tuple[Ref, Letters]:
    """Returns an argument with letters for its last dims; a vector has the letter of the sum alone."""
    rank = call.rank(name)
    letters = list(last) if rank >= len(last) else ["k"] * rank
    return call.given[name], [*_batch(rank - len(letters)), *letters]


def matmul(call: Call) -> Layout:
    """A product of two factors, of matrices or vectors, in dims of a batch; also added to a value."""
    pairs = [("mat1", "mat2"), ("batch1", "batch2"), ("mat", "vec")]
    first, second = next((p for p in pairs if p[0] in call.given), ("self", ""))
    second = second or next(n for n in ("mat2", "other", "vec") if n in call.given)
    left, right = _factor(call, first, "ik"), _factor(call, second, "kj")
    kept = ["i"] * (len(left[1]) > 1) + ["j"] * (len(right[1]) > 1)
    result = [*_batch(call.result.dim() - len(kept)), *kept]
    factors = [left, right]
    if first != "self":
        factors.append((call.given["self"], result[len(result) - call.rank("self") :]))
    return multiplied(call, factors, result)


def linear(call: Call) -> Layout:
    """A linear layer, over the last dim."""
    return before_last(call, ["input"], many=1, why=_OVER, is_mix=True, fixed=("weight", "bias"))


def bilinear(call: Call) -> Layout:
    """A bilinear layer, over the last dims of two inputs."""
    names, fixed = ["input1", "input2"], ("weight", "bias")
    return before_last(call, names, many=1, why=_OVER, is_mix=True, fixed=fixed)


def einsum(call: Call) -> Layout:
    """A sum of products by an equation. The dims of `...` have numbers, the last is 0."""
    refs = call.given["tensors"]
    ranks = [call.batch.values[ref.name].dim() for ref in refs]
    left, arrow, right = str(call.get("equation")).replace(" ", "").partition("->")

    def spelled(text: str, dims: int) -> Letters:
        before, dots, after = text.partition("...")
        return [*before, *_batch(dims if dots else 0), *after]

    texts = left.split(",")
    widths = [rank - len(text.replace("...", "")) for text, rank in zip(texts, ranks, strict=True)]
    widest = max([w for w, text in zip(widths, texts) if "..." in text], default=0)
    factors = [spelled(text, width) for text, width in zip(texts, widths)]
    if arrow:
        result = spelled(right, widest)
    else:
        used = [letter for factor in factors for letter in factor if letter.isalpha()]
        result = [*_batch(widest), *sorted(x for x in set(used) if used.count(x) == 1)]
    return multiplied(call, list(zip(refs, factors)), result)


def tensordot(call: Call) -> Layout:
    """A product over some dims of each factor; the other dims of both follow each other."""
    factors, result = [], []
    for name, dims in (("self", "dims_self"), ("other", "dims_other")):
        rank = call.rank(name)
        gone = {int(d) % rank for d in call.get(dims)}
        letters = ["summed" if d in gone else f"{name}{d}" for d in range(rank)]
        factors.append((call.given[name], letters))
        result += [x for x in letters if x != "summed"]
    return multiplied(call, factors, result)


def attention(call: Call) -> Layout:
    """Attention of queries `[..., L, E]` to keys and values `[..., S, E]`."""
    if call.get("enable_gqa"):
        for name in ("query", "key", "value"):
            axis = call.axis(name)
            if axis is not None and axis.dim >= call.rank(name) - 3:
                call.unknown("shares keys between rows")
            call.apart(name, dims=range(call.rank(name) - 3))
    rank = call.first_result.dim()
    query = call.axis("query")
    if query is not None and query.dim == call.rank("query") - 2 and call.get("is_causal"):
        call.mixes("attends to earlier rows")
    masks = [n for n in ("attn_mask", "attn_bias") if isinstance(call.given.get(n), Ref)]
    letters = {"query": "le", "key": "se", "value": "sf", **dict.fromkeys(masks, "ls")}
    for name in ("query", "key", "value"):
        call.apart(name, dims=range(call.rank(name) - 2))
    factors = [_factor(call, name, last) for name, last in letters.items()]
    result = [*_batch(rank - 2), "l", "f"]
    found = multiplied(call, factors, result, "attends to the rows")
    if isinstance(call.result, torch.Tensor):
        return found
    # the last results are states of random generators, without the dims of the queries
    return [found if part.dim() >= rank - 1 else None for part in call.result]


def cdist(call: Call) -> Layout:
    """Distances of all pairs of vectors of two sets."""
    factors = [_factor(call, "x1", "ik"), _factor(call, "x2", "jk")]
    result = [*_batch(call.result.dim() - 2), "i", "j"]
    return multiplied(call, factors, result, "measures distances over the rows")
