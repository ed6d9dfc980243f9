"""Computes how many bytes of activations an op reads and writes, and up to which batch they fit the cache."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from widepack_artifacts.program import Kind, Node, Program, refs

from ..ir import ops
from ..ir.fake_values import Fakes, replay
from ..ir.kinds import weights_only
from ..ir.op_records import is_recurrent_layer
from .batch_growth import growth

CACHE_BYTES = 1 << 20  # the activations that a second-level cache can hold
MEMBER_BYTES = 64 << 10  # for each member: a pass over more bytes takes longer than starting an op
VIEWS = {
    "reshape",
    "view",
    "transpose",
    "permute",
    "unsqueeze",
    "squeeze",
    "select",
    "slice",
    "expand",
    "split",
    "split_with_sizes",
    "unbind",
    "flatten",
    "unflatten",
    "getitem",
    "sym_size",
    "alias",
    "detach",
    "t",
}


@dataclass(frozen=True)
class Activations:
    """The bytes that an op of all members reads and writes, on average over the ops: fixed + slope * batch.

    `batch` is the name of the batch's dim. `why` says why the sizes are not known, else it is empty.
    """

    members: int
    batch: str
    fixed: float = 0.0
    slope: float = 0.0
    why: str = ""

    def _limit(self, times: int) -> int:
        return times * max(CACHE_BYTES, self.members * MEMBER_BYTES)

    def crossover(self, times: int = 1) -> int | None:
        """Returns the largest batch that should run wide on a CPU; None means every batch.

        `times` multiplies the limits.
        """
        if self.why:
            return None
        if self.slope <= 0:
            return None if self.fixed <= self._limit(times) else 0
        return max(0, int((self._limit(times) - self.fixed) / self.slope))

    def reaches(self, size: int) -> int:
        """Returns the smallest batch at which they are `size` bytes; 1 if they do not grow with the batch."""
        return max(1, math.ceil((size - self.fixed) / self.slope)) if self.slope > 0 else 1

    def because(self, times: int = 1) -> str:
        """Returns the crossover as a sentence."""
        if self.why:
            return self.why
        batch, at, limit = self.batch, self.crossover(times), f"{self._limit(times) // 1024} KiB"
        where = f"{batch} = 1" if batch else "this size"
        size = f"{(self.fixed + self.slope) / 1024:.0f} KiB on average at {where}"
        words = f"an op's activations of all {self.members} members are {size}"
        if self.slope <= 0:
            return f"{words}, the limit is {limit}"
        return (
            f"{words}; up to {batch} = {at} they are within {limit}, "
            "above that members run one after the other"
        )


def activations(
    program: Program, found: Mapping[str, Kind], members: int, sizes: Mapping[str, int], batch: str
) -> Activations:
    """Computes how an op's activations grow with the batch."""
    grows = growth(lambda at: working_set(program, found, at), sizes, batch)
    if grows is None:
        return Activations(
            members,
            batch,
            why="a size depends on values, and so does the memory of the members' activations",
        )
    return Activations(members, batch, grows.fixed * members, grows.slope * members)


def working_set(program: Program, found: Mapping[str, Kind], sizes: Mapping[str, int]) -> float:
    """Returns the bytes of activations that one member's op reads and writes, on average.

    The average is over the ops whose results differ between members, without views.
    """
    values = replay(program, Fakes(sizes, static=True))
    early = weights_only(program)
    total, count = 0.0, 0

    def size(value: Any) -> int:
        value = value[0] if isinstance(value, (tuple, list)) and value else value
        return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0

    for node in program.nodes:
        if node.name in early or found[node.name] == "shared" or node.op.split(".")[1] in VIEWS:
            continue
        touched = size(values[node.name]) + sum(
            size(values[r]) for r in refs((node.args, node.kwargs)) if r not in early and found[r] != "shared"
        )
        total += touched / steps(node, values)
        count += 1
    return total / max(count, 1)


def steps(node: Node, values: Mapping[str, Any]) -> int:
    """Returns the number of steps of a recurrent op.

    Each step uses the values of one step only. Other ops have 1.
    """
    if not is_recurrent_layer(node.op) or not node.op.endswith(".input"):
        return 1
    arguments = ops.bind(node.op, node.args, node.kwargs)
    x = values[arguments["input"].name]
    return max(1, int(x.shape[1 if x.ndim == 3 and arguments.get("batch_first") else 0]))
