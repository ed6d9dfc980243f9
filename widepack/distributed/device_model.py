"""Defines a loaded artifact whose members are on several devices of one process, and its entries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from widepack_artifacts.manifest import Manifest
from widepack_artifacts.manifest import Member as MemberCheckpoint

from ..inference.loaded_model import LoadedModel
from ..inference.model import WideModel
from ..inference.reduced_answer import Reduction
from ..inference.routing.row_groups import RowGroups
from ..spec.names import number_of
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

if TYPE_CHECKING:
    from ..inference.members.swap import SwapReport


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


class DeviceModel(LoadedModel[DeviceEntry]):
    """N trained members on several devices that run in one call. `widepack.load(device=[...])` returns it.

    It is called as a `WideModel` is. Inputs and answers are on the first device. `reduce` moves sums of each
    part instead of the members' answers, except for quantiles, outputs whose shapes differ, and models with
    states. An answer has all members as they were before a swap, or as they were after it.

    Attributes:
        members: The names of all members, part after part.
        checkpoints: The checkpoint that each member is now.
        entries: The names of the entries.
        manifest: The manifest of the artifact. A swap does not change it.
        device: The first device.
        devices: The device of each part.
        models: The part of the members on each device, as a model of its own.
        plan: The first part's plan of pattern `shared` at the smallest batch class.
        backend: What runs the programs.

    Example:
        >>> ens = widepack.load("ens.wide", device=["cuda:0", "cuda:1"])
        >>> y = ens(x)  # x on cuda:0: [B, 8], y on cuda:0: [N, B, 3]
    """

    __module__ = "widepack"  # pickles name the public place

    def __init__(
        self,
        models: Sequence[WideModel],
        parts: Sequence[range],
        gate: Gate,
        again: Callable[[], DeviceModel],
    ) -> None:
        super().__init__({name: DeviceEntry(name, models, parts, gate) for name in models[0].entries})
        self.models, self._again = tuple(models), again
        self._members = tuple(m for model in models for m in model.members)
        self._places = [(model, place) for model in models for place in range(len(model))]

    @property
    def members(self) -> tuple[str, ...]:
        return self._members

    @property
    def checkpoints(self) -> tuple[MemberCheckpoint, ...]:
        return tuple(c for model in self.models for c in model.checkpoints)

    @property
    def manifest(self) -> Manifest:
        return self.models[0].manifest

    @property
    def device(self) -> torch.device:
        return self.models[0].device

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The device of each part.

        Example:
            >>> ens = widepack.load("ens.wide", device=["cpu", "cpu"])
            >>> ens.devices
            (device(type='cpu'), device(type='cpu'))
        """
        return tuple(model.device for model in self.models)

    def __reduce__(self) -> tuple[Callable[[], DeviceModel], tuple[()]]:
        """Copies and pickles by the path: the copy loads the same artifact with the same arguments.

        Raises: TypeError after a swap, which is of this process only; UsageError after `close`.
        """
        self._refuse_copy_of_swapped(self.manifest)
        for model in self.models:
            model.__reduce__()  # refuses after `close`
        return self._again, ()

    # ---------------------------------------------------------------- members, documented in `LoadedModel`

    def _place(self, member: int | str) -> tuple[WideModel, int]:
        """Returns the model that has a member, and the member's place there. Raises: UsageError."""
        return self._places[number_of(self.members, member)]

    def state_dict(self, member: int | str) -> dict[str, Any]:
        model, place = self._place(member)
        return model.state_dict(place)

    def stored_state(self, member: int | str) -> dict[str, Any]:
        model, place = self._place(member)
        return model.stored_state(place)

    def _swap(
        self, member: int | str, checkpoint: str | PathLike[str] | Mapping[str, Any], how: Mapping[str, Any]
    ) -> SwapReport:
        part, place = self._place(member)
        return part.swap(place, checkpoint, **how)

    def close(self) -> None:
        for model in self.models:
            model.close()
