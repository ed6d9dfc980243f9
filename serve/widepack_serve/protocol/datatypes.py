"""The datatypes of the Open Inference Protocol, and torch's dtypes."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Datatype:
    """A datatype of the protocol.

    Attributes:
        name: Its name on the wire, for example `FP32`.
        dtype: The dtype of torch.
        itemsize: The bytes of one number.
        numbers: The types that JSON numbers of it have in Python; empty if JSON cannot carry it.
        bounds: The smallest and the largest whole number; None for floats and booleans.
    """

    name: str
    dtype: torch.dtype
    itemsize: int
    numbers: frozenset[type]
    bounds: tuple[int, int] | None = None


def _datatype(name: str, dtype: torch.dtype, *numbers: type) -> Datatype:
    bounds = None
    if int in numbers and float not in numbers:
        info = torch.iinfo(dtype)
        bounds = (int(info.min), int(info.max))
    return Datatype(name, dtype, dtype.itemsize, frozenset(numbers), bounds)


DATATYPES = {
    d.name: d
    for d in (
        _datatype("BOOL", torch.bool, bool),
        _datatype("UINT8", torch.uint8, int),
        _datatype("UINT16", torch.uint16, int),
        _datatype("UINT32", torch.uint32, int),
        _datatype("UINT64", torch.uint64, int),
        _datatype("INT8", torch.int8, int),
        _datatype("INT16", torch.int16, int),
        _datatype("INT32", torch.int32, int),
        _datatype("INT64", torch.int64, int),
        _datatype("FP16", torch.float16),
        _datatype("BF16", torch.bfloat16),
        _datatype("FP32", torch.float32, int, float),
        _datatype("FP64", torch.float64, int, float),
    )
}
BYTES = "BYTES"
"""The datatype of texts. Only the input `member` has it."""

BY_DTYPE = {d.dtype: d for d in DATATYPES.values()}
