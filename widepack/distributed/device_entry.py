"""Defines an entry of a model on several devices of one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..inference.model import WideModel
from ..inference.reduced_answer import Reduction
from ..inference.routing.row_groups import RowGroups
from ..system.gate import Gate
from .part_calls import (
    PartReduction,
    PreparedCall,
    PreparedReduction,
    Sums,
    Together,
    join_members,
    join_rows,
    merge_sums,
)
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
        here = {k: model.entry(name) for k, model in enumerate(models)}
        super().__init__(name, here, models[0].manifest, members, parts, gate, models[0].device)
        self._devices = [model.device for model in models]

    def state(self, **sizes: int) -> dict[str, Tensor]:
        fresh = [entry.fresh_state(sizes) for entry in self._here.values()]
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
        moved = zip(self._here.values(), self._moved(values, per_member))
        calls = [PreparedCall(entry, inputs, per_member) for entry, inputs in moved]
        return join_members(calls, Together(calls).through(self._gate), self.device)

    def _sums(self, values: Sequence[Tensor], per_member: Sequence[bool], reduction: Reduction) -> Sums:
        total = len(self.members)
        parts = [PartReduction(reduction, places.start, total) for places in self.parts]
        moved = zip(self._here.values(), self._moved(values, per_member), parts)
        calls = [PreparedReduction(entry, inputs, per_member, part) for entry, inputs, part in moved]
        found = Together(calls).through(self._gate)
        return merge_sums([call.sums(outputs) for call, outputs in zip(calls, found)], self.device)

    def _rows(self, values: Sequence[Tensor], numbers: Sequence[int], groups: RowGroups) -> list[Any]:
        router = self._first.router
        split = zip(*(groups.split(v, axis) for v, axis in zip(values, router.axes)))
        calls = []
        for part, rows, inputs in zip(groups.members, groups.rows, split):
            places = [numbers[row] - self.parts[part].start for row in rows]
            moved = [v.to(self._devices[part]) for v in inputs]
            calls.append(self._here[part].router.prepared(moved, places))
        found = Together(calls).through(self._gate)
        return [
            join_rows(groups, leaves, axis.dim, self.device)
            for leaves, axis in zip(zip(*found), router.dims)
            if axis is not None
        ]
