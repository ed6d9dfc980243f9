"""Leaves the bytes of inputs where they are when a large message is read.

protobuf would copy `raw_input_contents`, and copy it again for each access: 180 MB for a message of 60 MB.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..protocol.growing import SMALL, Body
from .messages import CLASSES, parsed
from .wire import FieldCount

_REQUEST = "ModelInferRequest"
_RAW = 7
"""The number of the field `raw_input_contents`."""


@dataclass(frozen=True, slots=True)
class InferMessage:
    """A message of an inference.

    Attributes:
        fields: A `ModelInferRequest`, without `raw_input_contents` if it was large.
        raw: The values of `raw_input_contents`. Those of a large message are a part of its bytes.
    """

    fields: Any
    raw: Sequence[bytes | memoryview]


def infer_message(data: Body, count: FieldCount) -> InferMessage:
    """Reads the message of an inference.

    Args:
        data: Its bytes.
        count: What has counted its fields.

    Raises:
        RequestError: It is no `ModelInferRequest`.
    """
    found = [place for place in count.places if place[0] == _RAW]
    rest = len(data) - sum(end - start for _, start, _, end in found)
    if len(data) <= SMALL or count.groups or 2 * rest > len(data):
        fields = parsed(CLASSES[_REQUEST], data)
        return InferMessage(fields, fields.raw_input_contents)
    view, others, at = memoryview(data), bytearray(), 0
    for _, start, _, end in found:
        others += view[at:start]
        at = end
    others += view[at:]
    return InferMessage(
        parsed(CLASSES[_REQUEST], bytes(others)), [view[value:end] for *_, value, end in found]
    )
