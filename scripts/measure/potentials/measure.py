#!/usr/bin/env python3
"""Builds committees of public interatomic potentials, compares them with float64, and times them.

    taskset -c 1 python scripts/measure/potentials/measure.py schnet painn

Four members of random weights. Energies and forces of structures of 20, 37 and 60 atoms are compared with the
members' own modules in float64, in both patterns; `own` is the error of the modules in float32. The loop runs
the modules as their users do, one after the other, with weights that need no gradients. Loop and artifact are
interleaved, one thread. The packages are not dependencies of widepack: install them beside it, e3nn 0.4.4 for
`mace`. A run replaces the rows of the networks that it names, and keeps the others of the file.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import widepack
from widepack_bench.measure.processors import quiet
from widepack_bench.measure.race import AGAIN, OURS, race
from widepack_bench.report.environment import environment

NETWORKS = {
    "schnet": "nets_schnetpack",
    "painn": "nets_schnetpack",
    "ani": "nets_torchani",
    "aimnet2": "nets_aimnet",
    "mace": "nets_mace",
    "nequip": "nets_nequip",
    "chgnet": "nets_chgnet",
    "tensornet": "nets_matgl",
}
"""The module of each network. Its function of this name makes a member."""
MEMBERS, ATOMS, TIMED = 4, (20, 37, 60), (20, 40, 60)


def run(member: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Runs a module as its user does."""
    return {k: v.detach() for k, v in member(**{k: v.clone() for k, v in inputs.items()}).items()}


def doubled(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}


def moved(inputs: dict[str, Tensor], name: str, seed: int) -> dict[str, Tensor]:
    """Returns the same atoms at other positions."""
    value, generator = inputs[name], torch.Generator().manual_seed(seed)
    step = 0.003 if "frac" in name else 0.03
    return {**inputs, name: value + step * torch.randn(value.shape, generator=generator, dtype=value.dtype)}


def errors(net: Any, ens: Any, members: list[nn.Module], exact: list[nn.Module]) -> dict[str, Any]:
    """Returns for each output the largest error of the modules and of the artifact, of the largest number."""
    found: dict[str, dict[str, float]] = {}
    for atoms in ATOMS:
        given = net.example(atoms, atoms)
        own = [moved(given, net.MOVED, i) for i in range(MEMBERS)]
        each = ens.each(**{k: torch.stack([x[k] for x in own]) for k in given})
        for answer, inputs in ((ens(**given), [given] * MEMBERS), (each, own)):
            for i, x in enumerate(inputs):
                alone, truth = run(members[i], x), run(exact[i], doubled(x))
                for k, t in truth.items():
                    size = t.abs().max().clamp_min(1e-30)
                    row = found.setdefault(k, {"own": 0.0, "wide": 0.0})
                    for name, value in (("own", alone[k]), ("wide", answer[k][i])):
                        row[name] = max(row[name], float((value.double() - t).abs().max() / size))
    return found


def measure(name: str, seconds: float) -> dict[str, Any]:
    """Builds, compares and times one network."""
    net = importlib.import_module(NETWORKS[name])
    make: Callable[[], nn.Module] = getattr(net, name)
    with tempfile.TemporaryDirectory() as folder:
        members, paths = [], []
        for i in range(MEMBERS):
            torch.manual_seed(i)
            members.append(make())
            paths.append(f"{folder}/m{i}.pt")
            torch.save(members[-1].state_dict(), paths[-1])
        start = time.monotonic()
        report = widepack.build(
            paths,
            f"{folder}/c.wide",
            model=make,
            sample_kwargs=net.example(getattr(net, "BUILT_AT", 24), 7),
            dynamic=net.DYNAMIC,
            pt2=False,
            race=False,
            targets=("cpu",),
        )
        took = time.monotonic() - start
        ens = widepack.load(f"{folder}/c.wide", backend="eager")
    as_double = getattr(net, "as_double", nn.Module.double)
    exact = [as_double(copy.deepcopy(m)).requires_grad_(False) for m in members]
    for m in members:
        m.requires_grad_(False)
    row: dict[str, Any] = {
        "network": name,
        "parameters": sum(p.numel() for p in members[0].parameters()),
        "build_s": round(took, 1),
        "wide_share": report.wide_share,
        "kernels": {"member": report.kernels_member, "wide": report.kernels_wide},
        "errors": errors(net, ens, members, exact),
        "times": [],
    }
    for atoms in TIMED:
        given = net.example(atoms, atoms)

        def loop(given: dict[str, Tensor] = given) -> list[Any]:
            return [run(m, given) for m in members]

        raced = race(partial(ens, **given), {"loop": loop}, budget_s=seconds)
        row["times"].append(
            {
                "atoms": atoms,
                "ms": {"wide": raced.median_ms(OURS), "loop": raced.median_ms("loop")},
                "over_loop": raced.ratio("loop").to_json(),
                "noise": raced.ratio(AGAIN).to_json(),
            }
        )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures committees of interatomic potentials.")
    parser.add_argument("networks", nargs="+", choices=list(NETWORKS))
    parser.add_argument("-o", "--out", type=Path, default=Path("bench/results/potentials-cpu.json"))
    parser.add_argument("--seconds", type=float, default=6.0, help="for each number of atoms")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    for name in options.networks:
        with quiet(1):
            row = measure(name, options.seconds)
        print(json.dumps(row), flush=True)
        known = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {"rows": []}
        rows = [r for r in known["rows"] if r["network"] != name] + [row]
        document = {
            "what": f"committees of {MEMBERS} members, random weights, energies and forces",
            "environment": environment("cpu", 1),
            "rows": sorted(rows, key=lambda r: list(NETWORKS).index(r["network"])),
        }
        options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
