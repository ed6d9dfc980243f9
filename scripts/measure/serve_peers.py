#!/usr/bin/env python3
"""Serves N modules in a dict with another server: FastAPI or kserve.

    python scripts/measure/serve_peers.py {fastapi,kserve} FOLDER NETWORK PORT

`serve.py --peer NAME=PYTHON` starts it with the Python of an environment that has the server and torch.
Requests are JSON with one row, and one module is called for each request. Options are those of each server's
own documentation, on one thread an op.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from route_networks import NETWORKS
from torch import nn


def modules_of(folder: str, network: str) -> list[nn.Module]:
    """Returns the members."""
    make, count, _ = NETWORKS[network]
    found = []
    for i in range(count):
        module = make().eval()
        module.load_state_dict(torch.load(Path(folder) / f"m{i}.pt", weights_only=True))
        found.append(module)
    return found


def fastapi(folder: str, network: str, port: int) -> None:
    """FastAPI with a pydantic model of the body."""
    import uvicorn
    from fastapi import FastAPI
    from pydantic import BaseModel

    modules, app = modules_of(folder, network), FastAPI()

    class Body(BaseModel):
        x: list[float]
        shape: list[int]

    @app.get("/v2/health/ready")
    async def ready() -> dict[str, bool]:
        return {"ready": True}

    async def predict(member: int, body: Body) -> dict[str, list[list[float]]]:
        with torch.inference_mode():
            return {"y": modules[member](torch.tensor(body.x).reshape(body.shape)).tolist()}

    predict.__annotations__["body"] = Body  # the class is local, and FastAPI cannot find it by its name
    app.post("/predict/{member}")(predict)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning", access_log=False)


def kserve(folder: str, network: str, port: int) -> None:
    """The model server of kserve's SDK, one model for each member."""
    sys.argv = [sys.argv[0], f"--http_port={port}", "--enable_grpc=False"]
    from kserve import InferOutput, InferRequest, InferResponse, Model, ModelServer

    class One(Model):
        def __init__(self, name: str, module: nn.Module) -> None:
            super().__init__(name)
            self.module, self.ready = module, True

        def load(self) -> bool:
            return True

        async def predict(
            self, payload: InferRequest, headers: Any = None, response_headers: Any = None
        ) -> Any:
            x = torch.from_numpy(payload.inputs[0].as_numpy())
            with torch.inference_mode():
                y = self.module(x)
            output = InferOutput("y", list(y.shape), "FP32")
            output.set_data_from_numpy(y.numpy(), binary_data=False)
            return InferResponse(payload.id or "", self.name, [output])

    ModelServer(workers=1).start([One(f"m{i}", m) for i, m in enumerate(modules_of(folder, network))])


SERVERS = {"fastapi": fastapi, "kserve": kserve}

if __name__ == "__main__":
    torch.set_num_threads(1)
    SERVERS[sys.argv[1]](sys.argv[2], sys.argv[3], int(sys.argv[4]))
