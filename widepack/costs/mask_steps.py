"""Follows one op of a program that makes masks: says what is known of its result.

`MaskedPairs` (masked_pairs.py) takes the steps. What is known is a value of mask_values.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor

from widepack_artifacts.program import Ref

from .expressions import World
from .mask_values import (
    Bias,
    Constant,
    Distance,
    Index,
    Known,
    Mask,
    Scores,
    as_index,
    as_mask,
    chosen,
    compared,
    forbidden,
    forbids,
    with_forbidden,
)
from .pair_regions import NOTHING, Box, Range, Region, both

_ZERO = sympy.Integer(0)
_SAME = frozenset(
    [
        "alias",
        "clone",
        "contiguous",
        "detach",
        "dropout",
        "expand",
        "expand_as",
        "lift_fresh_copy",
        "to",
        "_to_copy",
        "type_as",
    ]
)
_COMPARISONS = frozenset(["eq", "ge", "gt", "le", "lt", "ne"])
_RESHAPES = frozenset(["_unsafe_view", "flatten", "reshape", "reshape_as", "unflatten", "view", "view_as"])
_VIEWS = frozenset(["mT", "permute", "select", "slice", "squeeze", "t", "transpose", "unsqueeze"])


@dataclass(frozen=True)
class Step:
    """One node of a program.

    world: names the dims. known_of: what is known of values, by name. name: of the op, without its library
    and overload. bound: the arguments by name. values: the symbolic values, by name. result: the node's own.
    """

    world: World
    known_of: Mapping[str, Known]
    name: str
    bound: Mapping[str, Any]
    values: Mapping[str, Any]
    result: Any

    def value(self, argument: str) -> Known:
        """Returns what is known of an argument."""
        found = self.bound.get(argument)
        if isinstance(found, Ref):
            if (known := self.known_of.get(found.name)) is not None:
                return known
            found = self.values.get(found.name)
        if isinstance(found, (bool, int, float)):
            return Constant(float(found))
        return Index((), self.world.expr(found)) if isinstance(found, torch.SymInt) else None

    def tensor(self, argument: str) -> Tensor | None:
        """Returns the symbolic tensor of an argument."""
        found = self.bound.get(argument)
        found = self.values.get(found.name) if isinstance(found, Ref) else None
        return found if isinstance(found, Tensor) else None

    def size(self, number: Any) -> Any:
        """Returns a number or a symbolic size as an expression."""
        if isinstance(number, Ref):
            number = self.values.get(number.name)
        return self.world.expr(number) if isinstance(number, (int, torch.SymInt)) else None

    def known(self) -> Known:
        """Returns what is known of the result."""
        makers: dict[str, Callable[[], Known]] = {
            "arange": self._arange,
            "full": lambda: _constant(self.bound["fill_value"]),
            "full_like": lambda: _constant(self.bound["fill_value"]),
            "new_full": lambda: _constant(self.bound["fill_value"]),
            "scalar_tensor": lambda: _constant(self.bound["s"]),
            **dict.fromkeys(("ones", "ones_like", "new_ones"), lambda: Constant(1.0)),
            **dict.fromkeys(("zeros", "zeros_like", "new_zeros"), lambda: Constant(0.0)),
        }
        if self.name in makers:
            return makers[self.name]()
        first = self.value(next(iter(self.bound), ""))
        if self.name in _SAME:
            stays = self.result.dtype != torch.bool or isinstance(first, (Mask, Constant))
            return first if stays else None
        if self.name in ("softmax", "_softmax", "_safe_softmax"):
            last = self.bound.get("dim") in (-1, self.result.dim() - 1)
            return Scores(first.nodes, first.forbidden, True) if isinstance(first, Scores) and last else None
        if self.name == "index":
            return self._read_at(first)
        if self.name in ("tril", "triu"):
            return self._triangle(first)
        if self.name in _COMPARISONS:
            return compared(self.name, first, self.value("other"))
        if self.name in ("masked_fill", "where"):
            return self._filled(first)
        moved = self._moved(first)
        return moved if moved is not None else self._computed(first)

    def _arange(self) -> Known:
        start, step = (self.size(self.bound.get(n, d)) for n, d in (("start", 0), ("step", 1)))
        return None if start is None or step is None else Index((step,), start)

    def _read_at(self, value: Known) -> Known:
        """Returns whole numbers at places that are whole numbers themselves: `positions[batch, i]`."""
        source, refs = self.tensor("self"), self.bound["indices"]
        places = [None if r is None else as_index(self.known_of.get(r.name)) for r in refs]
        if not isinstance(value, Index) or source is None or len(places) != source.dim():
            return None
        steps = (_ZERO,) * (len(places) - len(value.steps)) + value.steps
        found = Index((), value.start)
        for place, step in zip(places, steps):
            if place is None or not all(n.is_nonnegative for n in (place.start, *place.steps)):
                return None
            found = found.combined(place.times(step), 1)
        return found

    def _triangle(self, value: Known) -> Known:
        diagonal = self.size(self.bound.get("diagonal", 0))
        if diagonal is None:
            return None
        # tril keeps j - i <= diagonal, triu keeps j - i >= diagonal
        apart = Range(-diagonal, None) if self.name == "tril" else Range(None, 1 - diagonal)
        kept: Region = (Box(apart=apart),)
        if isinstance(value, Bias) or forbids(value):
            return Bias(both(forbidden(value), kept) or NOTHING)
        if isinstance(value, Mask) or (isinstance(value, Constant) and value.number in (0, 1)):
            return as_mask(value).also(Mask(kept, kept))
        return None

    def _filled(self, first: Known) -> Known:
        if self.name == "masked_fill":
            return chosen(as_mask(self.value("mask")), self.value("value"), first)
        return chosen(as_mask(first), self.value("self"), self.value("other"))

    def _computed(self, first: Known) -> Known:
        """Returns the result of arithmetic and of `and`, `or` and `not`."""
        second = self.value("other")
        boolean = self.result.dtype == torch.bool
        if self.name in ("logical_not", "bitwise_not") and boolean:
            return as_mask(first).opposite()
        if self.name in ("logical_and", "bitwise_and", "__and__") and boolean:
            return as_mask(first).also(as_mask(second))
        if self.name in ("logical_or", "bitwise_or", "__or__") and boolean:
            return as_mask(first).either(as_mask(second))
        if self.name in ("logical_xor", "bitwise_xor", "__xor__") and boolean:
            return as_mask(first).differs(as_mask(second))
        if self.name == "abs" and isinstance(first, Index):
            return Distance(first)
        if self.name == "neg" and isinstance(first, Index):
            return first.times(-1)
        if self.name in ("add", "sub", "rsub"):
            return self._sum(first, second)
        if self.name in ("mul", "div"):
            return self._scaled(first, second)
        if self.name == "tanh" and isinstance(first, Scores) and not first.forbidden:
            return first
        return None

    def _sum(self, first: Known, second: Known) -> Known:
        if self.bound.get("alpha", 1) != 1:
            return None
        if self.name == "rsub":
            first, second = second, first
        if self.name != "add" and isinstance(second, Mask) and first == Constant(1.0):
            return second.opposite()
        a, b = as_index(first), as_index(second)
        if a is not None and b is not None:
            return a.combined(b, 1 if self.name == "add" else -1)
        if self.name != "add" and (forbidden(second) or isinstance(second, Scores)):
            return None
        if isinstance(first, Scores) and isinstance(second, Scores):
            return None
        scores, other = (second, first) if isinstance(second, Scores) else (first, second)
        region = forbidden(other)
        return with_forbidden(scores, region) if region or isinstance(scores, (Bias, Scores)) else None

    def _scaled(self, first: Known, second: Known) -> Known:
        if isinstance(first, Scores) and isinstance(second, Scores):
            return None
        value, factor = (second, first) if isinstance(second, (Scores, Bias, Mask)) else (first, second)
        if self.name == "mul":
            if isinstance(value, Mask) and isinstance(factor, Mask):
                return value.also(factor)
            if isinstance(value, Mask) and forbids(factor):
                return Bias(value.sure)
            a, b = as_index(value), as_index(factor)
            if a is not None and b is not None and (not a.steps or not b.steps):
                return a.times(b.start) if not b.steps else b.times(a.start)
        if isinstance(value, Scores) and value is not second and not value.forbidden:
            return value
        if isinstance(value, Scores) and self.name == "mul" and not value.forbidden:
            return value
        return None

    def _moved(self, value: Known) -> Known:
        """Returns the result of a view."""
        source = self.tensor("self") if "self" in self.bound else self.tensor("input")
        if value is None or source is None:
            return None
        if isinstance(value, Constant):
            return value if self.name in {*_RESHAPES, *_VIEWS} else None
        if isinstance(value, Distance):
            return None
        if self.name in _RESHAPES or self.name in ("squeeze", "unsqueeze"):
            return self._reshaped(value, source)
        if self.name in ("mT", "permute", "t", "transpose"):
            return self._permuted(value, source.dim())
        if self.name == "slice":
            return self._sliced(value, source.dim())
        if self.name == "select":
            return self._selected(value, source.dim())
        return None

    def _reshaped(self, value: Known, source: Tensor) -> Known:
        """Returns a value in another shape, if that adds, removes or moves dims of size 1 only, or merges or
        splits dims before the pairs.
        """
        before, after = ([self.size(s) for s in t.shape] for t in (source, self.result))
        wide = [[d for d, s in enumerate(sizes) if s != 1] for sizes in (before, after)]
        same = [before[d] for d in wide[0]] == [after[d] for d in wide[1]]
        if isinstance(value, Index):
            if not same:
                return None
            steps = [_ZERO] * len(after)
            padded = (_ZERO,) * (len(before) - len(value.steps)) + value.steps
            for old, new in zip(*wide):
                steps[new] = padded[old]
            return Index(tuple(steps), value.start)
        if len(before) > 1 and before[-2:] == after[-2:]:
            return value
        if isinstance(value, Scores) or not same:
            return None
        places = [[d - len(sizes) for d in dims] for dims, sizes in zip(wide, (before, after))]
        moves = {old: new for old, new in zip(*places) if old >= -2}
        return _with_dims(value, moves)

    def _permuted(self, value: Known, rank: int) -> Known:
        order = self._order(rank)
        if order is None:
            return None
        if isinstance(value, Index):
            padded = (_ZERO,) * (rank - len(value.steps)) + value.steps
            return Index(tuple(padded[d] for d in order), value.start)
        moves = {d: order.index(d + rank) - rank for d in (-2, -1) if d + rank >= 0}
        if isinstance(value, Scores):
            return value if all(a == b for a, b in moves.items()) else None
        return _with_dims(value, moves)

    def _order(self, rank: int) -> list[int] | None:
        order = list(range(rank))
        if self.name == "permute":
            return [d % rank for d in self.bound["dims"]]
        if rank < 2:
            return order
        a, b = (
            (self.bound.get("dim0", -2), self.bound.get("dim1", -1)) if self.name == "transpose" else (-2, -1)
        )
        order[a], order[b] = order[b], order[a]
        return order

    def _sliced(self, value: Known, rank: int) -> Known:
        start = self.bound.get("start", 0)
        begin = self.size(0 if start is None else start)
        if begin is None or not begin.is_nonnegative or self.bound.get("step", 1) != 1:
            return None
        dim = self.bound.get("dim", 0) % rank - rank
        if isinstance(value, Index):
            place = dim + len(value.steps)
            step = value.steps[place] if place >= 0 else _ZERO
            return Index(value.steps, sympy.expand(value.start + step * begin))
        if isinstance(value, Scores):
            return value if dim < -2 else None
        shifts = {-2: (-begin, _ZERO), -1: (_ZERO, -begin)}
        return value if dim < -2 else _mapped(value, lambda box: box.moved(*shifts[dim]))

    def _selected(self, value: Known, rank: int) -> Known:
        dim, at = self.bound["dim"] % rank - rank, self.size(self.bound["index"])
        if isinstance(value, Index):
            place = dim + len(value.steps)
            if place < 0:
                return value
            if at is None or not at.is_nonnegative:
                return None
            steps = value.steps[:place] + value.steps[place + 1 :]
            return Index(steps, sympy.expand(value.start + value.steps[place] * at))
        return value if dim < -2 else None


def _constant(number: Any) -> Known:
    return Constant(float(number)) if isinstance(number, (bool, int, float)) else None


def _mapped(value: Known, change: Callable[[Box], Box]) -> Known:
    if isinstance(value, Mask):
        return Mask(tuple(map(change, value.sure)), tuple(map(change, value.possible)))
    return Bias(tuple(map(change, value.forbidden))) if isinstance(value, Bias) else None


def _with_dims(value: Known, moves: Mapping[int, int]) -> Known:
    """Returns a mask whose dims moved.

    moves: the old and the new place of each of its last two dims, from the end. A missing dim has size 1.
    """
    if not isinstance(value, (Mask, Bias)):
        return None
    regions = (value.sure, value.possible) if isinstance(value, Mask) else (value.forbidden,)
    boxes = [box for region in regions for box in region]
    read = {d for box in boxes for d in _read(box)}
    if not all(d in moves for d in read):
        return None
    if all(moves[d] == d for d in read):
        return value
    if {d: moves[d] for d in read}.items() <= {-2: -1, -1: -2}.items():
        return _mapped(value, Box.turned)
    return None


def _read(box: Box) -> set[int]:
    """Returns the dims that a box depends on, from the end."""
    everywhere = Range()
    found = {-2, -1} if box.apart != everywhere else set()
    found |= {-2} if box.queries != everywhere else set()
    return found | ({-1} if box.keys != everywhere else set())
