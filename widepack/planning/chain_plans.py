"""Plans for chains of small linear layers on a GPU: the strategy `chain`, one kernel for several layers.

A chain is two or more linear layers whose weights differ between members. Between them is nothing but
activations that the op `mlp_chain` knows, and nothing else reads a result there. A chain is chosen if its
kernel fits and is predicted to be faster than the kernels of plain torch
(`kernels/triton_kernels/predictions.py`), up to the largest batch for which the kernel is predicted to be
faster. The predictions are for an H100 in float32 without TF32, or in half precision. They were not measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from widepack_artifacts.program import Kind, Node, Program, Ref

from ..ir import ops
from ..ir.edit import readers, uses
from ..ir.fake_values import Fakes, replay
from ..ir.kinds import weights_only
from ..kernels.mlp_chain import activation_of
from ..kernels.triton_kernels.launches import chain_fits
from ..kernels.triton_kernels.predictions import chain_times, most_rows
from .batch_growth import Growth, at_two_batches
from .plan import NodeChoice, Plan
from .regions import Regions

CHAIN = "chain"
_LINEAR = "aten.linear.default"


@dataclass(frozen=True)
class _Shape:
    """The sizes of a chain at one batch: a member's rows, widths, which layers have a bias, the dtype."""

    rows: int
    widths: tuple[int, ...]
    biases: tuple[bool, ...]
    dtype: torch.dtype


def with_chains(
    plans: Sequence[Plan],
    regions: Regions,
    members: int,
    sizes: Mapping[str, int],
    batch: str,
    fixed: Mapping[str, NodeChoice],
) -> list[Plan]:
    """Returns the plans of a GPU with chains, up to the largest batch for which the kernel is predicted to be
    faster.

    Args:
        plans: The plans of the other strategies, smallest batch first. Those that loop stay as they are.
        regions: The regions of the member program.
        members: N.
        sizes: An example size of each dim.
        batch: The dim that batch classes are made of, or "".
        fixed: The strategies of nodes that are decided already.
    """
    chains = [c for c in linear_chains(regions.program, regions.found) if not any(n in fixed for n in c)]
    shapes = at_two_batches(lambda at: _shapes(regions.program, chains, at), sizes, batch) if chains else None
    if shapes is None:
        return list(plans)
    chosen: dict[str, NodeChoice] = {}
    limits: list[int | None] = []
    for chain, small, large in zip(chains, *shapes):
        if small is None or large is None:
            continue
        grows = Growth.between(small.rows, large.rows)
        most, why = _limit(regions.program, regions.found, chain, members, small, grows, sizes.get(batch, 1))
        if most is None or most >= 1:
            limits.append(most)
            chosen |= {name: NodeChoice(CHAIN, why) for name in chain}
    known = [most for most in limits if most is not None]
    return [part for plan in plans for part in _divided(plan, chosen, min(known) if known else None)]


def _divided(plan: Plan, chosen: Mapping[str, NodeChoice], end: int | None) -> list[Plan]:
    """Returns a plan with chains up to the batch `end`, None for every one, and without them above it."""
    least, most = plan.batch
    if not chosen or not plan.looped().isdisjoint(chosen) or (end is not None and least > end):
        return [plan]
    last = most if end is None else end if most is None else min(most, end)
    chained = replace(plan, batch=(least, last), choices={**plan.choices, **chosen})
    return [chained] if last == most else [chained, replace(plan, batch=(end + 1, most))]  # type: ignore[operator]


def linear_chains(program: Program, found: Mapping[str, Kind]) -> list[list[str]]:
    """Returns the names of the linear layers of each chain of two or more. found: the kinds."""
    early, count, read_by = weights_only(program), uses(program), readers(program)

    def layer(node: Node) -> bool:
        weight = _bound(node, "weight") if node.op == _LINEAR else None
        return weight is not None and found[weight] == "stacked" and node.name not in early

    chains, inside = [], set()
    for node in program.nodes:
        if not layer(node) or node.name in inside:
            continue
        chain, at = [node.name], node
        while count[at.name] == 1 and read_by.get(at.name):
            after = read_by[at.name][0]
            if layer(after) and _bound(after, "input") == at.name:
                chain.append(after.name)
            elif not activation_of(after) or activation_of(at):
                break
            at = after
        inside |= set(chain)
        if len(chain) > 1:
            chains.append(chain)
    return chains


def _bound(node: Node, name: str) -> str | None:
    """Returns the name of the value that an argument of a node is, if it is one."""
    value = ops.bind(node.op, node.args, node.kwargs).get(name)
    return value.name if isinstance(value, Ref) else None


def _shapes(program: Program, chains: list[list[str]], sizes: Mapping[str, int]) -> list[_Shape | None]:
    """Returns the shape of each chain at the sizes of dims; None for one that the kernel does not fit."""
    values = replay(program, Fakes(sizes, static=True))
    nodes = {n.name: n for n in program.nodes}

    def shape(chain: list[str]) -> _Shape | None:
        layers = [ops.bind(nodes[n].op, nodes[n].args, nodes[n].kwargs) for n in chain]
        weights = [values[layer["weight"].name] for layer in layers]
        given = [layer.get("bias") for layer in layers]
        biases = [None if b is None else values[b.name] for b in given]
        x = values[layers[0]["input"].name]
        tensors = [x, *weights, *(b for b in biases if b is not None)]
        if any(t.dtype != x.dtype for t in tensors) or any(w.dim() != 2 for w in weights):
            return None
        if any(b is not None and b.shape != w.shape[:1] for b, w in zip(biases, weights)):
            return None
        widths = (int(x.shape[-1]), *(int(w.shape[0]) for w in weights))
        if not chain_fits(widths, x.dtype) or not all(widths):
            return None
        return _Shape(x.numel() // widths[0], widths, tuple(b is not None for b in biases), x.dtype)

    return [shape(chain) for chain in chains]


def _limit(
    program: Program,
    found: Mapping[str, Kind],
    chain: list[str],
    members: int,
    shape: _Shape,
    grows: Growth,
    example: int,
) -> tuple[int | None, str]:
    """Returns the largest batch of a chain, None for every one and 0 for none, and the reason for it."""
    nodes, read_by = {n.name: n for n in program.nodes}, readers(program)
    after = [read_by.get(name, [])[:1] for name in chain]
    activations = [activation_of(few[0]) if few else "" for few in after]
    x = _bound(nodes[chain[0]], "input")
    shared = x is not None and found[x] == "shared"
    given = (shape.widths, shape.biases, activations, shared, shape.dtype)
    most = grows.largest(most_rows(members, *given))
    rows = max(1, round(grows.fixed + grows.slope * example))
    times = chain_times(members, rows, *given)
    why = (
        f"one kernel for {len(chain)} layers takes {1e6 * times.kernel:.1f} us on an H100 as predicted, "
        f"separate kernels take {1e6 * times.plain:.1f} us ({rows} rows, in a CUDA graph)"
    )
    return most, why
