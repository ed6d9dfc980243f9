"""Weights as safetensors files: written as a stream, a member at a time, and mapped lazily. Imports torch.

The file format is https://github.com/huggingface/safetensors#format: 8 bytes of header length (little-endian), a JSON header, the data. Its rule that
the data has no holes leaves two freedoms, which serve alignment: the header is padded so that data starts at a multiple of 64 bytes, and the tensors
are ordered by the largest power of two that divides their size, so that each starts at a multiple of it (64 at most).

safetensors has no complex128: such a tensor is stored as float64 `[..., 2]` and named in the metadata, `"complex128": '["name", ...]'`.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from . import header as headers
from . import strict_json
from .errors import ArtifactError
from .manifest import ITEM_BYTES, Weight

_PAIRS = "complex128"
ALIGNMENT = 64  # a cache line, and the widest vector load
_CODES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int16": "I16",
    "uint16": "U16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "int64": "I64",
    "uint64": "U64",
    "float64": "F64",
    "complex64": "C64",
    "complex128": "F64",  # and a last dim of 2
}
_NAMES = {code: name for name, code in _CODES.items() if name != _PAIRS}
_CHUNK_BYTES = 64 * 2**20
_SAID = 20  # differences that an error names

Source = Callable[[], Iterator[Tensor]]
"""Makes a tensor's content when it is its turn: its members in order, or any other parts that follow each other in memory."""


class Sink(Protocol):
    def write(self, data: memoryview, /) -> object: ...


def write(file: Sink, entries: Iterable[tuple[str, Sequence[int], torch.dtype, Source]], metadata: Mapping[str, str] | None = None) -> int:
    """Write a safetensors file and give its size in bytes. At most one part of one tensor is held at a time.

    entries: (name, shape, dtype, source); the parts that the source yields have this dtype and, one after another, fill the shape.
    Raises: ArtifactError for a dtype that the format does not have, a name that stands twice, and parts that do not fit.
    """
    if sys.byteorder != "little":
        raise ArtifactError("weights are little-endian; this machine is not")
    rows = [(name, list(shape), str(dtype).removeprefix("torch."), source) for name, shape, dtype, source in entries]
    for name, _, dtype, _ in rows:
        if dtype not in ITEM_BYTES:
            raise ArtifactError(f"weight {name} is {dtype}, which has no form in an artifact; known: {', '.join(ITEM_BYTES)}")
    rows.sort(key=lambda row: -_alignment(_bytes(row[1], row[2])))
    notes = dict(metadata or {})
    if any(dtype == _PAIRS for _, _, dtype, _ in rows):
        notes[_PAIRS] = json.dumps([name for name, _, dtype, _ in rows if dtype == _PAIRS])
    header: dict[str, Any] = {"__metadata__": notes} if notes else {}
    at = 0
    for name, shape, dtype, _ in rows:
        if name in header or name == "__metadata__":
            raise ArtifactError(f"weight {name}: the name stands twice or is the format's own")
        header[name] = {"dtype": _CODES[dtype], "shape": _stored(shape, dtype), "data_offsets": [at, at := at + _bytes(shape, dtype)]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    file.write(memoryview(struct.pack("<Q", len(text)) + text))
    for name, shape, dtype, source in rows:
        _stream(file, name, _bytes(shape, dtype), dtype, source)
    return 8 + len(text) + at


def _bytes(shape: Sequence[int], dtype: str) -> int:
    return math.prod(shape) * ITEM_BYTES[dtype]


def _stored(shape: list[int], dtype: str) -> list[int]:
    return [*shape, 2] if dtype == _PAIRS else shape


def _alignment(size: int) -> int:
    """The largest power of two, up to ALIGNMENT, that divides a size in bytes."""
    return math.gcd(size, ALIGNMENT)


def _stream(file: Sink, name: str, needed: int, dtype: str, source: Source) -> None:
    done = 0
    for part in source():
        if str(part.dtype) != f"torch.{dtype}":
            raise ArtifactError(f"weight {name}: a part is {str(part.dtype).removeprefix('torch.')}, the weight {dtype}")
        done += part.numel() * part.element_size()
        if done > needed:
            raise ArtifactError(f"weight {name}: the parts have over {needed:,} bytes, which is all that its shape holds")
        for view in views(part):
            file.write(view)
    if done != needed:
        raise ArtifactError(f"weight {name}: the parts have {done:,} bytes, its shape holds {needed:,}")


def views(part: Tensor) -> Iterator[memoryview]:
    """The tensor's bytes in chunks, uncopied where it is contiguous in memory. NumPy, which would do it, is not needed otherwise."""
    held = part.detach().resolve_conj().resolve_neg().cpu().contiguous()
    size = held.numel() * held.element_size()
    for start in range(0, size, _CHUNK_BYTES):
        length = min(_CHUNK_BYTES, size - start)
        yield memoryview((ctypes.c_char * length).from_address(held.data_ptr() + start)).cast("B")
    del held  # kept until here: the views look into its memory


class Weights:
    """Tensors of safetensors files by name, mapped and read when they are touched.

    The mapping is private: writing into a tensor changes this process's pages and never the file.
    Raises: ArtifactError for a file that is no safetensors file, and for a name in two files.
    """

    def __init__(self, files: Sequence[str | os.PathLike[str]]) -> None:
        self._open: dict[str, Any] = {}
        self._pairs: set[str] = set()
        for file in files:
            headers.read(Path(file))
            try:
                opened: Any = safe_open(Path(file), framework="pt")
            except (SafetensorError, OSError) as e:
                raise ArtifactError(f"{file}: not a whole safetensors file: {e}") from e
            self._pairs |= _pairs(opened, str(file))
            for name in opened.keys():  # noqa: SIM118  it is no dict
                if name in self._open:
                    raise ArtifactError(f"{file}: the weight {name[:80]!r} is in another file already")
                self._open[name] = opened

    @property
    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted(self._open)

    def __contains__(self, name: str) -> bool:
        return name in self._open

    def __len__(self) -> int:
        return len(self._open)

    def info(self, name: str) -> tuple[str, list[int]]:
        """(dtype, shape) from the header alone."""
        found = self._of(name).get_slice(name)
        if name in self._pairs:
            return _PAIRS, list(found.get_shape())[:-1]
        return _NAMES.get(found.get_dtype(), str(found.get_dtype())), list(found.get_shape())

    def get(self, name: str) -> Tensor:
        """The tensor, uncopied. Raises: ArtifactError for a name that is not there."""
        found: Tensor = self._of(name).get_tensor(name)
        return torch.view_as_complex(found) if name in self._pairs else found

    def slice(self, name: str, i: int) -> Tensor:
        """`[i]` of the tensor, uncopied: the weight of one member."""
        return self.get(name)[i]

    def check(self, table: Iterable[Weight], members: int) -> None:
        """Refuse files that do not hold exactly what the manifest's table says; all differences in one error. Reads headers only."""
        problems: list[str] = []
        left = set(self._open)

        def compare(name: str, found: tuple[str, list[int]] | None, wanted: tuple[str, list[int]] | None) -> None:
            if found == wanted:
                return
            if len(problems) == _SAID:  # what comes from a stranger may differ in millions of names
                raise ArtifactError("\n  ".join([said, *sorted(problems), "and more"]))
            problems.append(f"{name[:120]}: {_said(found)} in the files, {_said(wanted)} in the manifest")

        said = "the weights files do not hold what the manifest says:"
        for row in table:
            for name, shape in row.each(members):
                compare(name, self.info(name) if name in self._open else None, (row.dtype, shape))
                left.discard(name)
        for name in sorted(left):
            compare(name, self.info(name), None)
        if problems:
            raise ArtifactError("\n  ".join([said, *sorted(problems)]))

    def _of(self, name: str) -> Any:
        if name not in self._open:
            raise ArtifactError(f"weight {name[:80]!r} is in none of the weights files")
        return self._open[name]


def _pairs(opened: Any, file: str) -> set[str]:
    """The names of the tensors that are complex128."""
    names = strict_json.parse((opened.metadata() or {}).get(_PAIRS, "[]").encode(), f"{file}: metadata {_PAIRS}")
    if not isinstance(names, list):
        raise ArtifactError(f"{file}: metadata {_PAIRS} is no list of names")
    known, seen = set(opened.keys()), set[str]()  # each call of keys() makes a list
    for name in names:
        if isinstance(name, str) and name in seen:
            raise ArtifactError(f"{file}: metadata {_PAIRS} names {name[:60]!r} twice")
        found = opened.get_slice(name) if isinstance(name, str) and name in known else None
        if found is None or found.get_dtype() != _CODES[_PAIRS] or list(found.get_shape())[-1:] != [2]:
            raise ArtifactError(f"{file}: metadata {_PAIRS} names {str(name)[:60]!r}, which is not stored as pairs of float64")
        seen.add(name)
    return seen


def _said(info: tuple[str, list[int]] | None) -> str:
    return f"{info[0]}{info[1]}" if info else "nothing"
