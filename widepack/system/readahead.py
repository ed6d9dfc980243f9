"""What a subset of the members reads from the disk: its slices and no more.

A page that a mapped file does not have yet is read with all that lies around it, by some systems megabytes: 2 of 64 members would read half of the file. So the parts
that are needed are asked for by their offsets first, and a page that is there already brings no others. It is a hint: where the system has none, more is read.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from widepack_artifacts import header
from widepack_artifacts.manifest import Weight

Extent = tuple[Path, int, int]
"""A part of a file: offset and bytes."""

_STEP = 128 * 2**10  # Linux takes no more of one call than it reads ahead by itself
_HEADER = 100 * 2**20  # of a safetensors file, by its definition


def read_headers(files: Sequence[Path]) -> None:
    """Have the headers of safetensors files in memory, and not what follows them."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in files:
        with contextlib.suppress(OSError), open(path, "rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            size = int.from_bytes(os.pread(file.fileno(), 8, 0), "little")
            os.pread(file.fileno(), min(8 + size, _HEADER), 0)


def will_read(parts: Iterable[tuple[Path, int, int]]) -> None:
    """Ask for parts of files. parts: (file, offset, bytes)."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path, offset, size in parts:
        with contextlib.suppress(OSError), open(path, "rb", buffering=0) as file:
            for begin in range(0, size, _STEP):
                os.posix_fadvise(file.fileno(), offset + begin, min(_STEP, size - begin), os.POSIX_FADV_WILLNEED)


def extents(files: Sequence[Path]) -> dict[str, Extent]:
    """Where each tensor of safetensors files lies. Raises: ArtifactError."""
    found = {}
    for path in files:
        read = header.read(path)
        for name, row in read.tensors.items():
            found[name] = path, read.start + row.begin, row.end - row.begin
    return found


def parts_of(row: Weight, where: Mapping[str, Extent], members: int, chosen: Sequence[int]) -> list[Extent]:
    """Where some members' parts of a weight lie, and the first byte of the tensor: whoever opens one looks at its first page. members: all that there are."""
    if row.kind == "shared":
        return [where[row.name]]
    if row.kind == "ragged":
        return [where[f"{row.name}@{i}"] for i in chosen]
    path, offset, size = where[row.name]
    one = size // members
    return [(path, offset, 1), *((path, offset + i * one, one) for i in chosen)]


def asking(rows: Sequence[Weight], files: Sequence[Path], members: int) -> Callable[[Sequence[int]], None]:
    """What has the parts of some members read: a page that is missing would bring megabytes of other members' with it. rows: the weights. files: that they are in."""
    where = extents(files)
    return lambda chosen: will_read(extent for row in rows for extent in parts_of(row, where, members, chosen))
