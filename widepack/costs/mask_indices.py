"""Holds whole numbers that follow from the indices of the dims, and finds where they are not negative.

An `Index` is `arange(T)`, `i - j`, `i // 4`, or a sum of such numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import sympy
from torch.utils._sympy.functions import FloorDiv

from .pair_boxes import Box, Grid, Range
from .pair_regions import EVERYTHING, NOTHING, Region

_ZERO = sympy.Integer(0)


@dataclass(frozen=True)
class Index:
    """Whole numbers: `start`, for each dim the index times a step, and quotients times a number."""

    steps: tuple[Any, ...] = ()
    start: Any = _ZERO
    quotients: tuple[tuple[Any, Quotient], ...] = ()

    def combined(self, other: Index, sign: int) -> Index:
        """Returns the sum, or with sign -1 the difference."""
        rank = max(len(self.steps), len(other.steps))
        mine, others = self.of_rank(rank), other.of_rank(rank)
        steps = tuple(a + sign * b for a, b in zip(mine.steps, others.steps))
        times: dict[Quotient, Any] = {}
        for number, quotient in (*mine.quotients, *((sign * n, q) for n, q in others.quotients)):
            times[quotient] = times.get(quotient, 0) + number
        quotients = tuple((n, q) for q, n in times.items() if n != 0)
        return Index(steps, sympy.expand(self.start + sign * other.start), quotients)

    def times(self, factor: Any) -> Index:
        """Returns the product with a number."""
        quotients = tuple((n * factor, q) for n, q in self.quotients if factor != 0)
        return Index(tuple(s * factor for s in self.steps), sympy.expand(self.start * factor), quotients)

    def divided(self, by: int) -> Index | None:
        """Returns the quotient by a positive number, rounded down; None if it has no form."""
        if not self.quotients:
            if any(not s.is_Integer for s in self.steps):
                return None
            common = math.gcd(by, *map(int, self.steps))
            steps, start = tuple(s // common for s in self.steps), FloorDiv(self.start, common)
            if by == common:
                return Index(steps, start)
            if not any(steps):
                return Index(steps, FloorDiv(start, by // common))
            return Index((_ZERO,) * len(steps), _ZERO, ((1, Quotient(Index(steps, start), by // common)),))
        if len(self.quotients) > 1 or self.quotients[0][0] != 1 or any(self.steps):
            return None
        inner = self.quotients[0][1]  # (x // a + c) // b is (x + a c) // (a b)
        return inner.of.combined(Index((), inner.by * self.start), 1).divided(inner.by * by)

    def of_rank(self, rank: int) -> Index:
        """Returns the same numbers with more dims in front."""
        return self.changed(lambda one: replace(one, steps=(_ZERO,) * (rank - len(one.steps)) + one.steps))

    def changed(self, change: Callable[[Index], Index]) -> Index:
        """Returns the numbers after their dims changed. change: changes numbers without quotients."""
        plain = change(Index(self.steps, self.start))
        quotients = tuple((n, Quotient(change(q.of), q.by)) for n, q in self.quotients)
        return replace(plain, quotients=plain.quotients + quotients)

    @property
    def is_nonnegative(self) -> bool:
        """Whether no number is shown to be negative."""
        numbers = (*self.steps, self.start, *(n for n, _ in self.quotients))
        inner = all(q.of.is_nonnegative for _, q in self.quotients)
        return inner and all(sympy.sympify(n).is_nonnegative for n in numbers)


@dataclass(frozen=True)
class Quotient:
    """Whole numbers `of // by`, rounded down. of: has no quotients. by: positive."""

    of: Index
    by: int


@dataclass(frozen=True)
class _Term:
    """A part of an index that depends on one dim of the pairs: factor * ((index + shift) // by)."""

    factor: int
    by: int = 1
    shift: Any = _ZERO


def not_negative(value: Index) -> Region | None:
    """Returns the pairs where whole numbers are 0 or more; None if they have no form.

    Pairs are the last two dims.
    """
    value = value.of_rank(max(2, len(value.steps)))
    if len(value.quotients) == 1 and not any(value.steps):
        ((factor, quotient),) = value.quotients
        if factor == 1:
            return not_negative(_plus(quotient.of, quotient.by * value.start))
        if factor == -1:  # -(x // b) + c >= 0 where x < b * (c + 1)
            return not_negative(_plus(quotient.of.times(-1), quotient.by * (value.start + 1) - 1))
    terms = _terms(value)
    if terms is None:
        return None
    query, key = terms
    if query is None and key is None:
        sure = (EVERYTHING, value.start.is_nonnegative), (NOTHING, value.start.is_negative)
        return next((region for region, holds in sure if holds), None)
    box = _ordered(query or _Term(0), key or _Term(0), value.start)
    return None if box is None else (box,)


def _plus(value: Index, number: Any) -> Index:
    return value.combined(Index((), number), 1)


def _terms(value: Index) -> tuple[_Term | None, _Term | None] | None:
    """Returns the terms of the queries and of the keys; None if there are others."""
    found: list[list[_Term]] = [[], []]
    parts = [(sympy.Integer(n), q.by, q.of) for n, q in value.quotients]
    for place, step in enumerate(value.steps[-2:]):
        if step != 0:
            unit = tuple(sympy.Integer(p == place) for p in (0, 1))
            parts.append((step, 1, Index(unit)))
    for factor, by, of in parts:
        if not factor.is_Integer or any(of.steps[:-2]) or of.steps[-2:] not in ((1, 0), (0, 1)):
            return None
        found[of.steps[-1]].append(_Term(int(factor), by, of.start))
    if any(value.steps[:-2]) or max(map(len, found)) > 1:
        return None
    query, key = (one[0] if one else None for one in found)
    return query, key


def _ordered(query: _Term, key: _Term, start: Any) -> Box | None:
    """Returns where the sum of two terms and a number is 0 or more; None if that is no box.

    A term without a factor is 0.
    """
    common = math.gcd(query.factor, key.factor)
    a, b, c = query.factor // common, key.factor // common, FloorDiv(start, common)
    if b == 0:
        return Box(queries=_one_sided(query, a, c))
    if a == 0:
        return Box(keys=_one_sided(key, b, c))
    if abs(a) != 1:  # the same with queries and keys exchanged has one query block for each unit
        turned = _ordered(replace(key, factor=b), replace(query, factor=a), c) if abs(b) == 1 else None
        return None if turned is None else turned.turned()
    # now a is 1 or -1: a * I + b * J + c >= 0 with the blocks I = (i + p) // n and J = (j + q) // m
    if a * b > 0:
        return None
    grid = Grid(query.by * abs(b), key.by, query.shift, key.shift)
    if a == 1:  # I + c >= |b| J where the blocks of |b| I-blocks, from -c on, reach J
        shifted = query.shift + query.by * c if abs(b) != 1 else query.shift
        blocks = Range(_ZERO if abs(b) != 1 else -c, None)
    else:  # I - c <= |b| J
        shifted = query.shift + query.by * (abs(b) - 1 - c) if abs(b) != 1 else query.shift
        blocks = Range(None, sympy.Integer(1) if abs(b) != 1 else c + 1)
    return Box.of_blocks(blocks, replace(grid, query_shift=shifted))


def _one_sided(term: _Term, sign: int, start: Any) -> Range:
    """Returns where `sign * ((index + shift) // by) + start` is 0 or more."""
    if sign > 0:
        return Range(-term.by * start - term.shift, None)
    return Range(None, term.by * (start + 1) - term.shift)
