"""Tests how messages become requests: the bytes on the wire, and each datatype in each form."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from rpc_client import infer_message
from support import fresh, must

from widepack_serve.protocol.datatypes import DATATYPES
from widepack_serve.protocol.request import read_request
from widepack_serve.protocol.work import NoSteps
from widepack_serve.rpc.messages import CLASSES, classes_of, file_of
from widepack_serve.rpc.raw_inputs import InferMessage
from widepack_serve.rpc.raw_inputs import infer_message as read_bytes
from widepack_serve.rpc.receive import FIELDS, read_message
from widepack_serve.rpc.schema import MESSAGES, METHODS
from widepack_serve.rpc.wire import FieldCount, of_inference

VALUES: dict[str, list[Any]] = {
    "BOOL": [True, False, True],
    "UINT8": [0, 1, 255],
    "UINT16": [0, 1, 2**16 - 1],
    "UINT32": [0, 1, 2**32 - 1],
    "UINT64": [0, 1, 2**64 - 1],
    "INT8": [-128, 0, 127],
    "INT16": [-(2**15), 0, 2**15 - 1],
    "INT32": [-(2**31), 0, 2**31 - 1],
    "INT64": [-(2**63), 0, 2**63 - 1],
    "FP32": [-1.5, math.inf, math.nan],
    "FP64": [1e300, -math.inf, math.nan],
}


def plain(message: Any) -> InferMessage:
    """Returns a message as the server reads it."""
    return read(bytes(message.SerializeToString()))


def read(data: bytes) -> InferMessage:
    count = FieldCount(1000, NoSteps())
    count.check(data, of_inference(10**6))
    return read_bytes(data, count)


def test_the_bytes_of_a_message_are_those_of_the_published_protocol() -> None:
    """Tags are written out: field << 3 | wire type."""
    message = CLASSES["ModelInferRequest"](model_name="m", model_version="v", id="i")
    message.parameters["p"].int64_param = 5
    one = message.inputs.add(name="x", datatype="FP32", shape=[1, 2])
    one.contents.fp32_contents.extend([1.0])
    message.outputs.add(name="y").parameters["q"].bool_param = True
    message.raw_input_contents.append(b"\x07")
    expected = (
        b"\x0a\x01m\x12\x01v\x1a\x01i"
        + b"\x22\x07\x0a\x01p\x12\x02\x10\x05"
        + b"\x2a\x15\x0a\x01x\x12\x04FP32\x1a\x02\x01\x02\x2a\x06\x32\x04\x00\x00\x80\x3f"
        + b"\x32\x0c\x0a\x01y\x12\x07\x0a\x01q\x12\x02\x08\x01"
        + b"\x3a\x01\x07"
    )
    assert message.SerializeToString(deterministic=True) == expected


def test_every_method_has_its_messages() -> None:
    assert {f"{m}{kind}" for m in METHODS for kind in ("Request", "Response")} <= set(MESSAGES)


def test_fields_that_the_schema_leaves_out_can_be_read() -> None:
    more = classes_of(file_of({"A": ("string name = 1", "int64 later = 99")}, "other"))["A"](
        name="n", later=4
    )
    assert CLASSES["ModelReadyRequest"].FromString(more.SerializeToString()).name == "n"


@pytest.mark.parametrize("name", DATATYPES)
def test_raw_contents_become_the_tensor(name: str) -> None:
    value = torch.tensor(VALUES.get(name, [-0.5, 0.0, math.inf]), dtype=DATATYPES[name].dtype).reshape(3, 1)
    found = read_message(plain(infer_message("m", ("x", value))), None).inputs["x"]
    assert isinstance(found, torch.Tensor)
    assert found.dtype == value.dtype and found.shape == value.shape
    assert found.view(torch.uint8).tolist() == value.view(torch.uint8).tolist()


@pytest.mark.parametrize("name", VALUES)
def test_typed_contents_become_the_tensor(name: str) -> None:
    message = CLASSES["ModelInferRequest"](model_name="m")
    one = message.inputs.add(name="x", datatype=name, shape=[3])
    getattr(one.contents, FIELDS[name]).extend(VALUES[name])
    found = read_message(plain(message), None).inputs["x"]
    assert isinstance(found, torch.Tensor)
    assert found.dtype == DATATYPES[name].dtype
    assert [str(v) for v in found.tolist()] == [str(v) for v in VALUES[name]]


def test_an_input_without_numbers() -> None:
    raw = infer_message("m", ("x", torch.empty(0, 4)))
    typed = CLASSES["ModelInferRequest"](model_name="m")
    typed.inputs.add(name="x", datatype="FP32", shape=[0, 4])
    for message in (raw, typed):
        found = read_message(plain(message), None).inputs["x"]
        assert isinstance(found, torch.Tensor) and found.shape == (0, 4)


def test_a_message_and_a_json_body_are_the_same_request() -> None:
    body = (
        b'{"id": "7", "parameters": {"timeout": 2000000, "binary_data_output": true, "priority": 0},'
        b'"inputs": [{"name": "x", "datatype": "FP32", "shape": [2], "data": [1.5, 2.5]},'
        b'{"name": "member", "datatype": "BYTES", "shape": [2], "data": ["a", "\xc3\xa9"]}],'
        b'"outputs": [{"name": "y.mean", "parameters": {"of": "softmax", "dim": -1}},'
        b'{"name": "y", "parameters": {"binary_data": false}}]}'
    )
    message = infer_message("m", ("x", torch.tensor([1.5, 2.5])), ("member", ["a", "é"]), id="7")
    message.parameters["timeout"].uint64_param = 2_000_000
    message.parameters["priority"].uint64_param = 0
    first = message.outputs.add(name="y.mean")
    first.parameters["of"].string_param = "softmax"
    first.parameters["dim"].int64_param = -1
    message.outputs.add(name="y").parameters["binary_data"].bool_param = False
    rest, rpc = read_request(body, len(body)), read_message(plain(message), None)
    assert torch.equal(torch.as_tensor(rest.inputs.pop("x")), torch.as_tensor(rpc.inputs.pop("x")))
    assert rest == rpc


@pytest.mark.parametrize(
    ("parameter", "remaining", "timeout"),
    [(None, None, None), (None, 3.0, 3.0), (2_000_000, 3.0, 2.0), (5_000_000, 3.0, 3.0), (None, -1.0, 0.0)],
)
def test_the_deadline_of_the_client_is_the_timeout(
    parameter: int | None, remaining: float | None, timeout: float | None
) -> None:
    message = infer_message("m", ("x", torch.ones(1)))
    if parameter is not None:
        message.parameters["timeout"].int64_param = parameter
    assert read_message(plain(message), remaining).timeout == timeout


NAMED: bytes = CLASSES["ModelInferRequest"](model_name="m", id="i").SerializeToString()


def raw(*values: bytes) -> bytes:
    found: bytes = CLASSES["ModelInferRequest"](raw_input_contents=values).SerializeToString()
    return found


LARGE = bytes(range(256)) * 1000
UNKNOWN = b"\xfa\x01\x02ab"
"""Field 31, which the protocol has not."""
GROUP = b"\xfb\x01" + raw(b"inside") + b"\xfc\x01"
"""A group, which protobuf leaves out with its fields."""
NUMBER = b"\x38\x05"
"""Field 7 as a number, which is another field."""


@pytest.mark.parametrize(
    "data",
    [
        NAMED + raw(LARGE),
        raw(LARGE) + NAMED,
        raw(LARGE, b"", LARGE, b"x") + NAMED + raw(b"y"),
        raw(b"x") + NAMED + UNKNOWN + raw(LARGE),
        NAMED + raw(LARGE) + NUMBER,
        NAMED + GROUP + raw(LARGE),
        GROUP + NAMED,
        NAMED + raw(LARGE[:9000]) + CLASSES["ModelInferRequest"](id="j" * 300_000).SerializeToString(),
        NAMED + raw(b"x"),
        NAMED,
    ],
)
def test_a_large_message_is_read_as_protobuf_reads_it(data: bytes) -> None:
    found, expected = read(data), CLASSES["ModelInferRequest"].FromString(data)
    assert [bytes(one) for one in found.raw] == list(expected.raw_input_contents)
    assert (found.fields.model_name, found.fields.id) == (expected.model_name, expected.id)


def test_the_bytes_of_a_large_input_are_not_copied() -> None:
    data = NAMED + raw(LARGE)
    one = read(data).raw[0]
    assert isinstance(one, memoryview) and one.obj is data and not read(data).fields.raw_input_contents


def test_serving_http_does_not_import_grpc() -> None:
    code = "import sys, widepack_serve.server.run; print('grpc' in sys.modules, 'google' in sys.modules)"
    assert must(fresh(code)).split() == ["False", "False"]
