#!/usr/bin/env python3
"""Serves N modules in a dict with LitServe, in batches of up to 32 requests.

    python scripts/measure/serve_litserve.py FOLDER NETWORK PORT

`serve.py` starts it as it starts `serve_peers.py`. LitServe starts processes that import this module, so its
API is a class of the module. LitServe reads its annotations, so they are not postponed.
"""

import sys
from typing import Any

import litserve
import torch
from serve_peers import modules_of
from torch import nn


class Api(litserve.LitAPI):
    """Answers each request by one module."""

    def __init__(self, folder: str, network: str) -> None:
        super().__init__(max_batch_size=32, batch_timeout=0.001)
        self.folder, self.network = folder, network
        self.modules: list[nn.Module] = []

    def setup(self, device: str) -> None:
        torch.set_num_threads(1)
        self.modules = modules_of(self.folder, self.network)

    def decode_request(self, request: dict[str, Any]) -> tuple[int, torch.Tensor]:
        return request["member"], torch.tensor(request["x"]).reshape(request["shape"])

    def batch(self, inputs: list[Any]) -> list[Any]:
        return inputs

    def predict(self, inputs: list[tuple[int, torch.Tensor]]) -> list[torch.Tensor]:
        with torch.inference_mode():
            return [self.modules[i](x) for i, x in inputs]

    def unbatch(self, output: list[torch.Tensor]) -> list[torch.Tensor]:
        return output

    def encode_response(self, output: torch.Tensor) -> dict[str, Any]:
        return {"y": output.tolist()}


if __name__ == "__main__":
    server = litserve.LitServer(
        Api(sys.argv[1], sys.argv[2]), accelerator="cpu", healthcheck_path="/v2/health/ready"
    )
    server.run(host="127.0.0.1", port=int(sys.argv[3]), log_level="warning", generate_client_file=False)
