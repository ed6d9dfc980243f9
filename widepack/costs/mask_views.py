"""Follows the views of a program that makes masks: says what is known of a value in another shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import sympy
from torch import Tensor

from .mask_indices import Index
from .mask_operands import Step
from .mask_values import Bias, Constant, Distance, Known, Mask, Scores
from .pair_regions import EVERYTHING, NOTHING, PairSet, Region, changed

_ZERO = sympy.Integer(0)
_RESHAPES = frozenset(["_unsafe_view", "flatten", "reshape", "reshape_as", "unflatten", "view", "view_as"])
VIEWS = _RESHAPES | {"mT", "permute", "select", "slice", "squeeze", "t", "transpose", "unsqueeze"}


def viewed(step: Step, value: Known) -> Known:
    """Returns the result of a view."""
    source = step.tensor("self") if "self" in step.bound else step.tensor("input")
    if value is None or source is None:
        return None
    if isinstance(value, Constant):
        return value
    if isinstance(value, Distance):
        return None
    if step.name in _RESHAPES or step.name in ("squeeze", "unsqueeze"):
        return _reshaped(step, value, source)
    if step.name in ("mT", "permute", "t", "transpose"):
        return _permuted(step, value, source.dim())
    if step.name == "slice":
        return _sliced(step, value, source.dim())
    return _selected(step, value, source.dim())


def _reshaped(step: Step, value: Known, source: Tensor) -> Known:
    """Returns a value in another shape, if that adds, removes or moves dims of size 1 only, or merges or
    splits dims before the pairs.
    """
    before, after = ([step.size(s) for s in t.shape] for t in (source, step.result))
    wide = [[d for d, s in enumerate(sizes) if s != 1] for sizes in (before, after)]
    same = [before[d] for d in wide[0]] == [after[d] for d in wide[1]]
    if isinstance(value, Index):
        old = dict(zip(wide[1], wide[0]))
        moved = [old.get(d) for d in range(len(after))]
        return _with_order(value, len(before), moved) if same else None
    if len(before) > 1 and before[-2:] == after[-2:]:
        return value
    if isinstance(value, Scores) or not same:
        return None
    places = [[d - len(sizes) for d in dims] for dims, sizes in zip(wide, (before, after))]
    moves = {old: new for old, new in zip(*places) if old >= -2}
    return _with_dims(value, moves)


def _permuted(step: Step, value: Known, rank: int) -> Known:
    order = _order(step, rank)
    if order is None:
        return None
    if isinstance(value, Index):
        return _with_order(value, rank, order)
    moves = {d: order.index(d + rank) - rank for d in (-2, -1) if d + rank >= 0}
    if isinstance(value, Scores):
        return value if all(a == b for a, b in moves.items()) else None
    return _with_dims(value, moves)


def _order(step: Step, rank: int) -> list[int] | None:
    order = list(range(rank))
    if step.name == "permute":
        return [d % rank for d in step.bound["dims"]]
    if rank < 2:
        return order
    a, b = (step.bound.get("dim0", -2), step.bound.get("dim1", -1)) if step.name == "transpose" else (-2, -1)
    order[a], order[b] = order[b], order[a]
    return order


def _sliced(step: Step, value: Known, rank: int) -> Known:
    start = step.bound.get("start", 0)
    begin = step.size(0 if start is None else start)
    if begin is None or not begin.is_nonnegative or step.bound.get("step", 1) != 1:
        return None
    dim = step.bound.get("dim", 0) % rank - rank
    if isinstance(value, Index):
        whole = value.of_rank(rank)
        return whole.changed(lambda one: Index(one.steps, sympy.expand(one.start + one.steps[dim] * begin)))
    if isinstance(value, Scores):
        return value if dim < -2 else None
    shifts = {-2: (-begin, _ZERO), -1: (_ZERO, -begin)}
    return value if dim < -2 else _mapped(value, lambda pairs: pairs.moved(*shifts[dim]))


def _selected(step: Step, value: Known, rank: int) -> Known:
    dim, at = step.bound["dim"] % rank - rank, step.size(step.bound["index"])
    if isinstance(value, Index):
        if at is None or not at.is_nonnegative:
            return None
        return value.of_rank(rank).changed(
            lambda one: Index(
                tuple(s for d, s in enumerate(one.steps) if d != dim + rank),
                sympy.expand(one.start + one.steps[dim] * at),
            )
        )
    return value if dim < -2 else None


def _with_order(value: Index, rank: int, order: Sequence[int | None]) -> Index:
    """Returns whole numbers whose dims moved. order: the old place of each dim; None for a new one."""
    return value.of_rank(rank).changed(
        lambda one: Index(tuple(_ZERO if d is None else one.steps[d] for d in order), one.start)
    )


def without_single(value: Known, sizes: Sequence[Any]) -> Known:
    """Returns what is known without the dims of size 1: they have one index, also where they are broadcast.

    sizes: of the value's tensor.
    """
    single = [d - len(sizes) for d, size in enumerate(sizes) if size == 1]
    if isinstance(value, (Index, Distance)) and single:
        index = (value if isinstance(value, Index) else value.of).of_rank(len(sizes))
        order = [None if d - len(sizes) in single else d for d in range(len(sizes))]
        index = _with_order(index, len(sizes), order)
        return index if isinstance(value, Index) else Distance(index)
    for dim in (-2, -1):
        if dim in single:
            value = _mapped(value, partial(_of_first, dim))
    return value


def _of_first(dim: int, pairs: PairSet) -> PairSet | None:
    return pairs.of_first(dim) if dim in pairs.reads else pairs


def _mapped(value: Known, change: Callable[[PairSet], PairSet | None]) -> Known:
    """Returns a mask whose pairs changed. Where they have no form then, nothing is known of them."""

    def of(region: Region, otherwise: Region) -> Region:
        found = changed(region, change)
        return otherwise if found is None else found

    if isinstance(value, Mask):
        return Mask(of(value.sure, NOTHING), of(value.possible, EVERYTHING))
    return Bias(of(value.forbidden, NOTHING)) if isinstance(value, Bias) else value


def _with_dims(value: Known, moves: Mapping[int, int]) -> Known:
    """Returns a mask whose dims moved.

    moves: the old and the new place of each of its last two dims, from the end. A missing dim has size 1.
    """
    if not isinstance(value, (Mask, Bias)):
        return None
    regions = (value.sure, value.possible) if isinstance(value, Mask) else (value.forbidden,)
    read = {d for region in regions for pairs in region for d in pairs.reads}
    if not all(d in moves for d in read):
        return None
    if all(moves[d] == d for d in read):
        return value
    if {d: moves[d] for d in read}.items() <= {-2: -1, -1: -2}.items():
        return _mapped(value, lambda pairs: pairs.turned())
    return None
