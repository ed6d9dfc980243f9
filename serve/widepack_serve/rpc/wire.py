"""Counts the fields of a message before it is read: each one costs memory and time, however small it is.

A message of protobuf is a row of fields: a number and a type, and a value. The values of this protocol's
numbers are packed, so that an honest message has few fields.
"""

from __future__ import annotations

from ..errors import RequestError, TooLarge
from ..protocol.growing import Body
from ..protocol.work import Work

Inside = dict[int, "Inside | int"]
"""By the number of a field of a message: the fields inside, or the most whole numbers in its packed list.
Fields that are not named have no limit.
"""

_PARAMETERS: Inside = {2: {}}
_STEP = 1 << 12
_WINDOW = 1 << 20
_SHAPE = 64
"""The most sizes of a shape that are read. Fewer are allowed."""
_NOT_LAST = bytes(range(128, 256))
"""The bytes of a number but its last one."""


def of_inference(values: int) -> Inside:
    """Returns the limited fields of a `ModelInferRequest`: those of parameters, inputs and outputs.

    values: the most numbers of an input. A small whole number has one byte in a message, and eight once read.
    """
    contents: Inside = dict.fromkeys(range(1, 6), values)
    return {
        4: _PARAMETERS,
        5: {3: _SHAPE, 4: _PARAMETERS, 5: contents},
        6: {2: _PARAMETERS},
    }


class Broken(RequestError):
    """Raised for bytes that are no message."""


class FieldCount:
    """Counts the fields of one message.

    Args:
        most: The most fields, with those of the messages inside.
        work: Is told of each step.

    Attributes:
        places: The number of each field that carries a message, a list or bytes, where it begins, where its
            value begins, and where both end. Fields of the messages inside are not here.
        groups: Whether fields are in a group, which this protocol has not. `places` has those too.
    """

    def __init__(self, most: int, work: Work) -> None:
        self._most, self._work = most, work
        self._count = 0
        self.places: list[tuple[int, int, int, int]] = []
        self.groups = False

    def check(self, data: Body, inside: Inside) -> None:
        """Counts the fields of a message. Raises: TooLarge if they are too many; Broken for no message."""
        try:
            self._fields(data, 0, len(data), inside, self.places)
        except IndexError:
            raise Broken("the message ends in a field") from None

    def _fields(
        self, data: Body, at: int, end: int, inside: Inside, places: list[tuple[int, int, int, int]] | None
    ) -> None:
        """places: gets what `places` has; None in a message inside. Raises: TooLarge; Broken; IndexError."""
        while at < end:
            start = at
            self._count += 1
            if self._count > self._most:
                raise TooLarge(
                    f"the message has over {self._most} fields; send numbers packed, or in "
                    "raw_input_contents, and members in raw_input_contents"
                )
            if not self._count % _STEP:
                self._work.step()
            tag, at = _varint(data, at)
            kind = tag & 7
            if kind == 0:
                _, at = _varint(data, at)
            elif kind == 1:
                at += 8
            elif kind == 5:
                at += 4
            elif kind == 2:
                size, at = _varint(data, at)
                if at + size > end:
                    raise Broken("the message ends in a field")
                self._inner(data, at, size, inside.get(tag >> 3))
                if places is not None:
                    places.append((tag >> 3, start, at, at + size))
                at += size
            elif kind > 5:
                raise Broken("the message has a field of an unknown type")
            else:
                self.groups = True
        if at > end:
            raise Broken("the message ends in a field")

    def _inner(self, data: Body, at: int, size: int, limit: Inside | int | None) -> None:
        """Checks the value of a field. Raises: TooLarge; Broken."""
        if isinstance(limit, dict):
            self._fields(data, at, at + size, limit, None)
        elif limit is not None and size > limit:
            count = 0
            for start in range(at, at + size, _WINDOW):
                last = data[start : min(start + _WINDOW, at + size)].translate(None, _NOT_LAST)
                count += len(last)
                self._work.step()
            if count > limit:
                raise TooLarge(f"the message has a list of {count} numbers, and the limit is {limit}")


def _varint(data: Body, at: int) -> tuple[int, int]:
    """Returns a number of 7 bits for each byte, and where it ends. Raises: IndexError; Broken."""
    found = shift = 0
    while True:
        byte = data[at]
        at += 1
        found |= (byte & 127) << shift
        if byte < 128:
            return found, at
        shift += 7
        if shift > 63:
            raise Broken("the message has a number of over 10 bytes")
