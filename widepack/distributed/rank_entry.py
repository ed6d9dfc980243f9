"""Defines an entry of a model whose members are in several processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import UsageError
from ..inference.model import WideModel
from ..inference.reduced_answer import Reduction
from ..inference.routing.row_groups import RowGroups
from ..reduction.sums import StreamedSums
from ..system.gate import Gate
from .collectives import Ranks, described
from .part_calls import PartReduction, PreparedCall, PreparedReduction, Sums, Together, join_rows
from .split_entry import SplitEntry

ADDED = ("mean", "expected_entropy", "counts")
"""Sums that the group adds up. Others are gathered and merged."""


class RankEntry(SplitEntry):
    """One entry of a model in several processes. All ranks make the same calls, with the inputs of rank 0.

    Attributes:
        name: The method's name.
        entry: What the manifest says of the entry.
        members: The names of all members.
        parts: The places of the members of each rank.
        device: Where this rank's inputs, members and answers are.
    """

    def __init__(
        self,
        name: str,
        model: WideModel,
        members: tuple[str, ...],
        parts: Sequence[range],
        ranks: Ranks,
        gate: Gate,
    ) -> None:
        here = {ranks.rank: model.entry(name)}
        super().__init__(name, here, model.manifest, members, parts, gate, model.device)
        self._ranks, self._lock = ranks, ranks.lock
        self._places = parts[ranks.rank]

    @property
    def runs_on(self) -> str:
        return f"rank {self._ranks.rank} of {self._ranks.size}: {super().runs_on}"

    def refuse_elsewhere(self, place: int) -> None:  # documented in `SplitEntry`
        if place not in self._places:
            raise UsageError(
                f"member {self.members[place]} is on rank {self._part_of[place]}, this is rank "
                f"{self._ranks.rank}; take it there, or load it with widepack.load(members=[{place}])"
            )

    def state(self, **sizes: int) -> dict[str, Tensor]:
        with self._lock:
            text = f"{self.name} state {sorted(sizes.items())}"
            found = self._ranks.agreed(lambda: self._first.state(**sizes), lambda _: text)
            shapes = [[(len(p), *v.shape[1:]) for v in found.values()] for p in self.parts]
            gathered = self._ranks.gathered(list(found.values()), shapes)
            return dict(zip(found, map(torch.cat, zip(*gathered))))

    def _checked(self, check: Callable[[], Any]) -> Any:
        return self._ranks.agreed(check, lambda found: f"{self.name} {_call(found)}")

    def _through(self, call: Any) -> Any:
        """Runs this rank's part inside the gate. The caller makes sure that all ranks know if it fails."""
        return Together([call]).through(self._gate)[0]

    # ---------------------------------------------------------------- all ranks

    def _inputs(self, values: Sequence[Tensor], per_member: Sequence[bool]) -> list[Tensor]:
        """Returns the inputs of this rank's members, from rank 0."""
        found = []
        for value, stacked in zip(values, per_member):
            if stacked:
                part = self._ranks.parts_from_first([value[p.start : p.stop] for p in self.parts])
                assert part is not None  # every rank has members
                found.append(part)
            else:
                found.append(self._ranks.from_first(value))
        return found

    def _outputs(self, values: Sequence[Tensor], per_member: Sequence[bool]) -> list[Any]:
        inputs = self._inputs(values, per_member)

        def run() -> list[Any]:
            call = PreparedCall(self._first, inputs, per_member)
            return call.leaves(self._through(call))

        leaves = self._ranks.agreed(run, lambda _: "ran")
        flat = [t for leaf in leaves for t in (leaf if isinstance(leaf, list) else [leaf])]
        shapes = None
        if not any(isinstance(leaf, list) for leaf in leaves):
            shapes = [[(len(p), *leaf.shape[1:]) for leaf in leaves] for p in self.parts]
        gathered = [iter(tensors) for tensors in self._ranks.gathered(flat, shapes)]
        return [
            [next(t) for t, p in zip(gathered, self.parts) for _ in p]
            if isinstance(leaf, list)
            else torch.cat([next(t) for t in gathered])
            for leaf in leaves
        ]

    def _sums(self, values: Sequence[Tensor], per_member: Sequence[bool], reduction: Reduction) -> Sums:
        parts = [PartReduction(reduction, p.start, len(self.members)) for p in self.parts]
        inputs = self._inputs(values, per_member)

        def run() -> Sums:
            call = PreparedReduction(self._first, inputs, per_member, parts[self._ranks.rank])
            return call.sums(self._through(call))

        mine = self._ranks.agreed(run, lambda _: "summed")
        empty = torch.empty(0)
        shares = [list(part.shares(empty, len(p)).values()) for part, p in zip(parts, self.parts)]
        return {name: self._total(one, shares) for name, one in mine.items()}

    def _total(self, mine: StreamedSums, shares: Sequence[Sequence[float]]) -> StreamedSums:
        """Returns the sums of all ranks. shares: the weights of the members of each rank."""
        tensors = mine.tensors
        added = {n: self._ranks.summed(t) for n, t in tensors.items() if n in ADDED}
        others = {n: t for n, t in tensors.items() if n not in ADDED}
        total = StreamedSums(mine.of, mine.dim, mine.equal, mine.reads)
        if others:
            shapes = [[t.shape for t in others.values()]] * self._ranks.size
            for rank, weights in zip(self._ranks.gathered(list(others.values()), shapes), shares):
                part = StreamedSums(mine.of, mine.dim, mine.equal, mine.reads)
                part.put(dict(zip(others, rank)), len(weights), sum(weights))
                total.merge(part)
        every = [w for weights in shares for w in weights]
        total.put({**total.tensors, **added}, len(every), sum(every))
        total.dtype = mine.dtype
        return total

    def _rows(self, values: Sequence[Tensor], numbers: Sequence[int], groups: RowGroups) -> list[Any]:
        router, size = self._first.router, self._ranks.size
        inputs: list[Any] = []
        for value, axis in zip(values, router.axes):
            if axis is None:
                inputs.append(self._ranks.from_first(value))
                continue
            parts: list[Tensor | None] = [None] * size
            for rank, part in zip(groups.members, groups.split(value, axis)):
                parts[rank] = part
            inputs.append(self._ranks.parts_from_first(parts))
        found: list[Any] = self._ranks.agreed(
            lambda: self._part_of_rows(inputs, numbers, groups), lambda _: "ran"
        )
        # A leaf is a tensor, or a list with one tensor for each row if their shapes differ.
        counts = torch.tensor(
            [len(leaf) if isinstance(leaf, list) else 0 for leaf in found], device=self.device
        )
        flat = [t for leaf in found for t in (leaf if isinstance(leaf, list) else [leaf])]
        gathered = self._ranks.gathered([counts, *flat])
        leaves = []
        for rank in groups.members:
            tensors = iter(gathered[rank])
            lists = next(tensors).tolist()
            leaves.append([[next(tensors) for _ in range(n)] if n else next(tensors) for n in lists])
        return [
            join_rows(groups, parts_, axis.dim, self.device)
            for parts_, axis in zip(zip(*leaves), router.dims)
            if axis is not None
        ]

    def _part_of_rows(self, inputs: Sequence[Any], numbers: Sequence[int], groups: RowGroups) -> list[Any]:
        """Runs the rows of this rank's members. Returns: the outputs; [] without rows."""
        if self._ranks.rank not in groups.members:
            return []
        rows = groups.rows[groups.members.index(self._ranks.rank)]
        call = self._first.router.prepared(inputs, [numbers[row] - self._places.start for row in rows])
        found: list[Any] = self._through(call)
        return found


def _call(found: Any) -> str:
    """Returns what ranks must agree on: the call without what follows from it."""
    return described([part for part in found if not isinstance(part, RowGroups)])
