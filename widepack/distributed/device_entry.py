"""Defines an entry of a model on several devices of one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..inference.entry import WideEntry
from ..inference.graph_use import GraphUse
from ..inference.member import Member
from ..inference.model import WideModel
from ..inference.part_reduction import PartReduction, Sums
from ..inference.prepared_call import PreparedCall, PreparedReduction
from ..inference.reduced_answer import Reduction
from ..inference.router import Router
from ..inference.row_groups import RowGroups
from ..planning.plan import Plan
from ..spec.names import number_of
from ..system.gate import Gate
from .joined import Together, join_members, join_rows, merge_sums
from .split_entry import SplitEntry


class DeviceEntry(SplitEntry):
    """One entry of a model on several devices: one method of the members, for all members at once.

    It is called as a `WideEntry` is. Inputs are on the first device; each is copied once to every other one.
    The thread of the caller launches the parts one after the other, and joins them on the first device.

    Attributes:
        name: The method's name.
        entry: What the manifest says of the entry.
        members: The names of all members.
        parts: The places of the members of each part.
        device: Where inputs are and answers are joined.
    """

    def __init__(self, name: str, models: Sequence[WideModel], parts: Sequence[range], gate: Gate) -> None:
        members = tuple(m for model in models for m in model.members)
        self._entries: list[WideEntry] = [model.entry(name) for model in models]
        self._devices = [model.device for model in models]
        self._gate = gate
        first = models[0]
        super().__init__(self._entries[0].entry, name, first.manifest, members, parts, first.device)

    @property
    def backend(self) -> str:
        return "+".join(dict.fromkeys(e.backend for e in self._entries))

    @property
    def runs_on(self) -> str:
        return " + ".join(e.runs_on for e in self._entries)

    def plans(self, pattern: str = "shared") -> list[Plan]:
        """Returns the plans of the first part, one for each batch class.

        Args:
            pattern: `shared` or `each`.

        Returns:
            The plans, the smallest batch class first.
        """
        return self._entries[0].plans(pattern)

    def graph_use(self, pattern: str = "shared") -> list[GraphUse]:
        """Returns which calls of the first part run by CUDA graphs, and why others do not.

        Args:
            pattern: `shared` or `each`.

        Returns:
            One `GraphUse` for each batch class, the smallest first.
        """
        return self._entries[0].graph_use(pattern)

    def warmup(self, patterns: Sequence[str] = ("shared",)) -> None:
        for entry in self._entries:
            entry.warmup(patterns)

    def probe(self) -> None:
        for entry in self._entries:
            entry.probe()

    def member(self, member: int | str) -> Member:
        place = number_of(self.members, member)
        part = self._part_of[place]
        return self._entries[part].member(place - self.parts[part].start)

    def state(self, **sizes: int) -> dict[str, Tensor]:
        fresh = [entry.fresh_state(sizes) for entry in self._entries]
        with self._gate.passed():
            found = [make() for make in fresh]
        return {name: torch.cat([part[name].to(self.device) for part in found]) for name in found[0]}

    # ---------------------------------------------------------------- all parts

    def _moved(self, values: Sequence[Tensor], per_member: Sequence[bool]) -> list[list[Tensor]]:
        """Returns the inputs of each part on its device. What all members share is copied once to each."""
        copies = {
            device: [None if stacked else v.to(device) for v, stacked in zip(values, per_member)]
            for device in dict.fromkeys(self._devices)
        }
        return [
            [
                v[places.start : places.stop].to(device) if copy is None else copy
                for v, copy in zip(values, copies[device])
            ]
            for device, places in zip(self._devices, self.parts)
        ]

    def _outputs(self, values: Sequence[Tensor], per_member: Sequence[bool]) -> list[Any]:
        moved = zip(self._entries, self._moved(values, per_member))
        calls = [PreparedCall(entry, inputs, per_member) for entry, inputs in moved]
        return join_members(calls, Together(calls).through(self._gate), self.device)

    def _sums(self, values: Sequence[Tensor], per_member: Sequence[bool], reduction: Reduction) -> Sums:
        total = len(self.members)
        parts = [PartReduction.part_of(reduction, places.start, total) for places in self.parts]
        moved = zip(self._entries, self._moved(values, per_member), parts)
        calls = [PreparedReduction(entry, inputs, per_member, part) for entry, inputs, part in moved]
        found = Together(calls).through(self._gate)
        return merge_sums([call.sums(outputs) for call, outputs in zip(calls, found)], self.device)

    def _router(self) -> Router:
        return self._entries[0].router

    def _rows(self, values: Sequence[Tensor], numbers: Sequence[int], groups: RowGroups) -> list[Any]:
        router = self._router()
        split = zip(*(groups.split(v, axis) for v, axis in zip(values, router.axes)))
        calls = []
        for part, rows, inputs in zip(groups.members, groups.rows, split):
            places = [numbers[row] - self.parts[part].start for row in rows]
            moved = [v.to(self._devices[part]) for v in inputs]
            calls.append(self._entries[part].router.prepared(moved, places))
        found = Together(calls).through(self._gate)
        return [
            join_rows(groups, leaves, axis.dim, self.device)
            for leaves, axis in zip(zip(*found), router.dims)
            if axis is not None
        ]
