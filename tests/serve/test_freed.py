"""Tests that a refused request is freed with its error, and that connections end."""

from __future__ import annotations

import asyncio
import gc
import gzip
import mmap
import tracemalloc
import weakref
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import grpc
import grpc.aio
import orjson
import pytest
import torch
from asgi import InProcess, Request
from infer import document
from rpc_client import RpcClient, infer_message, with_server

import widepack
import widepack_serve
from widepack_serve.lifecycle.threads import Threads
from widepack_serve.rpc import server as rpc_server

MB = 1_000_000
MANY = 4 * MB


@pytest.fixture(autouse=True)
def _without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Held:
    """Stands for a body."""


def test_an_error_of_a_thread_holds_no_frame_for_ever() -> None:
    async def scene() -> weakref.ref[Held]:
        held = Held()
        found = weakref.ref(held)

        def fails(one: Held = held) -> None:
            raise ValueError(f"{type(one).__name__} is wrong")

        with pytest.raises(ValueError, match="Held is wrong"):
            await Threads().run(fails)
        return found

    assert asyncio.run(scene())() is None


def _more_bytes(after: list[int]) -> int:
    """Returns how many bytes the last of several rounds left, at most."""
    return max(b - a for a, b in pairwise(after))


@pytest.fixture
def maps(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[mmap.mmap]]:
    """Returns the memory of all large bodies of a test, which `tracemalloc` does not see."""
    found: list[weakref.ref[mmap.mmap]] = []

    def made(*args: int, **options: int) -> mmap.mmap:
        one = mmap.mmap(*args, **options)
        found.append(weakref.ref(one))
        return one

    names = {n: getattr(mmap, n) for n in ("MAP_PRIVATE", "MAP_ANONYMOUS", "MADV_NOHUGEPAGE")}
    monkeypatch.setattr("widepack_serve.protocol.growing.mmap", SimpleNamespace(mmap=made, **names))
    return found


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("packed", [False, True])
def test_bodies_of_refused_requests_are_freed(
    wide: dict[str, Path], packed: bool, maps: list[weakref.ref[mmap.mmap]]
) -> None:
    """Three at once are more than may be received: some are refused before they are read."""
    good = orjson.dumps(document({"x": torch.zeros(2, 6)}))
    text = good.replace(b"0.0]", b"0.0" + b",[]" * (MANY // 3) + b"]")
    most = len(text) * (2 if packed else 1) + MANY // 2
    app = widepack_serve.app({"plain": wide["plain"]}, max_body=most, max_receiving=most)
    started = InProcess(app).start()
    body = gzip.compress(text, 0) if packed else text
    headers = {"content-encoding": "gzip"} if packed else {}
    request = Request("POST", "/v2/models/plain/infer", body, headers)
    try:
        tracemalloc.start()
        after = []
        for _ in range(4):
            statuses = {answer.status for answer in started.together([request] * 3) if answer is not None}
            assert 503 in statuses <= {400, 503}
            after.append(tracemalloc.get_traced_memory()[0])
        assert _more_bytes(after) < MB
        assert bool(maps) == packed and not any(one() for one in maps)
    finally:
        tracemalloc.stop()
        started.close()


def test_messages_of_refused_calls_are_freed(wide: dict[str, Path]) -> None:
    message = infer_message("ens", ("x", torch.zeros(MANY // 24, 6)), ("zz", torch.zeros(1)))

    async def calls(client: RpcClient) -> list[int]:
        data, after = message.SerializeToString(), []
        for _ in range(5):
            with pytest.raises(grpc.aio.AioRpcError):
                await client.send("ModelInfer", data)
            await asyncio.sleep(0.05)
            after.append(tracemalloc.get_traced_memory()[0])
        return after

    tracemalloc.start()
    try:
        assert _more_bytes(with_server({"ens": widepack.load(wide["plain"])}, calls)[1:]) < MB
    finally:
        tracemalloc.stop()


def test_a_connection_ends_and_calls_go_on(wide: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc_server, "_AGE_MS", 200)
    monkeypatch.setattr(rpc_server, "_LAST_CALLS_MS", 200)

    async def calls(client: RpcClient) -> int:
        end, count = asyncio.get_running_loop().time() + 1.5, 0
        while asyncio.get_running_loop().time() < end:
            await client.infer("ens", ("x", torch.rand(2, 6)))
            count += 1
        host, port = client.address.rsplit(":", 1)
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5))  # empty settings
        assert await asyncio.wait_for(reader.read(), 10)  # until the server closes it
        writer.close()
        return count

    assert with_server({"ens": widepack.load(wide["plain"])}, calls) > 50
