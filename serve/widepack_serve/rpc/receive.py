"""Reads a request for an inference: a message becomes the same request that a JSON body becomes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..errors import RequestError
from ..protocol.datatypes import BYTES
from ..protocol.parameters import FEATURES, parameters_of
from ..protocol.request import Check, InferRequest, InputHead, Value, request_of, value_of_bytes
from ..protocol.tensors import MAX_RANK, datatype_of, from_numbers, texts_from_parts
from ..protocol.work import NoSteps, Work
from .raw_inputs import InferMessage

_NO_STEPS = NoSteps()
FIELDS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    BYTES: "bytes_contents",
}
"""The field of `InferTensorContents` for each datatype. FP16 and BF16 have none."""


def read_message(
    message: InferMessage, remaining: float | None, check: Check | None = None, work: Work = _NO_STEPS
) -> InferRequest:
    """Reads a request.

    Args:
        message: The message.
        remaining: Seconds until the client's deadline; None without one.
        check: Compares the inputs with the model before their values are read; None for a small message.
        work: Is told of each step.

    Raises:
        RequestError: It is not a request of the protocol.
    """
    fields = message.fields
    _check_contents(fields, len(message.raw))

    def value(one: InputHead) -> Value:
        parameters_of(one.given, one.title, (FEATURES,))
        if message.raw:
            raw = memoryview(message.raw[one.number])
            return value_of_bytes(one.title, one.datatype, one.shape, raw)
        return _of_contents(one.title, one.datatype, one.shape, fields.inputs[one.number], work)

    request = request_of(_document(fields), value, check)
    if remaining is None:
        return request
    waits = max(remaining, 0.0)
    return replace(request, timeout=waits if request.timeout is None else min(waits, request.timeout))


def all_binary(request: InferRequest) -> InferRequest:
    """Returns a request with all outputs binary if one is: a message has all outputs as bytes, or none."""
    if not any(o.binary for o in request.outputs) or all(o.binary for o in request.outputs):
        return request
    return replace(request, outputs=[replace(o, binary=True) for o in request.outputs])


def _document(message: Any) -> dict[str, Any]:
    """Returns a message in the form of a JSON body, without the data of its inputs. Outputs are binary unless
    the client says otherwise.
    """
    return {
        "id": message.id or None,
        "parameters": {"binary_data_output": True, **_values(message.parameters)},
        "inputs": [
            {
                "name": i.name,
                "datatype": i.datatype,
                "shape": list(i.shape[: MAX_RANK + 1]),
                "parameters": _values(i.parameters),
            }
            for i in message.inputs
        ],
        "outputs": [{"name": o.name, "parameters": _values(o.parameters)} for o in message.outputs],
    }


def _values(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Returns parameters with values of Python; None for a parameter without a value."""
    found = {}
    for name, one in parameters.items():
        choice = one.WhichOneof("parameter_choice")
        found[name] = None if choice is None else getattr(one, choice)
    return found


def _check_contents(message: Any, raw: int) -> None:
    """Checks that all inputs are in raw_input_contents, or none. raw: its values. Raises: RequestError."""
    inputs = message.inputs
    if not raw:
        return
    if raw != len(inputs):
        raise RequestError(
            f"raw_input_contents has {raw} values, and inputs has {len(inputs)}; all inputs are raw, or none"
        )
    for one in inputs:
        if one.HasField("contents"):
            raise RequestError(
                f"input {one.name} has contents, and the request has raw_input_contents; give one of them"
            )


def _of_contents(title: str, datatype: str, shape: Sequence[int], given: Any, work: Work) -> Value:
    """Returns an input that is carried in the field of its datatype. Raises: RequestError."""
    if datatype not in FIELDS:
        datatype_of(title, datatype)
        raise RequestError(f"{title}: {datatype} has no field of contents; send it in raw_input_contents")
    field = FIELDS[datatype]
    for other, _ in given.contents.ListFields():
        if other.name != field:
            raise RequestError(f"{title} has {other.name}; the contents of {datatype} are {field}")
    data = getattr(given.contents, field)
    if datatype == BYTES:
        return texts_from_parts(title, shape, data)
    return from_numbers(title, datatype_of(title, datatype), shape, data, work)
