"""Tests that every bad document and every bad path is refused with a status and a sentence."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from asgi import InProcess, Request
from batches import Batches
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from infer import binary_request, document, json_request, read
from refused import GOOD, Change, X, change, outputs, refused, sent, whole

from widepack import UsageError
from widepack_serve.settings import Settings

ONE: dict[str, Any] = document(GOOD)["inputs"][0]
DEEP: Any = 1.0
for _ in range(200):
    DEEP = [DEEP]


@dataclass(frozen=True)
class Nested:
    """A value inside of lists, of which orjson and Python do not write so many."""

    value: Any
    depth: int


NESTED = Nested(1, 1000)

JSON_BODIES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "the request is not JSON"),
    "none": (b"hello", "the request is not JSON"),
    "half": (b'{"inputs": [', "the request is not JSON"),
    "bytes that are no UTF-8": (b'{"inputs": "\xff"}', "the request is not JSON"),
    "lone surrogate": (b'{"id": "\\ud800", "inputs": []}', "the request"),
    "NaN": (orjson.dumps(document(GOOD)).replace(b"0.0,", b"NaN,"), "the request is not JSON"),
    "too deep": (b"[" * 5000 + b"]" * 5000, "the request is not JSON"),
    "a list": (b"[]", "not a JSON object"),
    "a number": (b"7", "not a JSON object"),
    "null": (b"null", "not a JSON object"),
    "no inputs": (b"{}", "has no list inputs"),
    "two documents": (b"{}{}", "the request is not JSON"),
}

DOCUMENTS: dict[str, tuple[Change, int, str]] = {
    "inputs is an object": (whole(inputs={}), 400, "has no list inputs"),
    "inputs is empty": (whole(inputs=[]), 400, "has no list inputs"),
    "inputs is null": (whole(inputs=None), 400, "has no list inputs"),
    "an input is a number": (whole(inputs=[5]), 400, "input 0 is not a JSON object"),
    "an input twice": (whole(inputs=[ONE, ONE]), 400, "input x is given twice"),
    "no name": (change(name=...), 400, "input 0 has no name"),
    "empty name": (change(name=""), 400, "input 0 has no name"),
    "name is a number": (change(name=3), 400, "input 0 has no name"),
    "long name": (change(name="a" * 1001), 400, "input 0 has no name"),
    "unknown name": (change(name="z"), 400, "model plain has no input z; its inputs are x"),
    "unknown name with a line": (change(name="z\n\x00"), 400, "has no input"),
    "no datatype": (change(datatype=...), 400, "input x has no datatype"),
    "unknown datatype": (change(datatype="FP33"), 400, "input x has the datatype 'FP33'; known: BOOL"),
    "datatype is a number": (change(datatype=32), 400, "input x has the datatype 32"),
    "other datatype": (change(datatype="FP64"), 400, "input x is FP64; the model takes FP32"),
    "whole numbers": (
        change(datatype="INT64", data=list(range(12))),
        400,
        "x is INT64; the model takes FP32",
    ),
    "texts": (change(datatype="BYTES", data=["a"] * 12), 400, "input x is BYTES; the model takes FP32"),
    "FP16 in JSON": (change(datatype="FP16"), 400, "JSON has no numbers of FP16; send the tensor as binary"),
    "BF16 in JSON": (change(datatype="BF16"), 400, "JSON has no numbers of BF16"),
    "no shape": (change(shape=...), 400, "input x has no shape"),
    "negative shape": (change(shape=[-1, 6]), 400, "input x has the shape [-1, 6]; a shape is a list"),
    "float shape": (change(shape=[2.0, 6]), 400, "has the shape [2.0, 6]"),
    "bool shape": (change(shape=[True, 6]), 400, "has the shape [True, 6]"),
    "text shape": (change(shape="2,6"), 400, "has the shape '2,6'"),
    "null shape": (change(shape=None), 400, "has the shape None"),
    "2^63 in the shape": (change(shape=[2**63, 6]), 400, "has the shape [9223372036854775808, 6]"),
    "17 dims": (change(shape=[1] * 17), 400, "a list of at most 16 whole numbers"),
    "overflow": (change(shape=[2**31 - 1] * 4), 400, "more numbers than a body can carry"),
    "shape of other data": (change(shape=[3, 6]), 400, "input x has 12 numbers; the shape [3, 6] has 18"),
    "no data": (change(data=...), 400, "input x has no data"),
    "data is null": (change(data=None), 400, "data is None; it is a list of numbers"),
    "data is a text": (change(data="AAAA"), 400, "data is 'AAAA'; it is a list of numbers"),
    "data is an object": (change(data={}), 400, "it is a list of numbers"),
    "ragged data": (change(data=[[1.0] * 6, [1.0] * 5]), 400, "data is not nested as the shape [2, 6]"),
    "mixed nesting": (change(data=[[1.0] * 6, 1.0]), 400, "data is not nested as the shape"),
    "too deep data": (change(data=[[[1.0] * 6], [[1.0] * 6]]), 400, "data is not nested as the shape"),
    "very deep data": (change(data=DEEP), 400, "data"),
    "parts of another dim 0": (
        change(data=[[1.0] * 6] * 3),
        400,
        "data has 3 parts in dim 0; the shape has 2",
    ),
    "texts in data": (change(data=["1"] * 12), 400, "data contains '1', which is not a number of FP32"),
    "null in data": (change(data=[None] * 12), 400, "data contains None, which is not a number of FP32"),
    "true in data": (change(data=[True] * 12), 400, "data contains True, which is not a number of FP32"),
    "NaN as a text": (change(data=["NaN"] * 12), 400, "data contains 'NaN'"),
    "too large for FP32": (change(data=[1e39] * 12), 400, "a number that FP32 cannot represent"),
    "parameters is a list": (change(parameters=[]), 400, "input x: parameters is not a JSON object"),
    "static dim": (change(shape=[3, 4]), 400, "the model takes 6"),
    "rank": (change(shape=[12]), 400, "x"),
    "0 rows and a number": (change(shape=[0, 6], data=[1.0]), 400, "input x"),
    "size without bytes": (change(parameters={"binary_data_size": 48}, data=...), 400, "0 bytes are left"),
    "size and data": (change(parameters={"binary_data_size": 0}), 400, "x has data and binary_data_size"),
    "negative size": (change(parameters={"binary_data_size": -1}, data=...), 400, "binary_data_size is -1"),
    "float size": (change(parameters={"binary_data_size": 0.0}, data=...), 400, "binary_data_size is 0.0"),
    "bool size": (change(parameters={"binary_data_size": False}, data=...), 400, "binary_data_size is False"),
    "text size": (change(parameters={"binary_data_size": "4"}, data=...), 400, "binary_data_size is 4"),
    "id is a number": (whole(id=5), 400, "id is not a text"),
    "long id": (whole(id="a" * 1001), 400, "id is not a text of at most 1000 characters"),
    "parameters of the request": (whole(parameters=5), 400, "the request: parameters is not a JSON object"),
    "timeout is a text": (whole(parameters={"timeout": "1s"}), 400, "timeout is 1s; it is a whole number"),
    "timeout is negative": (whole(parameters={"timeout": -1}), 400, "timeout is -1"),
    "timeout is a float": (whole(parameters={"timeout": 1.5}), 400, "timeout is 1.5"),
    "timeout is true": (whole(parameters={"timeout": True}), 400, "timeout is True"),
    "member is a parameter": (whole(parameters={"member": "fold1"}), 400, "it is an input"),
    "binary_data_output": (whole(parameters={"binary_data_output": 1}), 400, "it is true or false"),
    "outputs is an object": (whole(outputs={}), 400, "outputs is not a list"),
    "an output is a text": (whole(outputs=["output"]), 400, "output 0 is not a JSON object"),
    "an output without a name": (whole(outputs=[{}]), 400, "output 0 has no name"),
    "output twice": (outputs("output", "output"), 400, "output output is requested twice"),
    "unknown output": (outputs("z"), 400, "there is no output 'z'; the outputs are output, and figures such"),
    "unknown leaf of a figure": (outputs("z.mean"), 400, "there is no output 'z.mean'"),
    "unknown figure": (outputs("output.meen"), 400, "did you mean 'mean'?"),
    "quantile(2)": (outputs("output.quantile(2)"), 400, "a number from 0 to 1"),
    "quantile": (outputs("output.quantile"), 400, "quantile needs the share of members in parentheses"),
    "quantile(nan)": (outputs("output.quantile(nan)"), 400, "a number from 0 to 1"),
    "mean(2)": (outputs("output.mean(2)"), 400, "mean has no number in parentheses"),
    "entropy of answers": (outputs("output.entropy"), 400, "needs probabilities"),
    "mixture": (outputs("output.mixture"), 400, "request mean and var"),
    "binary_data": (outputs({"name": "output", "parameters": {"binary_data": 2}}), 400, "true or false"),
    "of of no figure": (outputs({"name": "output", "parameters": {"of": "softmax"}}), 400, "of a figure"),
    "unknown of": (
        outputs({"name": "output.mean", "parameters": {"of": "relu"}}),
        400,
        "of='relu' is unknown",
    ),
    "of is a number": (
        outputs({"name": "output.mean", "parameters": {"of": 2}}),
        400,
        "of is 2; it is softmax",
    ),
    "dim": (outputs({"name": "output.vote", "parameters": {"dim": 2}}), 400, "dim is 2; output has 2 dims"),
    "dim is true": (outputs({"name": "output.vote", "parameters": {"dim": True}}), 400, "dim is True"),
    "dim of the rows": (outputs({"name": "output.vote", "parameters": {"dim": 0}}), 400, "is the batch"),
    "classification": (
        outputs({"name": "output", "parameters": {"classification": 2}}),
        400,
        "the extension classification is not supported; leave out the parameter classification",
    ),
    "a deep shape": (change(shape=NESTED), 400, "input x has the shape a list of 1; a shape is a list"),
    "a deep timeout": (whole(parameters={"timeout": NESTED}), 400, "timeout is a list of 1"),
    "a deep datatype": (change(datatype=NESTED), 400, "input x has the datatype a list of 1"),
    "an output in shared memory": (
        outputs(
            {"name": "output", "parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 9}}
        ),
        400,
        "output output: the extension shared_memory is not supported",
    ),
    "an input in shared memory": (
        change(parameters={"shared_memory_region": "r"}),
        400,
        "input x: the extension shared_memory is not supported; leave out the parameter shared_memory_region",
    ),
    "a sequence": (whole(parameters={"sequence_id": 7}), 400, "the extension sequence is not supported"),
    "the start of a sequence": (
        whole(parameters={"sequence_id": 0, "sequence_start": True}),
        400,
        "leave out the parameter sequence_start",
    ),
    "priority": (
        whole(parameters={"priority": 1}),
        400,
        "the request: all requests have one priority; leave out the parameter priority",
    ),
    "an unknown parameter": (
        whole(parameters={"temperature": 0}),
        400,
        "the request: there is no parameter temperature; known: timeout, binary_data_output",
    ),
    "an unknown parameter of an input": (
        change(parameters={"content_type": "np"}),
        400,
        "input x: there is no parameter content_type; known: binary_data_size",
    ),
    "an unknown parameter of an output": (
        outputs({"name": "output", "parameters": {"dims": 1}}),
        400,
        "output output: there is no parameter dims; known: binary_data, of, dim",
    ),
}

MEMBERS: dict[str, tuple[Any, str]] = {
    "of another length": (
        {"datatype": "INT64", "shape": [3], "data": [0, 1, 2]},
        "input member has the shape [3]",
    ),
    "2-D": ({"datatype": "INT64", "shape": [2, 1], "data": [0, 1]}, "one number or name for each row, [2]"),
    "one for all": ({"datatype": "INT64", "shape": [], "data": [0]}, "one number or name for each row, [2]"),
    "negative": (
        {"datatype": "INT64", "shape": [2], "data": [0, -1]},
        "member contains -1; the members are 0 to 3",
    ),
    "too large": (
        {"datatype": "INT64", "shape": [2], "data": [4, 0]},
        "member contains 4; the members are 0 to 3",
    ),
    "huge": ({"datatype": "UINT64", "shape": [2], "data": [2**63, 0]}, "the members are 0 to 3"),
    "floats": ({"datatype": "FP32", "shape": [2], "data": [0.0, 1.0]}, "member is float32[2]"),
    "booleans": ({"datatype": "BOOL", "shape": [2], "data": [True, False]}, "member is bool[2]"),
    "unknown name": ({"datatype": "BYTES", "shape": [2], "data": ["fold1", "fold9"]}, "fold9"),
    "empty name": ({"datatype": "BYTES", "shape": [2], "data": ["", "fold1"]}, "''"),
    "name with zero": ({"datatype": "BYTES", "shape": [2], "data": ["\x00", "fold1"]}, "no member is called"),
    "numbers as texts": ({"datatype": "BYTES", "shape": [2], "data": [0, 1]}, "it is a list of texts"),
    "one name for two rows": ({"datatype": "BYTES", "shape": [1], "data": ["fold1"]}, "the shape [1]"),
    "fewer names": ({"datatype": "BYTES", "shape": [2], "data": ["fold1"]}, "member has 1 texts"),
}


@pytest.mark.parametrize("case", JSON_BODIES)
def test_bodies_that_are_no_request(case: str, server: InProcess) -> None:
    body, words = JSON_BODIES[case]
    refused(server, sent(body), 400, words)


@pytest.mark.parametrize("case", DOCUMENTS)
def test_documents_that_are_no_request(case: str, server: InProcess) -> None:
    changed, status, words = DOCUMENTS[case]
    request = document(GOOD)
    changed(request)
    refused(server, sent(as_json(request)), status, words)


def as_json(value: Any) -> bytes:
    """Returns a value as JSON, which may be nested deeper than orjson writes."""
    if isinstance(value, Nested):
        return b"[" * value.depth + as_json(value.value) + b"]" * value.depth
    if isinstance(value, list):
        return b"[" + b",".join(map(as_json, value)) + b"]"
    if isinstance(value, dict):
        return b"{" + b",".join(as_json(k) + b":" + as_json(v) for k, v in value.items()) + b"}"
    return orjson.dumps(value)


VALUES = st.recursive(
    st.sampled_from([None, True, 0, -1, 2**40, 1.5, "", "x", "FP32", "output.mean", "a" * 2000]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["name", "shape", "data", "parameters", "of", "x"]), inner, max_size=3
        )
    ),
    max_leaves=12,
)
PLACES = st.sampled_from(
    [
        ("inputs",),
        ("inputs", 0),
        *(("inputs", 0, k) for k in ("name", "datatype", "shape", "data", "parameters")),
        ("inputs", 0, "parameters", "binary_data_size"),
        ("outputs",),
        ("outputs", 0),
        *(("outputs", 0, k) for k in ("name", "parameters")),
        *(("outputs", 0, "parameters", k) for k in ("binary_data", "of", "dim", "classification", "x")),
        ("parameters",),
        *(("parameters", k) for k in ("timeout", "binary_data_output", "sequence_id", "priority", "x")),
        ("id",),
    ]
)


@given(st.lists(st.tuples(PLACES, VALUES, st.integers(0, 1000)), min_size=1, max_size=3), st.booleans())
@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_json_structure_is_answered_or_refused(
    server: InProcess, changes: list[tuple[tuple[Any, ...], Any, int]], routed: bool
) -> None:
    body = document({**GOOD, **({"member": ["fold1", "fold0"]} if routed else {})}, [{"name": "output"}])
    for place, value, depth in changes:
        at: Any = body
        for key, following in pairwise(place):
            inner = at[key] if isinstance(key, int) or key in at else None
            if not isinstance(inner, list if following == 0 else dict) or (following == 0 and not inner):
                at[key] = [{}] if following == 0 else {}
            at = at[key]
        if isinstance(at, dict) != isinstance(place[-1], str):
            continue
        at[place[-1]] = Nested(value, depth) if depth > 900 else value
    got = server.maybe(sent(as_json(body)))
    assert got is not None
    assert got.status == 200 or 400 <= got.status < 500, got.body
    assert got.status == 200 or (list(got.json) == ["error"] and len(got.error) < 1000)


@pytest.mark.parametrize("path", ["/v2/repository/index", "/v2/repository/models/plain.1/load"])
@given(VALUES, st.integers(0, 1000))
@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_json_structure_of_other_bodies(path: str, server: InProcess, value: Any, depth: int) -> None:
    value = Nested(value, depth) if depth > 900 else value
    for body in (value, {"ready": value}, {"parameters": value}, {"parameters": {"checkpoint": value}}):
        got = server("POST", path, as_json(body))
        assert got.status == 200 or 400 <= got.status < 500, got.body


def test_numbers_that_json_writes_and_no_type_has(server: InProcess) -> None:
    text = orjson.dumps(document(GOOD)).decode()
    for number in ("1e400", "-1e400"):
        refused(server, sent(text.replace("[0.0,", f"[{number},").encode()), 400, "")
    for data, words in (("[99999999999999999999, 2]", "INT64"), ("[9223372036854775808, 2]", "INT64")):
        body = document(GOOD)
        body["inputs"].append({"name": "member", "datatype": "INT64", "shape": [2], "data": "D"})
        refused(server, sent(orjson.dumps(body).replace(b'"D"', data.encode())), 400, words)


@pytest.mark.parametrize("case", MEMBERS)
def test_members_of_rows(case: str, server: InProcess) -> None:
    member, words = MEMBERS[case]
    request = document(GOOD)
    request["inputs"].append({"name": "member", **member})
    refused(server, sent(orjson.dumps(request)), 400, words)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("plain.fold3", "The input member is of the model of all members"),
        ("plain.3", "The input member is of the model of all members"),
        ("plain.each", "The input member is of the model of all members"),
        ("mixing", "It takes no input member: its rows are not known to be independent"),
        ("counting", "It takes no input member: it has states"),
    ],
)
def test_models_without_members_of_rows(model: str, words: str, server: InProcess) -> None:
    ids = torch.tensor([0, 1])
    refused(server, json_request(model, {**GOOD, "member": ids}), 400, words)


@pytest.mark.parametrize(
    ("model", "inputs", "words"),
    [
        (
            "text",
            {"ids": [[1]], "x": None, "loud": None},
            "input x is missing; model text takes ids, loud, x",
        ),
        ("text", {"ids": [[1], [2]], "x": [[0.0] * 4], "loud": [True]}, "B"),
        ("text", {"ids": [[20]], "x": [[0.0] * 4], "loud": [True]}, "the input ids contains 20"),
        ("text.1", {"ids": [[-1]], "x": [[0.0] * 4], "loud": [True]}, "cannot run on these rows"),
        ("text.each", {"ids": [[[1]]] * 2, "x": [[[0.0] * 4]] * 2, "loud": [[True]] * 2}, "3"),
        ("counting", {"x": [[0.0] * 6]}, "input state.total is missing"),
        (
            "counting",
            {"x": [[0.0] * 6], "state.total": [[0.0] * 6] * 2, "state.steps": [0] * 3},
            "total",
        ),
        ("counting.1", {"x": [[0.0] * 6], "state.total": [[0.0] * 6] * 3, "state.steps": 0}, "total"),
        ("scaled", {"x": [[0.0] * 6], "scale": [1.0] * 4}, "the model takes 3"),
        ("plain", {"x": [[0.0] * 6], "y": [1.0]}, "model plain has no input y"),
        ("mixing.each", {"x": [[0.0] * 6]}, "x"),
    ],
)
def test_inputs_that_do_not_fit(model: str, inputs: dict[str, Any], words: str, server: InProcess) -> None:
    given = {k: torch.tensor(v) for k, v in inputs.items() if v is not None}
    refused(server, binary_request(model, given), 400, words)


@pytest.mark.parametrize(
    ("model", "name", "words"),
    [
        ("text", "label.mean", "label is INT64, and figures are of floating numbers; request label"),
        ("text", "label.entropy", "label is INT64"),
        ("plain.fold1", "output.mean", "figures are of the answers of all members"),
        ("plain.each", "output.mean", "figures are of the answers of all members"),
        ("counting", "state.total.mean", "a state has no figures"),
        ("ragged_heads.1", "output.mean", "figures are of the answers of all members"),
        ("score", "output.vote", "dim -1 of the members' answers is the batch"),
        ("text", "odd.mean", "there is no output 'odd.mean'; the outputs are logits, words, label"),
    ],
)
def test_figures_that_do_not_exist(model: str, name: str, words: str, server: InProcess) -> None:
    shapes: dict[str, dict[str, torch.Tensor]] = {
        "text": {
            "ids": torch.ones(2, 3, dtype=torch.int64),
            "x": torch.ones(2, 4),
            "loud": torch.ones(2, dtype=torch.bool),
        },
        "counting": {
            **GOOD,
            "state.total": torch.zeros(3, 6),
            "state.steps": torch.zeros(3, dtype=torch.int64),
        },
        "ragged_heads.1": {"x": torch.zeros(2, 1, 16, 16)},
        "plain.each": {"x": X.repeat(4, 1, 1)},
    }
    refused(server, binary_request(model, shapes.get(model, GOOD), [name]), 400, words)


def test_half_precision_is_no_json(server: InProcess, batches: Batches) -> None:
    """It is refused before anything runs."""
    inputs = {
        "pixels": torch.zeros(1, 4, dtype=torch.uint8),
        "half": torch.zeros(1, 4, dtype=torch.float16),
        "small": torch.zeros(1, 4, dtype=torch.int32),
    }
    refused(
        server, binary_request("typed", inputs, parameters={}), 400, "output half is FP16, which only binary"
    )
    in_json = [{"name": "brain", "parameters": {"binary_data": False}}]
    refused(server, binary_request("typed", inputs, in_json), 400, "output brain is BF16, which only binary")
    assert not batches.parts
    others = [{"name": n, "parameters": {"binary_data": False}} for n in ("y", "brain.mean")]
    assert read(server.maybe(binary_request("typed", inputs, others))).outputs["brain.mean"].shape == (1, 4)
    assert len(batches.parts) == 1


# ---------------------------------------------------------------- names, paths, methods


@pytest.mark.parametrize(
    ("method", "path", "status", "words"),
    [
        ("GET", "/v2/models/plane", 404, "there is no model 'plane'; did you mean plain?"),
        ("GET", "/v2/models/plain.fold9", 404, "did you mean plain.fold"),
        ("GET", "/v2/models/plain.4", 404, "there is no model 'plain.4'"),
        ("GET", "/v2/models/plain.decode", 404, "did you mean plain.encode"),
        ("GET", "/v2/models/plain.each.0", 404, "there is no model 'plain.each.0'"),
        ("GET", "/v2/models/ragged_heads.each", 404, "there is no model"),
        ("GET", "/v2/models/..", 404, "there is no model '..'"),
        ("GET", "/v2/models/%2E%2E%2F..%2Fetc%2Fpasswd", 404, "there is no model '../../etc/passwd'"),
        ("GET", "/v2/models/%00", 404, "there is no model '\\x00'"),
        ("GET", "/v2/models/%0A", 404, "there is no model '\\n'"),
        ("GET", "/v2/models/" + "a" * 10_000, 404, "there is no model 'aaa"),
        ("GET", "/v2/models/%ED%A0%80", 404, "the path is not UTF-8"),
        ("GET", "/v2/models/%FF", 404, "the path is not UTF-8"),
        ("GET", "/v2/models/plain/versions/7", 404, "has no version '7'; its version is"),
        ("POST", "/v2/models/plain/versions/7/infer", 404, "has no version '7'"),
        ("GET", "/v2/models/plain/versions", 404, "there is no path /v2/models/plain/versions"),
        ("GET", "/v2/models/plain/predict", 404, "known: NAME, and after it /ready, /infer, /config, /stats"),
        ("GET", "/v2/models/plain/infer", 405, "GET is not the method of this path; it takes POST"),
        ("POST", "/v2/models/plain", 405, "it takes GET"),
        ("DELETE", "/v2/models/plain", 405, "it takes GET"),
        ("PUT", "/v2/health/live", 405, "it takes GET"),
        ("GET", "/v2/repository/index", 405, "it takes POST"),
        ("POST", "/metrics", 405, "it takes GET"),
        ("GET", "/", 404, "GET /v2 describes the server"),
        ("GET", "/v1/models/plain", 404, "GET /v2 describes the server"),
        ("GET", "/v2/models", 404, "there is no path /v2/models"),
        ("GET", "/a%0Ab", 404, "there is no path"),
        ("OPTIONS", "*", 404, "there is no path"),
        ("POST", "/v2/repository/models/plain.fold1/load", 403, "swaps are not allowed"),
        ("POST", "/v2/repository/models/plain.fold1/unload", 403, "models are not unloaded"),
        ("POST", "/v2/repository/models/plain.fold1/drop", 404, "there is no action 'drop'"),
        ("GET", "/v2/repository/models/plain.fold1/load", 405, "it takes POST"),
    ],
)
def test_paths(method: str, path: str, status: int, words: str, server: InProcess) -> None:
    refused(server, Request(method, path), status, words)


def test_a_websocket_is_closed(server: InProcess) -> None:
    messages: list[Any] = []

    async def send(message: Any) -> None:
        messages.append(message)

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    scope = {"type": "websocket", "path": "/v2", "raw_path": b"/v2", "headers": [], "root_path": ""}
    server.run(server.app(scope, receive, send))
    assert [m["type"] for m in messages] == ["websocket.close"]


def test_settings_that_are_refused(wide: dict[str, Path]) -> None:
    wrong: list[tuple[str, Any]] = [("max_batch", 0), ("timeout", 0), ("drain", -1), ("hang", float("nan"))]
    for name, value in wrong:
        with pytest.raises(UsageError, match=f"{name} is {value}"):
            Settings({}, **{name: value})


def test_every_refusal_left_the_server_as_it_was(server: InProcess) -> None:
    """The last test of this file: the server still answers, and nothing waits."""
    found = read(server.maybe(binary_request("plain", GOOD))).outputs["output"]
    assert found.shape == (4, 2, 3)
    metrics = server("GET", "/metrics").body.decode()
    assert "widepack_queue_rows 0.0" in metrics
