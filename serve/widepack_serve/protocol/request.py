"""Reads a request for an inference: JSON, and binary tensors after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
import torch

from ..errors import RequestError
from .datatypes import BYTES
from .growing import SMALL, Body
from .json_data import BOM, read_large
from .parameters import FEATURES, INPUT, OUTPUT, REQUEST, parameters_of
from .shown import shown
from .tensors import datatype_of, from_bytes, from_json, read_shape, texts_from_bytes, texts_from_json
from .work import NoSteps, Work

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
        options: The parameters `of`, `dim` and `calibrated` of a figure.
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
        features: The names of the numbers of a row that the client gives, by input; not checked.
    """

    id: str | None
    inputs: dict[str, Value]
    shapes: dict[str, list[int]]
    outputs: list[RequestedOutput]
    binary: bool
    timeout: float | None
    features: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class InputHead:
    """What a request says of an input besides its numbers.

    Attributes:
        number: Its place in the request.
        name: Its name.
        datatype: The name of its datatype; not checked.
        shape: Its shape, checked.
        given: All that the request says of it.
    """

    number: int
    name: str
    datatype: Any
    shape: list[int]
    given: Mapping[str, Any]

    @property
    def title(self) -> str:
        """The input in messages."""
        return f"input {self.name}"


Reader = Callable[[InputHead], Value]
"""Returns the value of an input."""
Check = Callable[[Sequence[InputHead]], None]
"""Compares names, datatypes and shapes with a model before values are read. Raises: RequestError."""
_NO_STEPS = NoSteps()


def read_request(
    body: Body,
    length: int,
    check: Check | None = None,
    work: Work = _NO_STEPS,
    most_texts: int = SMALL,
) -> InferRequest:
    """Reads the body of a request.

    Args:
        body: The bytes, unpacked.
        length: How many of them are JSON. Binary tensors follow, in the order of the inputs.
        check: Compares the inputs with the model before their values are read; None for a small body.
        work: Is told of each step.
        most_texts: The most texts of a list of a large body.

    Raises:
        RequestError: The body is not a request of the protocol.
    """
    document = _document(body, length, work, most_texts)
    if not isinstance(document, dict):
        raise RequestError("the request is not a JSON object with the list inputs")
    view = memoryview(body)
    at = length

    def value(one: InputHead) -> Value:
        nonlocal at
        size = parameters_of(one.given, one.title, INPUT).get("binary_data_size")
        if size is None:
            if "data" not in one.given:
                raise RequestError(f"{one.title} has no data")
            return _of_json(one, work)
        if type(size) is not int or size < 0 or at + size > len(view):
            raise RequestError(
                f"{one.title}: binary_data_size is {shown(size, quoted=False)}; {len(view) - at} bytes "
                "are left in the body"
            )
        if "data" in one.given:
            raise RequestError(f"{one.title} has data and binary_data_size; give one of them")
        at += size
        return value_of_bytes(one.title, one.datatype, one.shape, view[at - size : at])

    request = request_of(document, value, check)
    if at != len(view):
        raise RequestError(f"the body has {len(view) - at} bytes after the last input")
    return request


def _document(body: Body, length: int, work: Work, most_texts: int) -> Any:
    """Returns the JSON part of a body. Raises: RequestError."""
    if length > SMALL:
        return read_large(body, length, most_texts, work)
    try:
        start = len(BOM) if body[: len(BOM)] == BOM else 0
        return orjson.loads(memoryview(body)[start:length])
    except orjson.JSONDecodeError as e:
        raise RequestError(f"the request is not JSON: {e}") from None


def request_of(document: Mapping[str, Any], read: Reader, check: Check | None = None) -> InferRequest:
    """Reads a request in the form of JSON. What a request may say is checked here, for REST and gRPC.

    Args:
        document: The request.
        read: Returns the value of each input. It is called in their order.
        check: Compares the inputs with the model before that; None for a small request.

    Raises:
        RequestError: It is not a request of the protocol.
    """
    heads = _heads(document)
    parameters = parameters_of(document, "the request", REQUEST)
    binary_output = _flag(parameters, "binary_data_output", "the request", False)
    outputs = _outputs(document, binary_output)
    identity, timeout = _id(document), _timeout(parameters)
    if check is not None:
        check(heads)
    inputs = {one.name: read(one) for one in heads}
    shapes = {one.name: one.shape for one in heads}
    given = {one.name: one.given.get("parameters") or {} for one in heads}
    features = {name: found[FEATURES] for name, found in given.items() if FEATURES in found}
    return InferRequest(identity, inputs, shapes, outputs, binary_output, timeout, features)


def _heads(document: Mapping[str, Any]) -> list[InputHead]:
    """Returns what a request says of its inputs besides their numbers. Raises: RequestError."""
    given = document.get("inputs")
    if not isinstance(given, list) or not given:
        raise RequestError("the request has no list inputs with at least one input")
    heads: dict[str, InputHead] = {}
    for number, one in enumerate(given):
        if not isinstance(one, dict):
            raise RequestError(f"input {number} is not a JSON object with name, datatype, shape and data")
        name = _name(one, f"input {number}")
        title = f"input {name}"
        if name in heads:
            raise RequestError(f"{title} is given twice")
        if "datatype" not in one or "shape" not in one:
            raise RequestError(f"{title} has no {'datatype' if 'datatype' not in one else 'shape'}")
        heads[name] = InputHead(number, name, one["datatype"], read_shape(title, one["shape"]), one)
    return list(heads.values())


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


def _of_json(one: InputHead, work: Work) -> Value:
    """Returns an input that is carried as JSON. Raises: RequestError."""
    if one.datatype == BYTES:
        return texts_from_json(one.title, one.shape, one.given["data"])
    datatype = datatype_of(one.title, one.datatype)
    return from_json(one.title, datatype, one.shape, one.given["data"], work)


def _name(one: Mapping[str, Any], title: str) -> str:
    name = one.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        raise RequestError(f"{title} has no name: a text of 1 to {MAX_NAME} characters")
    return name


def _flag(parameters: Mapping[str, Any], key: str, title: str, default: bool) -> bool:
    found = parameters.get(key, default)
    if not isinstance(found, bool):
        raise RequestError(f"{title}: {key} is {shown(found, quoted=False)}; it is true or false")
    return found


def _id(document: Mapping[str, Any]) -> str | None:
    found = document.get("id")
    if found is not None and (not isinstance(found, str) or len(found) > MAX_NAME):
        raise RequestError(f"id is not a text of at most {MAX_NAME} characters")
    return found


def _timeout(parameters: Mapping[str, Any]) -> float | None:
    """Returns the seconds that a request may wait; None without the parameter. Raises: RequestError."""
    found = parameters.get("timeout")
    if found is None:
        return None
    if type(found) is not int or not 0 <= found <= _MAX_TIMEOUT:
        raise RequestError(f"timeout is {shown(found, quoted=False)}; it is a whole number of microseconds")
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
        parameters = parameters_of(one, f"output {name}", OUTPUT)
        options = {k: parameters[k] for k in ("of", "dim", "calibrated") if k in parameters}
        found[name] = RequestedOutput(
            name, _flag(parameters, "binary_data", f"output {name}", binary), options
        )
    return list(found.values())
