"""Measures fleets of fine-tunes against merged members: bytes, memory, and the time of calls.

    taskset -c 1 python scripts/measure/fleets.py [--fleet width,layers,members,rank]
    taskset -c 1 python scripts/measure/fleets.py --tune 60 -o bench/results/fleets-tuned-cpu.json
    taskset -c 1 python scripts/measure/fleets.py --peft -o bench/results/fleets-peft-cpu.json

A fleet is N LoRA adapters in all linear layers of an encoder. It is built twice: from the adapters, and
from checkpoints into which they were merged. Calls of both artifacts are interleaved in one process, on one
thread. Memory is read in fresh processes, after a load and a call of one row.

With `--peft` a row is a fleet beside PEFT's mixed batch, `model(x, adapter_names=[...])`: eight rows, each
for another adapter and with one or 16 tokens. PEFT is not a dependency of widepack: `pip install
peft==0.21.2`. `route_least` is the same call of an artifact that was loaded with `memory="least"`, and
`members` is `ens.member(i)(x[k:k+1])` for each row. Answers are compared before they are timed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fleet_networks import Encoder, options_of, write_fleet
from runner import child, parser, run
from torch import Tensor

import widepack
from widepack_bench.measure.processors import quiet
from widepack_bench.measure.race import OURS, Race, race

Call = Callable[[], Any]
MOST = 1e-5  # the largest difference of answers that agree: both compute in float32, in another order
CALLS = ((1, 1), (1, 4), (1, 16), (4, 16), (8, 16), (32, 16))
PROCESS = """
import json, sys, torch, widepack
def smaps():
    with open("/proc/self/smaps_rollup", encoding="ascii") as file:
        rows = dict(line.split(":", 1) for line in file if ":" in line)
    kb = {k: int(v.split()[0]) for k, v in rows.items() if v.split()[-1:] == ["kB"]}
    return {"resident": 1024 * kb["Rss"], "private_dirty": 1024 * kb["Private_Dirty"]}
torch.set_num_threads(1)
torch.ones(64, 64) @ torch.ones(64, 64)
import widepack.inference.load
before = smaps()
ens = widepack.load(sys.argv[1], memory=sys.argv[3])
ens(torch.randn(1, 1, int(sys.argv[2])))
print(json.dumps({k: v - before[k] for k, v in smaps().items()}))
"""


@dataclass(frozen=True)
class Sizes:
    """The sizes of a fleet."""

    width: int
    layers: int
    members: int
    rank: int

    @classmethod
    def of(cls, text: str) -> Sizes:
        """Reads `width,layers,members,rank`."""
        return cls(*map(int, text.split(",")))


def memory_of(path: Path, width: int, memory: str) -> dict[str, int]:
    """Returns by how many bytes a load and a call of one row let a process grow.

    The first process on a machine checks the artifact, for which torch imports its compiler. The later ones
    find in the user's cache that it passed.
    """
    with tempfile.TemporaryDirectory() as cache:
        variables = {"XDG_CACHE_HOME": cache}
        first, later = (child(PROCESS, path, width, memory, variables=variables) for _ in range(2))
    return {**later, **{f"first_{name}": value for name, value in first.items()}}


def compared(calls: Mapping[str, Call], right: str) -> float:
    """Returns the largest difference from the answer of one call, over its largest number.

    Raises: AssertionError: It is more than `MOST`.
    """
    expected = calls[right]()
    scale = float(expected.abs().max())
    found = {name: float((call() - expected).abs().max()) / scale for name, call in calls.items()}
    if wrong := {name: value for name, value in found.items() if not value <= MOST}:
        raise AssertionError(f"answers differ from those of {right}: {wrong}")
    return max(found.values())


def raced(calls: Mapping[str, Call], seconds: float) -> dict[str, dict[str, float]]:
    """Times calls in one race, the first as widepack's own. Returns the milliseconds of each."""
    ours, *others = calls
    found: Race = race(calls[ours], {name: calls[name] for name in others}, budget_s=seconds)
    return {name: {"ms": found.median_ms(OURS if name == ours else name)} for name in calls}


def by_groups(members: Sequence[Callable[[Tensor], Any]], x: Tensor, ids: Tensor) -> list[Any]:
    """Runs the rows of each member by the member alone."""
    return [member(x[ids == i]) for i, member in enumerate(members)]


def calls_of(ens: Any, least: Any, full: Any, sizes: tuple[int, int, int], seconds: float) -> dict[str, Any]:
    """Times calls of all members. sizes: batch, tokens and width."""
    batch, tokens, _ = sizes
    x = torch.randn(*sizes)
    calls: dict[str, Call] = {
        "fleet": partial(ens, x),
        "least": partial(least, x),
        "merged": partial(full, x),
    }
    times, difference = raced(calls, seconds), compared(calls, "merged")
    return {
        "batch": batch,
        "tokens": tokens,
        "rows": batch * tokens,
        "difference": difference,
        "ratio": times["merged"]["ms"] / times["fleet"]["ms"],
        "ratio_least": times["merged"]["ms"] / times["least"]["ms"],
        "times": times,
    }


def measured(sizes: Sizes, given: argparse.Namespace) -> dict[str, Any]:
    """Returns the row of one fleet."""
    width, members = sizes.width, sizes.members
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base, adapters, merged = write_fleet(folder, *vars(sizes).values())
        options = options_of(width, sizes.layers)
        thin, whole = folder / "fleet.wide", folder / "merged.wide"
        report = widepack.build(adapters, thin, base=base, **options)
        widepack.build(merged, whole, **options)
        tuning = {"budget_s": given.tune, "total_s": given.tune, "backends": ["eager"], "write": True}
        for path in (thin, whole) if given.tune else ():
            widepack.tune(path, batches=(1, 4, 32), patterns=("shared",), **tuning)
        ens, full = widepack.load(thin), widepack.load(whole)
        least = widepack.load(thin, memory="least")
        alone = [ens.member(i) for i in range(members)]
        ids, routes = torch.arange(max(32, members)) % members, []
        for tokens in (1, 16):
            x = torch.randn(len(ids), tokens, width)
            calls: dict[str, Call] = {
                "fleet": partial(ens.route, x, member=ids.tolist()),
                "merged": partial(full.route, x, member=ids.tolist()),
                "groups": partial(by_groups, alone, x, ids),
            }
            routes.append({"batch": len(ids), "tokens": tokens, "times": raced(calls, given.seconds)})
        return {
            **vars(sizes),
            "tune_s": given.tune,
            "weights_bytes": {
                "fleet": sum(report.weights.values()),
                "merged": sum(w.bytes(members) for w in full.manifest.weights),
            },
            "memory": {
                "fleet": memory_of(thin, width, "auto"),
                "fleet_least": memory_of(thin, width, "least"),
                "merged": memory_of(whole, width, "auto"),
            },
            "verification": {k: v for k, v in report.verification.items() if k in ("wide", "truth")},
            "calls": [
                calls_of(ens, least, full, (batch, tokens, width), given.seconds) for batch, tokens in CALLS
            ],
            "route": routes,
        }


def peft_model(state: Path, adapters: Sequence[Path], width: int, layers: int) -> Any:
    """Returns PEFT's model of the base with all adapters, by the names of their folders."""
    from peft import PeftModel

    base = Encoder(width, layers)
    base.load_state_dict(torch.load(state))
    model = PeftModel.from_pretrained(base, str(adapters[0]), adapter_name=adapters[0].name)
    for path in adapters[1:]:
        model.load_adapter(str(path), adapter_name=path.name)
    return model.eval()


def each_alone(models: Sequence[Any], x: Tensor) -> Tensor:
    """Calls each model with its row."""
    return torch.cat([model(x[k : k + 1]) for k, model in enumerate(models)])


def beside_peft(sizes: Sizes, given: argparse.Namespace, rows: int = 8) -> dict[str, Any]:
    """Returns the row of one fleet beside PEFT."""
    from importlib.metadata import version

    with tempfile.TemporaryDirectory() as name:
        folder, (width, layers) = Path(name), (sizes.width, sizes.layers)
        base, adapters, _ = write_fleet(folder, *vars(sizes).values())
        path = folder / "fleet.wide"
        widepack.build(adapters, path, base=base, **options_of(width, layers))
        ens, least = widepack.load(path), widepack.load(path, memory="least")
        model = peft_model(base, adapters, width, layers)
        ids = [k * sizes.members // rows for k in range(rows)]
        names, alone = [adapters[i].name for i in ids], [ens.member(i) for i in ids]
        mixed = []
        for tokens in (1, 16):
            x = torch.randn(rows, tokens, width)
            calls: dict[str, Call] = {
                "route": partial(ens.route, x, member=ids),
                "route_least": partial(least.route, x, member=ids),
                "members": partial(each_alone, alone, x),
                "peft": partial(model, x, adapter_names=names),
            }
            difference, times = compared(calls, "peft"), raced(calls, given.seconds)
            ratio = {n: times["peft"]["ms"] / row["ms"] for n, row in times.items() if n != "peft"}
            row = {"rows": rows, "tokens": tokens, "difference": difference, "ratio": ratio, "times": times}
            mixed.append(row)
    return {**vars(sizes), "mixed": mixed, "peft": version("peft")}


def main() -> int:
    options = parser(__doc__, "fleets-cpu.json", seconds=2.0)
    options.add_argument("--fleet", action="append", help="width,layers,members,rank; repeatable")
    options.add_argument("--tune", type=float, default=0.0, help="seconds of tuning of each artifact")
    options.add_argument("--peft", action="store_true", help="beside PEFT")
    given = options.parse_args()
    measure = beside_peft if given.peft else measured
    with quiet(1), torch.inference_mode():
        fleets = given.fleet or ("768,2,8,8", "768,2,32,8" if given.peft else "768,1,32,8")
        return run(given, {f: partial(measure, Sizes.of(f), given) for f in fleets})


if __name__ == "__main__":
    sys.exit(main())
