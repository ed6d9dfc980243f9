"""Writes how the FLOP formulas of `widepack analyze` compare with torch's counter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fleet_results import measured


@measured("flops-zoo", "scripts/measure/flops.py")
def table(document: Any) -> str:
    """Returns the counts, and each network that is an exception."""
    found = document["summary"]
    compared = found["compared"]
    by_hand: dict[str, list[str]] = {}
    for name, why in found["equal_by_hand"].items():
        by_hand.setdefault(why, []).append(name)
    wide = compared - len(found["wide_not_compared"])
    lines = [
        f"- {compared} networks were compared at three batches each, {found['on_meta']} of them on meta"
        f" tensors. {found['equal_to_torch']} formulas are equal to torch's counter at all three.",
        *(
            f"- Equal to the count by hand, because of {why}: {_names(names)}."
            for why, names in by_hand.items()
        ),
        f"- Formulas that differ: {_names(found['differ'])}.",
        f"- Costs of N members that are equal to `shared + N * member` at N = 1, 3 and 100:"
        f" {found['members_equal']} of {compared}.",
        f"- Costs of the wide program that are equal to the count of the program for N members at N = 1, 3"
        f" and 100: {found['wide_equal']} of {wide}.",
        "- Networks with ops whose other operations or bytes have no formula:"
        f" {_names(found['lower_bounds'])}.",
        *_reasons("has no wide program that was compared", found["wide_not_compared"]),
        *_reasons("was not compared", found["not_compared"]),
    ]
    return "\n".join(lines)


def _names(found: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in found) or "none"


def _reasons(what: str, found: Mapping[str, str]) -> list[str]:
    return [f"- `{name}` {what}: {reason.replace('|', ' ')}" for name, reason in found.items()]


PARTS = {"flops-zoo": table}
