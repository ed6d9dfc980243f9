"""A wide program as compilers take it: tensors only, loops written out, every weight dense.

requires: the main part of a wide program and its weights' values. ensures: the same answers; no loop, no list of weights, no node that nothing reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from widepack_artifacts.program import Program, Ref, Slot, substitute

from ..errors import UsageError
from ..ir.edit import sweep
from ..runtime.graph_module import unroll

MOST_NODES = 6000
"""Of a program with its loops written out: compilers take a hundredth of a second and more for each."""


@dataclass(frozen=True)
class Flat:
    """program: its outputs are single tensors. weights: one tensor for each of its weights. shape: where each output of the wide program is among them. parts: for
    each weight the number of the value that it is, or is a part of, and which part: -1 for all of it."""

    program: Program
    weights: list[torch.Tensor]
    shape: tuple[Any, ...]
    parts: tuple[tuple[int, int], ...]

    def outputs(self, found: Sequence[torch.Tensor]) -> list[Any]:
        """The wide program's outputs from those of this one."""
        return [_filled(s, found) for s in self.shape]


@dataclass(frozen=True, slots=True)
class _Leaf:
    number: int


def _filled(shape: Any, found: Sequence[torch.Tensor]) -> Any:
    return found[shape.number] if isinstance(shape, _Leaf) else [_filled(s, found) for s in shape] if isinstance(shape, (list, tuple)) else shape


def flatten(program: Program, values: Sequence[Any], backend: str, said: str) -> Flat:
    """Raises: UsageError for a program that is too long with its loops written out."""
    many = nodes_unrolled(program)
    if many > MOST_NODES:
        raise UsageError(
            f"{said} has {many:,} nodes with its loops written out for {program.members} members, and backend {backend!r} takes up to {MOST_NODES:,}: "
            "a compiler would work on it for hours. Load with backend='eager', or with strategies='wide' so that less runs in loops"
        )
    slots: list[Slot] = []
    tensors: dict[str, torch.Tensor] = {}
    lists: dict[str, Any] = {}
    places: dict[str, tuple[int, int]] = {}
    for number, (slot, value) in enumerate(zip(program.weights, values)):
        if isinstance(value, torch.Tensor):
            slots.append(slot)
            tensors[slot.name] = value
            places[slot.name] = number, -1
            continue
        if not isinstance(value, (list, tuple)):
            lists[slot.name] = value  # a number that the prologue made
            continue
        lists[slot.name] = parts = []
        for i, part in enumerate(value):
            if isinstance(part, torch.Tensor):
                source = f"{slot.source}@{i}" if slot.source else ""  # its name in the weights file
                slots.append(replace(slot, name=f"{slot.name}__{i}", source=source, kind="shared", type=""))
                tensors[slots[-1].name] = part
                places[slots[-1].name] = number, i
                parts.append(Ref(slots[-1].name))
            else:
                parts.append(part)
    if lists:

        def to(name: str) -> Any:
            return lists.get(name, Ref(name))

        program = replace(
            program,
            nodes=tuple(replace(n, args=substitute(n.args, to), kwargs=substitute(n.kwargs, to)) for n in program.nodes),
            outputs=tuple(replace(o, value=substitute(o.value, to)) for o in program.outputs),
        )
    whole = sweep(unroll(replace(program, weights=tuple(slots))))
    leaves: list[str] = []

    def leaf(name: str) -> _Leaf:
        if name not in leaves:
            leaves.append(name)
        return _Leaf(leaves.index(name))

    shape = tuple(substitute(o.value, leaf) for o in whole.outputs)
    outputs = tuple(replace(whole.outputs[0], value=Ref(name), kind="stacked") for name in leaves)
    return Flat(replace(whole, outputs=outputs), [dense(tensors[s.name]) for s in whole.weights], shape, tuple(places[s.name] for s in whole.weights))


def nodes_unrolled(program: Program) -> int:
    """How many nodes a program has with its loops written out."""
    return sum(program.members * len(n.body.nodes) if n.body else 1 for n in program.nodes)


def dense(weight: torch.Tensor) -> torch.Tensor:
    """The weight itself where its elements fill its memory, in whatever order; else a copy whose do."""
    order = sorted((stride, size) for stride, size in zip(weight.stride(), weight.shape) if size != 1)
    expected = 1
    for stride, size in order:
        if stride != expected:
            return weight.contiguous().resolve_conj().resolve_neg()
        expected *= size
    return weight.resolve_conj().resolve_neg()
