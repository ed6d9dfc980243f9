"""Writes the answer to an inference: JSON, and binary tensors after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson
import torch

from .datatypes import BY_DTYPE
from .tensors import to_bytes, to_json


@dataclass(frozen=True, slots=True)
class AnsweredOutput:
    """An output of an answer. binary: whether it is carried as bytes."""

    name: str
    value: torch.Tensor
    binary: bool


def answer_body(
    model: str, version: str, id: str | None, outputs: Sequence[AnsweredOutput]
) -> tuple[bytes, int | None]:
    """Returns the body of an answer.

    JSON has no NaN and no infinity: they are null in JSON data, and exact in binary data.

    Args:
        model: The name of the model, as the client wrote it.
        version: Its version.
        id: The text of the request; None without one.
        outputs: The outputs. Those that are not binary have types that JSON can carry.

    Returns:
        The body, and the length of its JSON part; None if there is nothing else.
    """
    rows: list[dict[str, Any]] = []
    parts: list[bytes | bytearray] = []
    for one in outputs:
        datatype = BY_DTYPE[one.value.dtype]
        row: dict[str, Any] = {"name": one.name, "datatype": datatype.name, "shape": list(one.value.shape)}
        if one.binary:
            data = to_bytes(one.value)
            row["parameters"] = {"binary_data_size": len(data)}
            parts.append(data)
        else:
            row["data"] = to_json(one.value)
        rows.append(row)
    document: dict[str, Any] = {"model_name": model, "model_version": version, "outputs": rows}
    if id is not None:
        document["id"] = id
    text = orjson.dumps(document)
    return (text, None) if not parts else (b"".join((text, *parts)), len(text))


def document_body(document: Any) -> bytes:
    """Returns any JSON document as bytes."""
    return orjson.dumps(document)
