"""Writes the part of a page about torch's test databases, from bench/results/torch-databases.json."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

DOCUMENT = Path(__file__).resolve().parents[2] / "bench" / "results" / "torch-databases.json"
REASONS = 12  # rows of the table of reasons
NAMES = ("right", "refused", "wrong", "crash")


def table() -> str:
    """Returns the counts by database and way, and the most frequent reasons of refusals."""
    document = json.loads(DOCUMENT.read_text(encoding="utf-8"))
    lines = ["| database, way | right | refused | wrong | crash | not counted |", "|---|---|---|---|---|---|"]
    total: Counter[str] = Counter()
    for group, row in document["counts"].items():
        total.update(row)
        lines.append(_row(group, row))
    lines.append(_row("all", total))
    compared = sum(total[name] for name in NAMES)
    lines += [
        "",
        f"{total['refused'] / compared:.1%} of the {compared:,} cases that count are refused.",
        "",
        "| refused because | cases |",
        "|---|---|",
    ]
    reasons = Counter(map(reason, document["refused"].values()))
    lines += [f"| {why} | {count} |" for why, count in reasons.most_common(REASONS)]
    rest = sum(count for _, count in reasons.most_common()[REASONS:])
    lines += [f"| other reasons | {rest} |"] if rest else []
    environment = document["environment"]
    lines += ["", f"{environment['date']}, torch {environment['versions']['torch']}."]
    return "\n".join(lines)


def _row(name: str, row: Any) -> str:
    counts = " | ".join(f"{row[n]:,}" for n in (*NAMES, "apart"))
    return f"| {name} | {counts} |"


def reason(message: str) -> str:
    """Returns the class of a refusal, in words without names and numbers."""
    known = {
        "an op that widepack does not know": "the format has no such op",
        "draws random numbers": "a random op that no wide program can have",
        "change from run to run": "a random answer, which a build cannot verify",
        "cannot be exported by torch.export": "torch.export fails in the form that widepack needs",
        "branches on the values": "the code branches on values",
        "is a number": "the answer is a number, not a tensor",
        "was fixed to": "an op fixes the batch",
        "side effect": "a side effect in forward",
        "the gradient of": "a gradient differs from torch's own",
        "cannot be compared": "the members refuse drawn inputs",
        "is wrong": "a verification stopped the program",
        "does not give the members' own answers": "a verification stopped the capture",
        "drawn from one seed": "random numbers of another source",
    }
    found = next((words for part, words in known.items() if part in message), "")
    return found or re.sub(r"[^A-Za-z ].*", "", message.partition(": ")[2])[:60].strip()
