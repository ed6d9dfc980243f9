"""Serves N modules in a dict, one call of a module for each request: what a service writes without widepack.

    python scripts/measure/serve_dict.py FOLDER NETWORK SOCKET

`serve.py` starts one process for each processor on one socket. The protocol is widepack_serve's own code, so
that only what runs the model differs.
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import torch
import uvicorn
from route_networks import NETWORKS
from starlette.types import Receive, Scope, Send
from torch import nn

from widepack_serve.errors import RequestError
from widepack_serve.lifecycle.receiving import Receiving
from widepack_serve.protocol.body import header_length
from widepack_serve.protocol.request import read_request
from widepack_serve.protocol.response import AnsweredOutput, answer_body
from widepack_serve.rest.models import named, path_parts
from widepack_serve.rest.receive import header, read_body
from widepack_serve.rest.send import BINARY, JSON, send_body, send_document, send_error

MOST = 64_000_000


class DictApp:
    """Answers requests for `ens.0`, `ens.1`, ... by one module each."""

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        self.modules = modules
        self._receiving = Receiving(4 * MOST, lambda: None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            await self._answer(scope, receive, send)
        except RequestError as e:
            await send_error(send, e)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        parts = path_parts(scope)
        if parts[:2] == ["v2", "health"]:
            await send_document(send, {"ready": True})
            return
        name, _, _ = named(parts[2:])
        with self._receiving.body() as held:
            body = await read_body(scope, receive, MOST, 30.0, held)
        length = header_length(header(scope, b"inference-header-content-length"), len(body))
        request = read_request(body, length)
        x = request.inputs["input"]
        assert isinstance(x, torch.Tensor)
        with torch.inference_mode():
            outputs = [AnsweredOutput("output", self.modules[name](x), request.binary)]
        answer, size = answer_body(name, "1", request.id, outputs)
        headers = () if size is None else ((b"inference-header-content-length", b"%d" % size),)
        await send_body(send, answer, JSON if size is None else BINARY, 200, headers)


def main(folder: str, network: str, number: str) -> None:
    """Serves on an open socket. folder: of the checkpoints."""
    torch.set_num_threads(1)
    make, count, _ = NETWORKS[network]
    modules = {}
    for i in range(count):
        module = make().eval()
        module.load_state_dict(torch.load(Path(folder) / f"{i:04}.pt", weights_only=True))
        modules[f"ens.{i}"] = module
    config = uvicorn.Config(
        DictApp(modules), http="httptools", loop="uvloop", log_config=None, access_log=False, lifespan="off"
    )
    uvicorn.Server(config).run(sockets=[socket.socket(fileno=int(number))])


if __name__ == "__main__":
    main(*sys.argv[1:])
