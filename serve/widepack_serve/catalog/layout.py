"""Describes an entry for the wire: its inputs and outputs, and where the rows of a batch are in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import torch

from widepack.errors import UsageError
from widepack.inference.entry import WideEntry
from widepack.ir.tensor_type import TensorType, tensor_type
from widepack.rows.axes import row_axis
from widepack.rows.layout import RowAxis
from widepack.spec.dtypes import dtype_of
from widepack.spec.entries import PATTERNS
from widepack.spec.output_names import STATE, output_name
from widepack_artifacts.entry import Entry

from ..protocol.datatypes import BY_DTYPE, Datatype

_NUMBERS = count()
ANY = -1
"""A size on the wire that may change."""


@dataclass(frozen=True, slots=True)
class WireTensor:
    """An input or an output of an entry on the wire.

    Attributes:
        name: Its name.
        datatype: The type of its numbers.
        sizes: The sizes in one member; -1 where a size may change.
        rows: Where the rows of the batch are; None if it has none.
        state: Whether it is a state.
        ragged: Whether the members' shapes differ.
    """

    name: str
    datatype: Datatype
    sizes: tuple[int, ...]
    rows: RowAxis | None
    state: bool = False
    ragged: bool = False


class EntryLayout:
    """The inputs and outputs of an entry on the wire.

    Args:
        entry: An entry of a loaded model.

    Attributes:
        entry: The same.
        inputs: In the order of the manifest.
        outputs: In the order of the manifest.
        only_binary: The numbers of the outputs that only binary data can carry: FP16 and BF16.
        batch: The dim of the rows; "" if requests cannot share a batch.
        reason: Why they cannot; "" if they can.
        least_rows, most_rows: The fewest and the most rows of a call; None if any larger number is allowed.
        divisible: Whether the rows of a call may run in several calls, as far as these limits allow.
        on_one_thread: Whether the calling thread does the work of a call, and no other thread or device.
        number: Differs from that of every other layout of the process. Caches remember it, not the layout,
            which would keep a replaced artifact in memory.

    Raises:
        UsageError: The protocol has no datatype for an input or an output.
    """

    def __init__(self, entry: WideEntry) -> None:
        self.entry = entry
        self.number = next(_NUMBERS)
        spec = entry.entry
        self.batch, self.reason = _batch(entry)
        try:
            self.inputs, self.outputs = self._described(spec)
        except ValueError as e:
            self.batch, self.reason = "", f"rows along {self.batch} are not in one dim: {e}"
            self.inputs, self.outputs = self._described(spec)
        if self.batch and not any(i.rows for i in self.inputs):
            self.batch, self.reason = "", f"no input has a row for each answer along {self.batch}"
        if self.batch and any(o.rows is None for o in self.outputs):
            self.batch, self.reason = "", f"an output has no rows along {self.batch}"
        self.least_rows = max(spec.dims[self.batch].min, 1) if self.batch else 1
        self.most_rows = spec.dims[self.batch].max if self.batch else None
        self.divisible = bool(self.batch) and not spec.guards
        self.only_binary = frozenset(k for k, o in enumerate(self.outputs) if not o.datatype.numbers)
        self.on_one_thread = _on_one_thread(entry)

    def _described(self, spec: Entry) -> tuple[list[WireTensor], list[WireTensor]]:
        """Returns the inputs and the outputs. Raises: UsageError; ValueError for rows in several dims."""
        inside, out = {s.input for s in spec.state}, {s.output for s in spec.state}
        inputs = [
            self._tensor(f"{STATE}{i.name}" if k in inside else i.name, i.type, state=k in inside)
            for k, i in enumerate(spec.inputs)
        ]
        outputs = [
            self._tensor(output_name(spec, k), o.type, state=k in out, ragged=o.kind == "ragged")
            for k, o in enumerate(spec.outputs)
        ]
        return inputs, outputs

    def _tensor(self, name: str, text: str, *, state: bool, ragged: bool = False) -> WireTensor:
        type_ = tensor_type(text)
        if type_ is None:
            raise UsageError(f"{self.entry.name}: {name} is {text or 'of an unknown type'}, not a tensor")
        dtype = dtype_of(type_.dtype)
        if dtype not in BY_DTYPE:
            raise UsageError(f"{self.entry.name}: {name} is {type_.dtype}, which the protocol cannot carry")
        rows = row_axis(type_, self.batch) if self.batch else None
        return WireTensor(name, BY_DTYPE[dtype], _sizes(type_, rows, ragged), rows, state, ragged)

    @property
    def ragged(self) -> bool:
        """Whether the members' answers have different shapes."""
        return any(o.ragged for o in self.outputs)

    def per_member(self, stacked: bool) -> Sequence[bool]:
        """Returns for each input whether it has one value for each member.

        stacked: whether inputs that are not states have one.
        """
        return [stacked or i.state for i in self.inputs]


def _sizes(type_: TensorType, rows: RowAxis | None, ragged: bool) -> tuple[int, ...]:
    if ragged:
        return (ANY,) * type_.rank
    return tuple(size if isinstance(size, int) else ANY for size in type_.sizes)


def _batch(entry: WideEntry) -> tuple[str, str]:
    """Returns along which dim requests can share a batch, and why they cannot."""
    if entry.entry.state:
        return "", "it has states"
    found = entry.tensor_calls.rows_of_callers
    if not found.independent:
        return "", f"its rows are not known to be independent: {found.reason}"
    return found.dim, ""


def _on_one_thread(entry: WideEntry) -> bool:
    """Returns whether the thread that calls an entry does its work."""
    programs = entry.programs
    plans = [p for pattern in PATTERNS for p in programs.source.stored_plans(pattern)]
    here = programs.artifact.device.type == "cpu" and "onnxruntime" not in entry.backend
    return here and not any(p.workers for p in plans)


def zeros(layout: EntryLayout, rows: int, members: int | None) -> list[torch.Tensor]:
    """Returns inputs of zeros for a call with a number of rows; sizes that may change are the smallest.

    members: N for inputs with one value for each member; None for shared ones.
    """
    spec = layout.entry.entry
    found = []
    for described, given in zip(layout.inputs, spec.inputs):
        type_ = tensor_type(given.type)
        assert type_ is not None
        sizes = []
        for size in type_.dims:
            if isinstance(size, int):
                sizes.append(size)
                continue
            dim = spec.dims[size.letter]
            sizes.append(size.factor * (rows if size.letter == layout.batch else max(dim.min, 1)))
        stacked = [members] if members is not None else []
        found.append(torch.full([*stacked, *sizes], max(given.low or 0, 0), dtype=described.datatype.dtype))
    return found
