"""Writes the results of fleets of fine-tunes."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from results import ROOT, read, where


def measured(name: str, command: str) -> Callable[[Callable[[Any], str]], Callable[[], str]]:
    """Reads a document for a function that writes its part of a page.

    Without the document, the part says how it is measured.
    """

    def of(write: Callable[[Any], str]) -> Callable[[], str]:
        @wraps(write)
        def part() -> str:
            if not (ROOT / "bench" / "results" / f"{name}.json").exists():
                return f"There are no figures yet. This measures them: `python {command}`."
            document = read(name)
            return f"{write(document)}\n\n{where(document['environment'])}"

        return part

    return of


def _fleet(row: dict[str, Any]) -> str:
    layers = row["layers"]
    return f"{row['members']} members, {layers} layer{'s' if layers > 1 else ''}"


@measured("fleets-cpu", "scripts/measure/fleets.py -o bench/results/fleets-cpu.json")
def memory(document: Any) -> str:
    """Returns the bytes of weights, and the memory of a process."""
    lines = [
        '| encoder | weights | as whole weights | memory | `memory="least"` | memory of whole weights |',
        "|---|---|---|---|---|---|",
    ]
    for row in document["rows"]:
        weights, taken = row["weights_bytes"], row["memory"]
        sizes = (*weights.values(), *(taken[k]["resident"] for k in ("fleet", "fleet_least", "merged")))
        lines.append(f"| {_fleet(row)} | {' | '.join(f'{size / 1e6:.0f} MB' for size in sizes)} |")
    more = [
        taken["first_resident"] - taken["resident"]
        for row in document["rows"]
        for taken in row["memory"].values()
        if "first_resident" in taken
    ]
    if more:
        lines += [
            "",
            "The first process on a machine checks the artifact, and takes up to"
            f" {max(more) / 1e6:.0f} MB more.",
        ]
    return "\n".join(lines)


def _calls(document: Any) -> str:
    """Returns the times of calls of all members."""
    lines = [
        '| encoder | rows a member | fleet | `memory="least"` | whole weights | ratio | ratio of `least` |',
        "|---|---|---|---|---|---|---|",
    ]
    for row in document["rows"]:
        for call in row["calls"]:
            times = (f"{call['times'][k]['ms']:.1f} ms" for k in ("fleet", "least", "merged"))
            lines.append(
                f"| {_fleet(row)} | {call['batch']} x {call['tokens']} | {' | '.join(times)} "
                f"| {call['ratio']:.2f} | {call['ratio_least']:.2f} |"
            )
    return "\n".join(lines)


calls = measured("fleets-cpu", "scripts/measure/fleets.py -o bench/results/fleets-cpu.json")(_calls)
tuned_calls = measured(
    "fleets-tuned-cpu", "scripts/measure/fleets.py -o bench/results/fleets-tuned-cpu.json --tune 60"
)(_calls)


@measured("fleets-cpu", "scripts/measure/fleets.py -o bench/results/fleets-cpu.json")
def route(document: Any) -> str:
    """Returns the times of `route`."""
    lines = [
        "| encoder | rows | tokens | fleet | whole weights | groups | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in document["rows"]:
        for call in row["route"]:
            times = {name: found["ms"] for name, found in call["times"].items()}
            best = min(times["merged"], times["groups"])
            lines.append(
                f"| {_fleet(row)} | {call['batch']} | {call['tokens']} | {times['fleet']:.1f} ms "
                f"| {times['merged']:.1f} ms | {times['groups']:.1f} ms | {best / times['fleet']:.2f} |"
            )
    return "\n".join(lines)


@measured("split-linear-cpu", "scripts/measure/split_linear.py")
def split_linear(document: Any) -> str:
    """Returns the ratio of single layers by shape and rows a member."""
    rows = document["rows"]
    counts = sorted({row["rows"] for row in rows})
    lines = [
        f"| layer | rank | members | {' | '.join(f'{n} row' + 's' * (n > 1) for n in counts)} |",
        f"|---|---|---|{'---|' * len(counts)}",
    ]
    shapes = dict.fromkeys((r["inputs"], r["outputs"], r["rank"], r["members"]) for r in rows)
    for shape in shapes:
        found = {
            r["rows"]: r["ratio"]
            for r in rows
            if (r["inputs"], r["outputs"], r["rank"], r["members"]) == shape
        }
        inputs, outputs, rank, members = shape
        ratios = (f"{found[n]:.2f}" if n in found else "" for n in counts)
        lines.append(f"| {inputs} x {outputs} | {rank} | {members} | {' | '.join(ratios)} |")
    return "\n".join(lines)


@measured("fleets-peft-cpu", "scripts/measure/peft_batches.py")
def peft(document: Any) -> str:
    """Returns the times of mixed batches beside those of PEFT."""
    lines = [
        "| encoder | tokens | PEFT | `route` | ratio | member by member | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in document["rows"]:
        for call in row["mixed"]:
            times, ratio = call["times"], call["ratio"]
            lines.append(
                f"| {_fleet(row)} | {call['tokens']} | {times['peft']['ms']:.1f} ms "
                f"| {times['route']['ms']:.1f} ms | {ratio['route']:.2f} "
                f"| {times['members']['ms']:.1f} ms | {ratio['members']:.2f} |"
            )
    most = max(call["difference"] for row in document["rows"] for call in row["mixed"])
    version = document["environment"]["versions"]["peft"]
    return "\n".join(
        [*lines, "", f"The answers differ by at most {most:.0e} of their largest number. PEFT {version}."]
    )


@measured("unmerge", "scripts/measure/unmerge.py")
def unmerge(document: Any) -> str:
    """Returns what `unmerge` found in fleets that were drawn."""
    found = document["summary"]
    others = found["others"]
    beyond = found["weights"] - found["allowed"]
    lines = [
        f"- {found['fleets']} fleets with {found['weights']} weights. The rank of each member of "
        f"{found['allowed']} weights is above the noise of rounding: all ranks were found for "
        f"{found['right_of_allowed']} of them.",
        f"- Of the other {beyond} weights, {others['right']} got the ranks that were drawn, "
        f"{others['smaller']} got smaller ones, {others['stacked']} stayed stacked, "
        f"and {others['other']} got others.",
        f"- Weights that come back bit for bit: {found['exact']} of {found['taken']}.",
        f"- Full fine-tunes that were taken for low-rank ones: {found['full_taken']} of {found['full']}.",
    ]
    for dtype in ("float32", "bfloat16"):
        one = found[dtype]
        if one["median_bits"] is None or one["largest_error_of_recovered_bases"] is None:
            continue
        lines.append(
            f"- {dtype}: a correction takes {one['median_bits']:.2f} bits a number in the median and "
            f"{one['most_bits']:.2f} at most. The largest relative error of a base that was computed from "
            f"the members is {one['largest_error_of_recovered_bases']:.1e}."
        )
    slowest = max(document["speed"], key=lambda row: row["seconds"])
    shape = " x ".join(map(str, slowest["shape"]))
    lines.append(
        f"- The slowest weight that was timed takes {slowest['seconds']:.1f} s: {shape} in "
        f"{slowest['dtype']}, {slowest['members']} members, base {slowest['base']}."
    )
    return "\n".join(lines)


@measured("fleets-swap-cpu", "scripts/measure/fleet_swap_under_load.py")
def swaps(document: Any) -> str:
    """Returns how long calls wait for swaps and for an append."""
    times, gaps, more = document["calls_ms"], document["gap_ms"], document["append"]
    pause, wait = document["pause_ms"], document["wait_ms"]
    return "\n".join(
        [
            f"{_fleet(document)} of width {document['width']}; {document['calls']:,} calls of "
            f"{document['threads']} threads during {document['swaps']} swaps, on "
            f"{document['environment']['cpus']} cores.",
            "",
            f"- Answers that were not completely of one version of each member: {document['torn']}.",
            f"- A swap stops calls for {pause['p50']:.1f} ms in the median and {pause['most']:.1f} ms at "
            f"most. The wait for running calls is up to {wait['most']:.1f} ms of it.",
            f"- Calls take {times['swaps']['p50']:.1f} ms in the median and {times['swaps']['p99']:.1f} ms "
            f"at the 99th percentile during swaps; without swaps {times['without']['p50']:.1f} ms and "
            f"{times['without']['p99']:.1f} ms. The longest time without the end of a call is "
            f"{gaps['swaps']:.1f} ms; without swaps {gaps['without']:.1f} ms.",
            f"- `widepack append` of one more adapter in another process takes "
            f"{more['seconds']['append']:.1f} s, and the load of the new artifact beside the old one "
            f"{more['seconds']['load']:.1f} s. Calls of the old one go on. The longest time without the end "
            f"of a call is {more['gap_ms']:.1f} ms. Append, load and calls share the cores: the calls take "
            f"{more['calls_ms']['append']['p50']:.1f} ms in the median during the append, and "
            f"{more['calls_ms']['load']['p50']:.1f} ms during the load.",
        ]
    )


PARTS = {
    "fleets-memory": memory,
    "fleets-calls": calls,
    "fleets-tuned-calls": tuned_calls,
    "fleets-route": route,
    "split-linear": split_linear,
    "fleets-peft": peft,
    "unmerge": unmerge,
    "fleets-swaps": swaps,
}
