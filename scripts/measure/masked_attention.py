#!/usr/bin/env python3
"""Measures attention with masks: the op that skips keys, beside torch's kernel and a loop over the members.

    taskset -c 1 python scripts/measure/masked_attention.py -o bench/results/masked-attention-cpu.json

Eight members with 4 heads of 32, one sample, one thread. `blocks` is `widepack::masked_attention` over the
members as a batch, `folded` torch's attention over the same batch, and `loop` torch's attention once for each
member. The three are interleaved. Their answers are compared first.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from widepack.kernels import masked
from widepack.system.timing import race, ratio
from widepack_bench.measure.processors import quiet
from widepack_bench.report.environment import environment

MEMBERS, HEADS, WIDTH = 8, 4, 32
LENGTHS = (512, 1024)
NEAR = 64
MASKS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "window": lambda i, j: (i >= j) & (i - j < NEAR),
    "blocks of 64": lambda i, j: i // NEAR == j // NEAR,
    "prefix": lambda i, j: (j < NEAR) | (i >= j),
    "nothing is forbidden": lambda i, j: i + j >= 0,
}


def measured(name: str, length: int, seconds: float) -> dict[str, Any]:
    """Times one mask at one length. name: of `MASKS`, or `is_causal`."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(MEMBERS, HEADS, length, WIDTH) for _ in range(3))
    i, j = torch.arange(length).unsqueeze(1), torch.arange(length)
    options: dict[str, Any] = {"is_causal": True} if name == "is_causal" else {"attn_mask": MASKS[name](i, j)}
    torchs = torch.nn.functional.scaled_dot_product_attention
    op = getattr(torch.ops.widepack, masked.OP.split(".")[1]).default
    calls: dict[str, Callable[[], Any]] = {
        "blocks": partial(op, q, k, v, **options),
        "folded": partial(torchs, q, k, v, **options),
        "loop": lambda: [torchs(q[n : n + 1], k[n : n + 1], v[n : n + 1], **options) for n in range(MEMBERS)],
    }
    difference = float((calls["blocks"]() - calls["folded"]()).abs().max())
    times = race(calls, seconds)
    return {
        "mask": name,
        "length": length,
        "rounds": len(times["blocks"]),
        "ms": {n: 1e3 * statistics.median(found) for n, found in times.items()},
        "over_folded": ratio(times, "folded", "blocks"),
        "over_loop": ratio(times, "loop", "blocks"),
        "difference": difference,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures attention with masks.")
    parser.add_argument("-o", "--out", type=Path, default=Path("bench/results/masked-attention-cpu.json"))
    parser.add_argument("--seconds", type=float, default=3.0, help="for each row")
    options = parser.parse_args()
    rows = []
    with quiet(1), torch.inference_mode():
        for name in (*MASKS, "is_causal"):
            for length in LENGTHS:
                rows.append(measured(name, length, options.seconds))
                print(json.dumps(rows[-1]), flush=True)
    document = {
        "what": f"{MEMBERS} members, {HEADS} heads of {WIDTH}, one sample",
        "environment": environment("cpu", 1),
        "rows": rows,
    }
    options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
