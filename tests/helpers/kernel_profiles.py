"""Kernel times of a machine that plans and tests may change."""

from __future__ import annotations

import re
from dataclasses import replace

from widepack.kernel_times.curves import ProductTimes
from widepack.kernel_times.profile import Profile
from widepack.kernel_times.sources import shipped

SHIPPED = shipped()["amd-epyc-avx512"]


def scaled(kinds: str, factor: float) -> Profile:
    """Returns kernel times in which some kinds of products take another part of their time.

    kinds: a regular expression.
    """
    products, starts = dict(SHIPPED.products), dict(SHIPPED.starts)
    for kind, times in SHIPPED.products.items():
        if re.search(kinds, kind):
            curves = [(n, replace(c, values=tuple(v * factor for v in c.values))) for n, c in times.by_rows]
            products[kind], starts[kind] = ProductTimes(tuple(curves)), factor * starts[kind]
    return replace(SHIPPED, products=products, starts=starts)
