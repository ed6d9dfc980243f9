"""Writes the results of a device: the documents of `scripts/on_device.py`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from statistics import geometric_mean as mean
from typing import Any

import results
from results import ROOT, part, read, table

sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "scripts" / "measure")]

from peer_claims import LAYERS  # noqa: E402

from device import verdict  # noqa: E402
from widepack_bench.text import duration  # noqa: E402

COMMAND = "scripts/on_device.py -o bench/results/device"


@part("device-lines", "device/verdict", COMMAND)
def lines(document: Any) -> str:
    """Returns each line that a device decides, with its figure."""
    return verdict.table(document)


@part("device-networks", "device/claims", COMMAND)
def networks(document: Any) -> str:
    """Returns the times of networks: the eager loop, forms of widepack, and the fastest baseline."""
    suite = results.ROOT / "bench" / "results" / "device" / "suite.json"
    rows = {**document["rows"], **(read("device/suite")["rows"] if suite.exists() else {})}
    head = "network | members | batch | eager loop | widepack, its form | fastest baseline | ratio"
    found = table(head, (cells for row in rows.values() for cells in _network(row)))
    failed = [f"- Not measured: {name}: {row['error'][:160]}" for name, row in rows.items() if "error" in row]
    return "\n".join([found, *([""] if failed else []), *failed])


def _network(row: Any) -> Iterator[tuple[Any, ...]]:
    measured = verdict.bench_row(row)
    if measured is None:
        return
    forms, fastest = verdict.forms_ms(measured), measured["fastest"]
    best = min(forms, key=lambda name: forms[name])
    loop = measured["baselines"].get("loop")
    ms = measured["baselines"][fastest]["median_ms"]
    yield (
        row["title"],
        row["members"],
        row["batch"],
        duration(loop["median_ms"]) if loop else "",
        f"{duration(forms[best])}, {best}",
        f"{fastest}, {duration(ms)}",
        f"{ms / forms[best]:.2f}",
    )


@part("device-layers", "device/layers", COMMAND)
def layers(document: Any) -> str:
    """Returns the ratios of layers and blocks in both ways of counting, beside the published ones."""
    rows = []
    for name, published in LAYERS.items():
        best = verdict.best_ratio(document["rows"], name)
        lowest = verdict.lowest_ratio(document["rows"], name)
        first = f"{best[0]:.1f} ({best[1]})" if best is not None else ""
        second = (f"{lowest[0]:.2f}", lowest[1]) if lowest is not None else ("", "")
        rows.append((name.replace("block:", "block "), published, first, *second))
    return table(
        "layer | published | over one compiled module N times | over one program, lowest | how", rows
    )


@part("device-kernels", "device/kernels", "scripts/measure/device_kernels.py")
def kernels(document: Any) -> str:
    """Returns how far the predicted times of kernels are from the measured ones, by op and dtype."""
    groups: dict[tuple[str, str], list[float]] = {}
    for row in document["rows"].values():
        if "us" in row:
            groups.setdefault((row["op"], row["dtype"]), []).append(row["us"] / row["predicted_us"])
    rows = (
        (f"`{op}`", dtype, len(found), *(f"{f(found):.2f}" for f in (mean, min, max)))
        for (op, dtype), found in groups.items()
    )
    start = document["rows"]["start"]["host_us"]
    return (
        f"{table('op | dtype | sizes | measured over predicted: mean | least | most', rows)}\n\n"
        f"The host starts a small op in {start:.1f} us. The data sheet: {document['predicted_for']}."
    )


@part("device-swaps", "device/swaps", "scripts/measure/swaps.py --device cuda")
def swaps(document: Any) -> str:
    """Returns how many answers mixed two versions of a member while members were swapped."""
    rows = (
        (form, *(f"{row[key]:,}" for key in ("answers", "swaps", "mixed", "captures")))
        for form, row in document["rows"].items()
    )
    return table("form | answers | swaps | answers that mix versions | new captures", rows)


@part("device-backends", "device/backends", f"{COMMAND} --collection FOLDER")
def architectures(document: Any) -> str:
    """Returns what each backend did with the drawn architectures."""
    rows = (
        (backend, *(counts[key] for key in ("ok", "wrong", "refused")))
        for backend, counts in document["counts"].items()
        if any(counts.values())
    )
    return table("backend | right | wrong | refused", rows)
