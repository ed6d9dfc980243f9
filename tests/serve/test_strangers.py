"""Tests that one client cannot hold all calls, all connections, or more memory than the limits say."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import mmap
import socket
import time
import tracemalloc
import weakref
from pathlib import Path

import grpc
import grpc.aio
import pytest
import torch
from command_server import command_server
from raw_http2 import RawCalls
from rpc_client import RpcClient, infer_message, served

import widepack
from widepack.inference.model import WideModel
from widepack_serve.lifecycle.collector import settle, settle_again
from widepack_serve.protocol import growing
from widepack_serve.protocol.growing import SMALL, Growing, place_of
from widepack_serve.protocol.response import AnsweredOutput, answer_body
from widepack_serve.protocol.work import Abandoned, Work

MB = 1_000_000
X = torch.rand(2, 6)


def own_memory() -> int:
    """Returns the bytes of the memory of this process."""
    rows = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(r for r in rows if r.startswith("RssAnon")).split()[1])


# ---------------------------------------------------------------- bodies


def test_bodies_that_grow_take_the_memory_of_their_bytes() -> None:
    """Several grow at the same time. It is returned at once."""
    piece, before = bytes(range(256)) * 1000, own_memory()
    bodies = [Growing() for _ in range(4)]
    most = 0
    for _ in range(80):
        for one in bodies:
            one.append(piece)
        most = max(most, own_memory())
    found = [one.whole() for one in bodies]
    assert [len(one) for one in found] == [80 * 256_000] * 4
    assert found[3][256_000 * 79 - 1 : 256_000 * 79 + 2] == b"\xff\0\1"
    assert most - before < 4 * 80 * 256_000 + 6 * MB
    del bodies, found, one
    assert own_memory() - before < 6 * MB


@pytest.mark.parametrize("binary", [False, True])
def test_an_answer_is_never_in_the_memory_of_the_allocator(binary: bool) -> None:
    """Its text is written into memory of its own, which the system gets back at once."""
    output = AnsweredOutput("y", torch.rand(1_500_000), binary)
    tracemalloc.start()
    body, _ = answer_body("m", "1", None, [output])
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(body) > 5_000_000
    assert most < (len(body) / 2 if binary else 12 * MB)  # orjson takes 10 MB for a piece
    assert isinstance(body, mmap.mmap)


@pytest.mark.parametrize("moves_pages", [True, False])
def test_bodies_of_all_sizes(moves_pages: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the system cannot move pages."""
    monkeypatch.setattr(growing, "_MOVES_PAGES", moves_pages)
    for size in (0, 1, SMALL, SMALL + 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 3_000_001):
        data = torch.randint(0, 256, (size,), dtype=torch.uint8).numpy().tobytes()
        for step in (size + 1, 70_000):
            one = Growing()
            for at in range(0, size, step):
                one.append(data[at : at + step])
            found = one.whole()
            assert found[:] == data and len(found) == size
            assert isinstance(found, bytes) == (size <= SMALL)


def test_a_byte_is_found_wherever_it_is() -> None:
    size, work = (2 << 20) + 10, Work()
    for place in (0, (1 << 20) - 1, 1 << 20, size - 1):
        data = bytearray(size)
        data[place] = 1
        one = Growing()
        one.append(bytes(data))
        body = one.whole()
        assert place_of(b"\1", body, 0, size, work) == place
        assert place_of(b"\1", body, place + 1, size, work) == -1 == place_of(b"\1", body, 0, place, work)
    work.abandoned = True
    with pytest.raises(Abandoned):
        place_of(b"\1", body, 0, size - 1, work)


# ---------------------------------------------------------------- calls


@pytest.fixture(scope="module")
def models(wide: dict[str, Path]) -> dict[str, WideModel]:
    return {"ens": widepack.load(wide["plain"])}


def test_messages_that_arrive_in_part_are_counted(models: dict[str, WideModel]) -> None:
    """Each counts as the largest. Others that arrive at once are read meanwhile, and bytes are freed."""

    async def scene() -> None:
        async with served(models, max_body=100_000, max_receiving=250_000) as client:
            raw = await RawCalls(client.address, "127.0.0.2").open()
            for _ in range(5):
                raw.begin(bytes(10_000), 90_000)
                assert (await client.infer("ens", ("x", X))).outputs
            got = await raw.received(2.5)
            assert got.count(b"all that arrive together are over the limit") == 3
            assert client.service.receiving.bytes == 200_000
            assert 'reason="receiving_full"} 3.0' in client.service.metrics_text().decode()
            assert (await client.infer("ens", ("x", X))).outputs
            await raw.close()
            for _ in range(100):
                await asyncio.sleep(0.02)
                if not client.service.receiving.bytes:
                    break
            assert client.service.receiving.bytes == 0

    asyncio.run(scene())


def test_a_message_that_arrives_slowly_is_answered(models: dict[str, WideModel]) -> None:
    async def scene() -> None:
        async with served(models) as client:
            raw = await RawCalls(client.address).open()
            data = infer_message("ens", ("x", X)).SerializeToString()
            raw.begin(data[:20], len(data))
            await raw.received(0.3)
            assert client.service.receiving.bytes == client.service.settings.max_body
            await raw.go_on(data[20:], last=True)
            assert b"raw_output" not in (got := await raw.received(2.0)) and b"output" in got
            assert client.service.receiving.bytes == 0
            await raw.close()

    asyncio.run(scene())


def test_clients_share_the_calls(models: dict[str, WideModel]) -> None:
    """One client opens all, and another gets its share."""

    async def scene() -> None:
        async with served(models, max_calls=2, max_body=1000, max_receiving=9000) as client:
            raw = await RawCalls(client.address, "127.0.0.2").open()
            for _ in range(4):
                raw.begin()
            got = await raw.received(1.0)
            assert got.count(b"too many calls run at once") == 2
            for _ in range(3):
                assert (await client.infer("ens", ("x", X))).outputs and (await client("ServerLive")).live
            assert 'reason="calls_full"} 2.0' in client.service.metrics_text().decode()
            await raw.close()

    asyncio.run(scene())


@pytest.mark.parametrize("packing", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_packed_messages_are_unpacked_within_the_limits(
    models: dict[str, WideModel], packing: grpc.Compression
) -> None:
    async def answered(client: RpcClient, *inputs: tuple[str, torch.Tensor]) -> grpc.StatusCode | None:
        message = infer_message("ens", *inputs).SerializeToString()
        try:
            assert await client.send("ModelInfer", message, compression=packing)
        except grpc.aio.AioRpcError as e:
            assert "over 200 for each" in str(e.details())
            return e.code()
        return None

    async def scene() -> None:
        async with served(models) as client:
            assert await answered(client, ("x", X)) is None
            assert await answered(client, ("x", torch.rand(60_000, 6))) is None
            zeros = ("x", torch.zeros(60_000, 6))  # packs to a thousandth
            assert await answered(client, zeros) == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert await client.send("ServerLive", b"", compression=packing)

    asyncio.run(scene())


# ---------------------------------------------------------------- connections


def test_clients_share_the_connections(wide: dict[str, Path]) -> None:
    request = b"GET /v2/health/ready HTTP/1.1\r\nHost: a\r\n\r\n"
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(
            command_server(wide["plain"], "--drain", "0s", "--max-connections", "10")
        )
        host, port = server.http.split(":")

        def connected(client: str) -> socket.socket:
            address = (host, int(port))
            return stack.enter_context(socket.create_connection(address, 20, source_address=(client, 0)))

        held = [connected("127.0.0.2") for _ in range(15)]
        time.sleep(0.2)
        for _ in range(3):
            one = connected("127.0.0.1")
            one.sendall(request)
            assert one.recv(100).startswith(b"HTTP/1.1 200")
        held[-1].sendall(request)
        assert held[-1].recv(100).startswith(b"HTTP/1.1 503")
        held[0].sendall(request)  # it was there before the limit
        assert held[0].recv(100).startswith(b"HTTP/1.1 200")
        held[-2].settimeout(5)
        assert held[-2].recv(100) == b""  # it sent nothing, and is closed


# ---------------------------------------------------------------- the collector


class Node:
    """An object that refers to itself."""

    def __init__(self) -> None:
        self.own = self


def test_what_lives_at_the_start_is_collected_later() -> None:
    one = Node()
    found = weakref.ref(one)
    assert not gc.get_freeze_count()
    settle_again()
    assert not gc.get_freeze_count()  # an app in another server has not begun it
    try:
        settle()
        assert gc.get_freeze_count() > 10_000 > len(gc.get_objects())
        del one
        gc.collect()
        assert found() is not None
        settle_again()
        assert found() is None and gc.get_freeze_count() > 10_000
    finally:
        gc.unfreeze()
