"""Rows of a trace: each node of the member program, its strategy, and what it becomes in the wide program."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from widepack_artifacts.fields import MAX_NAME
from widepack_artifacts.program import Node, Program, refs


@dataclass(frozen=True, slots=True)
class Step:
    """A node of the member program, and its ops in the wide program (`becomes`)."""

    node: str
    op: str
    reads: tuple[str, ...]
    kind: str
    strategy: str
    why: str
    becomes: tuple[str, ...]
    out: str
    source: str


def steps(member: Program, wide: Program, plan: dict[str, Any]) -> list[Step]:
    """Returns every node of the member program with its strategy and its wide ops."""
    made: dict[str, list[str]] = {}
    for node in wide.nodes:
        for owner in {n.member for n in node.body.nodes} if node.body else {node.member}:
            made.setdefault(owner, []).append(node.op)
    of_slot = {s.source: s.kind for s in (*wide.weights, *wide.inputs)}
    found: dict[str, str] = {s.name: of_slot.get(s.source, s.kind) for s in (*member.weights, *member.inputs)}
    chosen: dict[str, tuple[str, str]] = {n: (c[0], c[1]) for n, c in plan.get("choices", {}).items()}
    parts = derived(dict.fromkeys([*chosen, *made]), {n.name for n in member.nodes})
    planned: set[str] = set()
    for region in plan.get("regions", []):
        planned.update(region["nodes"])
        if region["strategy"] == "loop":
            chosen.update((n, ("loop", f"region {region['name']}")) for n in region["nodes"])
    result = []
    for node in member.nodes:
        reads = tuple(found[r] for r in dict.fromkeys(refs((node.args, node.kwargs))))
        own = [
            node.name,
            *parts.get(node.name, ()),
        ]  # the node, and what simplification made of it under names of its own
        strategy, why = _joined([chosen[n] for n in own if n in chosen]) or _unchosen(
            node, reads, node.name in planned, any(n in made for n in own)
        )
        found[node.name] = _kind(strategy, reads, node)
        becomes = tuple(op for n in own for op in made.get(n, ()))
        result.append(
            Step(node.name, node.op, reads, found[node.name], strategy, why, becomes, node.out, node.source)
        )
    return result


_MADE = re.compile(r"(_(rows|at|part|order|drop|one|dense)\d*)+$")
_MOVES = ("shape", "dim", "once", "part")  # strategies of ops that only move values


def derived(names: Iterable[str], members: Collection[str]) -> dict[str, list[str]]:
    """Maps a member's node to the nodes that simplification made from it: `linear_1` -> `linear_1_rows`."""
    found: dict[str, list[str]] = {}
    for name in names:
        if len(name) > MAX_NAME:  # no name of a build is so long, and the search takes its square
            continue
        ending = _MADE.search(name)
        while name not in members and ending and (base := name[: ending.start()]):
            if base in members:
                found.setdefault(base, []).append(name)
                break
            ending = _MADE.search(base)
    return found


def _joined(choices: Sequence[tuple[str, str]]) -> tuple[str, str] | None:
    """Joins the choices of a node's parts. Parts that only move values count only if no part computes."""
    computing = [c for c in choices if c[0] not in _MOVES] or list(choices)
    if not computing:
        return None
    unique = list(dict.fromkeys(computing))
    return ", ".join(dict.fromkeys(c[0] for c in unique)), "; ".join(dict.fromkeys(c[1] for c in unique))


def _unchosen(node: Node, reads: tuple[str, ...], planned: bool, made: bool) -> tuple[str, str]:
    """Returns strategy and reason of a node that has no row in the plan."""
    if planned and node.op == "operator.getitem":
        return "part", "one of the results of the node that it reads"
    if made:
        return "once", "its inputs are equal for all members" if set(reads) <= {
            "shared"
        } else "a size, equal for all members"
    return "-", "simplified away"


def _kind(strategy: str, reads: Iterable[str], node: Node) -> str:
    """Returns the kind of a node's result: Shared if it ran once, else the widest kind of its arguments."""
    kinds = set(reads)
    if strategy == "once" or kinds <= {"shared"}:
        return "shared"
    return "ragged" if "ragged" in kinds else "stacked"


def kinds(step: Step) -> str:
    """`Shared Stacked -> Stacked`."""
    return (
        f"{' '.join(k.capitalize() for k in dict.fromkeys(step.reads)) or '()'} -> {step.kind.capitalize()}"
    )


def becomes(step: Step) -> str:
    """Returns the short names of the wide ops; equal ones are counted."""
    counts: dict[str, int] = {}
    for op in step.becomes:
        counts[short(op)] = counts.get(short(op), 0) + 1
    return ", ".join(op if count == 1 else f"{count} x {op}" for op, count in counts.items()) or "-"


def short(op: str) -> str:
    """`aten.linear.default` -> `linear`, `aten.max.dim` -> `max.dim`."""
    return op.removeprefix("aten.").removesuffix(".default").removeprefix("operator.")
