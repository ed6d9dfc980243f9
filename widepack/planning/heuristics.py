"""Makes plans without a device, from predicted times and rules of thumb.

1. A node that reads a Ragged value always runs in a `loop` region.
2. `strategy="wide"` forbids other loops. `strategy="loop"` puts all that differs between members and depends
   on an input into one loop.
3. On a GPU, predicted times decide (`cuda_plans.py`). N members in a loop cost N times the launches, so the
   rest is wide with few exceptions. Chains of small linear layers are one kernel, for batches of few rows
   (`chain_plans.py`).
4. On a CPU, predicted times decide (`cpu_plans.py`). For members that train, the batch does
   (`cpu_training_plans.py`).
5. On a CPU, if tables and ids differ between members, one table of all members is looked up (`flat_index`). A
   gather along each table takes twice as long.
6. Layers whose weights are a base of all members plus thin factors split them: on a CPU for batches of few
   rows (`split_plans.py`), on a GPU always.
7. On a CPU a network that selects the matrix of an expert for each row runs wide, because a loop would copy a
   matrix for each row (`expert_plans.py`).
8. On a CPU attention with a mask skips keys that the mask forbids (`mask_plans.py`).
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace

from widepack_artifacts.program import Kind, Program, Ref

from ..ir import ops
from ..ir.kinds import kinds
from ..registry.registry import strategies_of
from .chain_plans import with_chains
from .cpu_plans import cpu_plans
from .cpu_training_plans import cpu_training_plans
from .cuda_plans import cuda_plans
from .expert_plans import BECAUSE, expert_layers
from .mask_plans import masked_attention
from .plan import REQUESTED, NodeChoice, Plan
from .regions import Regions
from .request import StrategyRequest
from .split_plans import SPLIT, row_limit, split_layers, with_split


def plans(
    program: Program,
    slots: Mapping[str, Kind],
    members: int,
    sizes: Mapping[str, int],
    batch: str,
    device: str,
    pattern: str,
    request: StrategyRequest,
) -> list[Plan]:
    """Returns the plans of one device kind and pattern, one for each batch class, smallest batch first.

    Args:
        program: The member program.
        slots: The kinds of weights and inputs.
        members: N.
        sizes: An example size of each dim.
        batch: The dim that batch classes are made of, or "".
        device: The kind of device: `cpu` or `cuda`.
        pattern: The pattern of inputs.
        request: The strategies that the user requests.
    """
    found = kinds(program, slots)
    split = split_layers(program, found)
    choices = preferred(program, found, request, split)
    if device == "cpu":
        choices = {**masked_attention(program, found), **choices}
    regions = Regions.of(program, found, slots, device, pattern, request.plain)
    on_gpu = device != "cpu" and bool(regions.looped)
    if on_gpu and request.whole != "loop":
        # The weights that a GPU reads take the time, and merged ones take the memory of N models.
        because, fixed = (REQUESTED, choices) if request.whole == "wide" else ("", {**split, **choices})
        found_plans = cuda_plans(
            regions, slots, members, sizes, batch, fixed, because=because, training=request.training
        )
        if request.whole == "wide" or request.training:
            return found_plans
        return with_chains(found_plans, regions, members, sizes, batch, fixed)
    if request.whole == "wide":
        return [regions.wide(REQUESTED, choices)]
    if not regions.looped:
        return [regions.wide("no value differs between members", choices)]
    if request.whole == "loop":
        return [regions.loop(REQUESTED, choices)]
    tables = looked_up(program, found)
    if split and SPLIT in request.preferred:
        return [regions.wide(REQUESTED, {**tables, **choices})]
    experts = expert_layers(program, found, sizes)
    if experts and not all(n in choices for n in experts):
        merged = [regions.wide(BECAUSE, {**tables, **experts, **choices})]
    elif request.training:
        merged = cpu_training_plans(regions, members, sizes, batch, {**tables, **choices})
    else:
        merged = cpu_plans(regions, slots, members, sizes, batch, {**tables, **choices})
        if any(c.requested for c in choices.values()):  # another machine takes them, too
            merged = [replace(plan, predicted="") for plan in merged]
    if not split:
        return merged
    most = row_limit(program, found, sizes, batch)
    return with_split(regions, merged, most, {**tables, **split, **choices}, batch)


def looked_up(program: Program, found: Mapping[str, Kind]) -> dict[str, NodeChoice]:
    """Returns the embeddings whose tables and ids differ between members, with the strategy `flat_index`."""
    choices = {}
    for node in program.nodes:
        if node.op == "aten.embedding.default":
            arguments = ops.bind(node.op, node.args, node.kwargs)
            if all(
                isinstance(arguments[k], Ref) and found[arguments[k].name] == "stacked"
                for k in ("weight", "indices")
            ):
                choices[node.name] = NodeChoice(
                    "flat_index",
                    "one look-up in all members' tables takes half as long as a gather along each",
                )
    return choices


def preferred(
    program: Program, found: Mapping[str, Kind], request: StrategyRequest, split: Container[str]
) -> dict[str, NodeChoice]:
    """Returns the strategies that the user prefers, for the nodes whose ops have them.

    split: the nodes that can split their weights.
    """
    choices: dict[str, NodeChoice] = {}
    for node in program.nodes:
        known = strategies_of(node.op)
        for name in request.preferred:
            if name == SPLIT and node.name not in split:
                continue
            if found[node.name] == "stacked" and (name in known or name == "sequential"):
                choices[node.name] = NodeChoice.by_user(name)
                break
    return choices
