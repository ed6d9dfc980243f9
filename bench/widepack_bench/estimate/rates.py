"""Holds the rates of a machine, and gives the time of a kernel at them.

Times between measured sizes are interpolated: the logarithm of the time is linear in the logarithms of the
sizes. Beyond the measured sizes the time grows with the work.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .kernel_work import ELEMENTWISE, KernelWork

MODULE_BYTES = 4096
"""About what the Python objects of a module take, all in all."""
LEAST_S = 1e-9
"""The least time of a product beside its start. A clock cannot resolve less."""


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
        many = tuple(r for r, _ in self.by_rows)
        values = tuple(c.at(width, grows=True) for _, c in self.by_rows)
        return Curve(many, values).at(rows, grows=True)


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What calls take on a machine, in seconds.

    threads, dtype: of the measurement. starts: the start of a product, by kind. products: what it takes
    beside that. others: the time of other kernels, start included, by kind, over their elements. cold: of a
    byte of weights more than of one in a cache, over the bytes of all weights that a call reads. view_s: of
    a view. modules: of the call of a module, without its ops, over the bytes that a call goes through.
    call_s: of the call of a wide program, without its ops.
    """

    threads: int
    dtype: str
    starts: Mapping[str, float]
    products: Mapping[str, ProductTimes]
    others: Mapping[str, Curve]
    cold: Curve
    view_s: float
    modules: Curve
    call_s: float

    def kernel(self, work: KernelWork, streamed: float) -> float:
        """Returns the seconds of a kernel.

        streamed: the bytes of weights that a whole call reads. If they do not fit a cache, they come from
        memory at every call.
        """
        moving = self.moving(work, streamed)
        if work.count:
            kind = work.kind if work.kind in self.products else "product"
            one = max(self.products[kind].at(work.rows, work.width), LEAST_S)
            return work.times * (self.starts[kind] + work.count * one + moving)
        kind = work.kind if work.kind in self.others else ELEMENTWISE
        return work.times * (self.others[kind].at(work.elements, grows=True) + moving)

    def moving(self, work: KernelWork, streamed: float) -> float:
        """Returns the seconds that weights take more than weights that are in a cache already.

        streamed: the bytes of weights of the whole call. The times of a large product contain that already.
        """
        if not work.weight_bytes:
            return 0.0
        own = work.weight_bytes / max(work.count, 1)
        return work.weight_bytes * max(0.0, self.cold.at(streamed) - self.cold.at(own))

    def others_start(self, work: KernelWork) -> float:
        """Returns the seconds that a kernel which is no product takes without any elements."""
        return self.others[work.kind if work.kind in self.others else ELEMENTWISE].values[0]

    def kernels(self, works: Sequence[KernelWork], weight_bytes: float) -> float:
        """Returns the seconds of kernels. weight_bytes: what all of them read, of all members."""
        return sum(self.kernel(w, weight_bytes) for w in works)


def product_times(measured: Mapping[tuple[float, float], float]) -> ProductTimes:
    """Returns the table of products. measured: seconds by (rows, width)."""
    rows = itertools.groupby(sorted(measured.items()), key=lambda item: item[0][0])
    return ProductTimes(tuple((r, curve({k[1]: s for k, s in items})) for r, items in rows))


def curve(values: Mapping[float, float]) -> Curve:
    """Returns the curve through measured values, by their sizes."""
    sizes = sorted(values)
    return Curve(tuple(sizes), tuple(values[s] for s in sizes))
