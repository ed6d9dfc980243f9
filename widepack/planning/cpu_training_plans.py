"""Makes the plans of a CPU for members that train: wide for small batches, a loop for large ones.

A program runs wide up to the batch at which one op's activations of all members no longer fit the
second-level cache (`CACHE_BYTES`), on average over the ops. `MEMBER_BYTES` for each member is a second limit:
above it a pass over the activations in memory takes longer than starting an op. The larger of the two counts,
`TRAINING` times, because a loop also pays for what autograd does at each op of each member. Above that batch
members run one after the other, each in the cache. For a recurrent op one step counts. A program of one op
that reads and writes all values once (`ONE_PASS`) runs wide at every batch.

The limits were measured on one CPU (AMD EPYC, one thread).
"""

from __future__ import annotations

from collections.abc import Mapping

from widepack_artifacts.program import Kind, Node, Program

from ..ir.kinds import weights_only
from ..registry.registry import family_of
from .plan import NodeChoice, Plan
from .regions import Regions
from .working_set import VIEWS, activations

ONE_PASS = {"attention", "bag", "embedding", "pool"}  # families
TRAINING = 4


def cpu_training_plans(
    regions: Regions, members: int, sizes: Mapping[str, int], batch: str, choices: Mapping[str, NodeChoice]
) -> list[Plan]:
    """Returns the plans of a CPU for a program with gradients, smallest batch first.

    Args:
        regions: The regions of the member program.
        members: N.
        sizes: An example size of each dim.
        batch: The dim that batch classes are made of, or "".
        choices: The strategies of nodes that are decided already.
    """
    program, found = regions.program, regions.found
    node = alone(program, found)
    if node is not None and family_of(node.op) in ONE_PASS:
        why = "one op, which reads and writes all once, straight into the answer"
        return [regions.wide(why, choices)]
    grows = activations(program, found, members, sizes, batch)
    at, because = grows.crossover(TRAINING), grows.because(TRAINING)
    if at is None:
        return [regions.wide(because, choices)]
    small = [regions.wide(because, choices, 1, at)] if at >= 1 else []
    return [*small, regions.loop(because, choices, at + 1)]


def alone(program: Program, found: Mapping[str, Kind]) -> Node | None:
    """Returns the only op that differs between members at every call, apart from views; None if there are
    several.
    """
    early = weights_only(program)
    own = [
        n
        for n in program.nodes
        if found[n.name] == "stacked" and n.name not in early and n.op.split(".")[1] not in VIEWS
    ]
    return own[0] if len(own) == 1 else None
