"""Plans for chains of small linear layers on a GPU: the strategy `chain`, one kernel for several layers.

A chain is two or more linear layers whose weights differ between members. Between them is nothing but
activations that the op `mlp_chain` knows, and nothing else reads a result there. Layers that fit no kernel
divide a chain. A part is chosen if its kernel is predicted to be faster, up to the largest batch for which it
is, than both of these:

- the kernels of plain torch (`kernels/triton_kernels/predictions.py`), by which the op decides at a call
- the strategies that the plan chose for its layers (`separate_layers.py`)

The predictions are for an H100 in float32 without TF32, or in half precision. They were not measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch

from widepack_artifacts.program import Kind, Node, Program, Ref

from ..ir import ops
from ..ir.edit import readers, uses
from ..ir.fake_values import Fakes, replay
from ..ir.kinds import weights_only
from ..kernels.mlp_chain import activation_of
from ..kernels.triton_kernels.launches import MOST_LAYERS, chain_fits
from ..kernels.triton_kernels.predictions import chain_times, most_rows
from ..spec.dtypes import dtype_name
from .batch_growth import Growth, at_two_batches
from .plan import NodeChoice, Plan
from .regions import Regions
from .separate_layers import SeparateLayers

CHAIN = "chain"
MOST_ENDS = 3
"""The most batches at which chains end. Each one makes a batch class, and so a program."""
_LINEAR = "aten.linear.default"


@dataclass(frozen=True)
class _Shape:
    """The sizes of a chain at one batch: a member's rows, widths, which layers have a bias, the dtype."""

    rows: int
    widths: tuple[int, ...]
    biases: tuple[bool, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class PlannedChain:
    """A chain that a plan takes. most: the largest batch; None for every one. why: the reason."""

    layers: tuple[str, ...]
    most: int | None
    why: str


def with_chains(
    plans: Sequence[Plan],
    regions: Regions,
    members: int,
    sizes: Mapping[str, int],
    batch: str,
    fixed: Mapping[str, NodeChoice],
) -> list[Plan]:
    """Returns the plans of a GPU with chains, each up to the largest batch for which its kernel is predicted
    to be faster.

    Args:
        plans: The plans of the other strategies, smallest batch first. Those that loop stay as they are.
        regions: The regions of the member program.
        members: N.
        sizes: An example size of each dim.
        batch: The dim that batch classes are made of, or "".
        fixed: The strategies of nodes that are decided already.
    """
    program = regions.program
    chains = [c for c in linear_chains(program, regions.found) if not any(n in fixed for n in c)]
    shapes = at_two_batches(lambda at: _shapes(program, chains, at), sizes, batch) if chains else None
    if shapes is None:
        return list(plans)
    small, large = shapes
    parts: list[Plan] = []
    for plan in plans:
        looped, taken = plan.looped(), []
        for layers, shape in small.items():
            if layers not in large or not looped.isdisjoint(layers):
                continue
            grows = Growth.between(shape.rows, large[layers].rows)
            chain = _chain(regions, layers, members, shape, grows, sizes.get(batch, 1), plan)
            taken += [] if chain is None else [chain]
        parts += divided(plan, taken)
    return parts


def divided(plan: Plan, chains: Sequence[PlannedChain]) -> list[Plan]:
    """Returns the plans of the batch classes into which the ends of chains divide a plan."""
    least, last = plan.batch
    chains = [c for c in chains if c.most is None or c.most >= least]
    ends = sorted({c.most for c in chains if c.most is not None and (last is None or c.most < last)})
    ends = ends[:1] + ends[1:][1 - MOST_ENDS :]  # the smallest and the largest ones
    parts = []
    for end in (*ends, last):
        within = [c for c in chains if c.most is None or (end is not None and c.most >= end)]
        choices = {name: NodeChoice(CHAIN, c.why) for c in within for name in c.layers}
        parts.append(replace(plan, batch=(least, end), choices={**plan.choices, **choices}))
        least = least if end is None else end + 1
    return parts


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


def _shapes(
    program: Program, chains: list[list[str]], sizes: Mapping[str, int]
) -> dict[tuple[str, ...], _Shape]:
    """Returns the shapes of the chains that a kernel may run, at the sizes of dims.

    A layer that fits no kernel divides a chain, and so does each `MOST_LAYERS`-th layer.
    """
    values = replay(program, Fakes(sizes, static=True))
    nodes = {n.name: n for n in program.nodes}

    def shape(chain: Sequence[str]) -> _Shape | None:
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

    found: dict[tuple[str, ...], _Shape] = {}
    for chain in chains:
        for fits, run in groupby(chain, lambda name: shape([name]) is not None):
            layers = list(run)
            for first in range(0, len(layers) if fits else 0, MOST_LAYERS):
                part = tuple(layers[first : first + MOST_LAYERS])
                known = shape(part) if len(part) > 1 else None
                found |= {} if known is None else {part: known}
    return found


def _chain(
    regions: Regions,
    layers: tuple[str, ...],
    members: int,
    shape: _Shape,
    grows: Growth,
    example: int,
    plan: Plan,
) -> PlannedChain | None:
    """Returns a chain with its largest batch in a plan, and the reason; None if no batch has it."""
    program, found = regions.program, regions.found
    nodes, read_by, count = {n.name: n for n in program.nodes}, readers(program), uses(program)
    after = [read_by[name][0] if count[name] == 1 and read_by.get(name) else None for name in layers]
    activations = ["" if node is None else activation_of(node) for node in after]
    x = _bound(nodes[layers[0]], "input")
    given = (shape.widths, shape.biases, activations, x is not None and found[x] == "shared", shape.dtype)
    most_plain = most_rows(members, *given)
    if not most_plain:
        return None
    inside = [n for name, act in zip(layers, after) for n in (nodes[name], act) if n is not None]
    inside = [n for n in inside if n.name in layers or activation_of(n)]
    dtype = dtype_name(shape.dtype)
    separate = SeparateLayers(inside, found, plan.choices, members, shape.widths, dtype)
    most = 0
    for rows in (1 << power for power in range(most_plain.bit_length())):
        if not separate.compared(chain_times(members, rows, *given), rows).faster:
            break
        most = rows
    end = grows.largest(most) if most else 0
    if end == 0:
        return None
    rows = max(1, round(grows.fixed + grows.slope * example))
    times = separate.compared(chain_times(members, rows, *given), rows)
    why = (
        f"one kernel for {len(layers)} layers takes {1e6 * times.kernel:.1f} us on an H100 as predicted, "
        f"separate kernels take {1e6 * times.plain:.1f} us ({rows} rows, in a CUDA graph)"
    )
    return PlannedChain(layers, end, why)
