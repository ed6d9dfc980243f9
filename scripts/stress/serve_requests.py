"""Makes requests for a server, valid ones and changed ones: JSON, headers, binary sizes, encodings, names,
paths and chunks.
"""

from __future__ import annotations

import copy
import gzip
import json
import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from asgi import Request
from fuzz_json import INTS, TEXTS, junk, mutate_json
from infer import HEADER, binary_request, document

BOMB = gzip.compress(b" " * 30_000_000)
SHAPES: dict[str, dict[str, tuple[tuple[str | int, ...], torch.dtype]]] = {
    "plain": {"x": (("B", 6), torch.float32)},
    "scaled": {"x": (("B", 6), torch.float32), "scale": ((3,), torch.float32)},
    "mixing": {"x": (("B", 6), torch.float32)},
    "score": {"x": (("B", 6), torch.float32)},
    "text": {
        "ids": (("B", "T"), torch.int64),
        "x": (("B", 4), torch.float32),
        "loud": (("B",), torch.bool),
    },
    "typed": {
        "pixels": (("B", 4), torch.uint8),
        "half": (("B", 4), torch.float16),
        "small": (("B", 4), torch.int32),
    },
}
MEMBERS = {"plain": 4}
FIGURES = ["output.mean", "output.std", "output.vote", "output.entropy", "output.quantile(0.3)", "output"]
PATHS = [
    "/v2",
    "/v2/health/live",
    "/v2/health/ready",
    "/v2/models/plain",
    "/v2/models/plain.fold1/ready",
    "/v2/models/text/stats",
    "/v2/models/stats",
    "/v2/repository/index",
    "/v2/repository/models/plain.fold1/load",
    "/metrics",
]


@dataclass(frozen=True)
class Valid:
    """A valid request. inputs: its inputs, without `member`. members: of each row; empty for all members."""

    request: Request
    model: str
    inputs: dict[str, torch.Tensor]
    members: Sequence[int]


class Requests:
    """Draws requests. draw: the source of chance."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self._ways: list[Callable[[Request], Request]] = [
            self._json,
            self._json,
            self._json,
            self._bytes,
            self._header,
            self._length,
            self._encoding,
            self._path,
            self._method,
            self._chunks,
            self._tail,
        ]

    def inputs(self, model: str, rows: int) -> dict[str, torch.Tensor]:
        """Returns inputs of a model."""
        found = {}
        words = self.draw.randint(1, 4)
        for name, (shape, dtype) in SHAPES[model].items():
            sizes = [{"B": rows, "T": words}.get(s, 0) if isinstance(s, str) else s for s in shape]
            x = torch.randint(20, sizes) if not dtype.is_floating_point else torch.randn(sizes)
            found[name] = x.to(dtype)
        return found

    def valid(self, model: str | None = None) -> Valid:
        """Returns a valid request of a random kind."""
        draw = self.draw
        model = model or draw.choice(list(SHAPES))
        rows, count = draw.choice([1, 1, 1, 2, 3, 5, 70]), MEMBERS.get(model, 3)
        inputs = self.inputs(model, rows)
        given: dict[str, Any] = dict(inputs)
        kind = draw.choice(["all", "one", "one", "routed"])
        members: list[int] = []
        name = model
        if kind == "one":
            members = [draw.randrange(count)] * rows
            name = f"{model}.{draw.choice(['', 'fold'])}{members[0]}"
        elif kind == "routed" and model not in ("mixing",):
            members = [draw.randrange(count) for _ in range(rows)]
            by_name = draw.random() < 0.5
            given["member"] = [f"fold{m}" for m in members] if by_name else torch.tensor(members)
        in_json = [n for n in given if draw.random() < 0.3 and model != "typed"]
        request = binary_request(name, given, in_json=in_json, id=draw.choice(["", "a", "é" * 20]))
        return Valid(request, model, inputs, members)

    def changed(self) -> Request:
        """Returns a request that was changed one to four times."""
        request = self.request()
        for _ in range(self.draw.choice([1, 1, 1, 2, 2, 3, 4])):
            request = self.draw.choice(self._ways)(request)
        return request

    def request(self) -> Request:
        """Returns a request before it is changed: JSON or binary, with outputs, or of another path."""
        draw = self.draw
        if draw.random() < 0.1:
            path = draw.choice(PATHS)
            return Request("POST" if "repository" in path else "GET", path)
        one = self.valid()
        if draw.random() < 0.4:
            return one.request
        text = document(one.inputs, nested=draw.random() < 0.5)
        if draw.random() < 0.3:
            text["outputs"] = [
                {"name": n, "parameters": {"of": draw.choice(["softmax", "sigmoid"]), "binary_data": True}}
                for n in draw.sample(FIGURES, 2)
            ]
        if draw.random() < 0.3:
            text["parameters"] = {"timeout": draw.choice([1, 1000, 10**6, 10**9]), "priority": 1}
        name = one.model if draw.random() < 0.7 else f"{one.model}.{draw.randrange(3)}"
        return Request("POST", f"/v2/models/{name}/infer", dumped(text))

    # ---------------------------------------------------------------- ways to change a request

    def _json(self, request: Request) -> Request:
        """Changes the JSON part, and often its length in the header."""
        body = whole(request)
        length = header_length(request, len(body))
        try:
            text = json.loads(body[:length])
        except (ValueError, RecursionError):
            return self._bytes(request)
        if not isinstance(text, (dict, list)):
            return request
        for _ in range(self.draw.choice([1, 1, 2, 5])):
            mutate_json(self.draw, text, [copy.deepcopy(text)])
        head = dumped(text)
        headers = dict(request.headers)
        if HEADER in headers and self.draw.random() < 0.9:
            headers[HEADER] = str(len(head))
        return replace(request, body=head + body[length:], headers=headers)

    def _bytes(self, request: Request) -> Request:
        """Changes bytes of the body."""
        body, draw = bytearray(whole(request)), self.draw
        for _ in range(draw.choice([1, 1, 3, 20])):
            if not body:
                body += b"{"
            at = draw.randrange(len(body))
            how = draw.randrange(4)
            if how == 0:
                body[at] = draw.randrange(256)
            elif how == 1:
                del body[at : at + draw.choice([1, 4, 100])]
            elif how == 2:
                body[at:at] = draw.choice([b"1e400", b"NaN", b"\x00", b"[" * 3000, b'"', b"-", b"\xff" * 9])
            else:
                body[at : at + 8] = body[-8:]
        return replace(request, body=bytes(body))

    def _header(self, request: Request) -> Request:
        """Sets a header that means something to the server."""
        draw = self.draw
        name = draw.choice(
            [HEADER, "content-length", "content-encoding", "accept-encoding", "authorization", "expect"]
        )
        value = draw.choice(
            [*map(str, INTS), "abc", "", "gzip", "gzip;q=0", "*", "é", "Bearer x", "100-continue", "1, 2"]
        )
        return replace(request, headers={**request.headers, name: value})

    def _length(self, request: Request) -> Request:
        """Shifts the length of the JSON part."""
        length = header_length(request, len(whole(request))) + self.draw.choice([-9, -1, 1, 7, 48])
        return replace(request, headers={**request.headers, HEADER: str(length)})

    def _encoding(self, request: Request) -> Request:
        """Compresses the body, sometimes in a damaged or another form than the header says, or as a bomb."""
        draw, body = self.draw, whole(request)
        name = draw.choice(["gzip", "deflate"])
        packed = gzip.compress(body, 1) if name == "gzip" else zlib.compress(body, 1)
        how = draw.randrange(6)
        if how == 0:
            packed = packed[: draw.randrange(len(packed) + 1)]
        elif how == 1:
            packed += packed
        elif how == 2:
            name = draw.choice(["gzip", "deflate", "br", "identity", "GZIP"])
        elif how == 3 and draw.random() < 0.3:
            name, packed = "gzip", BOMB
        elif how == 4 and packed:
            at = draw.randrange(len(packed))
            packed = packed[:at] + bytes([draw.randrange(256)]) + packed[at + 1 :]
        return replace(request, body=packed, headers={**request.headers, "content-encoding": name})

    def _path(self, request: Request) -> Request:
        """Changes the path."""
        draw = self.draw
        parts = request.path.split("/")
        at = draw.randrange(1, len(parts) + 1)
        word = draw.choice(
            [
                "..",
                "%2F",
                "%00",
                "%0A",
                "%FF",
                "%ED%A0%80",
                "a" * 10_000,
                "plain%2Efold1",
                "plain.99",
                "plain.-1",
                "text.each",
                "versions",
                "infer",
                "",
                "%",
                "?x=1",
                "#",
            ]
        )
        if draw.random() < 0.5 and at < len(parts):
            parts[at] = word
        else:
            parts.insert(at, word)
        return replace(request, path="/".join(parts))

    def _method(self, request: Request) -> Request:
        return replace(
            request, method=self.draw.choice(["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"])
        )

    def _chunks(self, request: Request) -> Request:
        """Sends the body in parts; sometimes the client goes before the last one."""
        body, draw = whole(request), self.draw
        cuts = sorted(draw.randrange(len(body) + 1) for _ in range(draw.choice([1, 2, 10])))
        parts = [body[a:b] for a, b in zip([0, *cuts], [*cuts, len(body)])]
        return replace(request, body=parts, cut=draw.random() < 0.2)

    def _tail(self, request: Request) -> Request:
        """Replaces the body by something else."""
        draw = self.draw
        value = junk(draw)
        text = dumped(value) if draw.random() < 0.7 else draw.choice(TEXTS).encode("utf-8", "replace")
        return replace(request, body=text * draw.choice([1, 1, 2, 300]))


def whole(request: Request) -> bytes:
    """Returns the body of a request as one piece."""
    return request.body if isinstance(request.body, bytes) else b"".join(request.body)


def header_length(request: Request, size: int) -> int:
    """Returns how many bytes of the body are JSON by the header; all without one."""
    text = request.headers.get(HEADER, "")
    return min(int(text), size) if text.isascii() and text.isdigit() and len(text) < 12 else size


def dumped(value: Any) -> bytes:
    """Returns any value as JSON, also numbers and texts that orjson refuses to write."""
    return json.dumps(value, separators=(",", ":")).encode()


def on_the_wire(request: Request) -> bytes:
    """Returns a request as HTTP/1.1, with a length or in chunks."""
    named = dict(request.headers)
    lines = [f"{request.method} {request.path} HTTP/1.1", "Host: localhost"]
    body = whole(request)
    if isinstance(request.body, bytes):
        named.setdefault("content-length", str(len(body)))
        tail = body
    else:
        named = {k: v for k, v in named.items() if k != "content-length"}
        named["transfer-encoding"] = "chunked"
        parts = [p for p in request.body if p]
        tail = b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in parts)
        tail += b"" if request.cut else b"0\r\n\r\n"
    lines += [f"{k}: {v}" for k, v in named.items()]
    return "\r\n".join(lines).encode("utf-8", "replace") + b"\r\n\r\n" + tail


def is_complete(request: Request) -> bool:
    """Returns whether a request is answered without more bytes from the client."""
    return not request.cut and not {"content-length", "expect"} & set(request.headers)


def damaged(data: bytes, draw: random.Random) -> bytes:
    """Returns bytes of HTTP with a change, or without their end."""
    at = draw.randrange(len(data))
    if draw.random() < 0.4:
        return data[:at]
    return data[:at] + draw.choice([b"\x00", b"\r\n", b" ", b":", b"\xff", b"HTTP/1.0"]) + data[at + 1 :]
