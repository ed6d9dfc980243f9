"""Writes the results of a device: the documents of `scripts/on_device.py`.

Without a document, a part says how it is measured.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import Any

from fleet_results import measured

from results import ROOT, read

sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "scripts" / "measure")]

from peer_claims import LAYERS  # noqa: E402

from device import verdict  # noqa: E402
from widepack_bench.text import duration  # noqa: E402

COMMAND = "scripts/on_device.py -o bench/results/device"


@measured("device/verdict", COMMAND)
def lines(document: Any) -> str:
    """Returns each line that a device decides, with its figure."""
    return verdict.table(document)


@measured("device/claims", COMMAND)
def networks(document: Any) -> str:
    """Returns the times of networks: the eager loop, forms of widepack, and the fastest baseline."""
    rows = {**document["rows"], **_suite()}
    found = [
        "| network | members | batch | eager loop | widepack, its form | fastest baseline | ratio |",
        "|---|--:|--:|--:|---|---|--:|",
        *(line for row in rows.values() for line in _network(row)),
    ]
    failed = [f"{name}: {row['error'][:160]}" for name, row in rows.items() if "error" in row]
    return "\n".join([*found, *(["", *(f"- Not measured: {line}" for line in failed)] if failed else [])])


def _suite() -> dict[str, Any]:
    """Returns the rows of the suite, if it was measured."""
    path = ROOT / "bench" / "results" / "device" / "suite.json"
    rows: dict[str, Any] = read("device/suite")["rows"] if path.exists() else {}
    return rows


def _network(row: Any) -> Iterator[str]:
    measured_row = verdict.bench_row(row)
    if measured_row is None:
        return
    forms = verdict.forms_ms(measured_row)
    best = min(forms, key=lambda name: forms[name])
    fastest = measured_row["fastest"]
    loop = measured_row["baselines"].get("loop")
    over = measured_row["baselines"][fastest]["median_ms"] / forms[best]
    yield (
        f"| {row['title']} | {row['members']} | {row['batch']} "
        f"| {duration(loop['median_ms']) if loop else ''} | {duration(forms[best])}, {best} "
        f"| {fastest}, {duration(measured_row['baselines'][fastest]['median_ms'])} | {over:.2f} |"
    )


@measured("device/layers", COMMAND)
def layers(document: Any) -> str:
    """Returns the ratios of layers and blocks in both ways of counting, beside the published ones."""
    found = [
        "| layer | published | over one compiled module N times | over one program, lowest | how |",
        "|---|--:|--:|--:|---|",
    ]
    for name, published in LAYERS.items():
        best = verdict.best_ratio(document["rows"], name)
        lowest = verdict.lowest_ratio(document["rows"], name)
        cells = (
            f"{best[0]:.1f} ({best[1]})" if best is not None else "",
            f"{lowest[0]:.2f}" if lowest is not None else "",
            lowest[1] if lowest is not None else "",
        )
        found.append(f"| {name.replace('block:', 'block ')} | {published} | {' | '.join(cells)} |")
    return "\n".join(found)


@measured("device/kernels", "scripts/measure/device_kernels.py")
def kernels(document: Any) -> str:
    """Returns how far the predicted times of kernels are from the measured ones, by op and dtype."""
    groups: dict[tuple[str, str], list[float]] = {}
    for row in document["rows"].values():
        if "us" in row:
            groups.setdefault((row["op"], row["dtype"]), []).append(row["us"] / row["predicted_us"])
    found = [
        "| op | dtype | sizes | measured over predicted: mean | least | most |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for (op, dtype), ratios in groups.items():
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        found.append(
            f"| `{op}` | {dtype} | {len(ratios)} | {mean:.2f} | {min(ratios):.2f} | {max(ratios):.2f} |"
        )
    start = document["rows"]["start"]["host_us"]
    last = f"The host starts a small op in {start:.1f} us. The data sheet: {document['predicted_for']}."
    return "\n".join([*found, "", last])


@measured("device/swaps", "scripts/measure/device_swaps.py")
def swaps(document: Any) -> str:
    """Returns how many answers mixed two versions of a member while members were swapped."""
    found = ["| form | answers | swaps | answers that mix versions | new captures |", "|---|--:|--:|--:|--:|"]
    for form, row in document["rows"].items():
        cells = (row["answers"], row["swaps"], row["mixed"], row["captures"])
        found.append(f"| {form} | {' | '.join(f'{cell:,}' for cell in cells)} |")
    return "\n".join(found)


@measured("device/backends", "scripts/on_device.py -o bench/results/device --collection FOLDER")
def architectures(document: Any) -> str:
    """Returns what each backend did with the drawn architectures."""
    found = ["| backend | right | wrong | refused |", "|---|--:|--:|--:|"]
    for backend, counts in document["counts"].items():
        if any(counts.values()):
            found.append(f"| {backend} | {counts['ok']} | {counts['wrong']} | {counts['refused']} |")
    return "\n".join(found)


PARTS = {
    "device-lines": lines,
    "device-networks": networks,
    "device-layers": layers,
    "device-swaps": swaps,
    "device-backends": architectures,
    "device-kernels": kernels,
}
