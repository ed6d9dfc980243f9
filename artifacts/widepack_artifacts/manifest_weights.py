"""Defines the weights table of a manifest. No torch is imported."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from .fields import manifest_error, read_choice, read_list, read_name, read_object, read_shape

KINDS = ("shared", "stacked", "ragged")
FACTOR = "factor"
ROLES = ("parameter", "buffer", "constant", FACTOR)
ITEM_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int16": 2, "uint16": 2, "float16": 2, "bfloat16": 2,
    "int32": 4, "uint32": 4, "float32": 4,
    "int64": 8, "uint64": 8, "float64": 8, "complex64": 8,
    "complex128": 16,
}  # fmt: skip  # one line for each size
"""The dtypes that a weight may have, with the bytes of one element."""

_PART = re.compile(r"(?:0|[1-9][0-9]{0,9})\Z")


def member_tensor(name: str, member: int) -> str:
    """Returns the name of one member's tensor of a ragged weight in the weights files."""
    return f"{name}@{member}"


def member_of(tensor: str) -> tuple[str, int]:
    """Returns the name and the member of `member_tensor`; the number is -1 if the tensor is none."""
    name, at, number = tensor.rpartition("@")
    return (name, int(number)) if at and _PART.match(number) else (tensor, -1)


@dataclass(frozen=True, slots=True)
class Weight:
    """A row of the weights table.

    `shape` is the shape in one member, without the member axis; for a Ragged weight it is a list of N shapes
    of one rank. `aliases` are other names of the same value (tied weights).

    In the weights files, a Shared weight is the tensor `name` of shape `[*shape]`, and a Stacked one is the
    tensor `name` of shape `[N, *shape]`. A Ragged weight is N tensors, `name@0` to `name@N-1`.
    """

    name: str
    kind: str
    dtype: str
    shape: list[Any]
    role: str
    aliases: list[str] = field(default_factory=list)

    def of(self, member: int) -> list[int]:
        """Returns the shape in one member."""
        return list(self.shape[member]) if self.kind == "ragged" else list(self.shape)

    def tensors(self, members: int) -> dict[str, list[int]]:
        """Returns the names and shapes of the tensors in the weights files that contain this weight."""
        return dict(self.each(members))

    def each(self, members: int) -> Iterator[tuple[str, list[int]]]:
        """Yields the rows of `tensors` one by one, because an untrusted table may have millions of long
        names.
        """
        if self.kind == "ragged":
            yield from ((member_tensor(self.name, i), self.of(i)) for i in range(members))
        else:
            yield self.name, [members, *self.shape] if self.kind == "stacked" else list(self.shape)

    def bytes(self, members: int) -> int:
        """Returns the number of bytes of the weight on disk."""
        if self.kind == "ragged":
            count = sum(math.prod(shape) for shape in self.shape)
        else:
            count = math.prod(self.shape) * (members if self.kind == "stacked" else 1)
        return int(count) * ITEM_BYTES[self.dtype]

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "kind": self.kind,
            "dtype": self.dtype,
            "shape": self.shape,
            "role": self.role,
            "aliases": self.aliases,
        }

    @classmethod
    def from_json(cls, data: Any, members: int, where: str = "a weight") -> Weight:
        d = read_object(data, where, ("name", "kind", "dtype", "shape", "role", "aliases"))
        name = read_name(d["name"], f"{where}: name")
        where = f"weight {name[:200]}"
        kind = read_choice(d["kind"], KINDS, f"{where}: kind")
        dtype = read_choice(d["dtype"], tuple(ITEM_BYTES), f"{where}: dtype")
        row = cls(
            name,
            kind,
            dtype,
            _read_shapes(d["shape"], members, where) if kind == "ragged" else _read_one(d["shape"], where),
            read_choice(d["role"], ROLES, f"{where}: role"),
            read_list(d["aliases"], f"{where}: aliases", read_name),
        )
        if row.bytes(members) >= 2**63:
            raise manifest_error(
                f"{where}: {dtype}{d['shape']} for {members} members has more bytes than 64 bits can count"
            )
        return row


def _read_one(value: Any, where: str) -> list[Any]:
    return read_shape(value, f"{where}: shape")


def _read_shapes(value: Any, members: int, where: str) -> list[Any]:
    """Reads the shapes of a Ragged weight, one for each member."""
    shapes = read_list(value, f"{where}: shape", read_shape)
    if len(shapes) != members or len({len(s) for s in shapes}) != 1:
        raise manifest_error(
            f"{where}: a ragged weight has one shape for each of the {members} members, all of one rank; "
            f"got {str(shapes)[:80]}"
        )
    return shapes


def check_ragged_names(weights: Iterable[Weight], members: int) -> None:
    """Refuses a name that is also the tensor `name@<i>` of a Ragged weight.

    It compares without writing out the names of all tensors, because an untrusted table may have millions.
    """
    ragged = {w.name for w in weights if w.kind == "ragged"}
    for name in (name for w in weights if ragged for name in (w.name, *w.aliases)):
        of, member = member_of(name)
        if of in ragged and 0 <= member < members:
            raise manifest_error(
                f"weights: the name {name[:80]!r} occurs twice: "
                f"it is also the name of a tensor of the ragged weight {of[:80]!r}"
            )
