"""Reads a request for an inference: JSON, and binary tensors after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
import torch

from ..errors import RequestError
from .datatypes import BYTES
from .tensors import datatype_of, from_bytes, from_json, read_shape, texts_from_bytes, texts_from_json

MAX_NAME = 1_000
_MICROSECONDS = 1e6
_MAX_TIMEOUT = 10**12

Value = torch.Tensor | list[str]
"""An input of a request: a tensor, or texts."""


@dataclass(frozen=True, slots=True)
class RequestedOutput:
    """An output that a client requests.

    Attributes:
        name: Its name, for example `logits` or `logits.mean`.
        binary: Whether the answer carries it as bytes.
        options: The parameters `of` and `dim` of a figure.
    """

    name: str
    binary: bool
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class InferRequest:
    """A request for an inference.

    Attributes:
        id: The client's text, which the answer carries; None without one.
        inputs: The inputs by name.
        shapes: The shape of each input on the wire.
        outputs: The requested outputs; empty for the model's default.
        binary: Whether the answer carries all outputs as bytes, unless an output says otherwise.
        timeout: Seconds that the request may wait; None for the server's default.
    """

    id: str | None
    inputs: dict[str, Value]
    shapes: dict[str, list[int]]
    outputs: list[RequestedOutput]
    binary: bool
    timeout: float | None


Reader = Callable[[int, str, Mapping[str, Any], Sequence[int]], Value]
"""Returns the value of an input. Takes its number, its title in messages, its description, and its shape."""


def read_request(body: bytes | bytearray, length: int) -> InferRequest:
    """Reads the body of a request.

    Args:
        body: The bytes, unpacked.
        length: How many of them are JSON. Binary tensors follow, in the order of the inputs.

    Raises:
        RequestError: The body is not a request of the protocol.
    """
    view = memoryview(body)
    try:
        document = orjson.loads(view[:length])
    except orjson.JSONDecodeError as e:
        raise RequestError(f"the request is not JSON: {e}") from None
    if not isinstance(document, dict):
        raise RequestError("the request is not a JSON object with the list inputs")
    at = length

    def value(_: int, title: str, one: Mapping[str, Any], shape: Sequence[int]) -> Value:
        nonlocal at
        size = _parameters(one, title).get("binary_data_size")
        if size is None:
            if "data" not in one:
                raise RequestError(f"{title} has no data")
            return _of_json(title, one, shape)
        if type(size) is not int or size < 0 or at + size > len(view):
            raise RequestError(
                f"{title}: binary_data_size is {str(size)[:40]}; {len(view) - at} bytes are left in the body"
            )
        if "data" in one:
            raise RequestError(f"{title} has data and binary_data_size; give one of them")
        at += size
        return value_of_bytes(title, one["datatype"], shape, view[at - size : at])

    request = request_of(document, value)
    if at != len(view):
        raise RequestError(f"the body has {len(view) - at} bytes after the last input")
    return request


def request_of(document: Mapping[str, Any], read: Reader) -> InferRequest:
    """Reads a request in the form of JSON. What a request may say is checked here, for REST and gRPC.

    Args:
        document: The request.
        read: Returns the value of each input. It is called in their order.

    Raises:
        RequestError: It is not a request of the protocol.
    """
    given = document.get("inputs")
    if not isinstance(given, list) or not given:
        raise RequestError("the request has no list inputs with at least one input")
    inputs: dict[str, Value] = {}
    shapes: dict[str, list[int]] = {}
    for number, one in enumerate(given):
        if not isinstance(one, dict):
            raise RequestError(f"input {number} is not a JSON object with name, datatype, shape and data")
        name = _name(one, f"input {number}")
        title = f"input {name}"
        if name in inputs:
            raise RequestError(f"{title} is given twice")
        if "datatype" not in one or "shape" not in one:
            raise RequestError(f"{title} has no {'datatype' if 'datatype' not in one else 'shape'}")
        shapes[name] = read_shape(title, one["shape"])
        inputs[name] = read(number, title, one, shapes[name])
    parameters = _parameters(document, "the request")
    binary_output = _flag(parameters, "binary_data_output", "the request", False)
    return InferRequest(
        _id(document),
        inputs,
        shapes,
        _outputs(document, binary_output),
        binary_output,
        _timeout(parameters),
    )


def value_of_bytes(title: str, datatype: Any, shape: Sequence[int], data: memoryview) -> Value:
    """Returns an input that is carried as bytes.

    Args:
        title: The input in messages.
        datatype: The name of its datatype.
        shape: Its shape, checked.
        data: The bytes.

    Raises:
        RequestError: They are not such an input.
    """
    if datatype == BYTES:
        return texts_from_bytes(title, shape, data)
    return from_bytes(title, datatype_of(title, datatype), shape, data)


def _of_json(title: str, one: Mapping[str, Any], shape: Sequence[int]) -> Value:
    """Returns an input that is carried as JSON. Raises: RequestError."""
    if one["datatype"] == BYTES:
        return texts_from_json(title, shape, one["data"])
    return from_json(title, datatype_of(title, one["datatype"]), shape, one["data"])


def _name(one: Mapping[str, Any], title: str) -> str:
    name = one.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        raise RequestError(f"{title} has no name: a text of 1 to {MAX_NAME} characters")
    return name


def _parameters(one: Mapping[str, Any], title: str) -> Mapping[str, Any]:
    found = one.get("parameters")
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise RequestError(f"{title}: parameters is not a JSON object")
    return found


def _flag(parameters: Mapping[str, Any], key: str, title: str, default: bool) -> bool:
    found = parameters.get(key, default)
    if not isinstance(found, bool):
        raise RequestError(f"{title}: {key} is {str(found)[:40]}; it is true or false")
    return found


def _id(document: Mapping[str, Any]) -> str | None:
    found = document.get("id")
    if found is not None and (not isinstance(found, str) or len(found) > MAX_NAME):
        raise RequestError(f"id is not a text of at most {MAX_NAME} characters")
    return found


def _timeout(parameters: Mapping[str, Any]) -> float | None:
    """Returns the seconds that a request may wait; None without the parameter. Raises: RequestError."""
    if "member" in parameters:
        raise RequestError(
            'member is a parameter of the request; it is an input: {"name": "member", "datatype": "BYTES", '
            '"shape": [1], "data": ["NAME"]}'
        )
    found = parameters.get("timeout")
    if found is None:
        return None
    if type(found) is not int or not 0 <= found <= _MAX_TIMEOUT:
        raise RequestError(f"timeout is {str(found)[:40]}; it is a whole number of microseconds")
    return found / _MICROSECONDS if found else None


def _outputs(document: Mapping[str, Any], binary: bool) -> list[RequestedOutput]:
    """Returns the requested outputs. Raises: RequestError."""
    given = document.get("outputs")
    if given is None:
        return []
    if not isinstance(given, list):
        raise RequestError("outputs is not a list")
    found: dict[str, RequestedOutput] = {}
    for number, one in enumerate(given):
        if not isinstance(one, dict):
            raise RequestError(f"output {number} is not a JSON object with a name")
        name = _name(one, f"output {number}")
        if name in found:
            raise RequestError(f"output {name} is requested twice")
        parameters = _parameters(one, f"output {name}")
        if parameters.get("classification"):
            raise RequestError(f"output {name}: the extension classification is not supported")
        options = {k: parameters[k] for k in ("of", "dim") if k in parameters}
        found[name] = RequestedOutput(
            name, _flag(parameters, "binary_data", f"output {name}", binary), options
        )
    return list(found.values())
