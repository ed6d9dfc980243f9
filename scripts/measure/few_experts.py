#!/usr/bin/env python3
"""Measures members with few experts: a Mixtral of 8 experts, 2 of them active.

    taskset -c 1 python scripts/measure/few_experts.py -o bench/results/few-experts-cpu.json

Eight members of two layers, width 128, one thread. `built` is the artifact as it is built, and `loop` the
members' modules one after the other. The two are interleaved. Their answers are compared first.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import widepack
from widepack_bench.baselines.table import loop
from widepack_bench.measure.answers import difference
from widepack_bench.measure.processors import quiet
from widepack_bench.measure.race import AGAIN, OURS, race
from widepack_bench.report.environment import environment

MEMBERS, WORDS = 8, 100


class Mixtral(nn.Module):
    """A small Mixtral that answers logits."""

    def __init__(self) -> None:
        super().__init__()
        import transformers

        config = transformers.MixtralConfig(
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            num_local_experts=8,
            num_experts_per_tok=2,
            vocab_size=WORDS,
            use_cache=False,
        )
        self.model = transformers.AutoModelForCausalLM.from_config(config)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.model(ids, use_cache=False).logits
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures members with few experts.")
    parser.add_argument("-o", "--out", type=Path, default=Path("bench/results/few-experts-cpu.json"))
    parser.add_argument("--seconds", type=float, default=5.0, help="for each row")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with quiet(1), tempfile.TemporaryDirectory() as folder:
        nets, paths = [], []
        for i in range(MEMBERS):
            torch.manual_seed(i)
            nets.append(Mixtral().eval())
            paths.append(f"{folder}/m{i}.pt")
            torch.save(nets[-1].state_dict(), paths[-1])
        artifact = f"{folder}/experts.wide"
        inputs = [f"ids=int64[B,T]:0..{WORDS - 1}"]
        widepack.build(paths, artifact, model=Mixtral, inputs=inputs, pt2=False, race=False, targets=("cpu",))
        ens = widepack.load(artifact, backend="eager")
        for batch, length in ((1, 1), (1, 64), (4, 16)):
            ids = torch.randint(0, WORDS, (batch, length))
            with torch.inference_mode():
                members = partial(loop(nets, False), ids)
                if wrong := difference(ens(ids), members()):
                    raise SystemExit(f"other answers: {wrong}")
                found = race(partial(ens, ids), {"loop": members}, budget_s=options.seconds)
            rows.append(
                {
                    "batch": batch,
                    "length": length,
                    "ms": {"built": found.median_ms(OURS), "loop": found.median_ms("loop")},
                    "over_loop": found.ratio("loop").to_json(),
                    "noise": found.ratio(AGAIN).to_json(),
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    document = {
        "what": f"{MEMBERS} members, Mixtral of two layers of 128, 8 experts, 2 active",
        "environment": environment("cpu", 1),
        "rows": rows,
    }
    options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
