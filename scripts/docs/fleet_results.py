"""Writes the results of fleets of fine-tunes."""

from __future__ import annotations

from typing import Any

from results import part, rows_of, table
from widepack_bench.text import plural

SCRIPT = "scripts/measure/fleets.py"


def _fleet(row: Any) -> str:
    return f"{row['members']} members, {plural(row['layers'], 'layer')}"


@part("fleets-memory", "fleets-cpu", SCRIPT)
def memory(document: Any) -> str:
    """Returns the bytes of weights, and the memory of a process."""
    lines, more = [], []
    for row in rows_of(document):
        taken = row["memory"]
        sizes = (
            *row["weights_bytes"].values(),
            *(taken[k]["resident"] for k in ("fleet", "fleet_least", "merged")),
        )
        lines.append((_fleet(row), *(f"{size / 1e6:.0f} MB" for size in sizes)))
        more += [t["first_resident"] - t["resident"] for t in taken.values()]
    head = 'encoder | weights | as whole weights | memory | `memory="least"` | memory of whole weights'
    return (
        f"{table(head, lines)}\n\nThe first process on a machine checks the artifact, and takes up to "
        f"{max(more) / 1e6:.0f} MB more."
    )


@part("fleets-calls", "fleets-cpu", SCRIPT)
@part("fleets-tuned-calls", "fleets-tuned-cpu", f"{SCRIPT} --tune 60 -o bench/results/fleets-tuned-cpu.json")
def calls(document: Any) -> str:
    """Returns the times of calls of all members."""
    rows = (
        (
            _fleet(row),
            f"{call['batch']} x {call['tokens']}",
            *(f"{call['times'][k]['ms']:.1f} ms" for k in ("fleet", "least", "merged")),
            f"{call['ratio']:.2f}",
            f"{call['ratio_least']:.2f}",
        )
        for row in rows_of(document)
        for call in row["calls"]
    )
    head = 'encoder | rows a member | fleet | `memory="least"` | whole weights | ratio | ratio of `least`'
    return table(head, rows)


@part("fleets-route", "fleets-cpu", SCRIPT)
def route(document: Any) -> str:
    """Returns the times of `route`."""
    lines = []
    for row in rows_of(document):
        for call in row["route"]:
            fleet, merged, groups = (call["times"][name]["ms"] for name in ("fleet", "merged", "groups"))
            times = (f"{ms:.1f} ms" for ms in (fleet, merged, groups))
            ratio = f"{min(merged, groups) / fleet:.2f}"
            lines.append((_fleet(row), call["batch"], call["tokens"], *times, ratio))
    return table("encoder | rows | tokens | fleet | whole weights | groups | ratio", lines)


@part("fleets-peft", "fleets-peft-cpu", f"{SCRIPT} --peft -o bench/results/fleets-peft-cpu.json")
def peft(document: Any) -> str:
    """Returns the times of mixed batches beside those of PEFT."""
    found = [(row, call) for row in rows_of(document) for call in row["mixed"]]
    rows = (
        (
            _fleet(row),
            call["tokens"],
            f"{call['times']['peft']['ms']:.1f} ms",
            f"{call['times']['route']['ms']:.1f} ms",
            f"{call['ratio']['route']:.2f}",
            f"{call['times']['members']['ms']:.1f} ms",
            f"{call['ratio']['members']:.2f}",
        )
        for row, call in found
    )
    most = max(call["difference"] for _, call in found)
    return (
        f"{table('encoder | tokens | PEFT | `route` | ratio | member by member | ratio', rows)}\n\n"
        f"The answers differ by at most {most:.0e} of their largest number. PEFT {found[0][0]['peft']}."
    )
