"""Makes the tables of training steps, and of committees of interatomic potentials."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fleet_results import measured

from results import read, where
from widepack_bench.training.table import training_table

_POTENTIALS = "scripts/measure/potentials/measure.py schnet painn ani aimnet2 mace nequip chgnet tensornet"
_COLUMNS = (
    "network",
    "N",
    "batch",
    "widepack",
    "compiled",
    "fastest baseline",
    "over the loop",
    "ratio",
    "compiled ratio",
)
_TITLES = {
    "schnet": "SchNet",
    "painn": "PaiNN",
    "ani": "ANI-2x-like",
    "aimnet2": "AIMNet2",
    "mace": "MACE",
    "nequip": "NequIP",
    "chgnet": "CHGNet",
    "tensornet": "TensorNet",
}


def training() -> str:
    """Returns the rows of the suite `training`, and the summary."""
    document = read("training-cpu")
    totals, rows = document["summary"], document["rows"]
    fastest, plain, loop = (totals[name] for name in ("over_fastest", "over_uncompiled", "over_loop"))
    left_out = ", ".join(totals["not_measured"])
    noisy = f", without noisy ones ({left_out})" if left_out else ""
    lines = [
        training_table(rows, _COLUMNS),
        "",
        f"{fastest['rows']} rows are counted{noisy}. Geometric means: the fused module is "
        f"{loop['geometric_mean']:.2f} times as fast as the loop, and {plain['geometric_mean']:.2f} times as "
        f"fast as the fastest baseline without compilation. The faster of it and its compiled form is "
        f"{fastest['geometric_mean']:.2f} times as fast as the fastest of all baselines. Slower than that "
        f"baseline: {', '.join(totals['below_1']) or 'none'}. "
        f"{where(next(r['environment'] for r in rows.values() if 'environment' in r))}",
    ]
    return "\n".join(lines)


@measured("potentials-cpu", _POTENTIALS)
def potentials(document: Any) -> str:
    """Returns the errors, the kernels and the speed of each committee."""
    atoms = [t["atoms"] for t in document["rows"][0]["times"]]
    head = ["potential", "energy", "forces", "kernels", "build", *(f"{n} atoms" for n in atoms)]
    lines = ["| " + " | ".join(head) + " |", "|---|" + "--:|" * (len(head) - 1)]
    for row in document["rows"]:
        energy, forces = (_errors(row, name) for name in ("energy", "forces"))
        kernels = f"{row['kernels']['member']} to {row['kernels']['wide']}"
        ratios = [f"{t['over_loop']['value']:.2f}" for t in row["times"]]
        cells = [_TITLES[row["network"]], energy, forces, kernels, f"{row['build_s']:.0f} s", *ratios]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _errors(row: Mapping[str, Any], name: str) -> str:
    """Returns the largest error of the artifact, and in brackets that of the modules in float32."""
    found = next((e for key, e in row["errors"].items() if key.rstrip("s") == name.rstrip("s")), None)
    return "" if found is None else f"{found['wide']:.1e} ({found['own']:.1e})"


PARTS = {"training": training, "potentials": potentials}
