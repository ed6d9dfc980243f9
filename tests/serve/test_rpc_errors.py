"""Tests what the gRPC interface refuses: the status code and the sentence of each error."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import torch
from rpc_client import RpcClient, infer_message, served, tensors, with_server
from support import Artifacts

import widepack
import widepack_serve.errors
from widepack.inference.model import WideModel
from widepack_serve.errors import Busy, RequestError
from widepack_serve.lifecycle.service import Service
from widepack_serve.rpc.messages import CLASSES, file_of
from widepack_serve.rpc.schema import SERVICE
from widepack_serve.rpc.server import RpcServer
from widepack_serve.rpc.status import CODES, status_of
from widepack_serve.settings import Settings

X = torch.ones(2, 64)
TOKEN = "0123456789abcdef"
INVALID = grpc.StatusCode.INVALID_ARGUMENT


@pytest.fixture(scope="module")
def models(artifacts: Artifacts) -> dict[str, WideModel]:
    return {"ens": widepack.load(artifacts("mlp"))}


async def refused(call: Any) -> tuple[grpc.StatusCode, str]:
    """Returns the status code and the sentence of a call that fails."""
    with pytest.raises(grpc.aio.AioRpcError) as found:
        await call
    return found.value.code(), str(found.value.details())


def changed(change: Callable[[Any], Any]) -> Any:
    """Returns a good request after a change."""
    message = infer_message("ens", ("input", X))
    change(message)
    return message


def with_contents(datatype: str, field: str, values: list[Any], shape: list[int]) -> Any:
    message = CLASSES["ModelInferRequest"](model_name="ens")
    one = message.inputs.add(name="input", datatype=datatype, shape=shape)
    getattr(one.contents, field).extend(values)
    return message


def _rename(message: Any) -> None:
    message.inputs[0].name = "x"


def _shape(*shape: int) -> Callable[[Any], None]:
    def change(message: Any) -> None:
        message.inputs[0].shape[:] = shape

    return change


def _output(name: str) -> Callable[[Any], Any]:
    return lambda m: m.outputs.add(name=name)


def _parameter(name: str, **value: Any) -> Callable[[Any], None]:
    def change(message: Any) -> None:
        for field, one in value.items():
            setattr(message.parameters[name], field, one)

    return change


def _set(parameters: Any, name: str, value: str) -> None:
    parameters[name].string_param = value


def _datatype(name: str) -> Callable[[Any], None]:
    def change(message: Any) -> None:
        message.inputs[0].datatype = name

    return change


REFUSED = {
    "no inputs": (
        CLASSES["ModelInferRequest"](model_name="ens"),
        "no list inputs with at least one input",
    ),
    "unknown input": (changed(_rename), "model ens has no input x; its inputs are input"),
    "no name": (changed(lambda m: m.inputs[0].ClearField("name")), "input 0 has no name"),
    "no datatype": (
        changed(lambda m: m.inputs[0].ClearField("datatype")),
        "has the datatype ''; known: BOOL",
    ),
    "unknown datatype": (changed(_datatype("FP8")), "has the datatype 'FP8'; known: BOOL"),
    "other datatype": (changed(_datatype("INT32")), "input input is INT32; the model takes FP32"),
    "negative size": (changed(_shape(-1, 64)), "input input has the shape [-1, 64]"),
    "large size": (changed(_shape(2**62, 64)), "input input has the shape [4611686018427387904, 64]"),
    "another size": (
        changed(_shape(3, 64)),
        "input input has 512 bytes; FP32 with the shape [3, 64] has 768",
    ),
    "another shape": (changed(_shape(4, 32)), "input input has 32 at axis 1"),
    "given twice": (
        infer_message("ens", ("input", X), ("input", X)),
        "input input is given twice",
    ),
    "raw for one of two": (
        changed(lambda m: m.inputs.add(name="member", datatype="INT64", shape=[2])),
        "raw_input_contents has 1 values, and inputs has 2; all inputs are raw, or none",
    ),
    "raw and contents": (
        changed(lambda m: m.inputs[0].contents.fp32_contents.append(1.0)),
        "input input has contents, and the request has raw_input_contents; give one of them",
    ),
    "neither raw nor contents": (
        changed(lambda m: m.ClearField("raw_input_contents")),
        "input input has 0 numbers; the shape [2, 64] has 128",
    ),
    "contents of another type": (
        with_contents("FP32", "fp64_contents", [1.0] * 64, [1, 64]),
        "input input has fp64_contents; the contents of FP32 are fp32_contents",
    ),
    "too few contents": (
        with_contents("FP32", "fp32_contents", [1.0] * 63, [1, 64]),
        "input input has 63 numbers; the shape [1, 64] has 64",
    ),
    "a number out of range": (
        with_contents("INT8", "int_contents", [128], [1]),
        "input input: data contains a number that INT8 cannot represent",
    ),
    "texts that are not UTF-8": (
        with_contents("BYTES", "bytes_contents", [b"\xff"], [1]),
        "input input has the text b'\\xff', which is not UTF-8",
    ),
    "raw texts that end early": (
        changed(_datatype("BYTES")),
        "input input: text 0 ends after the data",
    ),
    "unknown output": (changed(_output("zz")), "there is no output 'zz'; the outputs are output"),
    "unknown figure": (changed(_output("output.mode")), "output output.mode"),
    "output without a name": (changed(_output("")), "output 0 has no name"),
    "timeout in text": (
        changed(_parameter("timeout", string_param="5s")),
        "timeout is 5s; it is a whole number of microseconds",
    ),
    "member as a parameter": (
        changed(_parameter("member", string_param="mlp-1")),
        "member is a parameter of the request; it is an input",
    ),
    "binary_data_output in text": (
        changed(_parameter("binary_data_output", string_param="yes")),
        "the request: binary_data_output is yes; it is true or false",
    ),
    "unknown member": (
        infer_message("ens", ("input", X), ("member", ["mlp-1", "mlp-9"])),
        "no member is called 'mlp-9'",
    ),
    "member of another length": (
        infer_message("ens", ("input", X), ("member", torch.tensor([1, 2, 3]))),
        "input member has the shape [3]; it has one number or name for each row, [2]",
    ),
    "a sequence": (
        changed(_parameter("sequence_id", string_param="7")),
        "the request: the extension sequence is not supported; leave out the parameter sequence_id",
    ),
    "priority": (
        changed(_parameter("priority", uint64_param=1)),
        "the request: all requests have one priority; leave out the parameter priority",
    ),
    "an unknown parameter": (
        changed(_parameter("temperature", double_param=0.5)),
        "there is no parameter temperature; known: timeout, binary_data_output",
    ),
    "an input in shared memory": (
        changed(lambda m: _set(m.inputs[0].parameters, "shared_memory_region", "r")),
        "input input: the extension shared_memory is not supported",
    ),
    "an output in shared memory": (
        changed(lambda m: _set(m.outputs.add(name="output").parameters, "shared_memory_region", "r")),
        "output output: the extension shared_memory is not supported",
    ),
    "long id": (
        changed(lambda m: setattr(m, "id", "i" * 1001)),
        "id is not a text of at most 1000 characters",
    ),
}


def test_bad_requests_are_invalid_arguments(models: dict[str, WideModel]) -> None:
    """All in one server, which answers a good request after them."""

    async def calls(client: RpcClient) -> dict[str, tuple[grpc.StatusCode, str]]:
        found = {name: await refused(client("ModelInfer", message=m)) for name, (m, _) in REFUSED.items()}
        assert tensors(await client.infer("ens", ("input", X)))["output"].shape == (8, 2, 10)
        return found

    found = with_server(models, calls)
    assert {name: code for name, (code, _) in found.items() if code != INVALID} == {}
    assert {n: (text, REFUSED[n][1]) for n, (_, text) in found.items() if REFUSED[n][1] not in text} == {}


def test_unknown_names_are_not_found(models: dict[str, WideModel]) -> None:
    async def calls(client: RpcClient) -> list[tuple[grpc.StatusCode, str]]:
        return [
            await refused(client.infer("enz", ("input", X))),
            await refused(client.infer("ens", ("input", X), model_version="7")),
            await refused(client.infer("", ("input", X))),
            await refused(client("ModelReady", name="ens.mlp-8")),
            await refused(client("ModelMetadata", name="ens", version="2")),
            await refused(client("ModelStatistics", name="zz")),
        ]

    found = with_server(models, calls)
    assert {code for code, _ in found} == {grpc.StatusCode.NOT_FOUND}
    assert found[0][1] == "there is no model 'enz'; did you mean ens?"
    assert "has no version '7'; its version is" in found[1][1]


def test_bytes_that_are_no_message_and_unknown_methods(models: dict[str, WideModel]) -> None:
    good = infer_message("ens", ("input", X)).SerializeToString()

    async def calls(client: RpcClient) -> list[tuple[grpc.StatusCode, str]]:
        return [
            await refused(client.send("ModelInfer", b"\xff\xff\xff")),
            await refused(client.send("ModelInfer", good[:-9])),
            await refused(client.send("RepositoryModelLoad", b"")),
        ]

    broken, short, unknown = with_server(models, calls)
    assert broken == short == (INVALID, "the message is not a ModelInferRequest of the protocol")
    assert unknown[0] == grpc.StatusCode.UNIMPLEMENTED


def test_messages_over_the_limit_are_refused(
    models: dict[str, WideModel], caplog: pytest.LogCaptureFixture
) -> None:
    """Compressed ones, too: they are not unpacked first."""
    large = infer_message("ens", ("input", torch.zeros(1000, 64))).SerializeToString()

    async def calls(client: RpcClient) -> list[Any]:
        packed = {"compression": grpc.Compression.Gzip}
        small = infer_message("ens", ("input", X)).SerializeToString()
        return [
            await refused(client.send("ModelInfer", large)),
            await refused(client.send("ModelInfer", large, **packed)),
            CLASSES["ModelInferResponse"].FromString(await client.send("ModelInfer", small, **packed)),
        ]

    plain, packed, good = with_server(models, calls, max_body=100_000)
    assert plain[0] == packed[0] == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert good.outputs
    assert caplog.text == ""


@pytest.mark.parametrize("needs_token", [False, True])
def test_a_message_must_arrive_in_time(
    models: dict[str, WideModel], tmp_path: Path, needs_token: bool
) -> None:
    """A call without a token fails before its message."""
    (tmp_path / "token").write_text(TOKEN)
    settings = {"token_file": str(tmp_path / "token")} if needs_token else {}

    async def never() -> AsyncIterator[bytes]:
        await asyncio.sleep(20)
        yield b""

    async def nothing() -> AsyncIterator[bytes]:
        messages: tuple[bytes, ...] = ()
        for data in messages:
            yield data

    async def calls(client: RpcClient) -> list[tuple[grpc.StatusCode, str]]:
        infer = client.channel.stream_unary(f"/{SERVICE}/ModelInfer")
        return [await refused(infer(never())), await refused(infer(nothing()))]

    start = time.monotonic()
    slow, empty = with_server(models, calls, receive_timeout=0.3, **settings)
    assert time.monotonic() - start < 10
    if not needs_token:
        assert slow == (
            grpc.StatusCode.DEADLINE_EXCEEDED,
            "the message did not arrive within 0.3 seconds",
        )
        assert empty == (INVALID, "the call has no message")
    else:
        assert slow[0] == empty[0] == grpc.StatusCode.UNAUTHENTICATED


def test_a_token_is_needed_except_for_health(models: dict[str, WideModel], tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)

    def call(text: str) -> dict[str, Any]:
        return {"metadata": (("authorization", text),)}

    async def calls(client: RpcClient) -> list[Any]:
        assert (await client("ServerLive")).live and (await client("ServerReady")).ready
        assert (await client("ServerMetadata", call=call(f"Bearer {TOKEN}"))).name == "widepack"
        assert (await client.infer("ens", ("input", X), call=call(f"bearer {TOKEN}"))).outputs
        return [
            await refused(client.infer("ens", ("input", X))),
            await refused(client("ModelReady", name="ens")),
            await refused(client("ServerMetadata", call=call(TOKEN))),
            await refused(client("ServerMetadata", call=call(f"Bearer {TOKEN}x"))),
        ]

    found = with_server(models, calls, token_file=str(tmp_path / "token"))
    absent = "this server needs a token: send the metadata authorization: Bearer TOKEN"
    assert found[:3] == [(grpc.StatusCode.UNAUTHENTICATED, absent)] * 3
    assert found[3] == (grpc.StatusCode.PERMISSION_DENIED, "the token is wrong")


def test_a_full_queue_says_when_to_try_again(models: dict[str, WideModel]) -> None:
    async def calls(client: RpcClient) -> grpc.aio.AioRpcError:
        waiting = asyncio.ensure_future(client.infer("ens", ("input", X)))
        await asyncio.sleep(0.2)
        with pytest.raises(grpc.aio.AioRpcError) as found:
            await client.infer("ens", ("input", X))
        assert (await waiting).outputs
        return found.value

    error = with_server(models, calls, max_queue=3, max_delay=0.6)
    assert error.code() == grpc.StatusCode.UNAVAILABLE
    assert error.details() == "2 rows wait, and the limit of the queue is 3; try again"
    assert ("grpc-retry-pushback-ms", "1000") in [tuple(m) for m in error.trailing_metadata() or ()]


@pytest.mark.parametrize("kind", ["parameter", "deadline"])
def test_a_request_does_not_wait_longer_than_its_timeout(models: dict[str, WideModel], kind: str) -> None:
    message = infer_message("ens", ("input", X))
    call = {"timeout": 0.3} if kind == "deadline" else {}
    if kind == "parameter":
        message.parameters["timeout"].int64_param = 300_000

    async def calls(client: RpcClient) -> tuple[grpc.StatusCode, float, bytes]:
        start = time.monotonic()
        code, _ = await refused(client("ModelInfer", message=message, call=call))
        seconds = time.monotonic() - start
        await asyncio.sleep(0.5)
        return code, seconds, client.service.metrics_text()

    code, seconds, text = with_server(models, calls, max_delay=1.5)
    assert code == grpc.StatusCode.DEADLINE_EXCEEDED
    assert 0.2 < seconds < 1.2
    assert b'widepack_requests_total{code="200"' not in text
    assert b'code="500"' not in text


def test_a_cancelled_call_does_not_run(models: dict[str, WideModel]) -> None:
    async def calls(client: RpcClient) -> tuple[int, str]:
        call = client.send("ModelInfer", infer_message("ens", ("input", X)).SerializeToString())
        await asyncio.sleep(0.2)
        waiting = client.service.batcher.waiting
        call.cancel()
        await asyncio.sleep(0.8)
        return waiting, client.service.metrics_text().decode()

    waiting, text = with_server(models, calls, max_delay=0.6)
    assert waiting == 2
    assert 'code="499"' in text
    assert 'widepack_rejected_total{reason="disconnected"} 1.0' in text
    assert "widepack_batch_rows_count" not in text


def test_a_failure_of_the_server_tells_nothing_of_its_inside(
    models: dict[str, WideModel], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def calls(client: RpcClient) -> tuple[grpc.StatusCode, str]:
        monkeypatch.setattr(client.service, "infer", None)
        return await refused(client.infer("ens", ("input", X)))

    code, text = with_server(models, calls)
    assert (code, text) == (grpc.StatusCode.INTERNAL, "the server failed; its log has the reason")
    assert "NoneType" in caplog.text


def test_calls_over_the_limit_are_refused(models: dict[str, WideModel]) -> None:
    async def calls() -> tuple[grpc.StatusCode, str]:
        async with served(models, max_calls=1, max_delay=0.5) as client:
            first = asyncio.ensure_future(client.infer("ens", ("input", X)))
            await asyncio.sleep(0.1)
            found = await refused(client("ServerLive"))
            assert (await first).outputs
            return found

    assert asyncio.run(calls())[0] == grpc.StatusCode.UNAVAILABLE


def test_stop_answers_the_calls_that_wait(models: dict[str, WideModel]) -> None:
    async def calls() -> tuple[Any, grpc.StatusCode]:
        service = Service(Settings({}, max_delay=0.5), models)
        service.start()
        server = RpcServer(service, "127.0.0.1", 0)
        await server.start()
        client = RpcClient(server.address, service)
        waiting = asyncio.ensure_future(client.infer("ens", ("input", X)))
        await asyncio.sleep(0.1)
        stopping = asyncio.ensure_future(server.stop(5.0))
        await asyncio.sleep(0.1)
        code, text = await refused(client.infer("ens", ("input", X)))
        assert text == "the server is shutting down; send the request to another one"
        answer = await waiting
        await stopping
        await client.channel.close()
        await service.stop()
        return answer, code

    answer, code = asyncio.run(calls())
    assert answer.outputs and code == grpc.StatusCode.UNAVAILABLE


def test_every_error_of_a_request_has_a_status_code() -> None:
    kinds = [
        k for k in vars(widepack_serve.errors).values() if isinstance(k, type) and issubclass(k, RequestError)
    ]
    assert len(kinds) > 8
    assert {k.status for k in kinds} <= set(CODES)
    assert status_of(Busy("wait")) == (
        grpc.StatusCode.UNAVAILABLE,
        "wait",
        (("grpc-retry-pushback-ms", "1000"),),
    )
    assert len(status_of(RequestError("x" * 5000))[1]) == 600


def test_a_field_that_cannot_be_read_is_an_error() -> None:
    with pytest.raises(ValueError, match="A: 'string' is not a field"):
        file_of({"A": ("string",)}, "test")
    assert SERVICE == "inference.GRPCInferenceService"
