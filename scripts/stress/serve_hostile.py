"""Hostile clients of a server, by kind: each sends what costs the server most, again and again.

They come from another address of the loopback than the honest client, as strangers do.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from functools import cache
from typing import Any

import orjson
import torch
from asgi import Request
from infer import binary_request, document
from server_process import on_the_wire

HOST, STRANGER = "127.0.0.1", "127.0.0.2"
PATH = "/v2/models/ens/infer"
MB = 1_000_000
AT_ONCE = 8
Attack = Callable[[int, int, float], Coroutine[Any, Any, int]]
"""Runs for some seconds. Takes the ports of HTTP and gRPC. Returns: how many requests it sent."""
Client = Callable[[int, int, float, list[None]], Coroutine[Any, Any, None]]
"""Takes the ports, the end by the clock, and a list to which it adds one for each request."""


def _json(data: bytes, shape: str = "[2,6]") -> bytes:
    return b'{"inputs":[{"name":"x","datatype":"FP32","shape":%b,"data":%b}]}' % (shape.encode(), data)


def _post(body: bytes, **headers: str) -> bytes:
    return on_the_wire(Request("POST", PATH, body, {k.replace("_", "-"): v for k, v in headers.items()}))


def _list_of(part: bytes, count: int, last: bytes, shape: str = "[2,6]") -> bytes:
    return _json(b"[" + part * count + last + b"]", shape)


def _packed(body: bytes) -> bytes:
    return _post(gzip.compress(body, 6), content_encoding="gzip")


def _rows_of(name: str, **options: Any) -> bytes:
    return on_the_wire(binary_request(name, {"x": torch.rand(65_536, 6)}, **options))


DEEP = b'{"inputs":[{"name":"x","datatype":"FP32","shape":%b,"data":[1]}]}'
UNENDED = f"POST {PATH} HTTP/1.1\r\nHost: a\r\nContent-Length: {60 * MB}\r\n\r\n".encode()
PAYLOADS: dict[str, Callable[[], bytes]] = {
    "empty lists of 63 MB": lambda: _post(_list_of(b"[],", 21 * MB, b"[]")),
    "numbers of 63 MB": lambda: _post(_list_of(b"1,", 31 * MB, b"1")),
    "numbers of the largest size": lambda: _post(_list_of(b"1.5,", 6 * 65_536 - 1, b"1.5", "[65536,6]")),
    "texts of 60 MB": lambda: _post(_list_of(b'"",', 20 * MB, b'""')),
    "objects of 60 MB": lambda: _post(_list_of(b"{},", 20 * MB, b"{}")),
    "packed lists of 310 kB": lambda: _packed(_list_of(b"[],", 20 * MB, b"[]")),
    "packed rows": lambda: _packed(orjson.dumps(document({"x": torch.zeros(65_536, 6)}))),
    "rows": lambda: _rows_of("ens.fold1"),
    "answers in JSON": lambda: _rows_of("ens", parameters={}),
    "deep values": lambda: _post(DEEP % (b"[" * 1000 + b"1" + b"]" * 1000)),
    "bodies that never end": lambda: UNENDED + b" " * (60 * MB - 1),
}
"""The bytes of one request of each kind."""


@cache
def payload(kind: str) -> bytes:
    """Returns the bytes of one request of a kind, which takes seconds to make."""
    return PAYLOADS[kind]()


def prepare(kind: str) -> None:
    """Makes the requests of a kind, which takes seconds."""
    names = {"rows of clients that leave": "rows", "answers that nobody reads": "answers in JSON"}
    with contextlib.suppress(KeyError):
        payload(names.get(kind, kind))


def _left(end: float) -> float:
    """Returns the seconds until the end."""
    return max(end - time.monotonic(), 0.1)


def _again(client: Client, count: int = AT_ONCE) -> Attack:
    """Returns an attack of some clients, each of which begins again when it ends."""

    async def one(http: int, grpc: int, end: float, sent: list[None]) -> None:
        while time.monotonic() < end:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.TimeoutError):
                await client(http, grpc, end, sent)

    async def run(http: int, grpc: int, seconds: float) -> int:
        sent: list[None] = []
        end = time.monotonic() + seconds
        await asyncio.gather(*(one(http, grpc, end, sent) for _ in range(count)))
        return len(sent)

    return run


def _requests(kind: str, stay: float | None = None) -> Attack:
    """Returns an attack that sends requests on some connections.

    stay: seconds that a client stays without reading its answer; None reads the answer.
    """

    async def client(http: int, _: int, end: float, sent: list[None]) -> None:
        streams = await asyncio.open_connection(HOST, http, local_addr=(STRANGER, 0), limit=1 << 12)
        reader, writer = streams
        try:
            writer.write(payload(kind))
            await asyncio.wait_for(writer.drain(), _left(end))
            sent.append(None)
            if stay is None:
                await asyncio.wait_for(_answer(reader), _left(end))
            else:
                await asyncio.sleep(min(stay, _left(end)))
        finally:
            writer.transport.abort()

    return _again(client, 5 * AT_ONCE if stay == math.inf else AT_ONCE)


async def _answer(reader: asyncio.StreamReader) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(r for r in head.lower().split(b"\r\n") if r.startswith(b"content-length"))
    await reader.readexactly(int(length.split(b":")[1]))


async def _slow_message(_: int, grpc: int, end: float, sent: list[None]) -> None:
    """Begins a message of 60 MB over gRPC, sends its first 4 MB, and no more."""
    from raw_http2 import RawCalls

    part = bytes(16_000)
    calls = await RawCalls(f"{HOST}:{grpc}", STRANGER).open()
    calls.begin(part, 60 * MB)
    for _ in range(250):
        await calls.go_on(part)
    sent.append(None)
    await calls.received(min(end - time.monotonic(), 2.0), until=b"grpc-status")
    await calls.close()


async def _calls_without_messages(_: int, grpc: int, end: float, sent: list[None]) -> None:
    """Begins calls of gRPC without messages, as many as it can."""
    from raw_http2 import RawCalls

    calls = await RawCalls(f"{HOST}:{grpc}", STRANGER).open()
    for _ in range(100):
        calls.begin()
        sent.append(None)
    await calls.received(min(end - time.monotonic(), 1.0))
    await calls.close()


async def _connections(http: int, _: int, seconds: float) -> int:
    """Opens more connections than the server takes, and sends nothing."""
    opened = []
    for _ in range(6000):
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            connecting = asyncio.open_connection(HOST, http, local_addr=(STRANGER, 0), limit=1 << 12)
            opened.append(await asyncio.wait_for(connecting, 1.0))
    await asyncio.sleep(seconds)
    return len(opened)


_RPC = """
import os, signal, sys, time, grpc
kind, address, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
channel = grpc.insecure_channel(address)
infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
message = sys.stdin.buffer.read()
end, count = time.monotonic() + seconds, 0
while time.monotonic() < end:
    calls = [infer.future(message, timeout=max(end - time.monotonic(), 0.1)) for _ in range(8)]
    count += len(calls)
    if kind == "stopped":
        time.sleep(0.5)
        print(count, flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
    for call in calls:
        call.exception()
print(count, flush=True)
os._exit(0)
"""


def _rpc(message: Callable[[], bytes], *, stopped: bool = False) -> Attack:
    """Returns an attack over gRPC by a process of its own. stopped: whether it stops after its calls."""

    async def run(_: int, grpc: int, seconds: float) -> int:
        how = "stopped" if stopped else "calls"
        words = [sys.executable, "-c", _RPC, how, f"{HOST}:{grpc}", str(seconds)]
        process = await asyncio.create_subprocess_exec(*words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(message())
            process.stdin.close()
            await asyncio.sleep(seconds)
            process.send_signal(signal.SIGCONT)
            return int(await asyncio.wait_for(process.stdout.readline(), 20) or 0)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    return run


def _message(rows: int, more: bytes = b"", raw: bytes = b"") -> Callable[[], bytes]:
    """Returns what makes a message of gRPC. more: bytes after it. raw: in place of the numbers."""

    def make() -> bytes:
        from rpc_client import infer_message

        message = infer_message("ens", ("x", torch.rand(rows, 6)))
        if raw:
            message.raw_input_contents[0] = raw
        data: bytes = message.SerializeToString()
        return data + more

    return make


KINDS: dict[str, Attack] = {
    **{kind: _requests(kind) for kind in PAYLOADS},
    "rows of clients that leave": _requests("rows", 0.2),
    "answers that nobody reads": _requests("answers in JSON", math.inf),
    "bodies that never end": _requests("bodies that never end", 5.0),
    "empty inputs over gRPC": _rpc(_message(1, b"\x2a\x00" * (5 * MB))),
    "messages that never end": _again(_slow_message, 12 * AT_ONCE),
    "calls without messages": _again(_calls_without_messages),
    "connections without requests": _connections,
    "too many bytes over gRPC": _rpc(_message(65_536, raw=bytes(60 * MB))),
    "rows over gRPC": _rpc(_message(65_536)),
    "answers that a stopped process does not take": _rpc(_message(65_536), stopped=True),
}
