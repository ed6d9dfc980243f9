"""Reads and writes the headers of .npy files. No NumPy is imported, and nothing is unpickled.

The format is that of `numpy.lib.format`: a magic text, a version, the length of the header, and the header, a
Python dict with `descr`, `fortran_order` and `shape`. The numbers follow, row by row.
"""

from __future__ import annotations

import ast
import math
import os
import struct
from pathlib import Path
from typing import NamedTuple

import torch

from ..errors import InputError
from ..spec.dtypes import dtype_name

MAGIC = b"\x93NUMPY"
MAX_HEADER = 10_000
"""The most bytes of a header, the same limit as NumPy's."""
_ALIGNED = 64
_DIGITS = 20  # of the number of rows in a header that is written before the number is known
_DTYPES = {
    "f2": torch.float16,
    "f4": torch.float32,
    "f8": torch.float64,
    "c8": torch.complex64,
    "c16": torch.complex128,
    "b1": torch.bool,
    "i1": torch.int8,
    "i2": torch.int16,
    "i4": torch.int32,
    "i8": torch.int64,
    "u1": torch.uint8,
    "u2": torch.uint16,
    "u4": torch.uint32,
    "u8": torch.uint64,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class NpyHeader(NamedTuple):
    """The dtype and shape of an array, and the position of its first byte in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int


def read_header(path: Path) -> NpyHeader:
    """Reads the header of a file, and compares the size of the file with it. Raises: InputError; OSError."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        first = file.read(8)
        if first[:6] != MAGIC or first[6:7] not in (b"\x01", b"\x02", b"\x03"):
            raise InputError(f"{path}: this is not a .npy file of version 1, 2 or 3")
        form = "<H" if first[6] == 1 else "<I"
        length = file.read(struct.calcsize(form))
        count = struct.unpack(form, length)[0] if len(length) == struct.calcsize(form) else -1
        if not 0 <= count <= MAX_HEADER:
            raise InputError(f"{path}: its header has {count:,} bytes; at most {MAX_HEADER:,} are read")
        text = file.read(count)
        start = file.tell()
    dtype, shape = _parsed(path, text)
    needed = math.prod(shape) * dtype.itemsize
    if len(text) < count or size - start != needed:
        raise InputError(
            f"{path}: {dtype_name(dtype)}{list(shape)} has {needed:,} bytes, and the file holds "
            f"{max(0, size - start):,}: it is incomplete, or holds more than one array"
        )
    return NpyHeader(dtype, shape, start)


def _parsed(path: Path, text: bytes) -> tuple[torch.dtype, tuple[int, ...]]:
    """Returns the dtype and the shape that a header names. Raises: InputError."""
    try:
        header = ast.literal_eval(text.decode("utf-8").strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        header = None
    if not isinstance(header, dict) or set(header) != {"descr", "fortran_order", "shape"}:
        raise InputError(f"{path}: its header is not that of a .npy file: {text[:60]!r}")
    descr, shape = header["descr"], header["shape"]
    if not isinstance(descr, str) or descr[:1] not in ("<", "|", "=") or descr[1:] not in _DTYPES:
        raise InputError(
            f"{path}: its dtype is {str(descr)[:60]!r}; arrays of little-endian numbers are read, never "
            f"Python objects. Save it as one of {', '.join(_DTYPES)}"
        )
    sizes = isinstance(shape, tuple) and all(type(n) is int and 0 <= n < 2**63 for n in shape)
    if not sizes or len(shape) > 64:
        raise InputError(f"{path}: its shape {str(shape)[:60]} is not a tuple of sizes")
    if not shape:
        raise InputError(f"{path}: it holds one number; an input has rows along its first dim")
    if header["fortran_order"] is not False and len(shape) > 1:
        raise InputError(
            f"{path}: its numbers are in the order of Fortran, column by column; save "
            "numpy.ascontiguousarray(array)"
        )
    return _DTYPES[descr[1:]], shape


def header_of(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    """Returns the header of an array. Its length does not depend on the number of rows, `shape[0]`."""
    name = _NAMES[dtype]
    order = "|" if dtype.itemsize == 1 else "<"
    text = f"{{'descr': '{order}{name}', 'fortran_order': False, 'shape': {shape}, }}"
    text += " " * (_DIGITS - len(str(shape[0])))
    before = len(MAGIC) + 4
    text += " " * (-(before + len(text) + 1) % _ALIGNED) + "\n"
    return MAGIC + b"\x01\x00" + struct.pack("<H", len(text)) + text.encode("ascii")
