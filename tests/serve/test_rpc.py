"""Tests the gRPC interface with a server in this process: health, metadata, inferences and their options."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
import torch
from batches import Batches
from rpc_client import RpcClient, infer_message, tensors, with_server
from support import Artifacts, Bound, double, run

import widepack
from cases import load
from widepack.inference.model import WideModel
from widepack_serve.rpc.messages import CLASSES
from widepack_serve.rpc.schema import SERVICE

CASE = load("mlp")
ROWS = 4
X = CASE.sample(ROWS, 0)[0][0]


@pytest.fixture(scope="module")
def model(artifacts: Artifacts) -> WideModel:
    return widepack.load(artifacts("mlp"))


@pytest.fixture(scope="module")
def models(model: WideModel) -> dict[str, WideModel]:
    return {"ens": model}


def check_rows(answer: torch.Tensor, numbers: list[int], x: torch.Tensor) -> None:
    """Checks that row b is the answer of member numbers[b] alone."""
    bound = Bound()
    for row, number in enumerate(numbers):
        member = CASE.member(number)
        alone = run(member, (x[row : row + 1],), {})
        truth = run(member.double(), double((x[row : row + 1],)), {})
        bound.add(answer[row : row + 1], alone, truth)
    bound.check()


def test_health_and_readiness(models: dict[str, WideModel]) -> None:
    async def calls(client: RpcClient) -> list[bool]:
        before = [
            (await client("ServerLive")).live,
            (await client("ServerReady")).ready,
            (await client("ModelReady", name="ens")).ready,
        ]
        client.service.drain()
        return [
            *before,
            (await client("ServerLive")).live,
            (await client("ServerReady")).ready,
            (await client("ModelReady", name="ens")).ready,
        ]

    assert with_server(models, calls) == [True, True, True, True, False, False]


def test_metadata(models: dict[str, WideModel], model: WideModel) -> None:
    async def calls(client: RpcClient) -> tuple[Any, Any, Any]:
        version = client.service.catalog.find("ens").artifact.version
        return (
            await client("ServerMetadata"),
            await client("ModelMetadata", name="ens"),
            await client("ModelMetadata", name="ens.mlp-3", version=version),
        )

    server, ens, member = with_server(models, calls)
    assert (server.name, server.version) == ("widepack", widepack.__version__)
    assert "statistics" in server.extensions
    assert ens.name == "ens" and ens.platform == "widepack_wide"
    assert list(ens.versions) == [model.manifest.digest.removeprefix("sha256:")[:12]]
    assert [(i.name, i.datatype, list(i.shape)) for i in ens.inputs] == [("input", "FP32", [-1, 64])]
    assert [(o.name, o.datatype, list(o.shape)) for o in ens.outputs] == [("output", "FP32", [8, -1, 10])]
    assert [(o.name, o.datatype, list(o.shape)) for o in member.outputs] == [("output", "FP32", [-1, 10])]


def test_configuration_and_version_1(models: dict[str, WideModel]) -> None:
    x = CASE.sample(8, 1)[0][0]

    async def calls(client: RpcClient) -> tuple[Any, Any, Any]:
        return (
            (await client("ModelConfig", name="ens.mlp-3", version="1")).config,
            await client("ModelReady", name="ens", version="1"),
            await client.infer("ens", ("input", x), ("member", torch.arange(8)), model_version="1"),
        )

    config, ready, answer = with_server(models, calls)
    assert (config.name, config.platform, config.backend) == ("ens.mlp-3", "widepack_wide", "widepack")
    assert [(i.name, i.data_type, list(i.dims)) for i in config.input] == [("input", 11, [-1, 64])]
    assert [(o.name, o.data_type, list(o.dims)) for o in config.output] == [("output", 11, [-1, 10])]
    assert ready.ready
    (found,) = tensors(answer).values()
    check_rows(found, list(range(8)), x)


def test_all_members_answer_with_their_own_numbers(models: dict[str, WideModel]) -> None:
    answer = with_server(models, lambda client: client.infer("ens", ("input", X), id="r 17"))
    assert (answer.model_name, answer.id) == ("ens", "r 17")
    assert answer.model_version
    (found,) = tensors(answer).values()
    assert found.shape == (8, ROWS, 10)
    bound = Bound()
    for number in range(8):
        member = CASE.member(number)
        bound.add(found[number], run(member, (X,), {}), run(member.double(), double((X,)), {}))
    bound.check()


@pytest.mark.parametrize("how", ["names", "numbers"])
@pytest.mark.parametrize("raw", [True, False])
def test_the_input_member_chooses_the_member_of_each_row(
    models: dict[str, WideModel], how: str, raw: bool
) -> None:
    numbers = [5, 0, 5, 7, 2, 1, 6, 3]
    x = CASE.sample(len(numbers), 1)[0][0]
    names = [f"mlp-{n}" for n in numbers]
    member = torch.tensor(numbers) if how == "numbers" else names
    message = infer_message("ens", ("input", x), ("member", member))
    if not raw:
        del message.raw_input_contents[:]
        message.inputs[0].contents.fp32_contents.extend(x.reshape(-1).tolist())
        if how == "numbers":
            message.inputs[1].contents.int64_contents.extend(numbers)
        else:
            message.inputs[1].contents.bytes_contents.extend(name.encode() for name in names)
    answer = with_server(models, lambda client: client("ModelInfer", message=message))
    check_rows(tensors(answer)["output"], numbers, x)


def test_one_member_answers_under_its_own_name(models: dict[str, WideModel]) -> None:
    x = CASE.sample(8, 2)[0][0]
    answer = with_server(models, lambda client: client.infer("ens.mlp-6", ("input", x)))
    assert answer.model_name == "ens.mlp-6"
    check_rows(tensors(answer)["output"], [6] * 8, x)


def test_requested_outputs_are_computed_with_their_parameters(models: dict[str, WideModel]) -> None:
    message = infer_message("ens", ("input", X))
    first = message.outputs.add(name="output.mean")
    first.parameters["of"].string_param = "softmax"
    first.parameters["dim"].int64_param = -1
    message.outputs.add(name="output.std")
    answer = with_server(models, lambda client: client("ModelInfer", message=message))
    found = tensors(answer)
    assert list(found) == ["output.mean", "output.std"]
    alone = torch.stack([run(CASE.member(n).double(), double((X,)), {}) for n in range(8)])
    torch.testing.assert_close(found["output.mean"].double(), alone.softmax(-1).mean(0), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(found["output.std"].double(), alone.std(0, correction=0), atol=1e-5, rtol=1e-5)


def test_outputs_are_contents_if_the_client_wants_no_bytes(models: dict[str, WideModel]) -> None:
    plain = infer_message("ens", ("input", X))
    plain.parameters["binary_data_output"].bool_param = False
    both = infer_message("ens", ("input", X))
    both.outputs.add(name="output").parameters["binary_data"].bool_param = False
    both.outputs.add(name="output.mean")

    async def calls(client: RpcClient) -> tuple[Any, Any, Any]:
        return (
            await client.infer("ens", ("input", X)),
            await client("ModelInfer", message=plain),
            await client("ModelInfer", message=both),
        )

    raw, contents, mixed = with_server(models, calls)
    assert not contents.raw_output_contents and not raw.outputs[0].HasField("contents")
    numbers = torch.tensor(contents.outputs[0].contents.fp32_contents)
    assert torch.equal(numbers.reshape(8, ROWS, 10), tensors(raw)["output"])
    assert len(mixed.raw_output_contents) == 2  # the protocol has all of them raw, or none
    assert not any(o.HasField("contents") for o in mixed.outputs)


def test_half_precision_is_carried_raw_only(artifacts: Artifacts, batches: Batches) -> None:
    model = widepack.load(artifacts("mlp"), dtype="bf16")
    x = X.bfloat16()
    plain = infer_message("ens", ("input", x))
    plain.parameters["binary_data_output"].bool_param = False
    described = CLASSES["ModelInferRequest"](model_name="ens")
    described.inputs.add(name="input", datatype="BF16", shape=x.shape).contents.fp32_contents.append(1.0)

    async def calls(client: RpcClient) -> tuple[Any, list[str]]:
        refused = []
        for message in (plain, described):
            with pytest.raises(grpc.aio.AioRpcError) as found:
                await client("ModelInfer", message=message)
            assert found.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            refused.append(str(found.value.details()))
        return await client.infer("ens", ("input", x)), refused

    answer, refused = with_server({"ens": model}, calls)
    assert answer.outputs[0].datatype == "BF16"
    (found,) = tensors(answer).values()
    alone = torch.stack([run(CASE.member(n).double(), double((x,)), {}) for n in range(8)])
    assert float((found.double() - alone).square().mean().sqrt()) < 0.05 * float(alone.square().mean().sqrt())
    assert "output output is BF16, which only binary data can carry" in refused[0]
    assert len(batches.parts) == 1  # the others were refused before anything ran
    assert "input input: BF16 has no field of contents; send it in raw_input_contents" in refused[1]


def test_index_and_statistics(models: dict[str, WideModel]) -> None:
    async def calls(client: RpcClient) -> tuple[Any, ...]:
        index = await client("RepositoryIndex")
        await client.infer("ens.mlp-2", ("input", X))
        with pytest.raises(grpc.aio.AioRpcError):
            await client.infer("ens.mlp-2", ("x", X))
        every = await client("ModelStatistics")
        one = await client("ModelStatistics", name="ens.mlp-2")
        client.service.drain()
        return index, every, one, await client("RepositoryIndex"), await client("RepositoryIndex", ready=True)

    index, every, one, draining, ready = with_server(models, calls)
    names = {m.name for m in index.models}
    assert {"ens", "ens.each", "ens.mlp-0", "ens.7"} <= names
    assert {m.state for m in index.models} == {"READY"}
    assert {m.state for m in draining.models} == {"UNAVAILABLE"} and not ready.models
    assert [m.name for m in every.model_stats] == ["ens.mlp-2"]
    assert every == one
    found = one.model_stats[0]
    assert (found.inference_count, found.execution_count) == (ROWS, 1)
    assert (found.inference_stats.success.count, found.inference_stats.fail.count) == (1, 1)
    assert found.inference_stats.success.ns > 0 and found.last_inference > 0


def test_messages_that_cannot_be_read_are_counted(models: dict[str, WideModel]) -> None:
    async def nothing() -> AsyncIterator[bytes]:
        messages: tuple[bytes, ...] = ()
        for data in messages:
            yield data

    async def calls(client: RpcClient) -> tuple[str, Any]:
        shape = infer_message("ens", ("input", X))
        shape.inputs[0].shape[0] = ROWS + 1
        infer = client.channel.stream_unary(f"/{SERVICE}/ModelInfer")
        for call in (
            client("ModelInfer", message=shape),
            client.infer("ens", ("x", X)),
            client.send("ModelInfer", b"\xff\xff"),
            client.send("ModelMetadata", b"\xff\xff"),  # no inference
            infer(nothing()),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as found:
                await call
            assert found.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        return client.service.metrics_text().decode(), await client("ModelStatistics", name="ens")

    text, statistics = with_server(models, calls)
    rows = {row for row in text.splitlines() if row.startswith("widepack_requests_total{")}
    assert rows == {
        'widepack_requests_total{code="400",entry="forward",model="ens"} 2.0',
        'widepack_requests_total{code="400",entry="",model=""} 2.0',
    }
    assert statistics.model_stats[0].inference_stats.fail.count == 2


def test_calls_share_batches(models: dict[str, WideModel]) -> None:
    async def calls(client: RpcClient) -> list[Any]:
        return await asyncio.gather(
            *(client.infer(f"ens.{n}", ("input", X[:1]), id=str(n)) for n in [3, 1, 4, 1, 5, 2, 6, 5])
        )

    for answer, number in zip(with_server(models, calls, max_delay=0.02), [3, 1, 4, 1, 5, 2, 6, 5]):
        assert answer.id == str(number)
        alone = run(CASE.member(number).double(), double((X[:1],)), {})
        torch.testing.assert_close(tensors(answer)["output"].double(), alone, atol=1e-4, rtol=1e-4)
