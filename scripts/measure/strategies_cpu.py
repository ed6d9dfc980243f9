#!/usr/bin/env python3
"""Measures which strategy is fastest on a CPU for each shape: pairs of layers (I to O and back, each with a
relu) under every strategy that applies, and complete networks.

    python scripts/measure/strategies_cpu.py [-o bench/results/strategies-cpu.json] [--seconds 0.3] [--only
    linear|embedding|conv|nets]

The script uses one thread, pinned to one core. Strategies are interleaved in one process. They are compared
by the CPU time of the thread, because other processes may share the core. `us` is the lower quartile. `ratio`
is the median of ratios to the first strategy in the row (over 1: faster). Before the timing, the answer of
every strategy is compared with the answer of the first.
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
    """Returns a program of two layers, each followed by a relu, and the kinds of its slots."""
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
    program = Program(slots, (Slot("x", "x", "shared", text["x"]),), nodes, (Output(Ref("y"), "shared"),))
    return program, {**dict.fromkeys("wbvc", "stacked"), "x": "shared" if shared else "stacked"}


def table(v: int, d: int, rows: int, shared: bool) -> tuple[Program, dict[str, Kind]]:
    """Returns a program of one embedding, and the kinds of its slots."""
    weights, inputs = (
        Slot("w", "w", "shared", f"float32[{v},{d}]"),
        Slot("x", "x", "shared", f"int64[{rows}]"),
    )
    program = Program(
        (weights,),
        (inputs,),
        (Node("one", full_name("embedding"), (Ref("w"), Ref("x"))),),
        (Output(Ref("one"), "shared"),),
    )
    return program, {"w": "stacked", "x": "shared" if shared else "stacked"}


def candidates(
    program: Program, slots: dict[str, Kind], members: int, names: list[str]
) -> dict[str, Callable[[], torch.Tensor]]:
    """Returns the calls of a program under each strategy that applies."""
    generator = torch.Generator().manual_seed(0)

    def draw(slot: Slot) -> torch.Tensor:
        type_ = parse_slot(slot.type)
        shape = type_.shape({})
        if type_.dtype == "int64":  # rows of a table
            count = parse_slot(program.weights[0].type).shape({})[0]
            return torch.randint(
                0, count, [members, *shape] if slots[slot.name] == "stacked" else shape, generator=generator
            )
        scale = max(1, torch.Size(shape[1:]).numel()) ** -0.5 if slot.name in "wv" else 1.0
        return (
            torch.randn([members, *shape] if slots[slot.name] == "stacked" else shape, generator=generator)
            * scale
        )

    weights, x = {s.name: draw(s) for s in program.weights}, draw(program.inputs[0])
    calls: dict[str, Callable[[], torch.Tensor]] = {}
    for name in names:
        loop, _, strategy = name.rpartition(" ")
        regions = (
            (Region("members", "loop", tuple(n.name for n in program.nodes), ""),)
            if loop or strategy == "loop"
            else ()
        )
        choices = {n: NodeChoice(strategy, "") for n in ("one", "two")}
        plan = Plan("cpu", "shared", (1, None), regions, choices)
        lowered = lower([program], [0] * members, slots, plan, {})
        if not regions and strategy not in lowered.used.values():
            continue  # the strategy does not apply
        if loop and not any(
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
    """Returns the interleaved times of all calls."""
    expected = next(iter(calls.values()))()
    for name, call in calls.items():
        torch.testing.assert_close(call(), expected, rtol=1e-3, atol=1e-3, msg=partial("{}: {}".format, name))
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
    """Measures all calls of a row, prints the times and returns the row."""
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
    """Returns the calls of a network: its members one by one, and an artifact under each strategy."""
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
            ens = widepack.load(f"{folder}/e.wide", strategies=name.split())
            ens(x)  # weights are packed here
            calls[name] = partial(ens, x)
    return calls


def linear_rows(seconds: float) -> list[dict[str, Any]]:
    """Measures pairs of linear layers, with shared and with stacked inputs."""
    rows = []
    for shared in (False, True):
        for n, b, i, o in LINEAR:
            program, slots = pair("linear", [o, i], [i, o], [], [b, i], shared)
            names = [*(["one_gemm"] if shared else []), "bmm", "turned", "packed", "loop"]
            x = "shared" if shared else "stacked"
            kind = {"op": "linear", "x": x, "N": n, "rows": b, "I": i, "O": o}
            rows.append(row(kind, candidates(program, slots, n, names), seconds))
    return rows


def embedding_rows(seconds: float) -> list[dict[str, Any]]:
    """Measures embeddings, with shared and with stacked ids."""
    rows = []
    for shared in (False, True):
        for n, v, d, b in EMBEDDING:
            program, slots = table(v, d, b, shared)
            names = [*(["index_select"] if shared else ["gather"]), "flat_index", "loop"]
            ids = "shared" if shared else "stacked"
            kind = {"op": "embedding", "ids": ids, "N": n, "V": v, "D": d, "rows": b}
            rows.append(row(kind, candidates(program, slots, n, names), seconds))
    return rows


def conv_rows(seconds: float) -> list[dict[str, Any]]:
    """Measures pairs of convolutions with stacked inputs."""
    names = ["grouped", "packed", "grouped_channels_last", "bmm_1x1", "unfold_bmm", "loop", "loop packed"]
    rows = []
    for n, b, c, o, size, k, g in CONV:
        rest = [[1, 1], [k // 2] * 2, [1, 1], g]
        program, slots = pair("conv2d", [o, c // g, k, k], [c, o // g, k, k], rest, [b, c, size, size], False)
        shape = {"N": n, "batch": b, "C": c, "O": o, "size": size, "kernel": k, "groups": g}
        kind = {"op": "conv2d", "x": "stacked", **shape}
        rows.append(row(kind, candidates(program, slots, n, names), seconds))
    return rows


def net_rows(seconds: float) -> list[dict[str, Any]]:
    """Measures complete networks."""
    return [
        row({"net": name, "N": n, "batch": shape[0]}, network(make, n, spec, shape), seconds)
        for name, make, n, spec, shape in NETS
    ]


PARTS = {"linear": linear_rows, "embedding": embedding_rows, "conv": conv_rows, "nets": net_rows}


def cpu_name() -> str:
    """Returns the model name of the CPU."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(
        (line.split(":")[1].strip() for line in lines if line.startswith("model name")),
        platform.processor(),
    )


def document(rows: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Returns the rows with the device, the versions, the commit and the command."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    return {
        "what": __doc__,
        "device": f"{cpu_name()}, one thread, {torch.backends.cpu.get_cpu_capability()}",
        "versions": {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "widepack": widepack.__version__,
        },
        "commit": commit.stdout.strip(),
        "command": " ".join(["python", *sys.argv]),
        "date": date.today().isoformat(),
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("-o", "--out", type=Path, default=Path("bench/results/strategies-cpu.json"))
    parser.add_argument(
        "--seconds", type=float, default=0.3, help="seconds of measurement for each strategy and row"
    )
    parser.add_argument("--only", choices=list(PARTS), help="measure only this part")
    given = parser.parse_args()
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    with torch.inference_mode():
        rows = {
            name: measured(given.seconds) if given.only in (None, name) else []
            for name, measured in PARTS.items()
        }
    given.out.write_text(json.dumps(document(rows), indent=1) + "\n")


if __name__ == "__main__":
    main()
