#!/usr/bin/env python3
"""Measures what `widepack analyze` takes: Llama-2-7B from its config, 10,000 points, and an artifact.

    python scripts/measure/analyze.py -o bench/results/analyze-cpu.json

Each part runs in its own process with one thread. `peak_bytes` is the most memory of the process
(`ru_maxrss`), with torch and transformers. `own_bytes` is what it takes beyond its imports.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from widepack_bench.report.environment import environment

MODEL = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
    "use_cache": False,
    "dtype": "bfloat16",
}
POINTS = 10_000


def _most() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def llama() -> dict[str, Any]:
    """Derives the costs of Llama-2-7B, then evaluates them at 10,000 points."""
    import torch
    import transformers

    from widepack.building.model_costs import model_costs

    torch.set_num_threads(1)
    config = transformers.LlamaConfig(**MODEL)
    before, begin = _most(), time.perf_counter()
    costs = model_costs(
        lambda: transformers.AutoModelForCausalLM.from_config(config).eval(),
        ["input_ids=int64[B,T]:0..31999"],
    )
    seconds = time.perf_counter() - begin
    flops = costs.evaluate(costs.totals["flops"], costs.values({"B": 1, "T": 2048}))
    most, begin = _most(), time.perf_counter()
    for point in range(POINTS):
        costs.evaluate(costs.totals["flops"], costs.values({"B": 1 + point % 100, "T": 1 + point // 100}))
    return {
        "seconds": seconds,
        "peak_bytes": most,
        "own_bytes": most - before,
        "formula": list(costs.totals["flops"]),
        "flops_at_1_2048": int(flops),
        "points": POINTS,
        "points_seconds": time.perf_counter() - begin,
    }


def artifact() -> dict[str, Any]:
    """Times `widepack analyze` on a small artifact, five times in fresh processes."""
    import widepack
    from widepack_bench.models.factory import MODELS
    from widepack_bench.models.mlp import mlp
    from widepack_bench.models.weights import write_checkpoints

    with tempfile.TemporaryDirectory() as folder:
        paths = write_checkpoints(mlp, 8, folder)
        out = f"{folder}/ens.wide"
        widepack.build(paths, out, model=f"{MODELS}.mlp:mlp", inputs=["input=float32[B,64]"], pt2=False)
        code = (
            "import sys; from widepack_cli.main import cli; "
            "cli(sys.argv[1:], standalone_mode=False); print('torch' in sys.modules)"
        )
        times, imported = [], False
        for _ in range(5):
            begin = time.perf_counter()
            done = subprocess.run(
                [sys.executable, "-c", code, "analyze", out, "--at", "B=8,N=16"],
                check=True,
                capture_output=True,
                text=True,
            )
            times.append(time.perf_counter() - begin)
            imported |= done.stdout.rstrip().endswith("True")
    return {"seconds": sorted(times)[2], "imports_torch": imported}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures what `widepack analyze` takes.")
    parser.add_argument("-o", "--out", type=Path, default=Path("bench/results/analyze-cpu.json"))
    parser.add_argument("--part", choices=("llama", "artifact"), help="run one part, and print it as JSON")
    options = parser.parse_args()
    if options.part:
        print(json.dumps({"llama": llama, "artifact": artifact}[options.part]()))
        return
    document: dict[str, Any] = {"environment": environment("cpu", 1)}
    for part in ("llama", "artifact"):
        command = [sys.executable, "-W", "ignore", __file__, "--part", part]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        document[part] = json.loads(done.stdout.splitlines()[-1])
        print(part, document[part])
    options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
