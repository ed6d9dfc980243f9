"""Writes weights as safetensors files, as a stream, and maps them lazily. Imports torch.

The file format is https://github.com/huggingface/safetensors#format: 8 bytes of header length
(little-endian), a JSON header, the data. The data must have no holes, so alignment uses two freedoms. The
header is padded, and so the data starts at a multiple of 64 bytes. The tensors are sorted by the largest
power of two that divides their size, at most 64, and so each tensor starts at a multiple of it.

safetensors has no complex128. Such a tensor is stored as float64 `[..., 2]`, and the metadata lists its name:
`"complex128": '["name", ...]'`.
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
from weakref import WeakValueDictionary

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from . import header as headers
from . import strict_json
from .correction import StackedFactors, rounded, whole
from .errors import ArtifactError
from .factored import Factored, FactoredWeight
from .file_identity import FileIdentity, check_on_disk
from .manifest_weights import ITEM_BYTES, Weight, member_of, member_tensor

_PAIRS = "complex128"
ALIGNMENT = 64  # a cache line, and the widest vector load
CODES = {
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
NAMES = {code: name for name, code in CODES.items() if name != _PAIRS}
_CHUNK_BYTES = 64 * 2**20
_MOST_FOR_ELEMENT, _MOST_BESIDE = 10, 1024  # bytes of a correction; its streams have 9.2 for an element
_MOST_NAMED = 20  # differences that an error names

Source = Callable[[], Iterator[Tensor]]
"""Yields the content of a tensor when it is written, as parts that are adjacent in memory: usually one for
each member.
"""


class Sink(Protocol):
    """A file that bytes are written into."""

    def write(self, data: memoryview, /) -> object: ...


def write(
    file: Sink,
    entries: Iterable[tuple[str, Sequence[int], torch.dtype, Source]],
    metadata: Mapping[str, str] | None = None,
) -> int:
    """Writes a safetensors file and returns its size in bytes.

    At most one part of one tensor is in memory at a time.

    Args:
        file: Where the bytes go.
        entries: (name, shape, dtype, source) of each tensor. The parts of a source have this dtype and fill
            the shape in order.
        metadata: Texts for the header.

    Raises:
        ArtifactError: The format has no such dtype, a name occurs twice, or the parts do not fit the shape.
    """
    if sys.byteorder != "little":
        raise ArtifactError("weights are little-endian; this machine is not")
    rows = [
        (name, list(shape), str(dtype).removeprefix("torch."), source)
        for name, shape, dtype, source in entries
    ]
    for name, _, dtype, _ in rows:
        if dtype not in ITEM_BYTES:
            raise ArtifactError(
                f"weight {name} is {dtype}, which has no form in an artifact; known: {', '.join(ITEM_BYTES)}"
            )
    rows.sort(key=lambda row: -_alignment(_bytes(row[1], row[2])))
    text, size = _header([(name, shape, dtype) for name, shape, dtype, _ in rows], metadata or {})
    file.write(memoryview(struct.pack("<Q", len(text)) + text))
    for name, shape, dtype, source in rows:
        _stream(file, name, _bytes(shape, dtype), dtype, source)
    return 8 + len(text) + size


def _header(rows: Sequence[tuple[str, list[int], str]], metadata: Mapping[str, str]) -> tuple[bytes, int]:
    """Returns the header of tensors in this order, padded to `ALIGNMENT`, and the bytes of the data."""
    notes = dict(metadata)
    if any(dtype == _PAIRS for _, _, dtype in rows):
        notes[_PAIRS] = json.dumps([name for name, _, dtype in rows if dtype == _PAIRS])
    header: dict[str, Any] = {"__metadata__": notes} if notes else {}
    at = 0
    for name, shape, dtype in rows:
        if name in header or name == "__metadata__":
            raise ArtifactError(f"weight {name}: the name occurs twice or is reserved by the format")
        header[name] = {
            "dtype": CODES[dtype],
            "shape": _stored_shape(shape, dtype),
            "data_offsets": [at, at := at + _bytes(shape, dtype)],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    return text + b" " * (-(8 + len(text)) % ALIGNMENT), at


def _bytes(shape: Sequence[int], dtype: str) -> int:
    return math.prod(shape) * ITEM_BYTES[dtype]


def _stored_shape(shape: list[int], dtype: str) -> list[int]:
    return [*shape, 2] if dtype == _PAIRS else shape


def _alignment(size: int) -> int:
    """Returns the largest power of two, up to ALIGNMENT, that divides a size in bytes."""
    return math.gcd(size, ALIGNMENT)


def _stream(file: Sink, name: str, needed: int, dtype: str, source: Source) -> None:
    done = 0
    for part in source():
        if str(part.dtype) != f"torch.{dtype}":
            raise ArtifactError(
                f"weight {name}: a part is {str(part.dtype).removeprefix('torch.')}, the weight {dtype}"
            )
        done += part.numel() * part.element_size()
        if done > needed:
            raise ArtifactError(f"weight {name}: the parts have more than the {needed:,} bytes of its shape")
        for view in views(part):
            file.write(view)
    if done != needed:
        raise ArtifactError(f"weight {name}: the parts have {done:,} bytes, its shape has {needed:,}")


def views(part: Tensor) -> Iterator[memoryview]:
    """Yields the tensor's bytes in chunks, without a copy if it is contiguous. (It avoids a dependency on
    NumPy.)
    """
    dense = part.detach().resolve_conj().resolve_neg().cpu().contiguous()
    size = dense.numel() * dense.element_size()
    for start in range(0, size, _CHUNK_BYTES):
        length = min(_CHUNK_BYTES, size - start)
        yield memoryview((ctypes.c_char * length).from_address(dense.data_ptr() + start)).cast("B")
    del dense  # it must live until here, because the views point into its memory


class Weights:
    """Tensors of safetensors files by name. The files are mapped, and pages are read on first use.

    The mapping is private: a write into a tensor changes this process's memory and never the file.

    Args:
        files: The files.
        factored: The weights that are stored as factors.
        corrections: The file of their corrections, or None. It is read only for single members' weights.

    Attributes:
        identities: The files that are mapped, as they were when they were opened.

    Raises:
        ArtifactError if a file is not a safetensors file, or a name is in two files.
    """

    def __init__(
        self,
        files: Sequence[str | os.PathLike[str]],
        factored: Factored | None = None,
        corrections: str | os.PathLike[str] | None = None,
    ) -> None:
        self._factored = {w.name: w for w in factored.weights} if factored is not None else {}
        self._corrections = None if corrections is None else Weights([corrections])
        if self._corrections is not None:
            _check_corrections(self._corrections, self._factored)
        self._replaced: dict[tuple[str, int], tuple[int, bytes]] = {}
        self._computed: WeakValueDictionary[tuple[str, int], Tensor] = WeakValueDictionary()
        self._open: dict[str, Any] = {}
        self._paths: dict[int, Path] = {}
        self._pairs: set[str] = set()
        self.identities: list[FileIdentity] = []
        for file in files:
            try:
                identity = FileIdentity.of(file)
            except OSError as e:
                raise ArtifactError(f"{file}: not a whole safetensors file: {e.strerror or e}") from e
            headers.read(Path(file))
            try:
                opened: Any = safe_open(Path(file), framework="pt")
            except (SafetensorError, OSError) as e:
                raise ArtifactError(f"{file}: not a whole safetensors file: {e}") from e
            identity.check_same()
            self.identities.append(identity)
            self._paths[id(opened)] = Path(file)
            self._pairs |= _pairs(opened, str(file))
            for name in opened.keys():  # noqa: SIM118  it is not a dict
                if name in self._open:
                    raise ArtifactError(f"{file}: the weight {name[:80]!r} is in another file already")
                self._open[name] = opened

    @property
    def names(self) -> list[str]:
        """The names of all tensors, sorted."""
        return sorted(self._open)

    def __contains__(self, name: str) -> bool:
        return name in self._open

    def __len__(self) -> int:
        return len(self._open)

    def info(self, name: str) -> tuple[str, list[int]]:
        """Returns (dtype, shape) from the header, without reading data."""
        found = self._of(name).get_slice(name)
        if name in self._pairs:
            return _PAIRS, list(found.get_shape())[:-1]
        return NAMES.get(found.get_dtype(), str(found.get_dtype())), list(found.get_shape())

    def get(self, name: str) -> Tensor:
        """Returns a tensor without a copy. Raises: ArtifactError if no file has the name."""
        found: Tensor = self._of(name).get_tensor(name)
        return torch.view_as_complex(found) if name in self._pairs else found

    def check_unchanged(self) -> None:
        """Checks that no mapped file was changed in place since it was opened.

        Raises: ArtifactError.
        """
        for identity in self.identities:
            identity.check_content()
        if self._corrections is not None:
            self._corrections.check_unchanged()

    def slice(self, name: str, i: int) -> Tensor:
        """Returns `[i]` of a tensor without a copy: the weight of one member."""
        return self.get(name)[i]

    def of_member(self, name: str, kind: str, member: int) -> Tensor:
        """Returns one member's value of a weight: uncopied, or computed from its factors.

        kind: the weight's kind in the manifest. Raises: ArtifactError.
        """
        if name in self._factored:
            return self._product(self._factored[name], member)
        if kind == "shared":
            return self.get(name)
        return self.get(member_tensor(name, member)) if kind == "ragged" else self.slice(name, member)

    def _product(self, weight: FactoredWeight, member: int) -> Tensor:
        """Returns one member's value of a factored weight, bit for bit."""
        key = weight.name, member
        if (known := self._computed.get(key)) is not None:
            return known
        rank, correction = self.factors_of(*key)
        dtype, shape = self.info(weight.base)
        place = self._paths[id(self._of(weight.base))]
        check_on_disk(place, _bytes(shape, dtype), f"weight {weight.name[:200]}")
        ranks = [*weight.ranks[:member], rank, *weight.ranks[member + 1 :]]
        scale = self.get(weight.scale) if weight.scale else None
        base, left, right = (self.get(name) for name in (weight.base, weight.left, weight.right))
        factors = StackedFactors(base, left, right, ranks, scale)
        try:
            found = whole(factors, member, correction) if correction else rounded(factors, member)
        except ArtifactError as e:
            raise ArtifactError(f"weight {weight.name[:200]}: {e}") from e
        self._computed[key] = found
        return found

    def computed(self, name: str, member: int) -> Tensor | None:
        """Returns one member's value of a factored weight if somebody still uses it; else None."""
        return self._computed.get((name, member))

    def replace_factors(self, name: str, member: int, rank: int, correction: bytes) -> None:
        """Notes that one member's factors in the mapped files were replaced in this process.

        The caller writes the new value into the tensor that `computed` returns.

        Args:
            name: The factored weight.
            member: The member's number.
            rank: The rank of its new factors.
            correction: The correction of its new weight; empty if the factors give it.
        """
        self._replaced[name, member] = rank, correction

    def factors_of(self, name: str, member: int) -> tuple[int, bytes]:
        """Returns the rank and the correction of one member's factored weight, as they are now."""
        weight = self._factored[name]
        if (name, member) in self._replaced:
            return self._replaced[name, member]
        stored = member_tensor(name, member)
        if self._corrections is None or stored not in self._corrections:
            return weight.ranks[member], b""
        size, count = self._corrections.info(stored)[1][0], math.prod(self.info(weight.base)[1])
        if size > _MOST_FOR_ELEMENT * count + _MOST_BESIDE:  # it may be a hole in the file
            raise ArtifactError(f"the correction {stored[:80]!r} has {size:,} bytes for {count:,} elements")
        return weight.ranks[member], b"".join(map(bytes, views(self._corrections.get(stored))))

    def check(self, table: Iterable[Weight], members: int) -> None:
        """Refuses files whose tensors differ from the manifest's table. It reads headers only.

        One error lists up to 20 differences. Raises: ArtifactError.
        """
        problems: list[str] = []
        left = set(self._open)

        def compare(
            name: str, actual: tuple[str, list[int]] | None, expected: tuple[str, list[int]] | None
        ) -> None:
            if actual == expected:
                return
            if len(problems) == _MOST_NAMED:  # an untrusted artifact may differ in millions of names
                raise ArtifactError("\n  ".join([first_line, *sorted(problems), "and more"]))
            problems.append(
                f"{name[:120]}: {_describe(actual)} in the files, {_describe(expected)} in the manifest"
            )

        first_line = "the weights files differ from the manifest:"
        for row in table:
            for name, shape in row.each(members):
                compare(name, self.info(name) if name in self._open else None, (row.dtype, shape))
                left.discard(name)
        for name in sorted(left):
            compare(name, self.info(name), None)
        if problems:
            raise ArtifactError("\n  ".join([first_line, *sorted(problems)]))

    def _of(self, name: str) -> Any:
        if name not in self._open:
            raise ArtifactError(f"weight {name[:80]!r} is in none of the weights files")
        return self._open[name]


def _check_corrections(files: Weights, factored: Mapping[str, FactoredWeight]) -> None:
    """Refuses tensors that are no correction of a factored weight of a member. It reads the header only."""
    for tensor in files.names:
        name, member = member_of(tensor)
        if name not in factored or not 0 <= member < len(factored[name].ranks):
            raise ArtifactError(f"the correction {tensor[:80]!r} is of no member's factored weight")
        dtype, shape = files.info(tensor)
        if dtype != "uint8" or len(shape) != 1 or not shape[0]:
            raise ArtifactError(f"the correction {tensor[:80]!r} is {dtype}{shape}; expected bytes")


def _pairs(opened: Any, file: str) -> set[str]:
    """Returns the names of the complex128 tensors of a file."""
    names = strict_json.parse(
        (opened.metadata() or {}).get(_PAIRS, "[]").encode(), f"{file}: metadata {_PAIRS}"
    )
    if not isinstance(names, list):
        raise ArtifactError(f"{file}: metadata {_PAIRS} is not a list of names")
    known, seen = set(opened.keys()), set[str]()  # each call of keys() makes a new list
    for name in names:
        if isinstance(name, str) and name in seen:
            raise ArtifactError(f"{file}: metadata {_PAIRS} names {name[:60]!r} twice")
        found = opened.get_slice(name) if isinstance(name, str) and name in known else None
        if found is None or found.get_dtype() != CODES[_PAIRS] or list(found.get_shape())[-1:] != [2]:
            raise ArtifactError(
                f"{file}: metadata {_PAIRS} names {str(name)[:60]!r}, which is not stored as pairs of float64"
            )
        seen.add(name)
    return seen


def _describe(info: tuple[str, list[int]] | None) -> str:
    """Returns a dtype and shape as text."""
    return f"{info[0]}{info[1]}" if info else "nothing"
