"""Writes the answer to an inference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..protocol.datatypes import BY_DTYPE
from ..protocol.json_numbers import PIECE
from ..protocol.response import AnsweredOutput
from ..protocol.tensors import to_bytes
from ..protocol.work import NoSteps, Work
from .messages import CLASSES
from .receive import FIELDS

_NO_STEPS = NoSteps()


def answer_message(
    model: str,
    version: str,
    id: str | None,
    outputs: Sequence[AnsweredOutput],
    work: Work = _NO_STEPS,
) -> Any:
    """Returns a `ModelInferResponse`.

    The protocol has all outputs in raw_output_contents, or none: `all_binary` makes all of them binary, or
    none.

    Args:
        model: The name of the model, as the client wrote it.
        version: Its version.
        id: The text of the request; None without one.
        outputs: The outputs. If none is binary, all have types with a field of contents.
        work: Is told of each step.
    """
    answer = CLASSES["ModelInferResponse"](model_name=model, model_version=version, id=id or "")
    raw = any(o.binary for o in outputs)
    for one in outputs:
        datatype = BY_DTYPE[one.value.dtype].name
        row = answer.outputs.add(name=one.name, datatype=datatype, shape=one.value.shape)
        if raw:
            answer.raw_output_contents.append(bytes(to_bytes(one.value)))
        else:
            numbers, flat = getattr(row.contents, FIELDS[datatype]), one.value.reshape(-1)
            for start in range(0, flat.numel(), PIECE):
                numbers.extend(flat[start : start + PIECE].tolist())
                work.step()
    return answer
