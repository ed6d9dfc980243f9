#!/usr/bin/env python3
"""Measures mixed batches of a fleet beside PEFT's: each row is for another LoRA adapter.

    python scripts/measure/peft_batches.py [-o bench/results/fleets-peft-cpu.json] [--seconds 2]
    [--fleet width,layers,members,rank]

The members are LoRA adapters in all linear layers of an encoder. A batch has eight rows, each for another
adapter and with one or 16 tokens. The baseline is PEFT's model in eval and inference mode, called with the
name of an adapter for each row. PEFT is not a dependency of widepack: `pip install peft==0.21.2`. All calls
run in turn in one process, on one thread. Their answers are compared before they are timed.

| key | meaning |
|---|---|
| `peft` | `model(x, adapter_names=[...])` |
| `route` | `ens.route(x, member=[...])` |
| `route_least` | the same, of an artifact that was loaded with `memory="least"` |
| `members` | `ens.member(i)(x[k:k+1])` for each row, one after the other |
| `peft_one`, `member` | one row of one adapter, without the names: `model(x)` and `ens.member(i)(x)` |
| `difference` | the largest difference of an answer from PEFT's, over the largest number in PEFT's |
| `ratio` | time of `peft` over the time of the call; for `member`, time of `peft_one` |
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from fleet_networks import Encoder, options_of, write_adapter, write_base
from fleet_race import race
from torch import Tensor

import widepack
from widepack_bench.report.environment import environment

ROOT = Path(__file__).resolve().parents[2]
ROWS, TOKENS = 8, (1, 16)
FLEETS = ("768,2,8,8", "768,2,32,8")
MOST = 1e-5
"""The largest `difference` of answers that agree. Both compute in float32, in another order."""


def peft_model(state: Path, adapters: Sequence[Path], width: int, layers: int) -> Any:
    """Returns PEFT's model of the base with all adapters, by the names of their folders."""
    from peft import PeftModel

    base = Encoder(width, layers)
    base.load_state_dict(torch.load(state))
    model = PeftModel.from_pretrained(base, str(adapters[0]), adapter_name=adapters[0].name)
    for path in adapters[1:]:
        model.load_adapter(str(path), adapter_name=path.name)
    return model.eval()


def by_rows(members: Sequence[Callable[[Tensor], Any]], x: Tensor) -> Tensor:
    """Runs each row by the member alone."""
    return torch.cat([member(x[k : k + 1]) for k, member in enumerate(members)])


def compared(calls: Mapping[str, Callable[[], Any]], baseline: str) -> float:
    """Returns the largest relative difference from the baseline's answer.

    Raises:
        AssertionError: It is more than `MOST`.
    """
    right = calls[baseline]()
    scale = float(right.abs().max())
    found = {name: float((call() - right).abs().max()) / scale for name, call in calls.items()}
    wrong = {name: value for name, value in found.items() if not value <= MOST}
    if wrong:
        raise AssertionError(f"answers differ from those of {baseline}: {wrong}")
    return max(found.values())


def raced(calls: Mapping[str, Callable[[], Any]], baseline: str, seconds: float) -> dict[str, Any]:
    """Returns the times of the calls, and the ratios of the baseline's time to theirs."""
    difference = compared(calls, baseline)
    times = race(calls, seconds)
    ratio = {name: times[baseline]["ms"] / row["ms"] for name, row in times.items() if name != baseline}
    return {"difference": difference, "ratio": ratio, "times": times}


def measured(width: int, layers: int, members: int, rank: int, seconds: float) -> dict[str, Any]:
    """Returns the figures of one fleet."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base, path = folder / "base.pt", folder / "fleet.wide"
        state = write_base(base, width, layers)
        adapters = [folder / f"lora{i:02}" for i in range(members)]
        for i, adapter in enumerate(adapters):
            write_adapter(adapter, state, rank, i + 1)
        widepack.build(adapters, path, base=base, **options_of(width, layers))
        ens, least = widepack.load(path), widepack.load(path, memory="least")
        model = peft_model(base, adapters, width, layers)
        ids = [k * members // ROWS for k in range(ROWS)]
        names, alone = [adapters[i].name for i in ids], [ens.member(i) for i in ids]
        found: dict[str, Any] = {"width": width, "layers": layers, "members": members, "rank": rank}
        found["mixed"], found["one"] = [], []
        for tokens in TOKENS:
            x = torch.randn(ROWS, tokens, width, generator=torch.Generator().manual_seed(tokens))
            size = {"rows": ROWS, "tokens": tokens}
            mixed: dict[str, Callable[[], Any]] = {
                "peft": partial(model, x, adapter_names=names),
                "route": partial(ens.route, x, member=ids),
                "route_least": partial(least.route, x, member=ids),
                "members": partial(by_rows, alone, x),
            }
            found["mixed"].append({**size, **raced(mixed, "peft", seconds)})
            model.set_adapter(names[-1])
            one: dict[str, Callable[[], Any]] = {
                "peft_one": partial(model, x[-1:]),
                "member": partial(alone[-1], x[-1:]),
            }
            found["one"].append({**size, "rows": 1, **raced(one, "peft_one", seconds)})
            ratios = {**found["mixed"][-1]["ratio"], **found["one"][-1]["ratio"]}
            text = ", ".join(f"{name} {value:.2f}" for name, value in ratios.items())
            print(f"N={members}, {tokens} tokens: PEFT's time over that of {text}", file=sys.stderr)
        return found


def main() -> None:
    """Measures all fleets and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("-o", "--out", type=Path, default=ROOT / "bench/results/fleets-peft-cpu.json")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each race")
    parser.add_argument("--fleet", action="append", help="width,layers,members,rank; repeatable")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    with torch.inference_mode():
        for text in given.fleet or FLEETS:
            width, layers, members, rank = map(int, text.split(","))
            rows.append(measured(width, layers, members, rank, given.seconds))
    where = environment("cpu", 1)
    where["versions"]["peft"] = version("peft")
    document = {"what": __doc__, "environment": where, "threads": 1, "rows": rows}
    given.out.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
