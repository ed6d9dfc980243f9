"""Says in words which plan runs at which batch. No torch is imported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from widepack_artifacts.wide_program import WideProgram

_MEMBER_BY_MEMBER = ("loop", "sequential")
_Key = tuple[str, str, tuple[int, int] | None]


@dataclass(frozen=True)
class PlanRow:
    """What runs at the batches from `least` to `most` (None: any).

    loop: how many times as long a loop over the members takes, the least and the most; None if not measured.
    """

    least: int
    most: int | None
    text: str
    loop: tuple[float, float] | None = None

    @property
    def batches(self) -> str:
        if self.most is None:
            return "any batch" if self.least <= 1 else f"batch {self.least} and more"
        return f"batch {self.least}" if self.least == self.most else f"batch {self.least} to {self.most}"


def joined(rows: Sequence[PlanRow]) -> list[PlanRow]:
    """Returns rows in the order of batches, with neighbours of one text as one row."""
    found: list[PlanRow] = []
    for row in sorted(rows, key=lambda r: r.least):
        last = found[-1] if found else None
        if last is None or last.text != row.text or last.most is None or last.most + 1 < row.least:
            found.append(row)
            continue
        ratios = [r for one in (last.loop, row.loop) if one is not None for r in one]
        both = (min(ratios), max(ratios)) if last.loop and row.loop else None
        found[-1] = replace(last, most=row.most, loop=both)
    return found


def in_words(strategies: Mapping[str, int], backend: str = "") -> str:
    """Returns how a plan runs the members. strategies: the number of ops of each."""
    alone = sum(strategies.get(name, 0) for name in _MEMBER_BY_MEMBER)
    on = f" on {backend}" if backend not in ("", "eager") else ""
    if not alone:
        return f"all members at once{on}"
    if alone == sum(strategies.values()):
        return f"one member after the other{on}"
    ops = "op" if alone == 1 else "ops"
    return f"all members at once{on}, with {alone} {ops} one member after the other"


def strategies_of(plan: Mapping[str, Any]) -> dict[str, int]:
    """Counts the nodes of the member program by strategy, the most frequent first. plan: of a manifest."""
    counts: Counter[str] = Counter()
    for region in plan.get("regions", []):
        if region["strategy"] == "loop":
            counts["loop"] += len(region["nodes"])
    counts.update(choice[0] for choice in plan.get("choices", {}).values())
    return dict(counts.most_common())


def stored_lines(wide: Sequence[WideProgram]) -> list[str]:
    """Returns the plans of an entry: for each device, pattern and part a line for each batch class.

    Predicted plans that a load never takes, since others were measured on their machine, are left out.
    """
    text: list[str] = []
    for key in dict.fromkeys(_key(row) for row in wide):
        rows = [row for row in wide if _key(row) == key]
        measured = {row.plan["machine"] for row in rows if row.plan.get("machine")}
        by_origin: dict[str, list[WideProgram]] = {}
        for row in sorted(rows, key=lambda r: not r.plan.get("machine")):
            if row.plan.get("machine") or row.plan.get("predicted") not in measured:
                by_origin.setdefault(_origin(row.plan, bool(measured)), []).append(row)
        for origin, of_one in by_origin.items():
            text.append(f"plans   {_title(key)}{origin}")
            text += [f"          {row.batches}: {row.text}" for row in joined(_preferred(of_one))]
    return text


def _key(row: WideProgram) -> _Key:
    return row.device, row.pattern, row.members


def _title(key: _Key) -> str:
    device, pattern, members = key
    return f"{device}, {pattern}" + (
        "" if members is None else f", members {members[0]} to {sum(members) - 1}"
    )


def _origin(plan: Mapping[str, Any], others: bool) -> str:
    """Returns where a plan comes from. others: whether plans of its device and pattern were measured."""
    if machine := plan.get("machine"):
        threads = plan.get("threads", 0)
        return f", measured on {machine} with {threads} {'thread' if threads == 1 else 'threads'}"
    if predicted := plan.get("predicted"):
        return f", predicted for {predicted}"
    return ", on other machines" if others else ""


def _preferred(rows: Sequence[WideProgram]) -> list[PlanRow]:
    """Returns one row for each batch class. Later plans stand in if the backend of the first is missing."""
    by_batch: dict[tuple[int, int | None], list[str]] = {}
    for row in rows:
        used = ", ".join(f"{name} {count}" for name, count in strategies_of(row.plan).items())
        backend = f", backend {row.plan['backend']}" if row.plan.get("backend") else ""
        by_batch.setdefault(row.batch, []).append(f"{used or 'no strategies recorded'}{backend}")
    return [
        PlanRow(*batch, text=first + (f"; without that backend {later[0]}" if later else ""))
        for batch, (first, *later) in by_batch.items()
    ]
