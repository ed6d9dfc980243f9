"""Writes the answer to an inference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import RequestError
from ..protocol.datatypes import BY_DTYPE
from ..protocol.response import AnsweredOutput
from ..protocol.tensors import to_bytes, to_json
from .messages import CLASSES
from .receive import FIELDS


def answer_message(model: str, version: str, id: str | None, outputs: Sequence[AnsweredOutput]) -> Any:
    """Returns a `ModelInferResponse`.

    The protocol has all outputs in raw_output_contents, or none. None are if the client wants no output as
    bytes.

    Args:
        model: The name of the model, as the client wrote it.
        version: Its version.
        id: The text of the request; None without one.
        outputs: The outputs.

    Raises:
        RequestError: The fields of contents cannot carry a tensor.
    """
    answer = CLASSES["ModelInferResponse"](model_name=model, model_version=version, id=id or "")
    raw = any(o.binary for o in outputs)
    for one in outputs:
        datatype = BY_DTYPE[one.value.dtype].name
        row = answer.outputs.add(name=one.name, datatype=datatype, shape=one.value.shape)
        if raw:
            answer.raw_output_contents.append(bytes(to_bytes(one.value)))
        elif datatype not in FIELDS:
            raise RequestError(
                f"output {one.name} is {datatype}, which has no field of contents; request it with the "
                "parameter binary_data"
            )
        else:
            getattr(row.contents, FIELDS[datatype]).extend(to_json(one.value))
    return answer
