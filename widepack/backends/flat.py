"""Prepares a wide program for compilers: tensors only, loops written out, every weight dense.

requires: the main part of a wide program and the values of its weights. ensures: the same answers, from a
program without loops, without lists of weights, and without nodes that nothing reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from widepack_artifacts.program import Program, Ref, Slot, substitute

from ..errors import UsageError
from ..ir.edit import sweep
from ..runtime.unroll import unroll

MOST_NODES = 6000
"""The most nodes of a program with its loops written out.

A compiler takes a hundredth of a second or more for each.
"""


@dataclass(frozen=True)
class Flat:
    """A program for compilers.

    program: each of its outputs is one tensor. weights: one tensor for each of its weights. shape: where each
    output of the wide program is among these outputs. parts: for each weight the number of the wide program's
    weight, and which part of that it is, -1 for all of it.
    """

    program: Program
    weights: list[torch.Tensor]
    shape: tuple[Any, ...]
    parts: tuple[tuple[int, int], ...]

    def outputs(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """The outputs of the wide program, from the outputs of this one."""
        return [_filled(s, tensors) for s in self.shape]


@dataclass(frozen=True, slots=True)
class _TensorLeaf:
    number: int


def _filled(shape: Any, tensors: Sequence[torch.Tensor]) -> Any:
    # without a generic walk: this runs in every call
    if isinstance(shape, _TensorLeaf):
        return tensors[shape.number]
    return [_filled(s, tensors) for s in shape] if isinstance(shape, (list, tuple)) else shape


def flatten(program: Program, values: Sequence[Any], backend: str, name: str) -> Flat:
    """Prepares a program. values: of its weights. name: the program in error messages.

    Raises: UsageError for a program that has too many nodes with its loops written out.
    """
    nodes = nodes_unrolled(program)
    if nodes > MOST_NODES:
        raise UsageError(
            f"{name}: the program has {nodes:,} nodes with its loops written out for "
            f"{program.members} members, and backend {backend!r} takes at most {MOST_NODES:,}: "
            "compilation would take hours.\n"
            "Load with backend='eager', or with strategies='wide' so that less runs in loops."
        )
    weights = _TensorWeights(program, values)
    whole = sweep(unroll(weights.without_lists(program)))
    leaves: dict[str, int] = {}
    shape = tuple(
        substitute(o.value, lambda n: _TensorLeaf(leaves.setdefault(n, len(leaves)))) for o in whole.outputs
    )
    outputs = tuple(replace(whole.outputs[0], value=Ref(n), kind="stacked") for n in leaves)
    return Flat(
        replace(whole, outputs=outputs),
        [dense(weights.tensors[s.name]) for s in whole.weights],
        shape,
        tuple(weights.places[s.name] for s in whole.weights),
    )


class _TensorWeights:
    """The weights of a program with each list of tensors replaced by single weights.

    slots: the new weights. tensors, places: the value of each, and its place as in `Flat.parts`. lists: for
    each weight that is no tensor, what its readers read instead.
    """

    def __init__(self, program: Program, values: Sequence[Any]) -> None:
        self.slots: list[Slot] = []
        self.tensors: dict[str, torch.Tensor] = {}
        self.places: dict[str, tuple[int, int]] = {}
        self.lists: dict[str, Any] = {}
        for number, (slot, value) in enumerate(zip(program.weights, values)):
            if isinstance(value, torch.Tensor):
                self._add(slot, value, (number, -1))
            elif isinstance(value, (list, tuple)):
                self.lists[slot.name] = [self._part(slot, p, (number, i)) for i, p in enumerate(value)]
            else:
                self.lists[slot.name] = value  # a number that the prologue computed

    def _add(self, slot: Slot, value: torch.Tensor, place: tuple[int, int]) -> None:
        self.slots.append(slot)
        self.tensors[slot.name] = value
        self.places[slot.name] = place

    def _part(self, slot: Slot, part: Any, place: tuple[int, int]) -> Any:
        if not isinstance(part, torch.Tensor):
            return part
        i = place[1]
        source = f"{slot.source}@{i}" if slot.source else ""  # the name in the weights file
        self._add(replace(slot, name=f"{slot.name}__{i}", source=source, kind="shared", type=""), part, place)
        return Ref(self.slots[-1].name)

    def without_lists(self, program: Program) -> Program:
        """The program over these weights."""

        def to(name: str) -> Any:
            return self.lists.get(name, Ref(name))

        if self.lists:
            nodes = tuple(
                replace(n, args=substitute(n.args, to), kwargs=substitute(n.kwargs, to))
                for n in program.nodes
            )
            outputs = tuple(replace(o, value=substitute(o.value, to)) for o in program.outputs)
            program = replace(program, nodes=nodes, outputs=outputs)
        return replace(program, weights=tuple(self.slots))


def nodes_unrolled(program: Program) -> int:
    """The number of nodes that a program has with its loops written out."""
    return sum(program.members * len(n.body.nodes) if n.body else 1 for n in program.nodes)


def dense(weight: torch.Tensor) -> torch.Tensor:
    """The weight itself if its elements fill its memory, in any order; else a contiguous copy."""
    order = sorted((stride, size) for stride, size in zip(weight.stride(), weight.shape) if size != 1)
    expected = 1
    for stride, size in order:
        if stride != expected:
            return weight.contiguous().resolve_conj().resolve_neg()
        expected *= size
    return weight.resolve_conj().resolve_neg()
