"""Plans for weights that are a base of all members plus thin factors: the strategy `split`, for few rows.

A layer whose weight is a `widepack.factored_weight` may multiply with the base and the factors (`split`), or
with the merged weight of each member. Merged weights of N members are N times as many bytes to read, and
`split` computes a little more for each row. On a CPU `split` is used up to `ROWS` rows of a member, on
average over the layers, each counted as often as it has weights. Above that the plans are those of merged
weights. The rows of a layer with large factors count more than once: its thin products take longer. So do
the places of a convolution.

The times of linear layers were measured on one CPU (AMD EPYC, one thread). At rank 8 and 16, `turned` over
merged weights takes 1.4 times as long as `split` or more from 4 rows on, also at 2,048 rows, and 1.3 times at
rank 96. `packed` over merged weights takes 0.65 to 1.1 times as long from 64 rows on; only a race or `tune`
chooses it. bench/results/fleets-cpu.json has encoders at up to 512 rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from widepack_artifacts.program import Kind, Node, Program, Ref, refs

from ..ir import ops
from ..ir.fake_values import Fakes, replay
from ..ir.kinds import weights_only
from ..kernels.factored import WEIGHT
from ..registry.registry import strategies_of
from .batch_growth import growth
from .plan import NodeChoice, Plan
from .regions import Regions

SPLIT = "split"
ROWS = 4096
PLACE = 8  # how many rows a place of a convolution counts as
LARGE = 5  # with which power the rows count more
THIN = 8  # factors of up to a weight's numbers divided by this take no time beside the product with the base
_TABLE = "aten.embedding.default"
_WEIGHTS = {"aten.mm.default": "mat2", "aten.matmul.default": "other", "aten.addmm.default": "mat2"}
_BECAUSE = "the base of all members is read once, and each member's thin factors"


def split_layers(program: Program, found: Mapping[str, Kind]) -> dict[str, NodeChoice]:
    """Returns the layers that can split their weights, each with the strategy `split`. found: the kinds."""
    return {n.name: NodeChoice(SPLIT, _BECAUSE) for n in _layers(program, found)}


def _layers(program: Program, found: Mapping[str, Kind]) -> list[Node]:
    factored = {n.name for n in program.nodes if n.op == WEIGHT and found[n.name] == "stacked"}
    if not factored:
        return []
    early = weights_only(program)
    return [
        n
        for n in program.nodes
        if n.name not in early
        and found[n.name] == "stacked"
        and SPLIT in strategies_of(n.op)
        and (weight := _weight(n)) is not None
        and weight in factored
    ]


def _weight(node: Node) -> str | None:
    """Returns the name of a layer's weight, if it may be factored."""
    bound = ops.bind(node.op, node.args, node.kwargs)
    weight = bound.get(_WEIGHTS.get(node.op, "weight"))
    plain = all(bound.get(name, 1) == 1 for name in ("beta", "alpha", "groups"))
    return weight.name if plain and isinstance(weight, Ref) else None


def row_limit(
    program: Program, found: Mapping[str, Kind], sizes: Mapping[str, int], batch: str
) -> int | None:
    """Returns the largest batch at which layers of split weights read at most `ROWS` rows of a member.

    None means every batch, and 0 none. Look-ups in tables do not count, unless there are no other layers.
    """
    layers = _layers(program, found)
    counted = [n for n in layers if n.op != _TABLE]
    if not counted:
        return None if layers else 0
    grows = growth(lambda at: _rows(program, counted, at), sizes, batch)
    return 0 if grows is None else grows.largest(ROWS)


def _rows(program: Program, layers: list[Node], sizes: Mapping[str, int]) -> float:
    """Returns the rows of a member that a layer reads, on average over all weights of the layers.

    Rows with large factors count more than once.
    """
    values = replay(program, Fakes(sizes, static=True))
    parts = {
        n.name: sum(values[r].numel() for r in refs(n.args[1:])) for n in program.nodes if n.op == WEIGHT
    }
    total, weights = 0.0, 0
    for node in layers:
        name = _weight(node)
        assert name is not None
        count = values[name].numel()
        rows = _rows_of(node, values) * (PLACE if ".conv" in node.op else 1)
        total += count * rows * max(1.0, THIN * parts[name] / max(1, count)) ** LARGE
        weights += count
    return total / max(weights, 1)


def _rows_of(node: Node, values: Mapping[str, Any]) -> int:
    """Returns the number of vectors that a layer multiplies with its weight: rows, or places of an image."""
    y = values[node.name]
    assert isinstance(y, torch.Tensor)
    channels = y.shape[-1]
    if ".conv" in node.op:
        channels = values[str(_weight(node))].shape[0]
    return int(y.numel()) // max(1, int(channels))


def with_split(
    regions: Regions, merged: list[Plan], most: int | None, choices: Mapping[str, NodeChoice], batch: str
) -> list[Plan]:
    """Returns the plans of a CPU: one that splits weights up to batch `most`, then the plans of merged ones.

    Args:
        regions: The regions of the member program.
        merged: The plans over merged weights, smallest batch first.
        most: From `row_limit`.
        choices: The strategies of the nodes of the first plan.
        batch: The dim that batch classes are made of, or "".
    """
    if most is not None and most < 1:
        return merged
    limit = "" if most is None or not batch else f" up to {batch} = {most}, which is {ROWS} rows"
    first = regions.wide(f"{_BECAUSE}:{limit} or fewer" if limit else _BECAUSE, choices, 1, most)
    if most is None:
        return [first]
    rest = [p for p in merged if p.batch[1] is None or p.batch[1] > most]
    return [first, *(replace(p, batch=(max(p.batch[0], most + 1), p.batch[1])) for p in rest)]
