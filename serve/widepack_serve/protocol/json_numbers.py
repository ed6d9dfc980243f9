"""Reads and writes long lists of numbers in JSON, in pieces: at no time are all numbers objects of Python.

A list is checked in two passes over its text. The first compares its brackets and commas with those that the
shape has, so that a text with more or fewer numbers is refused before one of them is read. The second reads
the numbers, some thousands at a time.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Any

import orjson
import torch

from ..errors import RequestError, TooLarge
from .datatypes import Datatype
from .growing import Growing
from .json_data import JsonList
from .shortest import shortest
from .shown import shown
from .work import Work

PIECE = 1 << 15
"""How many bytes of text, or numbers of an answer, become objects at a time."""
_WINDOW = 1 << 20
"""How many bytes of text are compared at a time."""
_LONGEST = 1 << 12
"""The most bytes between two commas."""
_SPACE = b" \t\n\r"
_NUMBER = b"0123456789+-.eEtrufalsn"
"""The characters of numbers, `true`, `false` and `null`."""
_KINDS = bytes(c if c in b"[]," else ord("0") if c in _NUMBER else ord("!") for c in range(256))
"""Each character of a number becomes 0, and one that no list of numbers has becomes !."""
_NO_BRACKETS = bytes(ord(" ") if c in b"[]" else c for c in range(256))


def read_numbers(
    title: str,
    datatype: Datatype,
    shape: Sequence[int],
    given: JsonList,
    code: str,
    work: Work,
) -> array[Any]:
    """Returns the numbers of a list in JSON.

    Args:
        title: The input in messages.
        datatype: Its datatype.
        shape: Its shape, checked.
        given: The list, flat or nested as the shape is.
        code: The code of Python's `array` for the datatype.
        work: Is told of each step.

    Raises:
        RequestError: They are not numbers of the datatype, or not as many as the shape has.
        OverflowError: The type of the array cannot represent one.
    """
    count = math.prod(shape)
    _check_structure(title, shape, given, work)
    found: array[Any] = array(code)
    if not count:
        return found  # nothing is between its brackets
    text, at, end = given.body, given.start + 1, given.end - 1
    while at <= end:
        last = min(at + PIECE + _LONGEST, end)
        comma = text.find(b",", min(at + PIECE, end), last)
        stop = last if comma < 0 else comma
        if comma < 0 and last < end:
            raise RequestError(f"{title}: data has more than {_LONGEST} characters between two commas")
        _extend(title, datatype, text[at:stop], found)
        at = stop + 1
        work.step()
    if len(found) != count:
        raise RequestError(f"{title} has {len(found)} numbers; the shape {shown(list(shape))} has {count}")
    return found


def _extend(title: str, datatype: Datatype, piece: bytes | bytearray, found: array[Any]) -> None:
    """Adds the numbers of a piece of a list. Raises: RequestError; OverflowError."""
    try:
        numbers = orjson.loads(b"[" + piece.translate(_NO_BRACKETS) + b"]")
    except orjson.JSONDecodeError as e:
        raise RequestError(f"{title}: the request is not JSON: {e.msg}") from None
    if not set(map(type, numbers)) <= datatype.numbers:
        wrong = next(n for n in numbers if type(n) not in datatype.numbers)
        raise RequestError(f"{title}: data contains {shown(wrong)}, which is not a number of {datatype.name}")
    found.extend(numbers)


def _check_structure(title: str, shape: Sequence[int], given: JsonList, work: Work) -> None:
    """Compares the brackets and commas of a list with those of a shape. Raises: RequestError."""
    text, first, end = given.body, given.start, given.end
    inner = text[first + 1 : first + 1 + _LONGEST].lstrip(_SPACE)
    sizes = list(shape) if inner.startswith(b"[") else [math.prod(shape)]
    wrong = RequestError(
        f"{title}: data is not nested as the shape {shown(list(shape))}, and not a flat list of its "
        f"{math.prod(shape)} numbers"
    )
    if not sizes or _length(sizes) > end - first:
        raise wrong
    expected, at, before, empty = _brackets(sizes), 0, b"", 0 in sizes
    for start in range(first, end, _WINDOW):
        kinds = bytes(text[start : min(start + _WINDOW, end)].translate(_KINDS, _SPACE))
        near = before + kinds
        if b"!" in kinds or b"0[" in near or b"]0" in near or (empty and b"0" in kinds):
            raise wrong
        before = kinds[-1:] or before
        found = kinds.replace(b"0", b"")
        if expected[at : at + len(found)] != found:
            raise wrong
        at += len(found)
        work.step()
    if at != len(expected):
        raise wrong


def _length(sizes: Sequence[int]) -> int:
    """Returns how many brackets and commas nested lists of these sizes have."""
    length = 0
    for size in reversed(sizes):
        length = 2 + size * length + max(size - 1, 0)
    return length


def _brackets(sizes: Sequence[int]) -> bytes:
    """Returns the brackets and commas of nested lists of these sizes."""
    found = b""
    for size in reversed(sizes):
        found = b"[%b]" % (b",".join([found] * size) if found else b"," * max(size - 1, 0))
    return found


def write_numbers(value: torch.Tensor, most: int, body: Growing, work: Work) -> None:
    """Writes the numbers of a tensor as a flat list in JSON, each with as few digits as read back the same.

    Args:
        value: The tensor.
        most: The most bytes of the list.
        body: Gets the list.
        work: Is told of each step.

    Raises:
        TooLarge: The list has more bytes.
    """
    flat, first = value.reshape(-1), body.size
    body.append(b"[")
    for start in range(0, flat.numel(), PIECE):
        numbers = orjson.dumps(shortest(flat[start : start + PIECE]))[1:-1]
        if body.size + len(numbers) - first > most:
            raise TooLarge(
                f"the answer has over {most} bytes in JSON, the limit (--max-answer); request it as binary "
                "data, or send fewer rows in a request"
            )
        body.append(b"," + numbers if start else numbers)
        work.step()
    body.append(b"]")
