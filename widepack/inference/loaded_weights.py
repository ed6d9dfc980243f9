"""Reads the weights of an open artifact for programs: mapped on the CPU, else copied once."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from widepack_artifacts.manifest import Manifest
from widepack_artifacts.manifest_weights import Weight
from widepack_artifacts.reader import Reader
from widepack_artifacts.weights import Weights

from ..backends.task import Mapped
from ..errors import ArtifactError
from ..spec.dtypes import dtype_of
from ..system.memory import release_pages
from ..system.pinned_copy import Pinned
from ..system.readahead import Extent, extents, parts_of, will_read
from .cast import Cast


class LoadedWeights:
    """The weights of the loaded members on a device.

    Args:
        reader: The artifact's files.
        files: Its weights files, mapped.
        chosen: The numbers of the loaded members.
        device: Where programs run.
        cast: The cast to another dtype; None for the artifact's.
        lock: Guards the copies.
    """

    def __init__(
        self,
        reader: Reader,
        files: Weights,
        chosen: Sequence[int],
        device: torch.device,
        cast: Cast | None,
        lock: threading.RLock,
    ) -> None:
        self.reader, self.files, self.chosen, self.device, self.cast = reader, files, chosen, device, cast
        self.manifest: Manifest = reader.manifest
        self._rows = {w.name: w for w in (*self.manifest.member_weights, *self.manifest.weights)}
        self._factored = {w.name for w in self.manifest.factored.weights}
        self._lock = lock
        self._pinned = Pinned(device)
        first, last = chosen[0], chosen[-1]
        adjacent = tuple(chosen) == tuple(range(first, last + 1))
        self._slice = slice(first, last + 1) if adjacent else None  # adjacent members need no copy
        # Copies live as long as a program, or somebody else, uses them.
        self._copies: dict[str, list[TensorWeakRef]] = {}
        self._member_copies: dict[tuple[str, int], TensorWeakRef] = {}

    def row(self, name: str) -> Weight:
        """Returns the row of a stored weight, or of a weight of the members. Raises: ArtifactError."""
        if name not in self._rows:
            raise ArtifactError(
                f"a program reads the weight {name[:80]!r}, which the manifest's table does not have"
            )
        return self._rows[name]

    # ---------------------------------------------------------------- all loaded members

    def get(self, name: str) -> Any:
        """Returns a weight of the loaded members on the device: shared `[...]`, stacked `[N, ...]`, ragged a
        list of N.

        On the CPU it is mapped. It is copied if the loaded members are not adjacent in the file, or for a
        cast. All programs share one copy.
        """
        row = self.row(name)
        with self._lock:
            if (copies := self.copies(name)) is not None:
                return copies if row.kind == "ragged" else copies[0]
            value, mapped = self._read(row)
            if not mapped:
                tensors = value if row.kind == "ragged" else [value]
                self._copies[name] = [TensorWeakRef(v) for v in tensors]
            return value

    def copies(self, name: str) -> list[Tensor] | None:
        """Returns the copies of a weight that programs use: one tensor, or N of a ragged one; else None."""
        found = [copy() for copy in self._copies.get(name, ())]
        copies = [f for f in found if f is not None]
        return copies if found and len(copies) == len(found) else None

    def _read(self, row: Weight) -> tuple[Any, bool]:
        """Returns the value, and whether it is mapped."""
        mapped, what = self._is_mapped(row), f"weight {row.name}"
        self._request(row, self.chosen)
        if row.kind == "ragged":
            return [
                self.place(
                    self.files.of_member(row.name, row.kind, i),
                    f"{what} of member {self.manifest.members[i].name}",
                )
                for i in self.chosen
            ], mapped
        if row.name in self._factored:
            return torch.stack([self.place(self.part(row.name, i), what) for i in self.chosen]), False
        if row.kind == "shared":
            return self.place(self.files.get(row.name), what), mapped
        if self._slice is not None:
            return self.place(self.files.get(row.name)[self._slice], what), mapped
        return torch.stack([self.place(self.files.slice(row.name, i), what) for i in self.chosen]), False

    # ---------------------------------------------------------------- one member

    def part(self, name: str, number: int) -> Tensor:
        """Returns a weight of one member as the file has it, mapped, or computed from its factors.

        number: of the member in the artifact.
        """
        row = self.row(name)
        if name not in self._factored:
            self._request(row, [number])
        return self.files.of_member(name, row.kind, number)

    def for_sizes(self, name: str, number: int) -> Tensor:
        """Returns a weight of one member of which only the sizes count. A factored one is not computed."""
        if name not in self._factored:
            return self.part(name, number)
        row = self.row(name)
        return torch.empty(row.of(number), dtype=dtype_of(row.dtype), device="meta")

    def of_member(self, name: str, place: int) -> Tensor:
        """Returns a weight of one loaded member on the device. place: of the member among the loaded ones."""
        row = self.row(name)
        if self._is_mapped(row):
            return self.part(name, self.chosen[place])
        with self._lock:
            if (copies := self.copies(name)) is not None:
                if row.kind == "ragged":
                    return copies[place]
                return copies[0] if row.kind == "shared" else copies[0][place]
            if (copy := self.member_copy(name, place)) is None:
                number = self.chosen[place]
                what = f"weight {name} of member {self.manifest.members[number].name}"
                copy = self.place(self.part(name, number), what)
                self._member_copies[name, place] = TensorWeakRef(copy)
            return copy

    def member_copy(self, name: str, place: int) -> Tensor | None:
        """Returns the copy of one member's part of a weight that is in use; None if no copy exists."""
        copy = self._member_copies.get((name, place))
        return copy() if copy is not None else None

    # ---------------------------------------------------------------- files and device

    def place(self, value: Tensor, what: str) -> Tensor:
        """Returns a tensor on the device, in the requested dtype.

        what: the tensor's name in messages. Raises: UsageError for a number that the dtype cannot represent.
        """
        if self.device.type == "cuda" and value.device.type == "cpu":
            value = self._pinned.place(value)
        else:
            value = value.to(self.device)
        return self.cast.value(value, what) if self.cast else value

    def _is_mapped(self, row: Weight) -> bool:
        """Returns whether programs read this weight from the mapped files."""
        return self.device.type == "cpu" and (self.cast is None or row.dtype not in self.cast.table)

    def _request(self, row: Weight, numbers: Sequence[int]) -> None:
        """Starts to read members' parts of a weight, if not all are loaded. numbers: in the artifact."""
        members = len(self.manifest.members)
        if tuple(self.chosen) != tuple(range(members)):
            # This is a hint only. The files may have been replaced since they were mapped.
            with contextlib.suppress(ArtifactError, OSError):
                will_read(parts_of(row, self._extents, members, numbers))

    @cached_property
    def _extents(self) -> dict[str, Extent]:
        """Where each tensor of the weights files is."""
        return extents(self.reader.weights_files())

    def located(self) -> list[Mapped]:
        """Returns where every tensor of the weights files is mapped."""
        return [
            Mapped(self.files.get(name).data_ptr(), size, path.name, offset)
            for name, (path, offset, size) in self._extents.items()
        ]

    def release(self) -> None:
        """Takes the pages of the weights files out of memory: other copies are used."""
        release_pages((part.at, part.bytes) for part in self.located())

    def close(self) -> None:
        """Forgets the copies. Tensors that are in use stay valid."""
        self._copies.clear()
