"""Reads ahead only the parts of weights files that some members need.

When a mapped page is missing, the system also reads the pages around it, on some systems megabytes: loading 2
of 64 members would read half of the file. So the needed parts are requested first, by offset; a page that is
in memory brings no others. This is a hint: on a system without it more is read.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from widepack_artifacts import header
from widepack_artifacts.manifest_weights import Weight, member_tensor

Extent = tuple[Path, int, int]
"""A part of a file: offset and bytes."""

_STEP = 128 * 2**10  # Linux reads no more for one call than it reads ahead by itself
_HEADER = 100 * 2**20  # of a safetensors file, by its specification


def read_headers(files: Sequence[Path]) -> None:
    """Reads the headers of safetensors files into memory, without the pages behind them."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in files:
        with contextlib.suppress(OSError), open(path, "rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            size = int.from_bytes(os.pread(file.fileno(), 8, 0), "little")
            os.pread(file.fileno(), min(8 + size, _HEADER), 0)


def will_read(parts: Iterable[tuple[Path, int, int]]) -> None:
    """Requests parts of files. parts: (file, offset, bytes)."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path, offset, size in parts:
        with contextlib.suppress(OSError), open(path, "rb", buffering=0) as file:
            for begin in range(0, size, _STEP):
                os.posix_fadvise(
                    file.fileno(), offset + begin, min(_STEP, size - begin), os.POSIX_FADV_WILLNEED
                )


def extents(files: Sequence[Path]) -> dict[str, Extent]:
    """The place of each tensor of safetensors files. Raises: ArtifactError."""
    places = {}
    for path in files:
        read = header.read(path)
        for name, row in read.tensors.items():
            places[name] = path, read.start + row.begin, row.end - row.begin
    return places


def parts_of(row: Weight, where: Mapping[str, Extent], members: int, chosen: Sequence[int]) -> list[Extent]:
    """The places of some members' parts of a weight, and of its first byte, which is read when the tensor is
    opened.

    members: the number of members in the file. chosen: the numbers of those to read.
    """
    if row.kind == "shared":
        return [where[row.name]]
    if row.kind == "ragged":
        return [where[member_tensor(row.name, i)] for i in chosen]
    path, offset, size = where[row.name]
    one = size // members
    return [(path, offset, 1), *((path, offset + i * one, one) for i in chosen)]


def asking(rows: Sequence[Weight], files: Sequence[Path], members: int) -> Callable[[Sequence[int]], None]:
    """Returns a function that requests the parts of some members.

    rows: the weights. files: the files that contain them.
    """
    where = extents(files)
    return lambda chosen: will_read(
        extent for row in rows for extent in parts_of(row, where, members, chosen)
    )
