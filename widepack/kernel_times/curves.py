"""Holds times at measured sizes, and gives those between them.

Between measured sizes the logarithm of the time is linear in the logarithms of the sizes. Beyond the measured
sizes the time grows with the work.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from widepack_artifacts.errors import ArtifactError


def _short(size: float) -> float:
    """Returns a size as JSON writes it in fewest characters."""
    return int(size) if size == int(size) else size


@dataclass(frozen=True, slots=True)
class Curve:
    """Values at rising sizes. Both are positive."""

    sizes: tuple[float, ...]
    values: tuple[float, ...]

    def at(self, size: float, *, grows: bool = False) -> float:
        """Returns the value at a size.

        grows: beyond the largest size the value grows with the size; else it stays.
        """
        if size <= self.sizes[0]:
            return self.values[0]
        if size >= self.sizes[-1]:
            return self.values[-1] * (size / self.sizes[-1] if grows else 1.0)
        i = bisect.bisect_right(self.sizes, size) - 1
        part = math.log(size / self.sizes[i]) / math.log(self.sizes[i + 1] / self.sizes[i])
        return float(self.values[i] ** (1 - part) * self.values[i + 1] ** part)

    @classmethod
    def through(cls, values: Mapping[float, float]) -> Curve:
        """Returns the curve through measured values, by their sizes."""
        sizes = sorted(values)
        return cls(tuple(sizes), tuple(values[s] for s in sizes))

    def to_json(self) -> list[list[float]]:
        """Returns pairs of a size and a value, with three digits that count."""
        return [[_short(s), float(f"{v:.3g}")] for s, v in zip(self.sizes, self.values)]

    @classmethod
    def from_json(cls, data: Any) -> Curve:
        """Reads `to_json`. Raises: ArtifactError if sizes do not rise, or a number is not positive."""
        found = cls(tuple(float(s) for s, _ in data), tuple(float(v) for _, v in data))
        rises = all(a < b for a, b in itertools.pairwise(found.sizes))
        numbers = (*found.sizes, *found.values)
        if not numbers or not rises or not all(0 < n < math.inf for n in numbers):
            raise ArtifactError("a curve of kernel times needs positive numbers at rising sizes")
        return found


@dataclass(frozen=True, slots=True)
class ProductTimes:
    """Seconds of a product of `rows` rows with a matrix of some width, beside its start.

    by_rows: for rising numbers of rows, the seconds by width.
    """

    by_rows: tuple[tuple[float, Curve], ...]

    def at(self, rows: float, width: float) -> float:
        """Returns the seconds. Below the smallest measured size they stay; above the largest they grow with
        the work.
        """
        many = [r for r, _ in self.by_rows]
        i = min(max(bisect.bisect_right(many, rows), 1), len(many) - 1) - 1
        near = self.by_rows[max(i, 0) : i + 2] if len(many) > 1 else self.by_rows
        values = tuple(c.at(width, grows=True) for _, c in near)
        return Curve(tuple(r for r, _ in near), values).at(rows, grows=True)

    @classmethod
    def through(cls, measured: Mapping[tuple[float, float], float]) -> ProductTimes:
        """Returns the table through measured seconds, by (rows, width)."""
        rows = itertools.groupby(sorted(measured.items()), key=lambda item: item[0][0])
        return cls(tuple((r, Curve.through({k[1]: s for k, s in items})) for r, items in rows))

    def to_json(self) -> list[Any]:
        """Returns pairs of a number of rows and its curve."""
        return [[_short(r), c.to_json()] for r, c in self.by_rows]

    @classmethod
    def from_json(cls, data: Any) -> ProductTimes:
        """Reads `to_json`. Raises: as `Curve.from_json`."""
        found = cls(tuple((float(r), Curve.from_json(c)) for r, c in data))
        if not found.by_rows or not all(a[0] < b[0] for a, b in itertools.pairwise(found.by_rows)):
            raise ArtifactError("a table of products needs rising numbers of rows")
        return found
