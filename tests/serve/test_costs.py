"""Tests that a large request costs as much as it has bytes, and is checked before its values are read."""

from __future__ import annotations

import asyncio
import gzip
import threading
import time
from collections.abc import Callable
from typing import Any

import grpc
import orjson
import pytest
import torch
from asgi import InProcess, Request, exchange
from hypothesis import given, settings
from hypothesis import strategies as st
from infer import HEADER, binary_request, document, infer, json_request, read
from refused import refused, sent
from rpc_client import RpcClient, infer_message, with_server
from support import Artifacts

import widepack
from widepack_serve.errors import RequestError
from widepack_serve.protocol import json_data, json_numbers
from widepack_serve.protocol import request as requests
from widepack_serve.protocol.growing import SMALL
from widepack_serve.protocol.request import InferRequest, read_request
from widepack_serve.rpc.messages import CLASSES

LARGE = torch.randn(8_000, 6, generator=torch.Generator().manual_seed(1))


def in_json(data: str, shape: str = "[2, 6]", more: str = "") -> Request:
    text = f'{{"inputs": [{{"name": "x", "datatype": "FP32", "shape": {shape}, "data": {data}{more}}}]}}'
    return sent(text.encode())


# ---------------------------------------------------------------- the same request, small or large


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("indent", [False, True])
@pytest.mark.parametrize("first", ["data", "name"])
def test_a_large_body_is_read_as_a_small_one(
    nested: bool, indent: bool, first: str, server: InProcess
) -> None:
    text = document({"x": LARGE}, nested=nested, id='a "data": [5')
    if first == "data":
        text["inputs"] = [{"data": text["inputs"][0].pop("data"), **text["inputs"][0]}]
    body = orjson.dumps(text, option=orjson.OPT_INDENT_2 if indent else 0)
    assert len(body) > 2 * SMALL
    got = read(server.maybe(sent(body, model="plain.1"))).outputs["output"]
    torch.testing.assert_close(got, infer(server, "plain.1", {"x": LARGE})["output"], rtol=1e-4, atol=1e-5)


def test_members_of_many_rows(server: InProcess) -> None:
    names = [f"fold{i % 4}" for i in range(len(LARGE))]
    got = infer(server, "plain", {"x": LARGE, "member": names})["output"]
    text = json_request("plain", {"x": LARGE, "member": names})
    torch.testing.assert_close(read(server.maybe(text)).outputs["output"], got, rtol=1e-4, atol=1e-5)
    refused(server, json_request("plain", {"x": LARGE, "member": names[1:]}), 400, "[7999]")
    refused(server, json_request("plain", {"x": LARGE, "member": [*names[1:], "fold9"]}), 400, "fold9")


TREES: st.SearchStrategy[Any] = st.recursive(
    st.sampled_from([0, 1, -2.5, 1e39, True, None, "a", 'x"data": [1]', "\\", "é", {}, 2**60]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["data", "a"]), inner, max_size=2)
    ),
    max_leaves=8,
)
NUMBERS = st.lists(st.floats(-1e3, 1e3, width=32), min_size=6, max_size=6)
DATA = TREES | NUMBERS | st.lists(NUMBERS, min_size=1, max_size=3)
KEYS = st.sampled_from(["name", "datatype", "shape", "data", "parameters", "other"])
INPUTS = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["x", "member"]),
        "datatype": st.sampled_from(["FP32", "INT64", "BOOL", "BYTES"]),
    },
    optional={"shape": st.sampled_from([[1, 6], [6], [2, 3], [], [0], [2, 0]]) | TREES, "data": DATA},
)
DOCUMENTS = st.fixed_dictionaries(
    {"inputs": st.lists(INPUTS | TREES, max_size=2) | TREES},
    optional={"id": TREES, "outputs": TREES, "parameters": TREES},
)


def outcome(body: bytes) -> Any:
    try:
        found = read_request(body, len(body))
    except RequestError as e:
        return type(e).__name__
    values = {k: v if isinstance(v, list) else (v.dtype, v.tolist()) for k, v in found.inputs.items()}
    return found.id, found.shapes, found.outputs, values


def test_a_text_cannot_stand_for_the_list_of_another_input() -> None:
    text = b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [40000], "data": [%b]}, {"name": "y", '
    text += b'"datatype": "FP32", "shape": [40000], "data": "\\u0000list 0"}]}'
    body = text % b",".join([b"1"] * 40_000)
    assert len(body) > SMALL
    with pytest.raises(RequestError, match="input y: data is .* it is a list of numbers"):
        read_request(body, len(body))


@given(
    DOCUMENTS, st.booleans(), st.integers(0, 400), st.sampled_from([b"", b"]", b"[", b",", b'"', b" ", b"}"])
)
@settings(deadline=None, max_examples=300)
def test_both_ways_of_reading_agree(tree: Any, indent: bool, place: int, more: bytes) -> None:
    """Also for texts with a character too many."""
    body = orjson.dumps(tree, option=orjson.OPT_INDENT_2 if indent else 0)
    body = body[:place] + more + body[place:]
    with pytest.MonkeyPatch.context() as patch:
        expected = outcome(body)
        patch.setattr(requests, "SMALL", 0)
        patch.setattr(json_numbers, "PIECE", 5)
        patch.setattr(json_numbers, "_WINDOW", 7)
        assert outcome(body) == expected


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("[[]1]", "[1, 1]"),
        ("[1[]]", "[1, 1]"),
        ("[1 2]", "[1]"),
        ("[1[,2]]", "[1, 2]"),
        ("[[1,2]3]", "[1, 3]"),
        ("[1,,2]", "[3]"),
        ("[1,2,]", "[3]"),
        ("[,1,2]", "[3]"),
        ("[1],[2]", "[2]"),
        ("[1:2]", "[2]"),
        ("[01]", "[1]"),
        ("[NaN]", "[1]"),
        ("[tru]", "[1]"),
        ("[5]", "[0]"),
        ("[[5],[]]", "[2, 0]"),
        ("[[],[] 5]", "[2, 0]"),
        ("[[1],[2]", "[2, 1]"),
        ("[1]]", "[1]"),
    ],
)
def test_what_is_no_list_of_numbers_is_refused(
    text: str, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "SMALL", 0)
    body = in_json(text, shape).body
    assert isinstance(body, bytes)
    with pytest.raises(RequestError):
        read_request(body, len(body))


@pytest.mark.parametrize(
    ("text", "shape"),
    [("[]", "[0]"), ("[[], [ ]]", "[2, 0]"), ("[[[],[]],[[],[]]]", "[2, 2, 0]"), ("[]", "[2, 0]")],
)
def test_empty_lists_are_read_in_both_ways(text: str, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    body = in_json(text, shape).body
    assert isinstance(body, bytes)
    small = read_request(body, len(body)).inputs["x"]
    monkeypatch.setattr(requests, "SMALL", 0)
    large = read_request(body, len(body)).inputs["x"]
    assert isinstance(small, torch.Tensor) and isinstance(large, torch.Tensor)
    assert small.shape == large.shape and small.dtype == large.dtype and not small.numel()


# ---------------------------------------------------------------- what a hostile request costs


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Returns the bytes of each JSON text that becomes objects, and whether that is on the main thread."""
    found: list[tuple[int, bool]] = []
    loads = orjson.loads

    def recorded(text: Any) -> Any:
        found.append((len(text), threading.current_thread() is threading.main_thread()))
        return loads(text)

    for module in (json_data, json_numbers, requests):
        monkeypatch.setattr(module.orjson, "loads", recorded)
    return found


MB = 1_000_000
HOSTILE: dict[str, tuple[Callable[[], Request], int, str]] = {
    "empty lists": (lambda: in_json("[" + "[]," * MB + "[]]"), 400, "not nested as the shape"),
    "more numbers than the shape": (lambda: in_json("[" + "0," * MB + "0]"), 400, "not nested as the shape"),
    "rows of another model": (
        lambda: in_json("[" + "0," * MB + "0]", f"[1, {MB + 1}]"),
        400,
        "the model takes 6",
    ),
    "a shape of more": (lambda: in_json("[" + "0," * MB + "0]", "[65536, 6, 1]"), 400, "x"),
    "rows over the limit": (lambda: in_json("[" + "0," * MB + "0]", "[200000, 6]"), 413, "200000 rows"),
    "numbers over the limit": (
        lambda: in_json("[" + "0," * MB + "0]", "[2147483647, 6]"),
        413,
        "12884901882 numbers, and the limit of a request is 16777216 (--max-values)",
    ),
    "texts": (lambda: in_json("[" + '"",' * MB + '""]'), 413, "over 65536 texts"),
    "objects": (lambda: in_json("[" + "{}," * MB + "{}]"), 413, "besides the numbers"),
    "another key": (
        lambda: in_json("[0]", more=', "more": [' + "0," * MB + "0]"),
        413,
        "besides the numbers",
    ),
    "many keys": (
        lambda: in_json("[0]", more="".join(f', "k{i}": 0' for i in range(MB // 10))),
        413,
        "besides the numbers",
    ),
    "many inputs": (
        lambda: sent(b'{"inputs": [' + b'{"name": "x", "data": [0]},' * (MB // 10) + b"0]}"),
        413,
        "besides the numbers",
    ),
    "one long number": (lambda: in_json("[" + "1" * MB + "]", "[1, 6]"), 400, "not nested"),
    "a long number among others": (
        lambda: in_json("[" + "1" * MB + ",0,0,0,0,0]", "[1, 6]"),
        400,
        "more than 4096 characters between two commas",
    ),
    "a long name": (lambda: in_json("[0]", more=', "b": "' + "a" * MB + '"'), 413, "besides the numbers"),
    "white space": (lambda: in_json("[" + " " * MB + "0]"), 400, "not nested"),
    "packed zeros": (
        lambda: sent(gzip.compress(b" " * 60 * MB), content_encoding="gzip"),
        413,
        "once unpacked, over 200 for each",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_body_is_refused_before_it_becomes_objects(
    case: str, server: InProcess, pieces: list[tuple[int, bool]]
) -> None:
    make, status, words = HOSTILE[case]
    refused(server, make(), status, words)
    before = [size for size, _ in pieces]
    assert max(before, default=0) <= 400_000 and sum(before) < 500_000


def test_others_are_served_while_a_large_body_is_read(
    server: InProcess, pieces: list[tuple[int, bool]]
) -> None:
    text = document({"x": torch.rand(60_000, 6)})
    large, small = sent(orjson.dumps(text), model="plain.1"), binary_request("plain.0", {"x": LARGE[:1]})

    async def scene() -> tuple[int, Any]:
        reading = asyncio.ensure_future(exchange(server.app, large))
        answered = 0
        while not reading.done():
            read(await exchange(server.app, small))
            answered += 1
        return answered, await reading

    answered, response = server.run(scene())
    seen = [one for one in pieces if one[0] > 1000]  # without the small requests
    assert read(response).outputs["output"].shape == (60_000, 3)
    assert answered >= 10
    assert len(seen) > 100 and not any(main for _, main in seen)
    assert max(size for size, _ in seen) < 50_000


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("stage", ["unpacked", "read", "written"])
def test_work_ends_when_its_client_has_gone(
    stage: str, serve: Callable[..., InProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(max_batch=1 << 16)
    steps: list[int] = []

    def slow(seconds: float) -> None:
        steps.append(1)
        time.sleep(0.05)

    class Slow:
        sleep = staticmethod(lambda s: slow(s))

    body = orjson.dumps(document({"x": torch.rand(40_000, 6)}))
    request = sent(body, model="plain.1")
    if stage == "unpacked":
        request = sent(gzip.compress(b"[1]" * 20 * MB, 1), content_encoding="gzip")
        monkeypatch.setattr("widepack_serve.protocol.body.MOST_RATIO", 2000)
    elif stage == "written":
        request = binary_request("plain", {"x": torch.rand(60_000, 6)}, parameters={})
    request.leaves_after = 0.3
    monkeypatch.setattr("widepack_serve.protocol.work.time", Slow)
    assert server.maybe(request) is None
    seen = len(steps)
    time.sleep(0.2)
    assert 1 <= len(steps) <= seen + 1
    monkeypatch.undo()
    assert server.app.state.service.receiving.bytes == 0
    assert infer(server, "plain", {"x": LARGE[:1]})


# ---------------------------------------------------------------- gRPC


def field(number: int, data: bytes) -> bytes:
    size, length = len(data), b""
    while size > 127:
        length += bytes([size & 127 | 128])
        size >>= 7
    return bytes([number << 3 | 2]) + length + bytes([size]) + data


X = torch.ones(2, 64)
GOOD = infer_message("ens", ("input", X)).SerializeToString()
ONE = field(1, b"input") + field(2, b"FP32")
MESSAGES: dict[str, tuple[bytes, str]] = {
    "empty inputs": (GOOD + field(5, b"") * 80_000, "fields"),
    "empty outputs": (GOOD + field(6, b"") * 80_000, "fields"),
    "raw contents": (GOOD + field(7, b"") * 80_000, "fields"),
    "parameters": (GOOD + field(4, b"") * 80_000, "fields"),
    "parameters of an input": (field(1, b"ens") + field(5, ONE + field(4, b"") * 80_000), "fields"),
    "texts of an input": (field(1, b"ens") + field(5, ONE + field(5, field(8, b"") * 80_000)), "fields"),
    "single numbers": (field(1, b"ens") + field(5, ONE + field(5, b"\x10\x01" * 80_000)), "fields"),
    "unknown fields": (GOOD + field(15, b"") * 80_000, "fields"),
    "unknown numbers": (GOOD + b"\x78\x01" * 80_000, "fields"),
    "a long shape": (field(1, b"ens") + field(5, ONE + field(3, b"\x01" * 3_000_000)), "numbers"),
    "few empty inputs": (GOOD + field(5, b"") * 20_000, "raw_input_contents has 1 values"),
}


def test_messages_of_many_small_fields_are_refused(
    artifacts: Artifacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[int] = []
    kind = CLASSES["ModelInferRequest"]

    async def calls(client: RpcClient) -> dict[str, tuple[Any, str]]:
        found = {}
        for name, (data, _) in MESSAGES.items():
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await client.send("ModelInfer", data)
            found[name] = error.value.code(), str(error.value.details())
        assert await client.send("ModelInfer", GOOD)
        return found

    class Recorded:
        """The class of the message, which notes how large the messages are that it reads."""

        @staticmethod
        def FromString(data: bytes) -> Any:
            parsed.append(len(data))
            return kind.FromString(data)

    monkeypatch.setitem(CLASSES, "ModelInferRequest", Recorded)
    found = with_server({"ens": widepack.load(artifacts("mlp"))}, calls)
    assert {n: (text, MESSAGES[n][1]) for n, (_, text) in found.items() if MESSAGES[n][1] not in text} == {}
    assert max(parsed) < 100_000


def test_numbers_of_a_large_message(artifacts: Artifacts) -> None:
    """In raw contents and in fields, on both sides."""
    x = torch.rand(2_000, 64)
    ens = widepack.load(artifacts("mlp"))

    async def calls(client: RpcClient) -> list[torch.Tensor]:
        typed = CLASSES["ModelInferRequest"](model_name="ens")
        one = typed.inputs.add(name="input", datatype="FP32", shape=x.shape)
        one.contents.fp32_contents.extend(x.reshape(-1).tolist())
        typed.parameters["binary_data_output"].bool_param = False
        got = await client("ModelInfer", message=typed)
        raw = await client.infer("ens", ("input", x))
        numbers = torch.tensor(list(got.outputs[0].contents.fp32_contents))
        return [numbers, torch.frombuffer(bytearray(raw.raw_output_contents[0]), dtype=torch.float32)]

    for found in with_server({"ens": ens}, calls):
        torch.testing.assert_close(found, ens(x).reshape(-1), rtol=1e-4, atol=1e-5)


def test_a_request_of_the_largest_size(server: InProcess) -> None:
    x = torch.rand(65_536, 6)
    assert infer(server, "plain.2", {"x": x})["output"].shape == (65_536, 3)
    head: InferRequest = read_request(*_split(binary_request("plain.2", {"x": x})))
    assert head.shapes == {"x": [65_536, 6]}
    refused(server, binary_request("plain.2", {"x": torch.rand(65_537, 6)}), 413, "65537 rows")


def _split(request: Request) -> tuple[bytes, int]:
    assert isinstance(request.body, bytes)
    return request.body, int(request.headers[HEADER])
