"""Measures the kernel times of this machine in several passes, and writes the least of each.

    python scripts/measure/kernel_times.py widepack/kernel_times/profiles/amd-epyc-avx512.json
    ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 \
        python scripts/measure/kernel_times.py widepack/kernel_times/profiles/amd-epyc-avx2.json

Other processes only add time. A pass takes about twenty seconds, with one thread. What a byte takes more in
memory than in a cache is a difference of two times: for weights the least times in memory and in a cache
count, for results the median of the differences.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from widepack.kernel_times.calibration import READ_CHANNELS, READ_WIDTHS, measure
from widepack.kernel_times.curves import Curve, ProductTimes
from widepack.kernel_times.profile import LARGE, Profile
from widepack.kernel_times.sources import written


def joined(curves: Sequence[Curve], join: Callable[[Sequence[float]], float]) -> Curve:
    """Returns the curve through the joined values of curves over the same sizes."""
    return Curve(curves[0].sizes, tuple(join(values) for values in zip(*(c.values for c in curves))))


def reading(kind: str, profiles: Sequence[Profile], times: ProductTimes) -> Curve:
    """Returns what a byte of weights takes more from memory. times: the least of products in a cache."""
    width, found = (3 * READ_CHANNELS) ** 2, {}
    if "convolution" not in kind:
        width = READ_WIDTHS[f"{LARGE} " if kind.startswith(LARGE) else ""] ** 2
    product = kind.removeprefix(f"{LARGE} ")
    for n in profiles[0].reading[kind].sizes:
        cold = min(p.reading[kind].at(n) + p.products[product].at(n, width) / (4 * width) for p in profiles)
        found[n] = max(1e-15, cold - times.at(n, width) / (4 * width))
    return Curve.through(found)


def least(profiles: Sequence[Profile]) -> Profile:
    """Returns the least times of several passes, and the median of what memory adds."""
    first = profiles[0]
    products = {}
    for kind, times in first.products.items():
        every = [p.products[kind].by_rows for p in profiles]
        products[kind] = ProductTimes(
            tuple((n, joined([by[i][1] for by in every], min)) for i, (n, _) in enumerate(times.by_rows))
        )
    return replace(
        first,
        starts={kind: min(p.starts[kind] for p in profiles) for kind in first.starts},
        products=products,
        others={kind: joined([p.others[kind] for p in profiles], min) for kind in first.others},
        cold=joined([p.cold for p in profiles], statistics.median),
        reading={k: reading(k, profiles, products[k.removeprefix(f"{LARGE} ")]) for k in first.reading},
        fresh=joined([p.fresh for p in profiles], statistics.median),
        view_s=min(p.view_s for p in profiles),
        modules=joined([p.modules for p in profiles], min),
    )


def main() -> None:
    """Measures, and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path, help="the file")
    parser.add_argument("--passes", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    profiles = [measure() for _ in range(options.passes)]
    options.out.write_text(written(least(profiles)), encoding="utf-8")
    print(f"{profiles[0].machine}: {options.passes} passes, {options.out}", file=sys.stderr)


if __name__ == "__main__":
    main()
