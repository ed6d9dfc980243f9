"""Finds the lists of numbers in the text of a request, without reading them.

What a request says besides its numbers is small: names, shapes and parameters. It is read by a JSON reader
after each list of a key `data` was replaced. So a large text costs as much as it has bytes, not as much as it
has values, and names and shapes are compared with the model before a number is read.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from ..errors import RequestError, TooLarge
from .growing import Body, place_of
from .work import Work

BOM = b"\xef\xbb\xbf"
"""A byte order mark, which some programs of Windows write before a text. RFC 8259 lets a reader ignore it."""
MOST_ELSE = 1 << 18
"""The most bytes of a request besides its lists of numbers."""
_STEP = 1 << 12
_KEY = re.compile(rb'data"[ \t\n\r]*:[ \t\n\r]*\[')
_TEXT = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_ELEMENT = re.compile(rb'[ \t\n\r]*"(?:[^"\\]|\\.)*"[ \t\n\r]*([,\]])', re.DOTALL)
_LONGEST = 1 << 12
"""The most white space before and after a list."""
_MARK = f"\0list {secrets.token_hex(8)} "
"""Stands for a list while the rest is read. A client cannot write it, since it does not know it."""


@dataclass(frozen=True, slots=True)
class JsonList:
    """A list of a request as its text, which begins and ends with a bracket.

    Attributes:
        body: The body that has the list.
        start, end: Where it is.
        texts: Whether it has texts, not numbers.
    """

    body: Body
    start: int
    end: int
    texts: bool = False


def read_large(text: Body, length: int, most_texts: int, work: Work) -> Any:
    """Reads a large JSON text. A list of a key `data` is a `JsonList`.

    Args:
        text: The body.
        length: How many bytes of it are JSON.
        most_texts: The most texts of a list.
        work: Is told of each step.

    Raises:
        RequestError: It is not JSON.
        TooLarge: It has too many bytes besides its lists of numbers, or too many texts.
    """
    parts: list[bytes | bytearray] = []
    lists: dict[str, JsonList] = {}
    at, size, steps = len(BOM) if text[: len(BOM)] == BOM else 0, 0, 0
    while True:
        quote = text.find(b'"', at, min(at + MOST_ELSE, length))
        key = None if quote < 0 else _KEY.match(text, quote + 1, min(quote + _LONGEST, length))
        one = None
        if key is not None:
            end = key.end() - 1
            one = _numbers(text, end, length, work) or _texts(text, end, length, most_texts, work)
        else:
            found = None if quote < 0 else _TEXT.match(text, quote, min(quote + MOST_ELSE, length))
            end = length if found is None else found.end()
        size += end - at
        _check_size(size)
        parts.append(text[at:end])
        at = end
        if one is not None:
            mark = f"{_MARK}{len(lists)}"
            lists[mark] = one
            parts.append(orjson.dumps(mark))
            at = one.end
        if at >= length:
            break
        steps += 1
        if not steps % _STEP:
            work.step()
    try:
        document = orjson.loads(b"".join(parts))
    except orjson.JSONDecodeError as e:
        raise RequestError(f"the request is not JSON: {e.msg}") from None
    return _with_lists(document, lists)


def _check_size(size: int) -> None:
    if size > MOST_ELSE:
        raise TooLarge(
            f"the request has over {MOST_ELSE} bytes besides the numbers in the lists data of its inputs"
        )


def _numbers(text: Body, start: int, length: int, work: Work) -> JsonList | None:
    """Returns the list that begins at a place if it has neither texts nor objects; else None."""
    quote = place_of(b'"', text, start, length, work)
    stop = length if quote < 0 else quote
    brace = place_of(b"}", text, start, stop, work)
    stop = stop if brace < 0 else brace
    near = max(start, stop - _LONGEST)
    end = near + len(text[near:stop].rstrip(b" \t\n\r,"))
    return JsonList(text, start, end) if text[end - 1 : end] == b"]" else None


def _texts(text: Body, start: int, length: int, most: int, work: Work) -> JsonList | None:
    """Returns the list of texts that begins at a place; None if it is none. Raises: TooLarge."""
    at = start + 1
    for number in range(1, most + 1):
        found = _ELEMENT.match(text, at, min(at + MOST_ELSE, length))
        if found is None:
            return None
        at = found.end()
        if found[1] == b"]":
            return JsonList(text, start, at, texts=True)
        if not number % _STEP:
            work.step()
    raise TooLarge(f"a list data of the request has over {most} texts, the limit of rows (--max-rows)")


def _with_lists(document: Any, lists: Mapping[str, JsonList]) -> Any:
    """Puts the lists back into the inputs of a document."""
    inputs = document.get("inputs") if isinstance(document, dict) else None
    for one in inputs if isinstance(inputs, list) else ():
        if isinstance(one, dict) and isinstance(mark := one.get("data"), str):
            one["data"] = lists.get(mark, mark)
    return document
