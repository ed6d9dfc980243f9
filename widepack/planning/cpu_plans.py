"""Makes the plans of a CPU by rules of thumb: wide for small batches, a loop for large ones.

A program runs wide up to the batch at which one op's activations of all members no longer fit the
second-level cache (`CACHE_BYTES`), on average over the ops. `MEMBER_BYTES` for each member is a second limit:
above it a pass over the activations in memory takes longer than starting an op. The larger of the two counts.
Above that batch members run one after the other, each in the cache. What depends on weights only, and what is
Shared, stays outside the loop and runs once. For a recurrent op one step counts. A program of one op that
reads and writes all values once (`ONE_PASS`) runs wide at every batch, because it has no values to keep in
the cache and a loop would copy the answers.

Convolutions run over packed weights, up to `PACKED_BYTES`. Only one batch class packs them, because a loop
packs them in another order than a wide region, and both would need twice the memory. If a network may then
run wide up to `OFTEN`, with limits that are `PACKED` times as high, its wide region packs them. Else its loop
packs them, from the batch at which an op of one member has `LOOP_BYTES`, because a call over packed weights
takes longer to start. If reordering the plain weights would take longer at each call (`REORDER_BYTES`) than
the starts that a wide region saves (`START_S`), the packed loop serves every batch. A convolution by itself,
without a neighbour in its own memory order, is packed up to `LONE_BYTES` only.

In training the limits are `TRAINING` times as high.

The limits were measured on one CPU (AMD EPYC, one thread). scripts/measure/predictions.py compares the
choice of these rules with the fastest plan of each network.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from widepack_artifacts.program import Kind, Node, Program

from ..ir.kinds import weights_only
from ..registry.registry import family_of
from .packed_convs import packable, plain_bytes
from .plan import NodeChoice, Plan
from .regions import Regions
from .working_set import VIEWS, Activations, activations

ONE_PASS = {"attention", "bag", "embedding", "pool"}  # families
PACKED = 4  # with packed convolutions, a wide region pays off for this many times the activations
TRAINING = 4  # in training, a loop also pays for what autograd does at each op of each member
OFTEN = 16  # most calls have a smaller batch
LOOP_BYTES = 128 << 10
LONE_BYTES = 3 << 19
REORDER_BYTES = 4e9  # bytes of weights that oneDNN reorders in a second, on one core
START_S = 5e-6  # seconds that the start of an op takes
_PRODUCTS = re.compile(
    r"aten\.(linear|bilinear|matmul|mm|bmm|addmm|baddbmm|einsum|conv_transpose\dd|"
    r"scaled_dot_product_attention|lstm|gru|rnn_\w+)\."
)


def cpu_plans(
    regions: Regions,
    members: int,
    sizes: Mapping[str, int],
    batch: str,
    choices: Mapping[str, NodeChoice],
    training: bool = False,
) -> list[Plan]:
    """Returns the plans of a CPU, one for each batch class, smallest batch first.

    Args:
        regions: The regions of the member program.
        members: N.
        sizes: An example size of each dim.
        batch: The dim that batch classes are made of, or "".
        choices: The strategies of nodes that are decided already.
        training: Whether the plans are of a program with gradients.
    """
    program, found = regions.program, regions.found
    if one_pass(program, found):
        why = "one op, which reads and writes all once, straight into the answer"
        return [regions.wide(why, choices)]
    grows = activations(program, found, members, sizes, batch)
    packs = {} if regions.plain else packable(program, found, members)
    packs_wide = _packs_wide(program, found, grows, packs)
    times = TRAINING if training else PACKED if packs_wide and packs else 1
    at, because = grows.crossover(times), grows.because(times)
    wide_choices = {**(packs if packs_wide else {}), **choices}
    if at is None:
        return [regions.wide(because, {**packs, **choices})]
    small = [regions.wide(because, wide_choices, 1, at)] if at >= 1 else []
    # loops pack weights of two and three dims
    in_loop = {n.name: packs[n.name] for n in program.nodes if n.name in packs and "conv1d" not in n.op}
    if (packs_wide and small) or not in_loop:
        return [*small, regions.loop(because, choices, at + 1)]
    reorder_s = plain_bytes(program, in_loop, members) / REORDER_BYTES
    start_s = _kernels(program, found) * (members - 1) * START_S
    if reorder_s > start_s and not alone(program, found):
        why = (
            f"reordering plain weights of {members} members takes about {1e3 * reorder_s:.1f} ms a call, and "
            f"starting their ops one after the other {1e3 * start_s:.1f} ms"
        )
        return [regions.loop(why, {**in_loop, **choices})]
    return [*small, *_loops(regions, grows, members, because, choices, {**in_loop, **choices}, at + 1)]


def _kernels(program: Program, found: Mapping[str, Kind]) -> int:
    """Returns how many ops a member runs at each call, apart from views."""
    early = weights_only(program)
    return sum(
        found[n.name] == "stacked" and n.name not in early and n.op.split(".")[1] not in VIEWS
        for n in program.nodes
    )


def _packs_wide(
    program: Program, found: Mapping[str, Kind], grows: Activations, packs: Mapping[str, NodeChoice]
) -> bool:
    """Returns whether the wide region packs the convolutions.

    If other products take most of the time, it does not.
    """
    products = sum(found[n.name] == "stacked" and bool(_PRODUCTS.match(n.op)) for n in program.nodes)
    often = grows.crossover(PACKED) if len(packs) > products else 0
    return often is None or often >= OFTEN


def _loops(
    regions: Regions,
    grows: Activations,
    members: int,
    because: str,
    plain: Mapping[str, NodeChoice],
    packed: Mapping[str, NodeChoice],
    least: int,
) -> list[Plan]:
    """Returns the loop plans from batch `least` on: plain, then packed, then plain again for a lone
    convolution.
    """
    enough = max(least, grows.reaches(members * LOOP_BYTES))
    plans = [regions.loop(because, plain, least, enough - 1)] if enough > least else []
    far = None
    if alone(regions.program, regions.found) and grows.slope > 0:
        far = max(enough, grows.reaches(members * LONE_BYTES))
    if far != enough:
        plans.append(regions.loop(because, packed, enough, None if far is None else far - 1))
    if far is not None:
        plans.append(regions.loop(because, plain, far))
    return plans


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


def one_pass(program: Program, found: Mapping[str, Kind]) -> bool:
    """Returns whether the program is one op that reads and writes all values once."""
    node = alone(program, found)
    return node is not None and family_of(node.op) in ONE_PASS
