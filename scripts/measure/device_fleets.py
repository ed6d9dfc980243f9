"""Measures calls of fleets of fine-tunes on a device, beside artifacts of the merged checkpoints.

    python scripts/measure/device_fleets.py
    python scripts/measure/device_fleets.py --device cpu --fleet 32,1,2,4 --rows 1x1

A fleet is N LoRA adapters of one base of transformer layers (`fleet_networks.py`). It is built twice: from
the adapters, and from checkpoints into which they were merged. A row is one size of a call: `batch x tokens`
for each member. At one token attention reads one key, so a layer of a decoder does the same work. On a CUDA
device both artifacts also run by CUDA graphs. `ratio` is the time of the faster form of the merged artifact
over that of the faster form of the fleet. The row `mixed` is a batch in which each row is one token for
another adapter, beside PEFT's mixed batch of the same model, if the package `peft` is installed.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from fleet_networks import options_of, write_fleet
from fleets import Sizes, compared, peft_model
from runner import build_threads, parser, run

import widepack
from widepack_bench.measure.answers import difference
from widepack_bench.measure.processors import quiet
from widepack_bench.measure.race import AGAIN, OURS, race

FLEET, MERGED, GRAPH = "fleet", "merged", " as a graph"


class Fleet:
    """A fleet on a device, loaded when the first of its rows is measured. sizes: width, layers and so on."""

    def __init__(self, sizes: Sizes, device: str, folder: Path) -> None:
        self.sizes, self.device, self._folder = sizes, device, folder
        self.base, self.adapters = folder / "base.pt", [folder]

    @cached_property
    def models(self) -> dict[str, Any]:
        """The models by form, the fleet's first."""
        sizes, folder = self.sizes, self._folder
        torch.set_num_threads(build_threads(self.device))
        self.base, self.adapters, merged = write_fleet(folder, *vars(sizes).values())
        options = {**options_of(sizes.width, sizes.layers), "targets": (torch.device(self.device).type,)}
        widepack.build(self.adapters, folder / f"{FLEET}.wide", base=self.base, budget=0, **options)
        widepack.build(merged, folder / f"{MERGED}.wide", budget=0, **options)
        torch.set_num_threads(1)
        found = {}
        for name in (FLEET, MERGED):
            found[name] = widepack.load(folder / f"{name}.wide", device=self.device)
            if self.device.startswith("cuda"):
                found[name + GRAPH] = widepack.load(folder / f"{name}.wide", device=self.device, graph=True)
        return found

    def raced(self, calls: dict[str, Callable[[], Any]], seconds: float) -> dict[str, Any]:
        """Times the fastest form of the fleet against the fastest of the other calls."""
        ours = [name for name in calls if name.startswith(FLEET)]
        found = race(
            calls[FLEET],
            {name: call for name, call in calls.items() if name not in ours},
            others={name: calls[name] for name in ours[1:]},
            budget_s=seconds,
            sync=torch.cuda.synchronize if self.device.startswith("cuda") else None,
        )
        best = min((OURS, *found.others), key=found.median_ms)
        return {
            "ms": {FLEET if n == OURS else n: found.median_ms(n) for n in found.names if n != AGAIN},
            "form": FLEET if best == OURS else best,
            "fastest": found.fastest,
            "ratio": found.ratio(found.fastest, best).to_json(),
            "noise": found.noise.to_json(),
            "quiet": found.quiet,
        }

    def call(self, batch: int, tokens: int, seconds: float) -> dict[str, Any]:
        """Returns the row of one size of a call."""
        x = torch.randn(batch, tokens, self.sizes.width, device=self.device)
        calls: dict[str, Callable[[], Any]] = {name: partial(model, x) for name, model in self.models.items()}
        right = calls[MERGED]()
        if wrong := {name: why for name, call in calls.items() if (why := difference(call(), right))}:
            return {"error": f"answers differ from those of the merged artifact: {wrong}"}
        return {**vars(self.sizes), "batch": batch, "tokens": tokens, **self.raced(calls, seconds)}

    def mixed(self) -> dict[str, Any]:
        """Returns the row of a batch for all adapters, beside PEFT's."""
        sizes = self.sizes
        x = torch.randn(sizes.members, 1, sizes.width, device=self.device)
        forms = {name: ens for name, ens in self.models.items() if name.startswith(FLEET)}
        model = peft_model(self.base, self.adapters, sizes.width, sizes.layers).to(self.device)
        ids, names = list(range(sizes.members)), [path.name for path in self.adapters]
        calls: dict[str, Any] = {name: partial(ens.route, x, member=ids) for name, ens in forms.items()}
        calls["peft"] = partial(model, x, adapter_names=names)
        return {**vars(sizes), "difference": compared(calls, "peft"), **self.raced(calls, 1.0)}


def main() -> int:
    options = parser(__doc__, "device/fleets.json", seconds=1.0, device="cuda")
    options.add_argument("--fleet", default="768,1,32,8", help="width,layers,members,rank")
    options.add_argument("--rows", default="1x1,1x16,8x16", help="sizes of calls: batch x tokens")
    given = options.parse_args()

    def cases(fleet: Fleet) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
        for size in given.rows.split(","):
            batch, tokens = map(int, size.split("x"))
            yield f"{given.fleet}: {batch} x {tokens}", partial(fleet.call, batch, tokens, given.seconds)
        yield f"{given.fleet}: mixed", fleet.mixed

    with tempfile.TemporaryDirectory(prefix="widepack-fleet-") as name, quiet(1), torch.inference_mode():
        return run(given, cases(Fleet(Sizes.of(given.fleet), given.device, Path(name))))


if __name__ == "__main__":
    sys.exit(main())
