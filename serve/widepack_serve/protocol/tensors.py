"""Converts tensors from and to the forms of the protocol: JSON numbers, and little-endian bytes.

NumPy is not needed. Every input is checked completely before a tensor is made.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Any

import orjson
import torch

from ..errors import RequestError
from .datatypes import BY_DTYPE, DATATYPES, Datatype
from .growing import Growing
from .json_data import JsonList
from .json_numbers import PIECE, read_numbers
from .shown import shown
from .work import NoSteps, Work

MAX_RANK = 16
_NO_STEPS = NoSteps()
_MAX_SIZE = 2**31 - 1
_MAX_NUMBERS = 2**40
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
            f"{title} has the shape {shown(shape)}; a shape is a list of at most {MAX_RANK} whole "
            f"numbers from 0 to {_MAX_SIZE}"
        )
    found: list[int] = shape
    if math.prod(max(d, 1) for d in found) > _MAX_NUMBERS:
        raise RequestError(
            f"{title} has the shape {shown(shape)}, which has more numbers than a body can carry"
        )
    return found


def datatype_of(title: str, name: Any) -> Datatype:
    """Returns a datatype by its name on the wire. Raises: RequestError."""
    found = DATATYPES.get(name) if isinstance(name, str) else None
    if found is None:
        raise RequestError(
            f"{title} has the datatype {shown(name)}; known: {', '.join(DATATYPES)}, and BYTES for member"
        )
    return found


def from_json(title: str, datatype: Datatype, shape: Sequence[int], data: Any, work: Work) -> torch.Tensor:
    """Returns a tensor of JSON numbers.

    Args:
        title: The input in messages.
        datatype: Its datatype.
        shape: Its shape, checked.
        data: The numbers, flat or nested as the shape is; or their text.
        work: Is told of each step.

    Raises:
        RequestError: They are not numbers of the datatype, or not as many as the shape has.
    """
    if not datatype.numbers:
        raise RequestError(f"{title}: JSON has no numbers of {datatype.name}; send the tensor as binary data")
    if isinstance(data, JsonList):
        if data.texts:
            raise RequestError(f"{title}: data is a list of texts, not of numbers of {datatype.name}")
        try:
            numbers = read_numbers(title, datatype, shape, data, _CODES[datatype.dtype], work)
        except OverflowError:
            raise _out_of_range(title, datatype) from None
        found = _of_array(numbers, datatype, shape)
    else:
        found = from_numbers(title, datatype, shape, _checked(title, datatype, shape, data))
    if datatype.bounds is None and datatype.dtype != torch.bool and not bool(torch.isfinite(found).all()):
        raise _out_of_range(title, datatype)
    return found


def _checked(title: str, datatype: Datatype, shape: Sequence[int], data: Any) -> Sequence[Any]:
    """Returns JSON numbers as one list. Raises: RequestError."""
    numbers = _flat(title, data, shape)
    _check_count(title, shape, numbers)
    if not set(map(type, numbers)) <= datatype.numbers:
        wrong = next(n for n in numbers if type(n) not in datatype.numbers)
        raise RequestError(f"{title}: data contains {shown(wrong)}, which is not a number of {datatype.name}")
    return numbers


def _out_of_range(title: str, datatype: Datatype) -> RequestError:
    return RequestError(f"{title}: data contains a number that {datatype.name} cannot represent")


def from_numbers(
    title: str, datatype: Datatype, shape: Sequence[int], numbers: Sequence[Any], work: Work = _NO_STEPS
) -> torch.Tensor:
    """Returns a tensor of numbers of Python.

    Args:
        title: The input in messages.
        datatype: Its datatype.
        shape: Its shape, checked.
        numbers: Of the types of the datatype, row after row. NaN and infinity are floats.
        work: Is told of each step.

    Raises:
        RequestError: They are not as many as the shape has, or the datatype cannot represent one.
    """
    _check_count(title, shape, numbers)
    found = array(_CODES[datatype.dtype])
    try:
        for start in range(0, len(numbers), PIECE):
            found.extend(numbers[start : start + PIECE])
            work.step()
    except OverflowError:
        raise _out_of_range(title, datatype) from None
    return _of_array(found, datatype, shape)


def _of_array(numbers: array[Any], datatype: Datatype, shape: Sequence[int]) -> torch.Tensor:
    if not numbers:
        return torch.empty(tuple(shape), dtype=datatype.dtype)
    found: torch.Tensor = torch.frombuffer(numbers, dtype=datatype.dtype)
    return found.reshape(tuple(shape))


def _check_count(title: str, shape: Sequence[int], numbers: Sequence[Any]) -> None:
    if len(numbers) != math.prod(shape):
        raise RequestError(
            f"{title} has {len(numbers)} numbers; the shape {shown(list(shape))} has {math.prod(shape)}"
        )


def _flat(title: str, data: Any, shape: Sequence[int]) -> Sequence[Any]:
    """Returns nested lists as one list. The nesting is that of the shape. Raises: RequestError."""
    if not isinstance(data, list):
        raise RequestError(f"{title}: data is {shown(data)}; it is a list of numbers")
    if not data or type(data[0]) is not list:
        return data
    level: list[Any] = data
    for depth, size in enumerate(shape):
        if depth == 0:
            if len(level) != size:
                raise RequestError(f"{title}: data has {len(level)} parts in dim 0; the shape has {size}")
            continue
        if any(type(part) is not list or len(part) != size for part in level):
            raise RequestError(f"{title}: data is not nested as the shape {shown(list(shape))}")
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
            f"{title} has {len(data)} bytes; {datatype.name} with the shape {shown(list(shape))} has {needed}"
        )
    if not needed:
        return torch.empty(tuple(shape), dtype=datatype.dtype)
    copy = bytearray(data)
    if datatype.dtype == torch.bool and int(torch.frombuffer(copy, dtype=torch.uint8).max()) > 1:
        raise RequestError(f"{title} has a byte that is neither 0 nor 1, which are the values of BOOL")
    return torch.frombuffer(copy, dtype=datatype.dtype).reshape(tuple(shape))


def texts_from_bytes(title: str, shape: Sequence[int], data: memoryview) -> list[str]:
    """Returns the texts of a BYTES input: each is its length, four bytes, and its UTF-8 bytes. Raises:
    RequestError.
    """
    found: list[bytes] = []
    at = 0
    count = math.prod(shape)
    while at < len(data):
        if len(found) == count:
            raise RequestError(f"{title} has over {count} texts; the shape {shown(list(shape))} has {count}")
        end = at + 4 + int.from_bytes(data[at : at + 4], "little")
        if at + 4 > len(data) or end > len(data):
            raise RequestError(f"{title}: text {len(found)} ends after the data")
        found.append(bytes(data[at + 4 : end]))
        at = end
    return texts_from_parts(title, shape, found)


def texts_from_parts(title: str, shape: Sequence[int], parts: Sequence[bytes]) -> list[str]:
    """Returns the texts of a BYTES input, of the UTF-8 bytes of each. Raises: RequestError."""
    _check_texts(title, shape, len(parts))
    return [_decoded(title, part) for part in parts]


def texts_from_json(title: str, shape: Sequence[int], data: Any) -> list[str]:
    """Returns the texts of a BYTES input in JSON. Raises: RequestError."""
    if isinstance(data, JsonList):
        try:
            data = orjson.loads(data.body[data.start : data.end]) if data.texts else 0
        except orjson.JSONDecodeError as e:
            raise RequestError(f"the request is not JSON: {e.msg}") from None
    if not isinstance(data, list) or not all(isinstance(t, str) for t in data):
        raise RequestError(f"{title}: data is {shown(data)}; it is a list of texts")
    _check_texts(title, shape, len(data))
    return data


def _decoded(title: str, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise RequestError(f"{title} has the text {shown(data)}, which is not UTF-8") from None


def _check_texts(title: str, shape: Sequence[int], count: int) -> None:
    if count != math.prod(shape):
        raise RequestError(
            f"{title} has {count} texts; the shape {shown(list(shape))} has {math.prod(shape)}"
        )


def to_bytes(value: torch.Tensor) -> bytearray:
    """Returns the numbers of a tensor as little-endian bytes, row after row."""
    found = bytearray(value.numel() * value.element_size())
    if found:
        torch.frombuffer(found, dtype=value.dtype).copy_(value.reshape(-1))
    return found


def write_bytes(value: torch.Tensor, body: Growing, work: Work) -> None:
    """Writes the numbers of a tensor as `to_bytes` returns them, in pieces.

    Args:
        value: The tensor.
        body: Gets the bytes.
        work: Is told of each step.
    """
    flat = value.reshape(-1)
    for start in range(0, flat.numel(), PIECE):
        body.append(to_bytes(flat[start : start + PIECE]))
        work.step()


def count_of_no_numbers(value: torch.Tensor) -> int:
    """Returns how many numbers of a tensor are NaN or infinite, which JSON cannot carry."""
    return 0 if not value.dtype.is_floating_point else int((~torch.isfinite(value)).sum())


def wire_name(dtype: torch.dtype) -> str:
    """Returns the name of a dtype on the wire; "" if the protocol has none."""
    found = BY_DTYPE.get(dtype)
    return "" if found is None else found.name
