"""Reads the header of a safetensors file strictly, before the file is mapped. No torch is imported.

The file begins with 8 bytes of length (little-endian). Then follows JSON: name -> `{"dtype", "shape",
"data_offsets"}`, and `__metadata__`, an object of texts. Each byte of the data must belong to exactly one
tensor.
"""

from __future__ import annotations

import math
import os
import stat
import struct
from pathlib import Path
from typing import Any, NamedTuple

from . import strict_json
from .errors import ArtifactError

MAX_BYTES = 100_000_000
"""The limit of a header, the same as in safetensors."""
MAX_RANK = 66  # the member axis, 64 dims of a member, and the pairs of complex numbers
_METADATA = "__metadata__"
ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4,
    "I64": 8, "U64": 8, "F64": 8, "C64": 8,
}  # fmt: skip  # one line for each size


class Extent(NamedTuple):
    """A tensor of the file. `begin` and `end` are the positions of its bytes in the data."""

    dtype: str
    shape: list[int]
    begin: int
    end: int


class Header(NamedTuple):
    """The tensors and metadata of a file. `start` is the position of the data in the file."""

    tensors: dict[str, Extent]
    metadata: dict[str, str]
    start: int


def read(path: Path) -> Header:
    """Reads the header of a file. Raises: ArtifactError if the file is not a complete safetensors file."""
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ArtifactError(f"{path}: a special file; an artifact has plain files only")
            first = file.read(8)
            length = struct.unpack("<Q", first)[0] if len(first) == 8 else -1
            if not 0 <= length <= min(MAX_BYTES, status.st_size - 8):
                raise ArtifactError(
                    f"{path}: not a whole safetensors file: {status.st_size:,} bytes, "
                    f"and a header of {max(length, 0):,}"
                )
            data = file.read(length)
    except OSError as e:
        raise ArtifactError(f"{path}: not a whole safetensors file: {e.strerror or e}") from e
    what = f"{path}: the header"
    rows = strict_json.parse(data, what)
    if not isinstance(rows, dict):
        raise ArtifactError(f"{what} is not an object")
    metadata = rows.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ArtifactError(f"{what}: {_METADATA} is not an object of texts")
    header = Header(
        {name: _extent(row, f"{what}: {name[:80]!r}") for name, row in rows.items()}, metadata, 8 + length
    )
    _check_order(header, status.st_size - 8 - length, f"{path}: not a whole safetensors file")
    return header


def _extent(row: Any, what: str) -> Extent:
    if not isinstance(row, dict) or set(row) != {"dtype", "shape", "data_offsets"}:
        raise ArtifactError(f"{what}: expected dtype, shape and data_offsets, got {str(row)[:80]}")
    dtype, shape, offsets = row["dtype"], row["shape"], row["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise ArtifactError(
            f"{what}: the dtype {str(dtype)[:40]!r} is unknown; known: {', '.join(ITEM_BYTES)}"
        )
    if (
        not isinstance(shape, list)
        or len(shape) > MAX_RANK
        or not all(type(n) is int and n >= 0 for n in shape)
    ):
        raise ArtifactError(f"{what}: the shape {str(shape)[:80]} is not a list of up to {MAX_RANK} sizes")
    if (
        not isinstance(offsets, list)
        or len(offsets) != 2
        or not all(type(n) is int and n >= 0 for n in offsets)
    ):
        raise ArtifactError(f"{what}: data_offsets {str(offsets)[:80]} is not a pair of positions")
    size = math.prod(shape) * ITEM_BYTES[dtype]
    if offsets[1] - offsets[0] != size:
        raise ArtifactError(
            f"{what}: {dtype}{str(shape)[:80]} has {size:,} bytes, "
            f"and data_offsets {offsets} hold {offsets[1] - offsets[0]:,}"
        )
    return Extent(dtype, shape, offsets[0], offsets[1])


def _check_order(header: Header, size: int, what: str) -> None:
    """Refuses data in which a byte belongs to no tensor or to two."""
    at = 0
    for name, extent in sorted(header.tensors.items(), key=lambda row: (row[1].begin, row[1].end)):
        if extent.begin != at:
            raise ArtifactError(
                f"{what}: {name[:80]!r} begins at {extent.begin:,}, and what is before it ends at {at:,}: "
                "a hole, or two tensors over each other"
            )
        at = extent.end
    if at != size:
        raise ArtifactError(f"{what}: the tensors end at {at:,}, the file's data at {size:,}")
