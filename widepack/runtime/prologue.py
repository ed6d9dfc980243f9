"""Splits a program into the nodes that depend on weights alone, which run once, and the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from widepack_artifacts.program import Node, Output, Program, Ref, Slot, refs

from ..ir.kinds import weights_only


@dataclass(frozen=True)
class Split:
    """A program in two parts: the prologue computes `names` from weights; the main program reads these as its
    weights.
    """

    prologue: Program
    main: Program
    names: tuple[str, ...]


def split(program: Program) -> Split:
    """Splits a program into prologue and main program."""
    early = weights_only(program)
    first = tuple(n for n in program.nodes if n.name in early)
    rest = tuple(n for n in program.nodes if n.name not in early)
    read = {r for n in rest for r in refs((n.args, n.kwargs))} | {
        r for o in program.outputs for r in refs(o.value)
    }
    names = tuple(n for n in [*(s.name for s in program.weights), *(n.name for n in first)] if n in read)
    slots = {s.name: s for s in program.weights}
    prologue = replace(
        program,
        inputs=(),
        nodes=_as_needed(first, names),
        outputs=tuple(Output(Ref(n), "shared") for n in names),
    )
    main = replace(program, weights=tuple(slots.get(n, Slot(n, "", "shared", "")) for n in names), nodes=rest)
    return Split(prologue, main, names)


def _as_needed(nodes: Sequence[Node], names: Sequence[str]) -> tuple[Node, ...]:
    """The nodes in an order in which each result is complete before the next one begins, so that values
    between are freed.

    Nodes that no result needs come last: they still run, so that an error in them is reported.
    """
    by_name = {n.name: n for n in nodes}
    order: dict[str, Node] = {}
    for name in names:
        waiting = [name]
        while waiting:
            node = by_name.get(waiting[-1])
            before = (
                []
                if node is None or node.name in order
                else [r for r in refs((node.args, node.kwargs)) if r in by_name and r not in order]
            )
            if before:
                waiting += before
                continue
            waiting.pop()
            if node is not None:
                order.setdefault(node.name, node)
    return (*order.values(), *(n for n in nodes if n.name not in order))
