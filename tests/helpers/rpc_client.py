"""Calls a gRPC server of the tests: in this process, with the messages of the server's own schema."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import grpc
import grpc.aio
import torch

from widepack.inference.model import WideModel
from widepack_serve.lifecycle.service import Service
from widepack_serve.protocol.datatypes import BY_DTYPE, DATATYPES
from widepack_serve.rpc.messages import CLASSES
from widepack_serve.rpc.schema import SERVICE
from widepack_serve.rpc.server import RpcServer
from widepack_serve.settings import Settings

T = TypeVar("T")
UNLIMITED = ("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)


class RpcClient:
    """Calls the methods of the server at an address."""

    def __init__(self, address: str, service: Service) -> None:
        self.address, self.service = address, service
        self.channel = grpc.aio.insecure_channel(address, options=UNLIMITED)

    async def __call__(self, method: str, *, message: Any = None, call: Any = None, **fields: Any) -> Any:
        """Returns the answer of a method.

        message: of the call; None makes one of the fields. call: options of the call, such as a timeout.
        """
        if message is None:
            message = CLASSES[f"{method}Request"](**fields)
        data = await self.send(method, message.SerializeToString(), **(call or {}))
        return CLASSES[f"{method}Response"].FromString(data)

    def send(self, method: str, data: bytes, **options: Any) -> Any:
        """Sends bytes. Returns: the call."""
        return self.channel.unary_unary(f"/{SERVICE}/{method}")(data, **options)

    async def infer(self, model: str, *inputs: Any, call: Any = None, **fields: Any) -> Any:
        """Returns the answer to an inference. inputs: (name, tensor or texts), carried raw."""
        return await self("ModelInfer", message=infer_message(model, *inputs, **fields), call=call)


def infer_message(model: str, *inputs: Any, **fields: Any) -> Any:
    """Returns a request for an inference with raw inputs."""
    message = CLASSES["ModelInferRequest"](model_name=model, **fields)
    for name, value in inputs:
        if isinstance(value, torch.Tensor):
            message.inputs.add(name=name, datatype=BY_DTYPE[value.dtype].name, shape=value.shape)
            message.raw_input_contents.append(raw_bytes(value))
        else:
            texts = [t.encode() for t in value]
            message.inputs.add(name=name, datatype="BYTES", shape=[len(texts)])
            message.raw_input_contents.append(b"".join(len(t).to_bytes(4, "little") + t for t in texts))
    return message


def raw_bytes(value: torch.Tensor) -> bytes:
    return value.contiguous().view(torch.uint8).numpy().tobytes() if value.numel() else b""


def tensors(answer: Any) -> dict[str, torch.Tensor]:
    """Returns the outputs of an answer by name."""
    found = {}
    for one, data in zip(answer.outputs, answer.raw_output_contents):
        value = torch.frombuffer(bytearray(data), dtype=DATATYPES[one.datatype].dtype)
        found[one.name] = value.reshape(tuple(one.shape))
    return found


@contextlib.asynccontextmanager
async def served(
    models: dict[str, WideModel], max_calls: int | None = None, **settings: Any
) -> AsyncIterator[RpcClient]:
    """Serves loaded models with gRPC on a free port, and yields a client."""
    service = Service(Settings({}, **settings), models)
    service.start()
    server = RpcServer(service, "127.0.0.1", 0, max_calls)
    await server.start()
    client = RpcClient(server.address, service)
    try:
        yield client
    finally:
        await client.channel.close()
        await server.stop(5.0)
        await service.stop()


def with_server(models: dict[str, WideModel], run: Callable[[RpcClient], Awaitable[T]], **settings: Any) -> T:
    """Runs a coroutine with the client of a server, and returns its result."""

    async def all_of_it() -> T:
        async with served(models, **settings) as client:
            return await run(client)

    return asyncio.run(all_of_it())
