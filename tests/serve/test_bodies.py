"""Tests that every bad body is refused: binary tensors, encodings, sizes, and bodies that are slow."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from asgi import InProcess, Request, Response, exchange
from infer import HEADER, binary_request, document, read
from refused import GOOD, change, refused, sent

import widepack
import widepack_serve


def binary(header: str | None = None, more: bytes = b"", **first: Any) -> Request:
    """Returns a binary request. first: changes of its input."""
    request = binary_request("plain", GOOD)
    body, length = request.body, int(request.headers[HEADER])
    assert isinstance(body, bytes)
    text, data = orjson.loads(body[:length]), body[length:]
    change(**first)(text)
    head = orjson.dumps(text)
    return sent(head + data + more, **{HEADER: str(len(head)) if header is None else header})


BINARY: list[tuple[dict[str, Any], str]] = [
    ({"header": "abc"}, "Inference-Header-Content-Length is 'abc'; it is the number of bytes of the JSON"),
    ({"header": "-5"}, "Inference-Header-Content-Length is '-5'"),
    ({"header": "1.5"}, "Inference-Header-Content-Length is '1.5'"),
    ({"header": ""}, "Inference-Header-Content-Length is ''"),
    ({"header": "99999"}, "Inference-Header-Content-Length is '99999'"),
    ({"header": "9" * 400}, "Inference-Header-Content-Length is '9999"),
    ({"header": "+5"}, "Inference-Header-Content-Length is '+5'"),
    ({"header": "\xb2"}, "Inference-Header-Content-Length is"),
    ({"header": "0"}, "the request is not JSON"),
    ({"header": "10"}, "the request is not JSON"),
    ({"more": b"x"}, "the body has 1 bytes after the last input"),
    ({"parameters": {"binary_data_size": 44}}, "x has 44 bytes; FP32 with the shape [2, 6] has 48"),
    ({"parameters": {"binary_data_size": 49}}, "binary_data_size is 49; 48 bytes are left"),
    ({"parameters": {"binary_data_size": 2**63}}, "binary_data_size is 9223372036854775808"),
    ({"shape": [2, 7]}, "input x has 48 bytes; FP32 with the shape [2, 7] has 56"),
    ({"datatype": "FP64"}, "input x has 48 bytes; FP64 with the shape [2, 6] has 96"),
    ({"datatype": "BYTES"}, "ends after the data"),
    ({"datatype": "BOOL", "shape": [48]}, "neither 0 nor 1"),
]


@pytest.mark.parametrize(("changes", "words"), BINARY)
def test_binary_bodies(changes: dict[str, Any], words: str, server: InProcess) -> None:
    refused(server, binary(**changes), 400, words)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\x05\x00\x00\x00fold1\x06\x00\x00\x00fold1", "input member: text 1 ends after the data"),
        (b"\x05\x00\x00\x00fold1\x05\x00\x00", "input member: text 1 ends after the data"),
        (b"\xff\xff\xff\xfffold1", "input member: text 0 ends after the data"),
        (b"\x05\x00\x00\x00fold1", "member has 1 texts; the shape [2] has 2"),
        (b"\x01\x00\x00\x00\xff\x00\x00\x00\x00", "is not UTF-8"),
    ],
)
def test_binary_texts(data: bytes, words: str, server: InProcess) -> None:
    text = document(GOOD)
    parameters = {"binary_data_size": len(data)}
    text["inputs"].append({"name": "member", "datatype": "BYTES", "shape": [2], "parameters": parameters})
    head = orjson.dumps(text)
    refused(server, sent(head + data, **{HEADER: str(len(head))}), 400, words)


# ---------------------------------------------------------------- encodings and sizes


def test_encodings(server: InProcess) -> None:
    body = orjson.dumps(document(GOOD))
    packed = gzip.compress(body)
    for encoding in ("br", "gzip, gzip", "compress", "x" * 500):
        refused(server, sent(packed, content_encoding=encoding), 415, "is unknown; known: gzip, deflate")
    for encoding, data, words in (
        ("gzip", body, "the body is not gzip"),
        ("gzip", b"", "the body ends before its gzip data is complete"),
        ("gzip", packed[:-9], "the body ends before its gzip data is complete"),
        ("gzip", packed[:-8] + b"\0" * 8, "the body is not gzip"),
        ("gzip", packed + b"more", "the body has 4 bytes after its gzip data"),
        ("gzip", packed + packed, "after its gzip data"),
        ("deflate", packed, "the body is not deflate"),
        ("deflate", zlib.compress(body)[:-4], "the body ends before its deflate data is complete"),
        ("gzip", gzip.compress(b"hello"), "the request is not JSON"),
    ):
        refused(server, sent(data, content_encoding=encoding), 400, words)
    for encoding in ("", "identity", " GZIP "):
        good = sent(packed if "G" in encoding else body, content_encoding=encoding)
        assert read(server.maybe(good)).outputs


@pytest.fixture(scope="module")
def small(wide: dict[str, Path]) -> Iterator[InProcess]:
    """Returns a server that takes bodies of at most 2,000 bytes, within 0.2 seconds."""
    started = InProcess(widepack_serve.app(wide["plain"], max_body=2000, receive_timeout=0.2, members=False))
    yield started.start()
    started.close()


def test_bodies_over_the_limit(small: InProcess) -> None:
    words = "the limit is 2000"
    refused(small, sent(b"x" * 2001, content_length="2001"), 413, words)
    refused(small, sent(b"", content_length="9" * 30), 413, words)
    refused(small, sent(b"x", content_length="-1"), 400, "Content-Length is '-1'")
    chunks: list[bytes] = [b"x" * 1000] * 3
    request = Request("POST", "/v2/models/plain/infer", chunks)
    refused(small, request, 413, "over 2000 bytes, the limit")
    for make in (gzip.compress, zlib.compress):
        encoding = "gzip" if make is gzip.compress else "deflate"
        bomb = make(b" " * 1_900_000)
        assert len(bomb) < 2000
        refused(small, sent(bomb, content_encoding=encoding), 413, "more than 2000 bytes once unpacked")
        text = orjson.dumps(document(GOOD))
        exact = text + b" " * (2000 - len(text))
        assert read(small.maybe(sent(make(exact), content_encoding=encoding))).outputs
        refused(small, sent(make(exact + b" "), content_encoding=encoding), 413, "once unpacked")
    assert read(small.maybe(sent(exact))).outputs


def test_bodies_that_arrive_in_part_have_a_limit_together(wide: dict[str, Path]) -> None:
    app = widepack_serve.app(wide["plain"], max_body=2000, max_receiving=3000, members=False)
    server = InProcess(app).start()
    text = orjson.dumps(document(GOOD))
    whole = text + b" " * (1600 - len(text))
    path = "/v2/models/plain/infer"
    slow = Request("POST", path, [whole[:1200], whole[1200:1210], whole[1210:]], gap=0.2)

    async def scene() -> list[Response | None]:
        tasks = [asyncio.ensure_future(exchange(server.app, slow)) for _ in range(2)]
        await asyncio.sleep(0.3)
        at_once = await exchange(server.app, sent(whole))  # a body that arrives whole does not count
        parts = await exchange(server.app, Request("POST", path, [whole[:700], whole[700:]]))
        gone = await exchange(server.app, Request("POST", path, [whole[:500], b""], cut=True))
        return [at_once, parts, gone, *[await t for t in tasks]]

    at_once, parts, gone, first, second = server.run(scene())
    assert read(at_once).outputs and gone is None
    assert parts is not None
    assert (parts.status, parts.headers["retry-after"]) == (503, "1")
    assert parts.error == "bodies of 2400 bytes are being received, and the limit is 3000; try again"
    assert read(first).outputs and read(second).outputs
    for _ in range(3):  # nothing is counted any more
        assert read(server.maybe(Request("POST", path, [whole[:1500], whole[1500:]]))).outputs
    metrics = server("GET", "/metrics").body.decode()
    assert 'widepack_rejected_total{reason="receiving_full"} 1.0' in metrics
    assert 'code="503",entry="forward",model="plain"} 1.0' in metrics
    server.close()
    with pytest.raises(widepack.UsageError, match="max_receiving is 1000, and max_body is 64000000"):
        widepack_serve.app(wide["plain"], max_receiving=1000)


def test_a_slow_body(small: InProcess) -> None:
    body = orjson.dumps(document(GOOD))
    slow = Request("POST", "/v2/models/plain/infer", [body[:50], body[50:]], gap=0.15)
    got = small.maybe(slow)
    assert got is not None
    assert (got.status, got.headers.get("connection")) == (408, "close")
    assert "did not arrive within 0.2 seconds" in got.error
    left = Request("POST", "/v2/models/plain/infer", [body[:50], body[50:]], cut=True)
    assert small.maybe(left) is None
