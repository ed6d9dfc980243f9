"""Simplifies the member programs of an entry, once for each pattern, and keeps the results.

The passes run in this order. The result is a member program again.

1. Remove copies and casts that have no effect (`drop_copies`), and equal nodes (`drop_duplicates`).
2. Move linear layers before a new order of their rows, and write chains of reshapes and transposes as views
   (view_chains.py).
3. Compute one position of a dim where only one is read (select_pushdown.py).
4. Rewrite values at the true positions of Stacked masks (masked_selection.py).
5. Fold norms into the weights next to them (norm_folding.py), and join narrow linear layers over one value
   (horizontal_fusion.py).
6. Remove equal nodes again, and nodes that no other node reads.
7. Rewrite transposed convolutions of stride 1, and of windows that do not overlap, as convolutions
   (transposed_conv.py).

Steps 1 to 3 do not depend on kinds (`straighten`); the others do (`fold_all`).

Requires: a functional member program and the kinds of its slots. Ensures: equal results except for rounding;
no value has a higher kind than the value that it replaces.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from widepack_artifacts import weights as weight_files
from widepack_artifacts.program import Kind, Node, Program, Ref, Tag

from ..ir import ops
from ..ir.edit import DENSE, VIEWS, drop_duplicates, renamed, sweep, types_of, with_nodes
from ..ir.encoding import type_of
from ..ir.fake_values import Shapes
from ..ir.kinds import slot_kinds
from ..spec.state import CarriedState
from .factored_weights import FactorNames, with_factors
from .horizontal_fusion import join_siblings
from .masked_selection import select_by_masks
from .norm_folding import fold_batch_norms, fold_layer_norms
from .select_pushdown import narrow
from .transposed_conv import convolve_plainly
from .view_chains import merge_views, rows_in_order

_COPIES = ops.full_names("clone contiguous alias detach lift_fresh_copy dropout")
END = (1 << 63) - 1  # export writes it for a slice without an end


def straighten(program: Program, shapes: Shapes) -> Program:
    """Runs the passes that do not depend on kinds: copies, row order, views, positions that no node reads."""
    straight = drop_duplicates(drop_copies(program))
    for rewrite in (rows_in_order, merge_views, narrow):
        straight = rewrite(straight, shapes)
    old, values = {n.name for n in program.nodes}, shapes.of(straight)
    typed = (n if n.out or n.name in old else replace(n, out=type_of(values[n.name])) for n in straight.nodes)
    return replace(straight, nodes=tuple(typed))


def straighten_all(programs: Sequence[Program], shapes: Sequence[Shapes]) -> list[Program]:
    """Runs `straighten` on the program of each shape signature.

    All results have the same nodes. If they differ, for example because of a size of 1, only copies are
    removed.
    """
    straight = [straighten(p, s) for p, s in zip(programs, shapes)]
    return straight if _alike(straight) else [drop_copies(p) for p in programs]


def _alike(programs: Sequence[Program]) -> bool:
    """Whether all programs have the same nodes: names and ops."""
    return all(
        [(n.name, n.op) for n in p.nodes] == [(n.name, n.op) for n in programs[0].nodes] for p in programs
    )


def fold_all(programs: Sequence[Program], slots: Mapping[str, Kind]) -> list[Program]:
    """Runs the passes that depend on kinds over straight programs, in the same way for all."""
    folded = [fold(p, slots) for p in programs]
    plainly = [convolve_plainly(p, slots) for p in folded]
    return plainly if _alike(plainly) else folded


def fold(program: Program, slots: Mapping[str, Kind]) -> Program:
    """Runs the passes that depend on kinds: masked selections, norms and joined layers."""
    folded = fold_layer_norms(fold_batch_norms(select_by_masks(program, slots), slots), slots)
    return sweep(drop_duplicates(join_siblings(folded, slots)))


def drop_copies(program: Program) -> Program:
    """Removes copies, which have no effect in a functional program, and casts that change nothing."""
    to: dict[str, Any] = {}
    types = types_of(program)
    kept: list[Node] = []
    for node in program.nodes:
        node = renamed(node, to)
        source = node.args[0] if node.args else None
        if node.op in DENSE and isinstance(source, Ref):  # the copy before it may be removed
            in_order = {"memory_format": Tag("memory_format", "contiguous_format")}
            kept.append(
                Node(f"{node.name}_dense", "aten.clone.default", (source,), in_order, "", node.source)
            )
            node = replace(node, args=(Ref(kept[-1].name), *node.args[1:]))
        if node.op in VIEWS:  # a view may need a copy if the one before it is removed
            node = replace(node, op="aten.reshape.default")
        same = isinstance(source, Ref) and types[node.name] != "" and types[source.name] == types[node.name]
        copies = (node.op in _COPIES and isinstance(source, Ref)) or (
            node.op == "aten._to_copy.default" and same
        )
        if copies or (node.op == "aten.slice.Tensor" and _is_whole(node)):  # `x[:]`
            to[node.name] = source
        elif (written := _written_whole(node)) is not None and types[written.name] == types[node.name] != "":
            to[node.name] = written
        else:
            kept.append(node)
    return with_nodes(program, kept, to)


def _written_whole(node: Node) -> Ref | None:
    """Returns `y` of `x[:] = y` and of `x.copy_(y)`, which write all of x; None for another node."""
    if node.op != "aten.copy.default" and not (node.op == "aten.slice_scatter.default" and _is_whole(node)):
        return None
    source = ops.bind(node.op, node.args, node.kwargs).get("src")
    return source if isinstance(source, Ref) else None


def _is_whole(node: Node) -> bool:
    """Whether a slice, or a write to one, takes all places of its dim."""
    bound = ops.bind(node.op, node.args, node.kwargs)
    return bound.get("start") in (None, 0) and bound.get("end") in (None, END) and bound.get("step", 1) == 1


class MemberPrograms:
    """The member programs of one entry: the base of the entries of builds, artifacts and fused modules.

    programs: one for each shape signature, in plain ops.
    kind: returns the kind of a weight, by its name in the table of weights.
    states: the values that the caller carries from call to call.
    sizes: the size of each dim in the example.
    signatures: for each member the index of its program.
    factors: the weights that are stored as factors, by name. Wide programs read the factors.
    stored: the programs over the stored weights.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        kind: Callable[[str], Kind],
        states: Sequence[CarriedState],
        sizes: Mapping[str, int],
        signatures: Sequence[int],
        factors: Mapping[str, FactorNames] | None = None,
    ) -> None:
        self.programs, self.kind, self.states = list(programs), kind, tuple(states)
        self.signatures = tuple(signatures)
        self.shapes = [Shapes(sizes) for _ in programs]
        self.stored = [with_factors(p, factors) for p in self.programs] if factors else self.programs
        self._simple: dict[str, list[Program]] = {}
        self._straight: list[Program] = []

    @property
    def count(self) -> int:
        """The number of members."""
        return len(self.signatures)

    def weight(self, name: str, member: int, files: weight_files.Weights) -> torch.Tensor:
        """Returns one member's value of a weight, mapped from the weights files."""
        return files.of_member(name, self.kind(name), member)

    def weights_of(self, member: int, files: weight_files.Weights) -> dict[str, torch.Tensor]:
        """Returns the weights of a member's program by source name, mapped from the weights files."""
        program = self.programs[self.signatures[member]]
        return {s.source: self.weight(s.source, member, files) for s in program.weights}

    def slots(self, pattern: str) -> dict[str, Kind]:
        """Returns the kind of every stored weight and every input of the member program, by value name.

        A state has one value for each member in every pattern.
        """
        every = range(len(self.programs[0].inputs))
        return self.slots_for({s.input for s in self.states} if pattern == "shared" else every)

    def slots_for(self, stacked: Container[int]) -> dict[str, Kind]:
        """Returns what `slots` does. stacked: the numbers of the inputs with one value for each member."""
        return slot_kinds(self.stored[0], self.kind, stacked)

    def simple(self, pattern: str) -> list[Program]:
        """Returns the member programs, simplified for a pattern."""
        if pattern not in self._simple:
            self._simple[pattern] = self.folded(self.slots(pattern))
        return self._simple[pattern]

    def folded(self, slots: Mapping[str, Kind]) -> list[Program]:
        """Returns the member programs, simplified for these kinds of weights and inputs."""
        if not self._straight:
            self._straight = straighten_all(self.stored, self.shapes)
        return fold_all(self._straight, slots)
