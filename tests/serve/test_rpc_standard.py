"""Tests the services that gRPC itself defines: health, which probes ask, and reflection."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from rpc_client import RpcClient, with_server
from support import Artifacts

import widepack
from widepack.inference.model import WideModel
from widepack_serve.lifecycle.service import Service
from widepack_serve.rpc.schema import METHODS, SERVICE
from widepack_serve.rpc.server import RpcServer
from widepack_serve.settings import Settings

# The bytes are written out: tag, length, text. They are those that health_pb2 and reflection_pb2 make.
ALL, ENS, INFERENCE = b"", b"\x0a\x03ens", b"\x0a\x1e" + SERVICE.encode()
SERVING, NOT_SERVING = b"\x08\x01", b"\x08\x02"
LIST = b"\x3a\x01*"
REFLECTIONS = ["grpc.reflection.v1", "grpc.reflection.v1alpha"]


@pytest.fixture(scope="module")
def models(artifacts: Artifacts) -> dict[str, WideModel]:
    return {"ens": widepack.load(artifacts("mlp"))}


def check(client: RpcClient, data: bytes, **options: Any) -> Any:
    return client.channel.unary_unary("/grpc.health.v1.Health/Check")(data, **options)


def test_health(models: dict[str, WideModel]) -> None:
    async def calls(client: RpcClient) -> list[bytes]:
        found = [await check(client, ALL), await check(client, INFERENCE)]
        client.service.drain()
        return [*found, await check(client, ALL), await check(client, INFERENCE)]

    assert with_server(models, calls) == [SERVING, SERVING, NOT_SERVING, NOT_SERVING]


def watch(client: RpcClient, data: bytes) -> Any:
    return client.channel.unary_stream("/grpc.health.v1.Health/Watch")(data)


def test_a_client_that_watches_gets_each_change(models: dict[str, WideModel]) -> None:
    async def calls(client: RpcClient) -> None:
        watching, named, unknown = watch(client, ALL), watch(client, INFERENCE), watch(client, ENS)
        assert [await w.read() for w in (watching, named, unknown)] == [SERVING, SERVING, b"\x08\x03"]
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(again := asyncio.ensure_future(watching.read())), 1.2)
        client.service.drain()
        assert [await again, await named.read()] == [NOT_SERVING, NOT_SERVING]
        client.service.draining = False
        assert await watching.read() == SERVING
        watching.cancel()

    with_server(models, calls)


def test_calls_that_watch_are_limited_and_do_not_delay_the_end(models: dict[str, WideModel]) -> None:
    """They count as other calls do, and end with the server."""

    async def scene() -> None:
        service = Service(Settings({}), models)
        server = RpcServer(service, "127.0.0.1", 0, max_calls=2)
        await server.start()
        client = RpcClient(server.address, service)
        calls = [watch(client, ALL) for _ in range(2)]
        assert [await call.read() for call in calls] == [SERVING] * 2
        assert await watch(client, ALL).code() == grpc.StatusCode.UNAVAILABLE
        calls[0].cancel()
        refused: list[Any] = [calls[0]]
        while refused:  # until the server has seen that it was cancelled
            await asyncio.sleep(0.05)
            calls[0] = watch(client, ALL)
            with contextlib.suppress(grpc.aio.AioRpcError):
                assert await calls[0].read() == SERVING
                refused.clear()
        start = time.monotonic()
        await server.stop(60.0)
        assert time.monotonic() - start < 10
        assert [await call.code() for call in calls] == [grpc.StatusCode.UNAVAILABLE] * 2
        await client.channel.close()

    asyncio.run(scene())


def test_health_needs_no_token_and_tells_no_names_of_models(
    models: dict[str, WideModel], tmp_path: Any
) -> None:
    (tmp_path / "token").write_text("a-token-of-16-characters")

    async def calls(client: RpcClient) -> bytes:
        for data in (ENS, b"\x0a\x02zz"):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await check(client, data)
            assert error.value.code() == grpc.StatusCode.NOT_FOUND
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await check(client, b"\x0a\x05z")
        assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await check(client, b"\x0a\xc0\xc0\x07" + b"z" * 123_000)
        assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await questions(client, REFLECTIONS[0], LIST)
        assert error.value.code() == grpc.StatusCode.UNAUTHENTICATED
        return bytes(await check(client, ALL))

    assert with_server(models, calls, token_file=str(tmp_path / "token")) == SERVING


async def questions(client: RpcClient, package: str, *data: bytes) -> list[bytes]:
    """Asks in one call, one after another, and returns the answers."""
    call = client.channel.stream_stream(f"/{package}.ServerReflection/ServerReflectionInfo")()
    found = []
    for one in data:
        await call.write(one)
        found.append(await call.read())
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    assert await call.code() == grpc.StatusCode.OK
    return found


def field(data: bytes, number: int) -> bytes:
    """Returns the value of a field that has a length below 128 bytes or below 16384."""
    at = 0
    while at < len(data):
        tag, size, width = data[at], data[at + 1], 1
        if size > 127:
            size, width = size - 128 + (data[at + 2] << 7), 2
        start = at + 1 + width
        if tag == number << 3 | 2:
            return data[start : start + size]
        at = start + size
    raise AssertionError(f"there is no field {number}")


@pytest.mark.parametrize("package", REFLECTIONS)
def test_a_client_without_the_protocol_finds_it_by_reflection(
    package: str, models: dict[str, WideModel]
) -> None:
    """As grpcurl does: list the services, fetch the file of one, make messages of it, and call a method."""

    async def calls(client: RpcClient) -> None:
        symbol = b"\x22\x1e" + SERVICE.encode()
        method = b"\x22\x29" + SERVICE.encode() + b".ModelInfer"
        by_name = b"\x1a\x0finference.proto"
        listed, file, same, named, unknown = await questions(
            client, package, LIST, symbol, method, by_name, b"\x22\x04zz.y"
        )
        names = {"grpc.health.v1.Health", SERVICE, *(f"{p}.ServerReflection" for p in REFLECTIONS)}
        assert all(name.encode() in listed for name in names)
        assert field(unknown, 7).startswith(b"\x08\x05")  # NOT_FOUND
        described = field(field(file, 4), 1)
        assert described == field(field(same, 4), 1) == field(field(named, 4), 1)
        pool = DescriptorPool()
        pool.AddSerializedFile(described)
        service = pool.FindServiceByName(SERVICE)
        assert sorted(service.methods_by_name) == sorted(METHODS)
        asks, answers = (
            GetMessageClass(pool.FindMessageTypeByName(f"inference.ModelConfig{kind}"))
            for kind in ("Request", "Response")
        )
        answer = await client.send("ModelConfig", asks(name="ens").SerializeToString())
        config = answers.FromString(answer).config
        assert [(o.name, o.data_type, list(o.dims)) for o in config.output] == [("output", 11, [8, -1, 10])]
        assert FileDescriptorProto.FromString(described).service[0].name == "GRPCInferenceService"

    with_server(models, calls)


def test_questions_that_have_no_answer(models: dict[str, WideModel]) -> None:
    async def calls(client: RpcClient) -> list[bytes]:
        found = await questions(client, REFLECTIONS[0], b"", b"\x2a\x02\x10\x05", b"\x32\x01x")
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await questions(client, REFLECTIONS[0], b"\x22\x09z")
        assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        return found

    assert all(field(data, 7).startswith(b"\x08\x0c") for data in with_server(models, calls))


def test_a_call_that_asks_nothing_more_ends(
    models: dict[str, WideModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("widepack_serve.rpc.methods._QUESTION_S", 0.2)

    async def calls(client: RpcClient) -> grpc.StatusCode:
        call = client.channel.stream_stream(f"/{REFLECTIONS[0]}.ServerReflection/ServerReflectionInfo")()
        await call.write(LIST)
        assert await call.read()
        return await call.code()

    assert with_server(models, calls) == grpc.StatusCode.DEADLINE_EXCEEDED
