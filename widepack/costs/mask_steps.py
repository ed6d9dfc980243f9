"""Follows one op of a program that makes masks: says what is known of its result.

`MaskedPairs` (masked_pairs.py) takes the steps. What is known is a value of mask_values.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .mask_indices import Index
from .mask_operands import Step
from .mask_values import (
    Bias,
    Constant,
    Distance,
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
from .mask_views import VIEWS, viewed
from .pair_boxes import Box, Range
from .pair_regions import NOTHING, Region, both

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
_SHIFTS = frozenset(["__rshift__", "bitwise_right_shift"])
_FLOORED = _SHIFTS | {"floor_divide"}
_MOST_BITS = 32
_COMPARISONS = frozenset(["eq", "ge", "gt", "le", "lt", "ne"])
SOFTMAXES = frozenset(["_safe_softmax", "_softmax", "softmax"])
"""Ops after which scores are weights."""
_ARITHMETIC = frozenset(
    [
        *("__and__", "__or__", "__xor__", "bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor"),
        *("logical_and", "logical_not", "logical_or", "logical_xor"),
        *("abs", "add", "div", "mul", "neg", "rsub", "sub"),
    ]
)
FOLLOWED = _SAME | _FLOORED | _COMPARISONS | _ARITHMETIC | VIEWS | {"masked_fill", "tril", "triu", "where"}
"""Ops that make a mask of masks, or add one to scores."""


def is_attention(name: str) -> bool:
    """Whether an op is a whole attention. name: without library and overload."""
    return "scaled_dot_product" in name or name == "masked_attention"


class MaskStep(Step):
    """A node that may make a mask, or a part of one."""

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
        if self.name in SOFTMAXES:
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
        return viewed(self, first) if self.name in VIEWS else self._computed(first)

    def _arange(self) -> Known:
        start, step = (self.size(self.bound.get(n, d)) for n, d in (("start", 0), ("step", 1)))
        return None if start is None or step is None else Index((step,), start)

    def _read_at(self, value: Known) -> Known:
        """Returns whole numbers at places that are whole numbers themselves: `positions[batch, i]`."""
        source, refs = self.tensor("self"), self.bound["indices"]
        places = [None if r is None else as_index(self.known_of.get(r.name)) for r in refs]
        if not isinstance(value, Index) or source is None or len(places) != source.dim():
            return None
        known = [p for p in places if p is not None and p.is_nonnegative]
        if len(known) < len(places) or (value.quotients and any(p.quotients for p in known)):
            return None

        def read(one: Index) -> Index:
            found = Index((), one.start)
            for place, step in zip(known, one.steps):
                found = found.combined(place.times(step), 1)
            return found

        return value.of_rank(len(places)).changed(read)

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
        if (rounding := self._rounding()) is not None:
            return self._divided(first, second, rounding)
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

    def _rounding(self) -> str | None:
        """Returns how a division rounds, `floor` or `trunc`; None for another op, or if it rounds nothing."""
        return "floor" if self.name in _FLOORED else self.bound.get("rounding_mode")

    def _divided(self, first: Known, second: Known, rounding: str) -> Known:
        """Returns whole numbers over a number, rounded."""
        value, by = as_index(first), as_index(second)
        whole = not self.result.dtype.is_floating_point
        if value is None or by is None or by != Index((), by.start) or not (whole and by.start.is_Integer):
            return None
        number = int(by.start)
        if self.name in _SHIFTS:
            number = 2**number if 0 <= number < _MOST_BITS else 0
        if number <= 0 or not (rounding == "floor" or value.is_nonnegative):
            return None
        return value.divided(number)

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
            for x, y in ((a, b), (b, a)):
                if x is not None and y is not None and y == Index((), y.start):
                    return x.times(y.start)
        if isinstance(value, Scores) and value is not second and not value.forbidden:
            return value
        if isinstance(value, Scores) and self.name == "mul" and not value.forbidden:
            return value
        return None


def _constant(number: Any) -> Known:
    return Constant(float(number)) if isinstance(number, (bool, int, float)) else None
