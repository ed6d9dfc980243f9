#!/usr/bin/env python3
"""Measures which strategy is fastest on a CPU for each shape: pairs of layers (I to O and back, each with a
relu) under every strategy that applies, and whole networks.

    python scripts/measure/strategies_cpu.py [-o bench/results/strategies-cpu.json] [--seconds 0.3] [--only
    linear|embedding|conv|nets]

One thread, pinned to one core. Strategies are interleaved in one process; what is compared is the CPU time of
the thread, since cores may be shared: `us` is the lower quartile, `ratio` the median of ratios to the first
strategy in the row (over 1: faster). Every strategy's answer is compared with the first one's before it is
timed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import widepack
from widepack import primitives as primitives
from widepack.ir.ops import full_name
from widepack.ir.tensor_type import parse_slot
from widepack.lowering.lower import lower
from widepack.planning.plan import NodeChoice, Plan, Region
from widepack.runtime.executable import Executable
from widepack_artifacts.program import Kind, Node, Output, Program, Ref, Slot

CPU = torch.device("cpu")
LINEAR = [  # N, rows, I, O
    *((n, b, i, o) for n in (4, 16, 50) for b in (1, 4, 32) for i, o in ((16, 64), (64, 64), (64, 256),
    (256, 256))),
    (100, 1, 64, 128), (100, 32, 64, 128), (20, 128, 256, 256), (8, 8, 768, 768), (8, 256, 256, 1024), (16,
    32, 512, 10), (50, 32, 64, 1),
]  # fmt: skip
EMBEDDING = [  # N, V, D, rows
    (4, 1000, 16, 8), (8, 1000, 16, 32), (16, 1000, 64, 1), (32, 1000, 256, 1), (8, 1000, 64, 32), (8,
    1000, 16, 512), (8, 30000, 64, 128), (16, 5000, 256, 512),
]  # fmt: skip
CONV = [  # N, batch, C, O, size, kernel, groups
    (10, 1, 3, 32, 32, 3, 1), (10, 8, 3, 32, 32, 3, 1), (10, 1, 32, 32, 16, 3, 1), (10, 8, 32, 32, 16, 3,
    1), (20, 8, 64, 64, 16, 3, 1), (4, 1, 64, 64, 56, 3, 1),
    (10, 1, 256, 256, 14, 3, 1), (10, 1, 64, 256, 14, 1, 1), (10, 8, 64, 256, 14, 1, 1), (30, 1, 16, 16,
    16, 3, 1), (10, 1, 64, 64, 28, 3, 64), (10, 8, 32, 32, 16, 5, 32),
    (10, 4, 32, 64, 16, 3, 4),
]  # fmt: skip


def pair(
    op: str, first: list[int], back: list[int], rest: list[Any], x: list[int], shared: bool
) -> tuple[Program, dict[str, Kind]]:
    """Two layers, a relu behind each."""
    text = {
        k: f"float32[{','.join(map(str, v))}]"
        for k, v in (("w", first), ("b", first[:1]), ("v", back), ("c", back[:1]), ("x", x))
    }
    nodes = (
        Node("one", full_name(op), (Ref("x"), Ref("w"), Ref("b"), *rest)),
        Node("r", full_name("relu"), (Ref("one"),)),
        Node("two", full_name(op), (Ref("r"), Ref("v"), Ref("c"), *rest)),
        Node("y", full_name("relu"), (Ref("two"),)),
    )
    slots = tuple(Slot(n, n, "shared", text[n]) for n in "wbvc")
    made = Program(slots, (Slot("x", "x", "shared", text["x"]),), nodes, (Output(Ref("y"), "shared"),))
    return made, {**dict.fromkeys("wbvc", "stacked"), "x": "shared" if shared else "stacked"}


def table(v: int, d: int, rows: int, shared: bool) -> tuple[Program, dict[str, Kind]]:
    """One embedding."""
    weights, inputs = (
        Slot("w", "w", "shared", f"float32[{v},{d}]"),
        Slot("x", "x", "shared", f"int64[{rows}]"),
    )
    made = Program(
        (weights,),
        (inputs,),
        (Node("one", full_name("embedding"), (Ref("w"), Ref("x"))),),
        (Output(Ref("one"), "shared"),),
    )
    return made, {"w": "stacked", "x": "shared" if shared else "stacked"}


def candidates(
    made: Program, slots: dict[str, Kind], members: int, names: list[str]
) -> dict[str, Callable[[], torch.Tensor]]:
    """The pair under each strategy: of its op, or as a loop region."""
    generator = torch.Generator().manual_seed(0)

    def draw(slot: Slot) -> torch.Tensor:
        type_ = parse_slot(slot.type)
        shape = type_.shape({})
        if type_.dtype == "int64":  # rows of a table
            count = parse_slot(made.weights[0].type).shape({})[0]
            return torch.randint(
                0, count, [members, *shape] if slots[slot.name] == "stacked" else shape, generator=generator
            )
        scale = max(1, torch.Size(shape[1:]).numel()) ** -0.5 if slot.name in "wv" else 1.0
        return (
            torch.randn([members, *shape] if slots[slot.name] == "stacked" else shape, generator=generator)
            * scale
        )

    weights, x = {s.name: draw(s) for s in made.weights}, draw(made.inputs[0])
    calls: dict[str, Callable[[], torch.Tensor]] = {}
    for name in names:
        whole, _, own = name.rpartition(" ")
        regions = (
            (Region("members", "loop", tuple(n.name for n in made.nodes), ""),)
            if whole or own == "loop"
            else ()
        )
        choices = {n: NodeChoice(own, "") for n in ("one", "two")}
        lowered = lower([made], [0] * members, slots, Plan("cpu", "shared", (1, None), regions, choices), {})
        if not regions and own not in lowered.used.values():
            continue  # it does not apply here
        if whole and not any(
            n.body and any(b.op.startswith("widepack") for b in n.body.nodes) for n in lowered.program.nodes
        ):
            continue
        run = Executable(lowered.program, weights, CPU)
        calls[name] = partial(_answer, run, x)
    return calls


def _answer(run: Executable, x: torch.Tensor) -> torch.Tensor:
    answer: torch.Tensor = run.run(x)[0]
    return answer


def measure(calls: dict[str, Callable[[], torch.Tensor]], seconds: float) -> dict[str, dict[str, float]]:
    """Interleaved times of all calls."""
    want = next(iter(calls.values()))()
    for name, call in calls.items():
        torch.testing.assert_close(call(), want, rtol=1e-3, atol=1e-3, msg=partial("{}: {}".format, name))
    repeats = {}
    for name, call in calls.items():
        start = time.perf_counter()
        call()
        repeats[name] = max(1, int(0.0005 / max(time.perf_counter() - start, 1e-7)))
    times: dict[str, list[float]] = {n: [] for n in calls}
    end, names, k = time.perf_counter() + seconds * len(calls), list(calls), 0
    while time.perf_counter() < end or k < 5:
        for name in names[k % len(names) :] + names[: k % len(names)]:
            call = calls[name]
            call()
            start = time.thread_time()
            for _ in range(repeats[name]):
                call()
            times[name].append((time.thread_time() - start) / repeats[name])
        k += 1
    base = times[names[0]]
    return {
        n: {
            "us": round(sorted(t)[len(t) // 4] * 1e6, 1),
            "ratio": round(statistics.median(b / a for a, b in zip(t, base)), 3),
        }
        for n, t in times.items()
    }


def row(kind: dict[str, Any], calls: dict[str, Callable[[], torch.Tensor]], seconds: float) -> dict[str, Any]:
    times = measure(calls, seconds)
    best = max(times, key=lambda n: times[n]["ratio"])
    print(
        *kind.values(),
        "|",
        "  ".join(f"{n} {v['us']:.0f} us x{v['ratio']:.2f}" for n, v in times.items()),
        "|",
        best,
        flush=True,
    )
    return {**kind, "times": times, "best": best}


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        for a, b in ((3, 32), (32, 32), (32, 64)):
            parts += [
                nn.Conv2d(a, b, 3, padding=1),
                nn.BatchNorm2d(b),
                nn.ReLU(),
                *([nn.MaxPool2d(2)] if a == b else []),
            ]
        self.net = nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))

    def forward(self, x: torch.Tensor) -> Any:
        return self.net(x)


class ResBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (
            nn.Conv2d(64, 64, 3, padding=1, bias=False),
            nn.Conv2d(64, 64, 3, padding=1, bias=False),
        )
        self.n, self.m = nn.BatchNorm2d(64), nn.BatchNorm2d(64)

    def forward(self, x: torch.Tensor) -> Any:
        return torch.relu(x + self.m(self.b(torch.relu(self.n(self.a(x))))))


def deep() -> nn.Module:
    return nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(256, 256), nn.ReLU())))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))


def transformer() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2)


NETS: list[tuple[str, Callable[[], nn.Module], int, str, tuple[int, ...]]] = [
    ("deep MLP 8x256", deep, 20, "input=float32[B,256]", (32, 256)),
    ("MLP 64-128-64", mlp, 100, "input=float32[B,64]", (1, 64)),
    ("MLP 64-128-64", mlp, 100, "input=float32[B,64]", (32, 64)),
    ("transformer d=64, 2 layers", transformer, 16, "src=float32[B,16,64]", (4, 16, 64)),
    ("conv net 3-32-32-64", ConvNet, 10, "x=float32[B,3,32,32]", (8, 3, 32, 32)),
    ("ResBlock 64", ResBlock, 20, "x=float32[B,64,16,16]", (8, 64, 16, 16)),
]


def network(
    make: Callable[[], nn.Module], members: int, spec: str, shape: tuple[int, ...]
) -> dict[str, Callable[[], torch.Tensor]]:
    """A network's members one by one, and as an artifact under each strategy."""
    torch.manual_seed(0)
    models = [make().eval() for _ in range(members)]
    x = torch.randn(shape)
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "members one by one": lambda: torch.stack([m(x) for m in models])
    }
    with tempfile.TemporaryDirectory() as folder:
        for i, model in enumerate(models):
            torch.save(model.state_dict(), f"{folder}/{i}.pt")
        widepack.build(
            [f"{folder}/{i}.pt" for i in range(members)],
            f"{folder}/e.wide",
            model=make,
            inputs=[spec],
            targets=("cpu",),
            pt2=False,
        )
        for name in ("wide", "loop", "wide turned", "wide packed", "loop packed"):
            made = widepack.load(f"{folder}/e.wide", strategies=name.split())
            made(x)  # weights are packed here
            calls[name] = partial(made, x)
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("-o", "--out", type=Path, default=Path("bench/results/strategies-cpu.json"))
    parser.add_argument("--seconds", type=float, default=0.3, help="a strategy and row")
    parser.add_argument("--only", choices=["linear", "embedding", "conv", "nets"])
    given = parser.parse_args()
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    rows: dict[str, list[dict[str, Any]]] = {"linear": [], "embedding": [], "conv": [], "nets": []}
    with torch.inference_mode():
        if given.only in (None, "linear"):
            for shared in (False, True):
                for n, b, i, o in LINEAR:
                    made, slots = pair("linear", [o, i], [i, o], [], [b, i], shared)
                    calls = candidates(
                        made, slots, n, [*(["one_gemm"] if shared else []), "bmm", "turned", "packed", "loop"]
                    )
                    rows["linear"].append(
                        row(
                            {
                                "op": "linear",
                                "x": "shared" if shared else "stacked",
                                "N": n,
                                "rows": b,
                                "I": i,
                                "O": o,
                            },
                            calls,
                            given.seconds,
                        )
                    )
        if given.only in (None, "embedding"):
            for shared in (False, True):
                for n, v, d, b in EMBEDDING:
                    made, slots = table(v, d, b, shared)
                    calls = candidates(
                        made, slots, n, [*(["index_select"] if shared else ["gather"]), "flat_index", "loop"]
                    )
                    kind = {
                        "op": "embedding",
                        "ids": "shared" if shared else "stacked",
                        "N": n,
                        "V": v,
                        "D": d,
                        "rows": b,
                    }
                    rows["embedding"].append(row(kind, calls, given.seconds))
        if given.only in (None, "conv"):
            for n, b, c, o, size, k, g in CONV:
                rest = [[1, 1], [k // 2] * 2, [1, 1], g]
                made, slots = pair(
                    "conv2d", [o, c // g, k, k], [c, o // g, k, k], rest, [b, c, size, size], False
                )
                calls = candidates(
                    made,
                    slots,
                    n,
                    [
                        "grouped",
                        "packed",
                        "grouped_channels_last",
                        "bmm_1x1",
                        "unfold_bmm",
                        "loop",
                        "loop packed",
                    ],
                )
                kind = {
                    "op": "conv2d",
                    "x": "stacked",
                    "N": n,
                    "batch": b,
                    "C": c,
                    "O": o,
                    "size": size,
                    "kernel": k,
                    "groups": g,
                }
                rows["conv"].append(row(kind, calls, given.seconds))
        if given.only in (None, "nets"):
            for name, make, n, spec, shape in NETS:
                rows["nets"].append(
                    row(
                        {"net": name, "N": n, "batch": shape[0]}, network(make, n, spec, shape), given.seconds
                    )
                )
    model = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    record = {
        "what": __doc__,
        "device": f"{model}, one thread, {torch.backends.cpu.get_cpu_capability()}",
        "versions": {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "widepack": widepack.__version__,
        },
        "commit": subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip(),
        "command": " ".join(["python", *sys.argv]),
        "date": date.today().isoformat(),
        "rows": rows,
    }
    given.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
