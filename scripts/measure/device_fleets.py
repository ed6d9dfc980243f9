"""Measures calls of fleets of fine-tunes on a device, beside artifacts of the merged checkpoints.

    python scripts/measure/device_fleets.py -o bench/results/device/fleets.json
    python scripts/measure/device_fleets.py --device cpu --fleet 32,1,2,4 --rows 1x1

A fleet is N LoRA adapters of one base of transformer layers (`fleet_networks.py`). It is built twice: from
the adapters, and from checkpoints into which they were merged. A row is one size of a call: `batch x tokens`
for each member. At one token attention reads one key, so a layer of a decoder does the same work. On a CUDA
device both artifacts also run by CUDA graphs. `ratio` is the time of the faster form of the merged artifact
over that of the faster form of the fleet. The row `mixed` is a batch in which each row is one token for
another adapter, beside PEFT's mixed batch of the same model, if the package `peft` is installed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fleet_networks import options_of, write_fleet
from peft_batches import compared, peft_model
from row_file import RowFile, build_threads, device_parser, say

import widepack
from widepack_bench.measure.answers import difference
from widepack_bench.measure.processors import quiet
from widepack_bench.measure.race import AGAIN, OURS, Race, race

FORMAT = "widepack.device-fleets/1"
FLEET, MERGED, GRAPH = "fleet", "merged", " as a graph"


def load_forms(path: Path, name: str, device: str) -> dict[str, Any]:
    """Loads an artifact, on a CUDA device also with CUDA graphs. Returns the models by form."""
    models = {name: widepack.load(path, device=device)}
    if device.startswith("cuda"):
        models[name + GRAPH] = widepack.load(path, device=device, graph=True)
    return models


def row_of(models: dict[str, Any], x: torch.Tensor, seconds: float) -> dict[str, Any]:
    """Returns the row of one size of a call. models: by form, the fleet's first."""
    calls: dict[str, Callable[[], Any]] = {name: partial(model, x) for name, model in models.items()}
    right = calls[MERGED]()
    if wrong := {name: why for name, call in calls.items() if (why := difference(call(), right))}:
        return {"error": f"answers differ from those of the merged artifact: {wrong}"}
    run = race(
        calls[FLEET],
        {name: call for name, call in calls.items() if name.startswith(MERGED)},
        others={name: call for name, call in calls.items() if name == FLEET + GRAPH},
        budget_s=seconds,
        sync=torch.cuda.synchronize if x.is_cuda else None,
    )
    return figures(run)


def figures(run: Race) -> dict[str, Any]:
    """Returns the figures of a race: the fastest form of the fleet over the fastest one of the merged."""
    ours = min((OURS, *run.others), key=run.median_ms)
    return {
        "ms": {FLEET if n == OURS else n: run.median_ms(n) for n in run.names if n != AGAIN},
        "form": FLEET if ours == OURS else ours,
        "fastest": run.fastest,
        "ratio": run.ratio(run.fastest, ours).to_json(),
        "noise": run.noise.to_json(),
        "quiet": run.quiet,
    }


def mixed_row(
    fleet: Mapping[str, Any], state: Path, adapters: Sequence[Path], sizes: tuple[int, int], x: torch.Tensor
) -> dict[str, Any]:
    """Returns the row of a batch for all adapters, beside PEFT's.

    fleet: the models by form. state: the base's weights. sizes: width and layers. x: a row for each adapter.
    """
    try:
        model = peft_model(state, adapters, *sizes).to(x.device)
    except ImportError as error:
        return {"error": str(error)}
    ids, names = list(range(len(adapters))), [path.name for path in adapters]
    calls: dict[str, Callable[[], Any]] = {"peft": partial(model, x, adapter_names=names)}
    calls |= {name: partial(ens.route, x, member=ids) for name, ens in fleet.items()}
    difference = compared(calls, "peft")
    sync = torch.cuda.synchronize if x.is_cuda else None
    ours, *more = (name for name in calls if name != "peft")
    run = race(
        calls[ours], {"peft": calls["peft"]}, others={n: calls[n] for n in more}, budget_s=1.0, sync=sync
    )
    return {"difference": difference, **figures(run)}


def main() -> None:
    """Measures the rows that the file does not have yet."""
    parser = device_parser(__doc__, "device/fleets.json")
    parser.add_argument("--fleet", action="append", help="width,layers,members,rank; repeatable")
    parser.add_argument("--rows", default="1x1,1x16,8x16", help="sizes of calls: batch x tokens")
    given = parser.parse_args()
    file = RowFile(given.out, FORMAT, "fleets of fine-tunes", given.device)
    sizes = [tuple(map(int, size.split("x"))) for size in given.rows.split(",")]
    for fleet in given.fleet or ("768,1,32,8",):
        width, layers, members, rank = map(int, fleet.split(","))
        keys = {(b, t): f"{fleet}: {b} x {t}" for b, t in sizes}
        if not any(file.must_run(key) for key in keys.values()):
            continue
        with tempfile.TemporaryDirectory(prefix="widepack-fleet-") as name:
            folder = Path(name)
            torch.set_num_threads(build_threads(given.device))
            base, adapters, merged = write_fleet(folder, width, layers, members, rank)
            options = {**options_of(width, layers), "targets": (torch.device(given.device).type,)}
            widepack.build(adapters, folder / "fleet.wide", base=base, race=False, **options)
            widepack.build(merged, folder / "merged.wide", race=False, **options)
            models = load_forms(folder / "fleet.wide", FLEET, given.device)
            models |= load_forms(folder / "merged.wide", MERGED, given.device)
            with quiet(1), torch.inference_mode():
                for (batch, tokens), key in keys.items():
                    if file.must_run(key):
                        x = torch.randn(batch, tokens, width, device=given.device)
                        row: dict[str, Any] = {
                            "width": width,
                            "layers": layers,
                            "members": members,
                            "rank": rank,
                        }
                        row |= {"batch": batch, "tokens": tokens, **row_of(models, x, given.seconds)}
                        file.add(key, row)
                        say(key, row.get("error") or f"{row['ratio']['value']:.2f}x")
                key = f"{fleet}: mixed"
                if file.must_run(key):
                    x = torch.randn(members, 1, width, device=given.device)
                    forms = {name: ens for name, ens in models.items() if name.startswith(FLEET)}
                    row = mixed_row(forms, base, adapters, (width, layers), x)
                    file.add(key, {"members": members, "rank": rank, "width": width, **row})
                    say(key, row.get("error") or f"{row['ratio']['value']:.2f}x PEFT")


if __name__ == "__main__":
    main()
