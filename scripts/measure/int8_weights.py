#!/usr/bin/env python3
"""Measures a load with int8 weights against float32: `widepack.load(path, weights="int8")`.

    python scripts/measure/int8_weights.py [-o bench/results/int8-cpu.json] [--seconds 10] [--only linear]

With `--only`, the rows of other models in the file stay.

Each row is one model, N members and R rows for each member (pattern `each`), on one thread, pinned to one
core. The int8 model, the same model again, and the float32 model under each strategy of linear layers run in
one interleaved race (`widepack_bench.measure.race`).

| figure | what it is |
|---|---|
| `ratio` | the time of the fastest float32 model divided by that of the int8 model, with its 95% interval |
| `ratio_as_built` | the same of the artifact's own float32 plan (`auto`) |
| `noise` | the int8 model against itself |
| `int8` | whether these calls run over int8 weights; calls of many rows run the artifact's own plan |
| `error` | the largest error over all members: on the probe (`weight_errors`), and on the timed inputs |
| `bytes` | those of the linear layers' weights in both forms |

`kernel` rows call the ops alone, for numbers of rows and sizes of weights that no plan chooses. They are what
the two limits in widepack/inference/int8_programs.py come from.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import widepack
from widepack.ir import ops as ops  # defines widepack's own ops
from widepack.kernels.library import FUNCTIONS
from widepack_bench.measure.processors import quiet
from widepack_bench.measure.race import Race, race
from widepack_bench.models.transformer import Block
from widepack_bench.report.environment import environment

ROOT = Path(__file__).resolve().parents[2]
MEMBERS, ROWS = (8, 32), (1, 4, 32)
STRATEGIES = ("auto", "bmm", "turned", "streamed", "packed")
DIM = 768


def encoder() -> nn.Module:
    """Returns two blocks of BERT's size."""
    return nn.Sequential(*(Block(DIM, 12, 4 * DIM, False) for _ in range(2)))


MODELS: dict[str, tuple[Callable[[], nn.Module], str, tuple[str, ...]]] = {
    "linear 768x768": (lambda: nn.Linear(DIM, DIM), "input=float32[B,768]", STRATEGIES),
    "linear 768x3072": (lambda: nn.Linear(DIM, 4 * DIM), "input=float32[B,768]", STRATEGIES),
    "encoder 768x2": (encoder, "input=float32[B,{rows},768]", ("auto", "turned", "packed")),
}
KERNELS = [
    (members, rows, size, size)
    for members, size in ((1, 128), (4, 128), (8, 128), (4, 256), (8, 256), (8, 512), (8, 768), (32, 768))
    for rows in (1, 2, 4, 6, 8)
]


def built(folder: Path, make: Callable[[], nn.Module], members: int, spec: str) -> Path:
    """Builds an artifact of members with random weights, and returns its path."""
    folder.mkdir()
    files = []
    for i in range(members):
        torch.manual_seed(i)
        files.append(folder / f"m{i}.pt")
        torch.save(make().state_dict(), files[-1])
    widepack.build(files, folder / "e.wide", model=make, inputs=[spec], pt2=False, race=False)
    return folder / "e.wide"


def figures(found: Race) -> dict[str, Any]:
    """Returns the figures of a race."""
    return {
        "fastest": found.fastest,
        "ratio": found.ratio(found.fastest).to_json(),
        "noise": found.noise.to_json(),
        "quiet": found.quiet,
        "rounds": len(found.rounds),
        "ms": {name: round(found.median_ms(name), 4) for name in found.names},
    }


def error_of(found: Tensor, truth: Tensor) -> float:
    """Returns the largest error of a member as a part of the rms of its answer."""
    errors = (found.double() - truth.double()).abs().flatten(1).amax(1)
    return float((errors / truth.double().square().flatten(1).mean(1).sqrt()).max())


def model_row(name: str, members: int, rows: int, seconds: float, folder: Path) -> dict[str, Any]:
    """Returns the row of a model."""
    make, spec, strategies = MODELS[name]
    here = folder / f"{rows if '{rows}' in spec else 'any'}"
    path = here / "e.wide" if here.exists() else built(here, make, members, spec.format(rows=rows))
    x = torch.randn(members, *((rows, DIM) if "{rows}" not in spec else (1, rows, DIM)))
    ens = widepack.load(path, weights="int8", warmup=False)
    ens.warmup(("each",))
    floats = {
        s: widepack.load(path, strategies=None if s == "auto" else ["wide", s], warmup=False)
        for s in strategies
    }
    answer = ens.each(x)
    truth = torch.stack([member(x[i]) for i, member in enumerate(floats["auto"])])
    found = race(
        lambda: ens.each(x),
        {name: partial(model.each, x) for name, model in floats.items()},
        budget_s=seconds,
    )
    chosen = ens.entry("forward").bound([x], [True])
    layers = [w for w in ens.manifest.weights if len(w.of(0)) == 2]
    return {
        "model": name,
        "members": members,
        "rows": rows,
        "int8": chosen.int8,
        **figures(found),
        "ratio_as_built": found.ratio("auto").to_json(),
        "error": {
            "probe": max((e.largest for e in ens.weight_errors), default=0.0),
            "timed": error_of(answer, truth),
        },
        "bytes": {
            "float32": sum(w.bytes(members) for w in layers),
            "int8": sum(members * (w.of(0)[1] * (w.of(0)[0] + 8) + 4 * w.of(0)[0]) for w in layers),
        },
    }


def kernel_row(shape: tuple[int, int, int, int], seconds: float) -> dict[str, Any]:
    """Returns the row of the ops alone."""
    members, rows, inputs, outputs = shape
    # As many copies as do not fit into a cache, so that each call reads its weights from memory.
    copies = max(1, min(200, 200_000_000 // (4 * members * inputs * outputs)))
    weights = [torch.randn(members, outputs, inputs) / inputs**0.5 for _ in range(copies)]
    x, bias = torch.randn(members, rows, inputs), torch.randn(members, outputs)
    scales = [FUNCTIONS["widepack.int8_scales.default"](w) for w in weights]
    tables = [FUNCTIONS["widepack.int8_weight.default"](w, s) for w, s in zip(weights, scales)]
    turned = [w.transpose(1, 2).contiguous() for w in weights]
    packed = [FUNCTIONS["widepack.pack_linear.default"](w, rows) for w in weights]
    added = bias.unsqueeze(1)
    linear, streamed = FUNCTIONS["widepack.linear.default"], FUNCTIONS["widepack.streamed_linear.default"]
    int8 = FUNCTIONS["widepack.int8_linear.default"]

    def over(function: Callable[[int], Tensor]) -> Callable[[], None]:
        def all_copies() -> None:
            for k in range(copies):
                function(k)

        return all_copies

    found = race(
        over(lambda k: int8(x, tables[k], scales[k], bias)),
        {
            "bmm": over(lambda k: torch.baddbmm(added, x, weights[k].transpose(1, 2))),
            "turned": over(lambda k: torch.baddbmm(added, x, turned[k])),
            "streamed": over(lambda k: streamed(x, turned[k], bias)),
            "packed": over(lambda k: linear(x, packed[k], bias)),
        },
        budget_s=seconds,
    )
    return {
        "model": "kernel",
        **dict(zip(("members", "rows", "inputs", "outputs"), shape)),
        "calls": copies,
        **figures(found),
    }


def rows_of(only: str, seconds: float) -> Iterator[dict[str, Any]]:
    """Yields all rows. only: the first letters of the models to measure."""
    for name in MODELS:
        for members in MEMBERS:
            with tempfile.TemporaryDirectory() as folder:
                for rows in ROWS if name.startswith(only) else ():
                    yield model_row(name, members, rows, seconds, Path(folder))
    for shape in KERNELS:
        if "kernel".startswith(only):
            yield kernel_row(shape, seconds)


def started(path: Path, only: str) -> dict[str, Any]:
    """Returns the document at `path` without the rows that will be measured again, or a new one."""
    kept: list[dict[str, Any]] = []
    if only and path.exists():
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        kept = [row for row in rows if not row["model"].startswith(only)]
    what = "int8_weights: int8 weights with one scale for each row, against float32"
    return {"what": what, "rows": kept}


def main() -> None:
    """Measures all rows and writes the document."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--out", type=Path, default=ROOT / "bench" / "results" / "int8-cpu.json")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each row")
    parser.add_argument("--only", default="", help="the first letters of the models: linear, encoder, kernel")
    options = parser.parse_args()
    with quiet(1, pin=True), torch.inference_mode():
        document = started(options.out, options.only)
        for row in rows_of(options.only, options.seconds):
            print(json.dumps(row), flush=True)
            document["rows"].append({**row, "environment": environment("cpu", 1)})
            options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
