"""Writes the answer to an inference: JSON, and binary tensors after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson
import torch

from ..errors import RequestError
from .datatypes import BY_DTYPE
from .tensors import count_of_no_numbers, to_bytes, to_json
from .work import NoSteps, Work

_ANY = 1 << 62
_NO_STEPS = NoSteps()


@dataclass(frozen=True, slots=True)
class AnsweredOutput:
    """An output of an answer. binary: whether it is carried as bytes."""

    name: str
    value: torch.Tensor
    binary: bool


def answer_body(
    model: str,
    version: str,
    id: str | None,
    outputs: Sequence[AnsweredOutput],
    most: int = _ANY,
    work: Work = _NO_STEPS,
) -> tuple[bytes, int | None]:
    """Returns the body of an answer.

    Args:
        model: The name of the model, as the client wrote it.
        version: Its version.
        id: The text of the request; None without one.
        outputs: The outputs. Those that are not binary have types that JSON can carry.
        most: The most bytes of an output in JSON.
        work: Is told of each step.

    Returns:
        The body, and the length of its JSON part; None if there is nothing else.

    Raises:
        RequestError: JSON cannot carry a number of an output, since it has no NaN and no infinity.
        TooLarge: An output in JSON is too large.
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
            _check_json(one)
            row["data"] = to_json(one.value, most, work)
        rows.append(row)
    document: dict[str, Any] = {"model_name": model, "model_version": version, "outputs": rows}
    if id is not None:
        document["id"] = id
    text = orjson.dumps(document)
    return (text, None) if not parts else (b"".join((text, *parts)), len(text))


def _check_json(one: AnsweredOutput) -> None:
    """Checks that JSON can carry the numbers of an output. Raises: RequestError."""
    if count := count_of_no_numbers(one.value):
        raise RequestError(
            f"output {one.name}: {count} of its {one.value.numel()} numbers are NaN or infinite, which JSON "
            "cannot carry; request it with the parameter binary_data"
        )


def document_body(document: Any) -> bytes:
    """Returns any JSON document as bytes."""
    return orjson.dumps(document)
