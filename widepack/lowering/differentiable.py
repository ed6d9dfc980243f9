"""Wide programs to take gradients of.

They are lowered from the member program as it was captured: simplification drops what stops gradients (`detach`) and folds weights that are taken to be fixed. An op
of widepack's own has no derivative; where a strategy would write one, or says that it has none, the next strategy of the op runs, and `sequential` in the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from widepack_artifacts.program import Kind, Node, Program

from .lower import Lowered, lower
from ..planning.plan import Choice, Plan
from ..registry.registry import REGISTRY
from ..ir.fake_values import Shapes

_OWN = "widepack."


def for_gradients(program: Program, count: int, slots: Mapping[str, Kind], plan: Plan, sizes: Mapping[str, int], shapes: Shapes) -> Program:
    """The wide program of ops that have derivatives. program: of a member, as it was captured; the other arguments are those of `lower`. Raises: LoweringError."""
    tried: dict[str, set[str]] = {}
    while True:
        lowered = lower([program], [0] * count, slots, plan, sizes, shapes)
        bad = dict.fromkeys(n.member for n in _nodes(lowered.program) if n.op.startswith(_OWN))
        bad |= dict.fromkeys(n.name for n in program.nodes if _without(n.op, lowered.used.get(n.name, "")))
        if not bad:
            return lowered.program
        plan = replace(plan, choices={**plan.choices, **{name: _next(program, lowered, name, tried) for name in bad}})


def _without(op: str, name: str) -> bool:
    """Whether the op's strategy of this name says that it has no derivative, or not the op's own."""
    found = REGISTRY[op].strategies.get(name) if op in REGISTRY else None
    return found is not None and not found.derivative


def _next(program: Program, lowered: Lowered, name: str, tried: dict[str, set[str]]) -> Choice:
    """Another strategy for a node of the member program."""
    (node,) = (n for n in program.nodes if n.name == name)
    done = tried.setdefault(name, set())
    done.add(lowered.used[name])
    known = REGISTRY[node.op].strategies if node.op in REGISTRY else {}
    left = [s.name for s in known.values() if s.derivative and not s.asked and s.name not in done]
    chosen = left[0] if left else "sequential"
    done.add(chosen)
    return Choice(chosen, "the strategy before it has no derivative")


def _nodes(program: Program) -> Iterator[Node]:
    """All nodes, those of loops' bodies too."""
    for node in program.nodes:
        yield node
        if node.body is not None:
            yield from _nodes(node.body)
