"""Writes the results of calls, loads, builds, the server and the fuzzer, and of two how-tos."""

from __future__ import annotations

import statistics
from statistics import geometric_mean as mean
from typing import Any

from results import part, ratio, rows_of, table
from widepack_bench.text import duration


def _value(interval: Any, unit: float = 1.0, form: str = ".2f") -> str:
    value, low, high = (interval[key] / unit for key in ("value", "low", "high"))
    return f"{value:{form}} [{low:{form}}, {high:{form}}]"


@part("call-overhead", "call-overhead-cpu")
def call_overhead(document: Any) -> str:
    rows = ((f"`{name}`", _value(row["over_us"], form=".1f")) for name, row in document["rows"].items())
    return table("call | beyond the bare graph, us", rows)


@part("first-answer", "first-answer-cpu")
def first_answer(document: Any) -> str:
    rows = ((name, _value(row["beyond_torch_ms"], 1000)) for name, row in document["rows"].items())
    found = table("process | to its first answer, beyond `import torch`, s", rows)
    return f"{found}\n\n{document['weights_bytes'] / 1e6:.0f} MB of weights."


@part("load-1gb", "load-1gb-cpu")
def load_1gb(document: Any) -> str:
    (row,) = rows_of(document)
    first, later = (
        statistics.median(r["load_s"] for r in row["loads"] if r["probe"] == probe)
        for probe in ("run", "remembered")
    )
    private = max(r["anon_bytes"] for r in row["loads"]) / row["weights_bytes"]
    help_s, inspect_s = (statistics.median(row[name]) for name in ("help_s", "inspect_s"))
    return (
        f"- An artifact of {row['weights_bytes'] / 1e9:.2f} GB loads in {later:.2f} s beyond `import torch`, "
        f"and in {first:.2f} s the first time, when it runs the probe.\n"
        f"- The load takes {private:.1%} of the weights' size in private memory: the weights stay in the "
        "mapped file.\n"
        f"- `widepack --help` takes {help_s:.2f} s, `widepack inspect` {inspect_s:.2f} s."
    )


@part("route", "route-cpu")
def route(document: Any) -> str:
    found = rows_of(document)
    rows = (
        (
            *(r[key] for key in ("network", "members", "batch", "ids", "active")),
            duration(r["ms"]),
            f"{r['fastest']}, {duration(r['baselines_ms'][r['fastest']])}",
            ratio(r["ratio"], r["quiet"]),
        )
        for r in found
    )
    head = "network | members | rows | ids | members with rows | route | fastest baseline | ratio"
    over, better = (mean(r[k]["value"] for r in found if r["active"] >= 8) for k in ("ratio", "over_dict"))
    return (
        f"{table(head, rows)}\n\n"
        f"Geometric mean of the rows with 8 members or more: {over:.2f} over the fastest baseline, "
        f"{better:.2f} over the better one of `dict` and `sorted`."
    )


@part("served", "serve-cpu")
def served(document: Any) -> str:
    """Returns the table of requests with one row each, beside a dict of modules behind the same protocol."""

    def cells(row: Any) -> tuple[Any, ...]:
        ours, theirs = row["servers"]["serve"], row["servers"]["dict"]
        return (
            *(row[key] for key in ("network", "members", "ids", "form")),
            f"{ours['requests_per_s']:,.0f}",
            f"{theirs['requests_per_s']:,.0f}",
            f"{row['requests_ratio']:.2f}",
            f"{ours['p99_ms']:.3g} ms",
            f"{theirs['p99_ms']:.3g} ms",
            f"{ours['cpu_us']:.0f} us",
            f"{theirs['cpu_us']:.0f} us",
            f"{row['cpu_ratio']:.2f}",
        )

    head = (
        "network | members | ids | form | requests a second | dict | ratio | p99 | dict | CPU a request | "
        "dict | ratio"
    )
    noise = max(abs(r["noise"] - 1) for r in rows_of(document))
    return (
        f"{table(head, map(cells, rows_of(document)))}\n\n`widepack serve` against itself differs by at most "
        f"{noise:.0%} in requests a second."
    )


@part("swaps", "swap-cpu")
def swaps(document: Any) -> str:
    (row,) = rows_of(document)
    calls, pause, copy, wait = (row[key] for key in ("calls_ms", "pause_ms", "copy_ms", "wait_ms"))
    return (
        f"{row['members']} members of a residual MLP of {row['layers']} layers; {row['answers']:,} calls of "
        f"{row['threads']} threads during {row['swaps']} swaps, on {document['environment']['cpus']} "
        "cores.\n\n"
        f"- Answers that were not completely of one version of each member: {row['mixed']}.\n"
        f"- p99 of the calls: {calls['swaps']['p99']:.0f} ms; without swaps {calls['without']['p99']:.0f} "
        "ms.\n"
        f"- The pause: {pause['p50']:.1f} ms in the median, of which {copy['p50']:.1f} ms is for writing "
        f"{row['bytes_a_swap'] / 1e6:.1f} MB.\n"
        f"- The longest pause: {pause['most']:.1f} ms; in the longest wait, running calls took "
        f"{wait['most']:.1f} ms to end."
    )


@part("kills", "kills", place=False)
def kills(document: Any) -> str:
    both = document["random"], document["steps"]
    bad, left = (
        sum(p[key] for p in both) for key in ("damaged_or_missing", "litter_left_by_the_next_writer")
    )
    return (
        f"This was tested with {both[0]['killed']} SIGKILLs at random moments of first builds, builds, "
        "updates and appends,\n"
        f"and with {both[1]['killed']} more, one before each step that these take in the folder. Artifacts "
        "that were damaged or\n"
        f"missing afterwards: {bad}. Files that the next writer did not remove: {left}."
    )


@part("fuzz", "fuzz", place=False)
def fuzz(document: Any) -> str:
    rows = []
    for run in document:
        outcomes: dict[str, int] = dict(run["outcomes"])
        refused = outcomes.pop("refused", 0)
        loaded = outcomes.pop("loaded", 0) + outcomes.pop("same", 0)
        rest = ", ".join(f"{name} {count}" for name, count in outcomes.items()) or "none"
        rows.append(
            (f"{run['mode']}, seed {run['seed']}", f"{run['cases']:,}", f"{refused:,}", f"{loaded:,}", rest)
        )
    return table("mode | damaged artifacts | refused | loaded | other outcomes", rows)


@part("reduce", "reduce-cpu", "scripts/measure/reduce.py")
def reduce(document: Any) -> str:
    rows = (
        (
            " x ".join(map(str, row["shape"])),
            row["dim"] - 1,
            f"{row['ms']:.3f} ms",
            f"{row['after_ms']:.3f} ms",
            ratio(row["ratio"], row["quiet"]),
            *(f"{max(row[key].values()):.1e}" for key in ("errors", "errors_after")),
        )
        for row in rows_of(document)
    )
    return table(
        "answers | classes in dim | `reduce` | torch expressions | ratio | largest error | theirs", rows
    )
