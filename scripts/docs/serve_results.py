"""Writes the results of `widepack serve`."""

from __future__ import annotations

from typing import Any

from results import read


def served() -> str:
    """Returns the table of requests with one row each, beside a dict of modules behind the same protocol."""
    document = read("serve-cpu")
    lines = [
        "| network | members | ids | form | requests a second | dict | ratio | p99 | dict "
        "| CPU a request | dict | ratio |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in document["rows"]:
        ours, theirs = row["servers"]["serve"], row["servers"]["dict"]
        lines.append(
            f"| {row['network']} | {row['members']} | {row['ids']} | {row['form']} "
            f"| {ours['requests_per_s']:,.0f} | {theirs['requests_per_s']:,.0f} | "
            f"{row['requests_ratio']:.2f} "
            f"| {ours['p99_ms']:.3g} ms | {theirs['p99_ms']:.3g} ms "
            f"| {ours['cpu_us']:.0f} us | {theirs['cpu_us']:.0f} us | {row['cpu_ratio']:.2f} |"
        )
    noise = [abs(r["noise"] - 1) for r in document["rows"]]
    environment = document["environment"]
    versions = environment["versions"]
    return "\n".join(
        [
            *lines,
            "",
            f"`widepack serve` against itself differs by at most {max(noise):.0%} in requests a second.",
            f"{environment['date']}, {environment['device']}, one thread an op, torch {versions['torch']}.",
        ]
    )


def peers() -> str:
    """Returns the CPU time of a request beside that of other servers with a dict of modules."""
    rows = [r for r in read("serve-peers-cpu")["rows"] if r["peer_cpu_ratios"]]
    names = list(rows[0]["peer_cpu_ratios"])
    lines = [
        f"| network | members | widepack serve | {' | '.join(names)} |",
        f"|---|---|---|{'---|' * len(names)}",
    ]
    for row in rows:
        others = " | ".join(
            f"{row['servers'][n]['cpu_us']:.0f} us ({1 / row['peer_cpu_ratios'][n]:.1f}x)" for n in names
        )
        lines.append(
            f"| {row['network']} | {row['members']} | {row['servers']['serve']['cpu_us']:.0f} us | {others} |"
        )
    return "\n".join(lines)


def limits() -> str:
    """Returns what the server adds to a call, and how it behaves beyond its capacity."""
    found: dict[str, Any] = read("serve-limits-cpu")
    p, latency, start = found["protocol"], found["latency"], found["start"]
    flood, over, every = found["flood"], found["overload"], found["ensemble"]
    refused = over["statuses"].get("503", 0)
    rows = [
        ("CPU time of a request with one row of 64, JSON", f"{p['row_json_cpu_us']:.0f} us"),
        ("the same in binary form", f"{p['row_binary_cpu_us']:.0f} us"),
        ("an image of 3x224x224 in binary form", f"{p['image_binary_cpu_us']:.0f} us"),
        ("the call in process", f"{p['call_cpu_us']:.0f} us"),
        ("median time of a request on one connection", f"{latency['inline_p50_ms']:.2f} ms"),
        (
            "mean and deviation of 100 members, requests a second over those of a loop over modules",
            f"{every['requests_ratio']:.1f}",
        ),
        ("from start to ready, with the load", f"{start['ready_s']:.1f} s"),
        ("the load alone, in a process of its own", f"{start['load_s']:.1f} s"),
        ("p99 of eight quiet members", f"{flood['alone_p99_ms']:.1f} ms"),
        ("p99 of the same while another floods", f"{flood['flooded_p99_ms']:.1f} ms"),
        ("at three times the capacity: answered", f"{over['statuses'].get('200', 0):,}"),
        ("at three times the capacity: refused with 503 and Retry-After", f"{refused:,}"),
        ("memory that it leaves behind", f"{max(over['memory_grown_mb'], 0):.0f} MB"),
    ]
    return "\n".join(["| what | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])
