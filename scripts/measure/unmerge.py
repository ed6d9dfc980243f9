#!/usr/bin/env python3
"""Measures `widepack.fleet.unmerge`: drawn fleets of merged fine-tunes, and full fine-tunes.

    taskset -c 1 python scripts/measure/unmerge.py [-o bench/results/unmerge.json] [--fleets 200] [--full 40]

A fleet is N members over one base: float32 or bf16, rank 4 to 64, in all linear layers of a block or in q and
v, of a norm between 0.003 and 0.3 of the weight's; the base is given, among the members, or absent. Each
weight that is fine-tuned is one case.

The noise floor allows a rank if the smallest singular value of every member's fine-tune is above 1.5 times
the floor of `low_rank.py`: the margin is for directions that noise has weakened. `right` counts the weights
whose ranks are all those that were drawn. Where the floor does not allow it, a smaller rank with the residual
of rounding (`smaller`), or a weight that stays stacked (`stacked`), is right too.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from widepack.fleet.factors import KeptStacked
from widepack.fleet.low_rank import FLOOR
from widepack.fleet.rounding import noise_of
from widepack.fleet.unmerge import most_rank, unmerge
from widepack_artifacts.correction import encode_correction, whole
from widepack_bench.measure.processors import quiet
from widepack_bench.report.environment import environment

ROOT = Path(__file__).resolve().parents[2]
MARGIN = 1.5
WIDTHS = (128, 256, 384, 768)
SPEED = ((768, 768), (3072, 768))


def shapes_of(width: int, layers: str) -> dict[str, tuple[int, int]]:
    """Returns the weights of a block that are fine-tuned, as [O, I]."""
    square = (width, width)
    if layers == "q, v":
        return {"q": square, "v": square}
    return {"q": square, "v": square, "up": (4 * width, width), "down": (width, 4 * width)}


def members_of(
    base: Tensor, ranks: list[int], strength: float, generator: torch.Generator
) -> tuple[list[Tensor], list[float]]:
    """Returns merged members, and the smallest singular value of each one's fine-tune over the floor."""
    rows, columns = base.shape
    members, heights = [], []
    for rank in ranks:
        left = torch.randn(rows, rank, generator=generator)
        right = torch.randn(rank, columns, generator=generator)
        left *= strength * base.float().norm() / (left @ right).norm()
        delta = (left @ right).to(base.dtype)
        members.append((base.float() + delta.float()).to(base.dtype))
        core = torch.linalg.qr(left.double()).R @ torch.linalg.qr(right.double().t()).R.t()
        noise = noise_of(members[-1], members[-1].double() - base.double(), base.dtype, rounded=2)
        heights.append(float(torch.linalg.svdvals(core)[-1]) / (FLOOR * noise.edge))
    return members, heights


def one_fleet(seed: int) -> list[dict[str, Any]]:
    """Returns one row for each fine-tuned weight of a drawn fleet."""
    choose = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    dtype = choose.choice([torch.float32, torch.bfloat16])
    layers = choose.choice(["q, v", "all linear"])
    width = choose.choice(WIDTHS if layers == "q, v" else WIDTHS[:3])
    base_is = choose.choice(["given", "among", "absent"])
    count = choose.randint(3, 8)
    mixed = choose.random() < 0.3
    rank = choose.choice([4, 8, 16, 32, 64])
    strength = math.exp(choose.uniform(math.log(0.003), math.log(0.3)))
    rows = []
    for name, shape in shapes_of(width, layers).items():
        ranks = [choose.choice([4, 8, rank]) if mixed else rank for _ in range(count)]
        base = (torch.randn(shape, generator=generator) * 0.03).to(dtype)
        members, heights = members_of(base, ranks, strength, generator)
        expected = list(ranks)
        if base_is == "among":
            place = choose.randrange(count + 1)
            members.insert(place, base)
            expected.insert(place, 0)
        pays = max(ranks) <= most_rank(base)
        start = time.thread_time()
        found = unmerge(members, base if base_is == "given" else None)
        row: dict[str, Any] = {
            "seed": seed, "weight": name, "shape": list(shape), "dtype": str(dtype).removeprefix("torch."),
            "base": base_is, "members": len(members), "ranks": expected, "strength": strength,
            "seconds": time.thread_time() - start, "pays": pays, "height": min(heights),
            "allowed": pays and min(heights) > MARGIN,
        }  # fmt: skip  # one line for each group
        rows.append(row)
        if isinstance(found, KeptStacked):
            row |= {"result": "stacked", "reason": found.reason}
            continue
        smaller = all(a <= b for a, b in zip(found.ranks, expected))
        corrections = [encode_correction(m, found, i) for i, m in enumerate(members)]
        row |= {
            "result": "right" if found.ranks == expected else "smaller" if smaller else "other",
            "found": found.ranks,
            "source": found.source,
            "residual": found.residual._asdict(),
            "base_error": float((found.base.double() - base.double()).norm() / base.double().norm()),
            "factors": str(found.left.dtype).removeprefix("torch."),
            "exact": all(torch.equal(whole(found, i, c), members[i]) for i, c in enumerate(corrections)),
            "bits": max(8 * len(c) / base.numel() for c in corrections),
        }
    return rows


def one_full(seed: int) -> dict[str, Any]:
    """Returns a row for a fleet whose members are full fine-tunes."""
    choose = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    dtype = choose.choice([torch.float32, torch.bfloat16])
    width = choose.choice(WIDTHS)
    strength = math.exp(choose.uniform(math.log(0.003), math.log(0.3)))
    base = (torch.randn(width, width, generator=generator) * 0.03).to(dtype)
    members = [
        (base.float() + strength * 0.03 * torch.randn(width, width, generator=generator)).to(dtype)
        for _ in range(4)
    ]
    base_is = choose.choice(["given", "among", "absent"])
    given = members + [base] * (base_is == "among")
    found = unmerge(given, base if base_is == "given" else None)
    row = {"seed": seed, "shape": [width, width], "dtype": str(dtype).removeprefix("torch."), "base": base_is}
    row |= {"strength": strength, "taken": not isinstance(found, KeptStacked)}
    return row | ({"reason": found.reason} if isinstance(found, KeptStacked) else {})


def speed(shape: tuple[int, int], base_is: str, dtype: torch.dtype) -> dict[str, Any]:
    """Returns the time of one weight of 32 members of rank 8."""
    generator = torch.Generator().manual_seed(1)
    base = (torch.randn(shape, generator=generator) * 0.03).to(dtype)
    members, _ = members_of(base, [8] * 32, 0.05, generator)
    if base_is == "among":
        members[31] = base
    start = time.thread_time()
    found = unmerge(members, base if base_is == "given" else None)
    taken = time.thread_time() - start
    assert not isinstance(found, KeptStacked)
    name = str(dtype).removeprefix("torch.")
    return {"shape": list(shape), "base": base_is, "dtype": name, "members": 32, "seconds": taken}


def summary_of(rows: list[dict[str, Any]], full: list[dict[str, Any]]) -> dict[str, Any]:
    allowed = [row for row in rows if row["allowed"]]
    taken = [row for row in rows if row["result"] != "stacked"]
    absent = [row for row in taken if row["source"] == "recovered" and row["allowed"]]
    found: dict[str, Any] = {
        "fleets": len({row["seed"] for row in rows}),
        "weights": len(rows),
        "allowed": len(allowed),
        "right_of_allowed": sum(row["result"] == "right" for row in allowed),
        "others": {
            kind: sum(row["result"] == kind for row in rows if not row["allowed"])
            for kind in ("right", "smaller", "other", "stacked")
        },
        "exact": sum(row["exact"] for row in taken),
        "taken": len(taken),
        "full": len(full),
        "full_taken": sum(row["taken"] for row in full),
    }
    for dtype in ("float32", "bfloat16"):
        errors = [row["base_error"] for row in absent if row["dtype"] == dtype]
        of = [row for row in taken if row["dtype"] == dtype]
        bits = sorted(row["bits"] for row in of)
        found[dtype] = {
            "largest_error_of_recovered_bases": max(errors, default=None),
            "largest_rms": max((row["residual"]["rms"] for row in of), default=None),
            "median_bits": bits[len(bits) // 2] if bits else None,
            "most_bits": bits[-1] if bits else None,
            "weights_over_2_bits": sum(b > 2 for b in bits),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--out", type=Path, default=ROOT / "bench" / "results" / "unmerge.json")
    parser.add_argument("--fleets", type=int, default=200)
    parser.add_argument("--full", type=int, default=40)
    options = parser.parse_args()
    with quiet(1), torch.inference_mode():
        rows = []
        for seed in range(options.fleets):
            rows += one_fleet(seed)
            print(seed, rows[-1]["dtype"], rows[-1]["base"], rows[-1]["result"], flush=True)
        full = [one_full(10_000 + i) for i in range(options.full)]
        times = [
            speed(shape, base, dtype)
            for shape in SPEED
            for base in ("given", "among", "absent")
            for dtype in (torch.float32, torch.bfloat16)
        ]
        document = {
            "what": "unmerge: ranks, bases and corrections of drawn fleets; full fine-tunes; times",
            "environment": environment("cpu", 1),
            "summary": summary_of(rows, full),
            "speed": times,
            "rows": rows,
            "full": full,
        }
    options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(document["summary"], indent=1))


if __name__ == "__main__":
    main()
