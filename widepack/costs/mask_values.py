"""Holds what is known of a value of which a mask is made, and combines such values.

| value | what it is |
|---|---|
| `Index` | whole numbers that follow from the indices of the dims: `arange(T)`, `i - j`, `i // 4` |
| `Distance` | the absolute values of an `Index` |
| `Constant` | one number everywhere |
| `Mask` | booleans, or the numbers 0 and 1 |
| `Bias` | what is added to scores, and forbids some pairs |
| `Scores` | products of queries and keys, later their softmax |

Pairs are the last two dims of a value. No value of an input is known. Of weights, those of masks in buffers
are known (mask_data.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import sympy

from .mask_indices import Index, not_negative
from .pair_regions import EVERYTHING, NOTHING, Region, both, complement, either

FORBIDS = -1e4
"""A score that is this much smaller has no weight after a softmax."""


@dataclass(frozen=True)
class Distance:
    """The absolute values of whole numbers."""

    of: Index


@dataclass(frozen=True)
class Constant:
    """One number everywhere."""

    number: float


@dataclass(frozen=True)
class Mask:
    """Booleans. sure: pairs that are true at any input. possible: all pairs that may be true."""

    sure: Region = NOTHING
    possible: Region = EVERYTHING

    def also(self, other: Mask) -> Mask:
        """Returns `self and other`."""
        return Mask(
            _or(both(self.sure, other.sure), NOTHING), _or(both(self.possible, other.possible), EVERYTHING)
        )

    def either(self, other: Mask) -> Mask:
        """Returns `self or other`."""
        return Mask(
            _or(either(self.sure, other.sure), NOTHING),
            _or(either(self.possible, other.possible), EVERYTHING),
        )

    def opposite(self) -> Mask:
        """Returns `not self`."""
        return Mask(_or(complement(self.possible), NOTHING), _or(complement(self.sure), EVERYTHING))

    def differs(self, other: Mask) -> Mask:
        """Returns `self != other`."""
        return self.also(other.opposite()).either(other.also(self.opposite()))


@dataclass(frozen=True)
class Bias:
    """What is added to scores. forbidden: pairs that get no weight at any input."""

    forbidden: Region


@dataclass(frozen=True)
class Scores:
    """Products of queries and keys. nodes: that compute them. forbidden: as in `Bias`. weights: whether a
    softmax was taken.
    """

    nodes: tuple[str, ...]
    forbidden: Region = field(default=NOTHING)
    weights: bool = False


Known = Index | Distance | Constant | Mask | Bias | Scores | None


def as_index(value: Known) -> Index | None:
    """Returns a value as whole numbers; None if it is not known to be."""
    if isinstance(value, Constant) and float(value.number).is_integer():
        return Index((), sympy.Integer(int(value.number)))
    return value if isinstance(value, Index) else None


def as_mask(value: Known) -> Mask:
    """Returns a value as booleans. What is not known may be true or false."""
    if isinstance(value, Index) and not (value.steps or value.quotients) and value.start.is_number:
        value = Constant(float(value.start))
    if isinstance(value, Constant):
        return Mask(EVERYTHING, EVERYTHING) if value.number else Mask(NOTHING, NOTHING)
    return value if isinstance(value, Mask) else Mask()


def forbidden(value: Known) -> Region:
    """Returns the pairs that a value forbids if it is added to scores."""
    if isinstance(value, (Bias, Scores)):
        return value.forbidden
    return EVERYTHING if forbids(value) else NOTHING


def forbids(value: Known) -> bool:
    """Whether a value is one number that forbids."""
    return isinstance(value, Constant) and value.number <= FORBIDS


def with_forbidden(value: Known, more: Region) -> Known:
    """Returns scores, or what is added to scores, with more forbidden pairs."""
    found = _or(either(forbidden(value), more), NOTHING)
    if isinstance(value, Scores):
        return Scores(value.nodes, found, value.weights)
    return Bias(found) if found else None


def chosen(mask: Mask, first: Known, second: Known) -> Known:
    """Returns `where(mask, first, second)`."""
    if forbids(second) and not forbids(first):
        return with_forbidden(first, _or(complement(mask.possible), NOTHING))
    if forbids(first) and not forbids(second):
        return with_forbidden(second, mask.sure)
    if all(isinstance(v, Constant) and v.number in (0, 1) for v in (first, second)):
        yes, no = as_mask(first), as_mask(second)
        return mask.also(yes).either(mask.opposite().also(no))
    return None


def _number(value: Known) -> float | None:
    """Returns a value that is one number everywhere; None for another."""
    if isinstance(value, Index) and not (value.steps or value.quotients) and value.start.is_number:
        return float(value.start)
    return value.number if isinstance(value, Constant) else None


def compared(name: str, a: Known, b: Known) -> Mask:
    """Returns the comparison of whole numbers or booleans. name: `ge`, `gt`, `le`, `lt`, `eq` or `ne`."""
    if name in ("eq", "ne") and (isinstance(a, Mask) or isinstance(b, Mask)):
        if any(_number(v) not in (None, 0, 1) for v in (a, b)):
            found = Mask(EVERYTHING, EVERYTHING)  # a mask has no such number
        else:
            found = as_mask(a).differs(as_mask(b))
        return found if name == "ne" else found.opposite()
    if isinstance(b, Distance):
        a, b, name = b, a, {"ge": "le", "gt": "lt", "le": "ge", "lt": "gt"}.get(name, name)
    if isinstance(a, Distance):
        return _distance(name, a.of, as_index(b))
    first, second = as_index(a), as_index(b)
    if first is None or second is None:
        return Mask()
    difference = first.combined(second, -1)
    if name in ("gt", "ge"):
        region = not_negative(difference.combined(Index((), sympy.Integer(name == "gt")), -1))
        return Mask() if region is None else Mask(region, region)
    if name in ("lt", "le"):
        return compared("gt" if name == "lt" else "ge", second, first)
    equal = compared("ge", first, second).also(compared("ge", second, first))
    return equal if name == "eq" else equal.opposite()


def _distance(name: str, of: Index, other: Index | None) -> Mask:
    if other is None or any(other.steps) or other.quotients:
        return Mask()
    if name in ("gt", "ge", "ne"):
        return _distance({"gt": "le", "ge": "lt", "ne": "eq"}[name], of, other).opposite()
    low = compared({"lt": "gt", "le": "ge"}.get(name, "eq"), of, other.times(-1))
    high = compared(name, of, other)
    return low.either(high) if name == "eq" else low.also(high)


def _or(region: Region | None, otherwise: Region) -> Region:
    return otherwise if region is None else region
