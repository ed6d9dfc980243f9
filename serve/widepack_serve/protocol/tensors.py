"""Converts tensors from and to the forms of the protocol: JSON numbers, and little-endian bytes.

NumPy is not needed. Every input is checked completely before a tensor is made.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Any

import torch

from ..errors import RequestError
from .datatypes import BY_DTYPE, DATATYPES, Datatype

MAX_RANK = 16
_MAX_SIZE = 2**31 - 1
_MAX_NUMBERS = 2**40
_SHOWN = 60
_CODES = {
    torch.float32: "f",
    torch.float64: "d",
    torch.int64: "q",
    torch.int32: "i",
    torch.int16: "h",
    torch.int8: "b",
    torch.uint8: "B",
    torch.uint16: "H",
    torch.uint32: "I",
    torch.uint64: "Q",
    torch.bool: "b",
}
"""The code of Python's `array` for each dtype that JSON can carry."""


def read_shape(title: str, shape: Any) -> list[int]:
    """Returns a shape of the wire, checked. title: the input in messages. Raises: RequestError."""
    usual = isinstance(shape, list) and all(type(d) is int and 0 <= d <= _MAX_SIZE for d in shape)
    if not usual or len(shape) > MAX_RANK:
        raise RequestError(
            f"{title} has the shape {_short(shape)}; a shape is a list of at most {MAX_RANK} whole "
            f"numbers from 0 to {_MAX_SIZE}"
        )
    found: list[int] = shape
    if math.prod(max(d, 1) for d in found) > _MAX_NUMBERS:
        raise RequestError(
            f"{title} has the shape {_short(shape)}, which has more numbers than a body can carry"
        )
    return found


def datatype_of(title: str, name: Any) -> Datatype:
    """Returns a datatype by its name on the wire. Raises: RequestError."""
    found = DATATYPES.get(name) if isinstance(name, str) else None
    if found is None:
        raise RequestError(
            f"{title} has the datatype {_short(name)}; known: {', '.join(DATATYPES)}, and BYTES for member"
        )
    return found


def from_json(title: str, datatype: Datatype, shape: Sequence[int], data: Any) -> torch.Tensor:
    """Returns a tensor of JSON numbers.

    Args:
        title: The input in messages.
        datatype: Its datatype.
        shape: Its shape, checked.
        data: The numbers, flat or nested as the shape is.

    Raises:
        RequestError: They are not numbers of the datatype, or not as many as the shape has.
    """
    if not datatype.numbers:
        raise RequestError(f"{title}: JSON has no numbers of {datatype.name}; send the tensor as binary data")
    numbers = _flat(title, data, shape)
    _check_count(title, shape, numbers)
    if not set(map(type, numbers)) <= datatype.numbers:
        wrong = next(n for n in numbers if type(n) not in datatype.numbers)
        raise RequestError(
            f"{title}: data contains {_short(wrong)}, which is not a number of {datatype.name}"
        )
    found = from_numbers(title, datatype, shape, numbers)
    if datatype.bounds is None and datatype.dtype != torch.bool and not bool(torch.isfinite(found).all()):
        raise RequestError(f"{title}: data contains a number that {datatype.name} cannot represent")
    return found


def from_numbers(
    title: str, datatype: Datatype, shape: Sequence[int], numbers: Sequence[Any]
) -> torch.Tensor:
    """Returns a tensor of numbers of Python.

    Args:
        title: The input in messages.
        datatype: Its datatype.
        shape: Its shape, checked.
        numbers: Of the types of the datatype, row after row. NaN and infinity are floats.

    Raises:
        RequestError: They are not as many as the shape has, or the datatype cannot represent one.
    """
    _check_count(title, shape, numbers)
    if not numbers:
        return torch.empty(tuple(shape), dtype=datatype.dtype)
    try:
        found: torch.Tensor = torch.frombuffer(array(_CODES[datatype.dtype], numbers), dtype=datatype.dtype)
    except OverflowError:
        raise RequestError(f"{title}: data contains a number that {datatype.name} cannot represent") from None
    return found.reshape(tuple(shape))


def _check_count(title: str, shape: Sequence[int], numbers: Sequence[Any]) -> None:
    if len(numbers) != math.prod(shape):
        raise RequestError(
            f"{title} has {len(numbers)} numbers; the shape {_short(list(shape))} has {math.prod(shape)}"
        )


def _flat(title: str, data: Any, shape: Sequence[int]) -> Sequence[Any]:
    """Returns nested lists as one list. The nesting is that of the shape. Raises: RequestError."""
    if not isinstance(data, list):
        raise RequestError(f"{title}: data is {_short(data)}; it is a list of numbers")
    if not data or type(data[0]) is not list:
        return data
    level: list[Any] = data
    for depth, size in enumerate(shape):
        if depth == 0:
            if len(level) != size:
                raise RequestError(f"{title}: data has {len(level)} parts in dim 0; the shape has {size}")
            continue
        if any(type(part) is not list or len(part) != size for part in level):
            raise RequestError(f"{title}: data is not nested as the shape {_short(list(shape))}")
        level = [number for part in level for number in part]
    return level


def from_bytes(title: str, datatype: Datatype, shape: Sequence[int], data: memoryview) -> torch.Tensor:
    """Returns a tensor of little-endian bytes, row after row.

    Args:
        title: The input in messages.
        datatype: Its datatype.
        shape: Its shape, checked.
        data: The bytes. They are copied.

    Raises:
        RequestError: They are not as many as the shape needs, or a boolean is neither 0 nor 1.
    """
    needed = math.prod(shape) * datatype.itemsize
    if len(data) != needed:
        raise RequestError(
            f"{title} has {len(data)} bytes; {datatype.name} with the shape {_short(list(shape))} "
            f"has {needed}"
        )
    if not needed:
        return torch.empty(tuple(shape), dtype=datatype.dtype)
    copy = bytearray(data)
    if datatype.dtype == torch.bool and max(copy) > 1:
        raise RequestError(f"{title} has a byte that is neither 0 nor 1, which are the values of BOOL")
    return torch.frombuffer(copy, dtype=datatype.dtype).reshape(tuple(shape))


def texts_from_bytes(title: str, shape: Sequence[int], data: memoryview) -> list[str]:
    """Returns the texts of a BYTES input: each is its length, four bytes, and its UTF-8 bytes. Raises:
    RequestError.
    """
    found: list[bytes] = []
    at = 0
    while at < len(data):
        end = at + 4 + int.from_bytes(data[at : at + 4], "little")
        if at + 4 > len(data) or end > len(data):
            raise RequestError(f"{title}: text {len(found)} ends after the data")
        found.append(bytes(data[at + 4 : end]))
        at = end
    return texts_from_parts(title, shape, found)


def texts_from_parts(title: str, shape: Sequence[int], parts: Sequence[bytes]) -> list[str]:
    """Returns the texts of a BYTES input, of the UTF-8 bytes of each. Raises: RequestError."""
    return _counted(title, shape, [_decoded(title, part) for part in parts])


def texts_from_json(title: str, shape: Sequence[int], data: Any) -> list[str]:
    """Returns the texts of a BYTES input in JSON. Raises: RequestError."""
    if not isinstance(data, list) or not all(isinstance(t, str) for t in data):
        raise RequestError(f"{title}: data is {_short(data)}; it is a list of texts")
    return _counted(title, shape, data)


def _decoded(title: str, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise RequestError(f"{title} has the text {_short(data)}, which is not UTF-8") from None


def _counted(title: str, shape: Sequence[int], texts: list[str]) -> list[str]:
    if len(texts) != math.prod(shape):
        raise RequestError(
            f"{title} has {len(texts)} texts; the shape {_short(list(shape))} has {math.prod(shape)}"
        )
    return texts


def to_bytes(value: torch.Tensor) -> bytearray:
    """Returns the numbers of a tensor as little-endian bytes, row after row."""
    found = bytearray(value.numel() * value.element_size())
    if found:
        torch.frombuffer(found, dtype=value.dtype).copy_(value.reshape(-1))
    return found


def to_json(value: torch.Tensor) -> list[Any]:
    """Returns the numbers of a tensor as a flat list.

    Half precision is carried as floats: every such number is a float.
    """
    found: list[Any] = value.reshape(-1).tolist()
    return found


def wire_name(dtype: torch.dtype) -> str:
    """Returns the name of a dtype on the wire; "" if the protocol has none."""
    found = BY_DTYPE.get(dtype)
    return "" if found is None else found.name


def _short(value: Any) -> str:
    text = repr(value) if not isinstance(value, list) or len(value) <= MAX_RANK else f"a list of {len(value)}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
