"""Writes the answer to an inference: JSON, and binary tensors after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson
import torch

from ..errors import RequestError
from .datatypes import BY_DTYPE
from .growing import Body, Growing
from .json_numbers import write_numbers
from .tensors import count_of_no_numbers, write_bytes
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
) -> tuple[Body, int | None]:
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
    body = Growing()  # neither the text nor the bytes are in memory twice
    body.append(orjson.dumps({"model_name": model, "model_version": version})[:-1] + b',"outputs":[')
    comma = b""
    for one in outputs:
        datatype = BY_DTYPE[one.value.dtype]
        row: dict[str, Any] = {"name": one.name, "datatype": datatype.name, "shape": list(one.value.shape)}
        if one.binary:
            row["parameters"] = {"binary_data_size": one.value.nbytes}
            body.append(comma + orjson.dumps(row))
        else:
            _check_json(one)
            body.append(comma + orjson.dumps(row)[:-1] + b',"data":')
            write_numbers(one.value, most, body, work)
            body.append(b"}")
        comma = b","
    body.append(b"]}" if id is None else b'],"id":' + orjson.dumps(id) + b"}")
    length, binary = body.size, [one.value for one in outputs if one.binary]
    for value in binary:
        write_bytes(value, body, work)
    return body.whole(), length if binary else None


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
