"""Calls a server with kserve's own clients: `kserve_calls.py HTTP GRPC INPUTS RESULTS`.

INPUTS is a file .npz with `x`, rows for the model `ens`. The members of the model are `mlp-0`, `mlp-1`, and
so on. `test_clients.py` runs it, and checks what `RESULTS` has.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from typing import Any

import grpc
import httpx
import numpy
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig
from recorder import Recorder

MEMBERS = [3, 0, 3, 7]


def request(x: Any, model: str = "ens", *, binary: bool, members: bool = False) -> Any:
    rows = InferInput("input", list(x.shape), "FP32")
    rows.set_data_from_numpy(x, binary_data=binary)
    inputs = [rows]
    if members:
        member = InferInput("member", [len(MEMBERS)], "INT64")
        member.set_data_from_numpy(numpy.array(MEMBERS, dtype=numpy.int64), binary_data=binary)
        inputs.append(member)
    return InferRequest(model_name=model, infer_inputs=inputs, request_id="request 7")


def recorded(record: Recorder, name: str, call: Coroutine[Any, Any, Any]) -> None:
    """Records the result of a call."""
    record(name, lambda: LOOP.run_until_complete(call))


async def rest_answer(client: Any, url: str, asked: Any) -> Any:
    found = await client.infer(url, asked, model_name=asked.model_name)
    return found.outputs[0].as_numpy()


async def grpc_answer(client: Any, asked: Any) -> Any:
    return (await client.infer(asked)).outputs[0].as_numpy()


async def answered_id(client: Any, asked: Any) -> Any:
    return (await client.infer(asked)).id


def main(http: str, address: str, inputs: str, results: str) -> None:
    """Makes all calls."""
    x = numpy.load(inputs)["x"]
    record = Recorder(httpx.HTTPError, grpc.RpcError, RuntimeError)
    url = f"http://{http}"
    rest = InferenceRESTClient(RESTConfig(protocol="v2", retries=0))
    recorded(record, "http live", rest.is_server_live(url))
    recorded(record, "http ready", rest.is_server_ready(url))
    recorded(record, "http model", rest.is_model_ready(url, "ens"))
    for name, binary in (("binary", True), ("json", False)):
        recorded(record, f"http {name}", rest_answer(rest, url, request(x, binary=binary)))
        members = request(x, binary=binary, members=True)
        recorded(record, f"http members {name}", rest_answer(rest, url, members))
    recorded(record, "http unknown", rest_answer(rest, url, request(x, "enz", binary=True)))

    rpc = InferenceGRPCClient(address, retries=0)
    recorded(record, "grpc live", rpc.is_server_live())
    recorded(record, "grpc ready", rpc.is_server_ready())
    recorded(record, "grpc model", rpc.is_model_ready("ens"))
    for name, binary in (("raw", True), ("contents", False)):
        recorded(record, f"grpc {name}", grpc_answer(rpc, request(x, binary=binary)))
        members = request(x, binary=binary, members=True)
        recorded(record, f"grpc members {name}", grpc_answer(rpc, members))
    recorded(record, "grpc id", answered_id(rpc, request(x, binary=True)))
    recorded(record, "grpc unknown", grpc_answer(rpc, request(x, "enz", binary=True)))
    LOOP.run_until_complete(rpc.close())
    record.write(results)


if __name__ == "__main__":
    LOOP = asyncio.new_event_loop()
    asyncio.set_event_loop(LOOP)
    main(*sys.argv[1:])
