"""Makes wide programs that have gradients.

It lowers the captured member program, because simplification drops ops that stop gradients (`detach`) and
folds weights that it assumes to be fixed. Most of widepack's own ops have no derivative. If a strategy uses
such an op, or declares that it has no derivative, the next strategy of the op runs, and `sequential` at last.
Ops that answer integers need no derivative.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace

from widepack_artifacts.program import Kind, Program

from ..errors import LoweringError
from ..ir.edit import all_nodes
from ..ir.fake_values import Shapes
from ..kernels.library import DIFFERENTIABLE, INTEGER_ANSWERS
from ..planning.plan import NodeChoice, Plan
from ..registry.registry import strategies_of
from .lower import Lowered, lower

_OWN_OPS = "widepack."


def for_gradients(
    program: Program,
    count: int,
    slots: Mapping[str, Kind],
    plan: Plan,
    sizes: Mapping[str, int],
    shapes: Shapes,
    *,
    transforms: bool = False,
) -> Program:
    """Returns the wide program of ops that have derivatives.

    `program` is the captured member program. `transforms` says whether the program must also run inside
    transforms of `torch.func`, in forward mode and under autocast, for which widepack's own ops with
    derivatives have no rules. The other arguments are those of `lower`. Raises: LoweringError.
    """
    known: Container[str] = INTEGER_ANSWERS if transforms else INTEGER_ANSWERS | DIFFERENTIABLE
    tried: dict[str, set[str]] = {}
    while True:
        lowered = lower([program], [0] * count, slots, plan, sizes, shapes)
        bad = dict.fromkeys(
            n.member for n in all_nodes(lowered.program) if n.op.startswith(_OWN_OPS) and n.op not in known
        )
        bad |= dict.fromkeys(n.name for n in program.nodes if _without(n.op, lowered.used.get(n.name, "")))
        if not bad:
            return lowered.program
        plan = replace(
            plan, choices={**plan.choices, **{name: _next(program, lowered, name, tried) for name in bad}}
        )


def _without(op: str, name: str) -> bool:
    """Returns whether the op's strategy of this name declares that it has no derivative."""
    strategy = strategies_of(op).get(name)
    return strategy is not None and not strategy.derivative


def _next(program: Program, lowered: Lowered, name: str, tried: dict[str, set[str]]) -> NodeChoice:
    """Returns another strategy for a node of the member program. Raises: LoweringError if there is none."""
    (node,) = (n for n in program.nodes if n.name == name)
    done = tried.setdefault(name, set())
    done.add(lowered.used[name])
    known = strategies_of(node.op).values()
    left = [s.name for s in known if s.derivative and not s.on_request and s.name not in done]
    if not left and "sequential" in done:
        raise LoweringError(f"node {name} ({node.op}, {node.source}) has no derivative in any strategy")
    chosen = left[0] if left else "sequential"
    done.add(chosen)
    return NodeChoice(chosen, "the strategy before it has no derivative")
