"""Hostile clients of a server, by kind: each sends what costs the server most, again and again.

They come from another address of the loopback than the honest client, as strangers do.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
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
from serve_requests import on_the_wire

HOST, STRANGER = "127.0.0.1", "127.0.0.2"
PATH = "/v2/models/ens/infer"
MB = 1_000_000
AT_ONCE = 8
Attack = Callable[[int, int, float], Coroutine[Any, Any, int]]
"""Runs for some seconds. Takes the ports of HTTP and gRPC. Returns: how many requests it sent."""


def _json(data: bytes, shape: str = "[2,6]") -> bytes:
    return b'{"inputs":[{"name":"x","datatype":"FP32","shape":%b,"data":%b}]}' % (shape.encode(), data)


def _post(body: bytes, **headers: str) -> bytes:
    return on_the_wire(Request("POST", PATH, body, {k.replace("_", "-"): v for k, v in headers.items()}))


@cache
def payload(kind: str) -> bytes:
    """Returns the bytes of one request of a kind."""
    if kind == "empty lists of 63 MB":
        return _post(_json(b"[" + b"[]," * (21 * MB) + b"[]]"))
    if kind == "numbers of 63 MB":
        return _post(_json(b"[" + b"1," * (31 * MB) + b"1]"))
    if kind == "numbers of the largest size":
        return _post(_json(b"[" + b"1.5," * (6 * 65_536 - 1) + b"1.5]", "[65536,6]"))
    if kind == "texts of 60 MB":
        return _post(_json(b"[" + b'"",' * (20 * MB) + b'""]'))
    if kind == "objects of 60 MB":
        return _post(_json(b"[" + b"{}," * (20 * MB) + b"{}]"))
    if kind == "packed lists of 310 kB":
        return _post(gzip.compress(_json(b"[" + b"[]," * (20 * MB) + b"[]]"), 6), content_encoding="gzip")
    if kind == "packed rows":
        rows = orjson.dumps(document({"x": torch.zeros(65_536, 6)}))
        return _post(gzip.compress(rows, 6), content_encoding="gzip")
    if kind == "rows":
        return on_the_wire(binary_request("ens.fold1", {"x": torch.rand(65_536, 6)}))
    if kind == "answers in JSON":
        return on_the_wire(binary_request("ens", {"x": torch.rand(65_536, 6)}, parameters={}))
    if kind == "deep values":
        deep = b"[" * 1000 + b"1" + b"]" * 1000
        return _post(b'{"inputs":[{"name":"x","datatype":"FP32","shape":%b,"data":[1]}]}' % deep)
    raise KeyError(kind)


def prepare(kind: str) -> None:
    """Makes the requests of a kind, which takes seconds."""
    names = {"rows of clients that leave": "rows", "answers that nobody reads": "answers in JSON"}
    with contextlib.suppress(KeyError):
        payload(names.get(kind, kind))


def _requests(kind: str, *, read: bool = True, leave: bool = False) -> Attack:
    """Returns an attack that sends requests on some connections. read: whether it reads the answers. leave:
    whether it closes each connection at once.
    """

    async def one(port: int, end: float) -> int:
        count = 0
        while time.monotonic() < end:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.TimeoutError):
                streams = await asyncio.open_connection(HOST, port, local_addr=(STRANGER, 0), limit=1 << 12)
                reader, writer = streams
                try:
                    writer.write(payload(kind))
                    await asyncio.wait_for(writer.drain(), max(end - time.monotonic(), 0.1))
                    count += 1
                    if leave:
                        await asyncio.sleep(0.2)
                    elif read:
                        await asyncio.wait_for(_answer(reader), max(end - time.monotonic(), 0.1))
                    else:
                        await asyncio.sleep(max(end - time.monotonic(), 0.1))
                finally:
                    writer.transport.abort()
        return count

    async def run(http: int, _: int, seconds: float) -> int:
        payload(kind)
        end = time.monotonic() + seconds
        count = AT_ONCE if read else 5 * AT_ONCE
        return sum(await asyncio.gather(*(one(http, end) for _ in range(count))))

    return run


async def _answer(reader: asyncio.StreamReader) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(r for r in head.lower().split(b"\r\n") if r.startswith(b"content-length"))
    await reader.readexactly(int(length.split(b":")[1]))


async def _slow_bodies(http: int, _: int, seconds: float) -> int:
    """Sends bodies of 60 MB but for their last byte, on many connections."""
    end = time.monotonic() + seconds
    head = f"POST {PATH} HTTP/1.1\r\nHost: a\r\nContent-Length: {60 * MB}\r\n\r\n".encode()

    async def one() -> int:
        count = 0
        while time.monotonic() < end:
            with contextlib.suppress(OSError, asyncio.TimeoutError):
                _, writer = await asyncio.open_connection(HOST, http, local_addr=(STRANGER, 0))
                try:
                    writer.write(head + b" " * (60 * MB - 1))
                    await asyncio.wait_for(writer.drain(), max(end - time.monotonic(), 0.1))
                    count += 1
                    await asyncio.sleep(min(max(end - time.monotonic(), 0.1), 5.0))
                finally:
                    writer.transport.abort()
        return count

    return sum(await asyncio.gather(*(one() for _ in range(AT_ONCE))))


async def _slow_messages(_: int, grpc: int, seconds: float) -> int:
    """Begins messages of 60 MB over gRPC, sends the first 4 MB of each, and no more."""
    from raw_http2 import RawCalls

    part, end = bytes(16_000), time.monotonic() + seconds

    async def one() -> int:
        count = 0
        while time.monotonic() < end:
            with contextlib.suppress(OSError):
                calls = await RawCalls(f"{HOST}:{grpc}", STRANGER).open()
                calls.begin(part, 60 * MB)
                for _ in range(250):
                    await calls.go_on(part)
                count += 1
                await calls.received(min(end - time.monotonic(), 2.0), until=b"grpc-status")
                await calls.close()
        return count

    return sum(await asyncio.gather(*(one() for _ in range(12 * AT_ONCE))))


async def _calls_without_messages(_: int, grpc: int, seconds: float) -> int:
    """Begins calls of gRPC without messages, as many as it can."""
    from raw_http2 import RawCalls

    end = time.monotonic() + seconds

    async def one() -> int:
        count = 0
        while time.monotonic() < end:
            with contextlib.suppress(OSError):
                calls = await RawCalls(f"{HOST}:{grpc}", STRANGER).open()
                for _ in range(100):
                    calls.begin()
                    count += 1
                await calls.received(min(end - time.monotonic(), 1.0))
                await calls.close()
        return count

    return sum(await asyncio.gather(*(one() for _ in range(AT_ONCE))))


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
        words = [
            sys.executable,
            "-c",
            _RPC,
            "stopped" if stopped else "calls",
            f"{HOST}:{grpc}",
            str(seconds),
        ]
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


def _empty_inputs() -> bytes:
    from rpc_client import infer_message

    good: bytes = infer_message("ens", ("x", torch.rand(1, 6))).SerializeToString()
    return good + b"\x2a\x00" * (5 * MB)


def _too_many_bytes() -> bytes:
    from rpc_client import infer_message

    message = infer_message("ens", ("x", torch.rand(65_536, 6)))
    message.raw_input_contents[0] = bytes(60 * MB)
    data: bytes = message.SerializeToString()
    return data


def _many_rows() -> bytes:
    from rpc_client import infer_message

    data: bytes = infer_message("ens", ("x", torch.rand(65_536, 6))).SerializeToString()
    return data


KINDS: dict[str, Attack] = {
    **{
        kind: _requests(kind)
        for kind in (
            "empty lists of 63 MB",
            "numbers of 63 MB",
            "numbers of the largest size",
            "texts of 60 MB",
            "objects of 60 MB",
            "packed lists of 310 kB",
            "packed rows",
            "rows",
            "answers in JSON",
            "deep values",
        )
    },
    "rows of clients that leave": _requests("rows", leave=True),
    "answers that nobody reads": _requests("answers in JSON", read=False),
    "bodies that never end": _slow_bodies,
    "empty inputs over gRPC": _rpc(_empty_inputs),
    "messages that never end": _slow_messages,
    "calls without messages": _calls_without_messages,
    "connections without requests": _connections,
    "too many bytes over gRPC": _rpc(_too_many_bytes),
    "rows over gRPC": _rpc(_many_rows),
    "answers that a stopped process does not take": _rpc(_many_rows, stopped=True),
}
