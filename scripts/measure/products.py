#!/usr/bin/env python3
"""Times a linear layer of N members that train, forward and backward: oneDNN beside the batched product.

    taskset -c 1 python scripts/measure/products.py -o bench/results/products-cpu.json

`over_batched` is the time of the batched product over that of oneDNN: above 1 oneDNN is faster. `chosen` says
whether the op chooses oneDNN at these sizes (`widepack/kernels/member_products.py`). One thread, interleaved.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from widepack.kernels import member_products
from widepack_bench.measure.processors import quiet
from widepack_bench.measure.race import AGAIN, OURS, race
from widepack_bench.report.environment import environment

SIZES = (
    (16, 128, 128),
    (32, 128, 128),
    (32, 512, 512),
    (64, 64, 256),
    (64, 256, 256),
    (128, 64, 64),
    (128, 64, 256),
    (128, 256, 64),
    (128, 128, 128),
    (128, 128, 512),
    (128, 256, 256),
    (256, 128, 128),
    (256, 64, 256),
    (256, 512, 512),
    (512, 64, 128),
    (512, 128, 128),
    (512, 256, 1024),
    (1024, 64, 64),
    (1024, 64, 256),
)
"""Rows of a member, inputs and outputs."""


def step(members: int, rows: int, inputs: int, outputs: int, least: float) -> Callable[[], None]:
    """Returns the forward and backward pass of a layer. least: the multiplications from which oneDNN runs."""
    x = torch.randn(members, rows, inputs, requires_grad=True)
    weight = torch.randn(members, outputs, inputs, requires_grad=True)
    bias = torch.randn(members, outputs, requires_grad=True)
    gradient = torch.randn(members, rows, outputs)
    multiply = torch.ops.widepack.member_products

    def run() -> None:
        with ExitStack() as patches:
            patches.enter_context(mock.patch.object(member_products, "LEAST", least))
            patches.enter_context(mock.patch.object(member_products, "NARROW", 0))
            torch.autograd.grad(multiply(x, weight, bias), (x, weight, bias), gradient)

    return run


def measure(members: int, sizes: tuple[int, int, int], seconds: float) -> dict[str, Any]:
    """Times a layer both ways."""
    raced = race(
        step(members, *sizes, least=0),
        {"batched": step(members, *sizes, least=float("inf"))},
        budget_s=seconds,
    )
    rows, inputs, outputs = sizes
    large = rows * inputs * outputs >= member_products.LEAST and min(sizes) >= member_products.NARROW
    return {
        "members": members,
        "rows": rows,
        "inputs": inputs,
        "outputs": outputs,
        "ms": {"onednn": raced.median_ms(OURS), "batched": raced.median_ms("batched")},
        "over_batched": raced.ratio("batched").to_json(),
        "noise": raced.ratio(AGAIN).to_json(),
        "chosen": large,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Times linear layers of members that train.")
    parser.add_argument("-o", "--out", type=Path, default=Path("bench/results/products-cpu.json"))
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=2.0, help="for each row")
    options = parser.parse_args()
    rows = []
    with quiet(1):
        for sizes in SIZES:
            rows.append(measure(options.members, sizes, options.seconds))
            r = rows[-1]
            print(*sizes, f"{r['over_batched']['value']:.2f}", r["chosen"], flush=True)
    document = {"environment": environment("cpu", 1), "rows": rows}
    options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
