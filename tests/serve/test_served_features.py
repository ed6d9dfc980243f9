"""Tests that a server tells the names of features, and compares those of a request with them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson
import pytest
import torch
from asgi import InProcess
from infer import binary_request
from loaded import saved
from rpc_client import RpcClient, infer_message, tensors, with_server
from torch import nn

import widepack_serve
from widepack.inference.model import WideModel
from widepack.spec.names import names_in, text_of_names
from widepack_serve.rpc.messages import CLASSES

NAMES = ("age", "height", "a,b")
TEXT = 'age,height,"a,b"'
X = torch.ones(2, 3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> WideModel:
    folder = tmp_path_factory.mktemp("features")
    return saved(lambda: nn.Linear(3, 2), folder, "input=float32[B,3]", members=2, features=NAMES)


@pytest.fixture(scope="module")
def server(model: WideModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcess]:
    plain = saved(lambda: nn.Linear(3, 2), tmp_path_factory.mktemp("plain"), "input=float32[B,3]", members=2)
    started = InProcess(widepack_serve.app({"ens": model, "plain": plain})).start()
    yield started
    started.close()


def test_the_metadata_name_the_features(server: InProcess) -> None:
    for name in ("ens", "ens.1", "ens.each"):
        (given,) = server("GET", f"/v2/models/{name}").json["inputs"]
        assert given["parameters"] == {"features": TEXT}
    assert "parameters" not in server("GET", "/v2/models/plain").json["inputs"][0]
    assert names_in(TEXT, "features") == list(NAMES) and text_of_names(NAMES) == TEXT


@pytest.mark.parametrize(
    ("model_name", "features", "text"),
    [
        ("ens", TEXT, ""),
        ("ens", ' age, height,"a,b"', ""),
        ("ens", "height,age,a", "its features are age, height, a,b, in this order; the request gives height"),
        ("ens", "age,height", "the request gives age, height"),
        ("ens", "", "gives no text with names"),
        ("ens", 3, "gives no text with names"),
        ("ens", 'age,"b', "a quote has no end"),
        ("plain", TEXT, "records no names of features; leave out the parameter features"),
    ],
)
def test_a_request_may_name_them(model_name: str, features: Any, text: str, server: InProcess) -> None:
    one = {"name": "input", "datatype": "FP32", "shape": [2, 3], "data": X.tolist()}
    body = orjson.dumps({"inputs": [{**one, "parameters": {"features": features}}]})
    got = server("POST", f"/v2/models/{model_name}/infer", body)
    assert got.status == (400 if text else 200), got.body
    assert not text or (text in got.error and got.error.startswith("input input: "))
    assert server.maybe(binary_request("ens", {"input": X})) is not None


def test_over_grpc(model: WideModel) -> None:
    async def calls(client: RpcClient) -> None:
        described = await client("ModelMetadata", name="ens")
        assert [i.name for i in described.inputs] == ["input"]
        message = infer_message("ens", ("input", X))
        message.inputs[0].parameters["features"].CopyFrom(CLASSES["InferParameter"](string_param=TEXT))
        assert tensors(await client("ModelInfer", message=message))["output"].shape == (2, 2, 2)
        message.inputs[0].parameters["features"].string_param = "a,b,c"
        with pytest.raises(Exception, match="its features are age, height"):
            await client("ModelInfer", message=message)

    with_server({"ens": model}, calls)
