"""Answers requests for inferences: the body becomes a request, its outputs become a body."""

from __future__ import annotations

import asyncio
import time

from starlette.types import Receive, Scope, Send

from ..batching.job import Job, Outputs
from ..catalog.served import ServedModel
from ..errors import RequestError
from ..lifecycle.service import Service
from ..protocol.body import header_length, packed, unpacked
from ..protocol.request import InferRequest, read_request
from ..protocol.response import AnsweredOutput, answer_body
from .receive import header, read_body
from .send import BINARY, JSON, Headers, send_body

_COMPRESSED = 1 << 10
"""The fewest bytes of an answer that are compressed."""


async def answer_inference(
    service: Service, name: str, version: str, scope: Scope, receive: Receive, send: Send
) -> None:
    """Answers a request for an inference.

    Args:
        service: What runs it.
        name: The name of the model, as the client wrote it.
        version: Its version; "" for the current one.
        scope, receive, send: Of the request.

    Raises:
        RequestError: It is refused, and nothing was sent.
        Disconnected: The client closed the connection.
    """
    model = service.catalog.find(name, version)  # an unknown model is refused before its body is read
    start = time.monotonic()
    try:
        request = await _received(service, scope, receive)
    except RequestError as e:
        service.metrics.answered(model, e.status, time.monotonic() - start)
        raise
    model = service.catalog.find(name, version)  # as it is now: another artifact may have come meanwhile
    watch = _Watch(receive)
    try:
        names, outputs = await service.infer(model, request, watch.begin)
    finally:
        if watch.task is not None:
            watch.task.cancel()
    await _send_outputs(model, name, request, names, outputs, scope, send)


async def _received(service: Service, scope: Scope, receive: Receive) -> InferRequest:
    """Reads a request. Raises: RequestError; Disconnected."""
    settings = service.settings
    body = await read_body(scope, receive, settings.max_body, settings.receive_timeout, service.receiving)
    if (encoding := header(scope, b"content-encoding")) is not None:
        body = unpacked(body, encoding, settings.max_body)
    length = header_length(header(scope, b"inference-header-content-length"), len(body))
    return read_request(body, length)


async def _send_outputs(
    model: ServedModel,
    name: str,
    request: InferRequest,
    names: list[str],
    outputs: Outputs,
    scope: Scope,
    send: Send,
) -> None:
    binary = {o.name: o.binary for o in request.outputs}
    answered = [AnsweredOutput(n, value, binary.get(n, request.binary)) for n, value in zip(names, outputs)]
    body, length = answer_body(name, model.artifact.version, request.id, answered)
    headers: Headers = () if length is None else ((b"inference-header-content-length", b"%d" % length),)
    accepted = header(scope, b"accept-encoding")
    if accepted is not None and len(body) >= _COMPRESSED:
        body, encoding = packed(body, accepted)
        if encoding:
            headers = (*headers, (b"content-encoding", encoding.encode()))
    await send_body(send, body, JSON if length is None else BINARY, 200, headers)


class _Watch:
    """Cancels a job if its client closes the connection.

    It begins only when the job has waited for some time, since most requests are answered before.

    Attributes:
        task: Waits for the end of the connection; None before `begin`.
    """

    __slots__ = ("_receive", "task")

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.task: asyncio.Task[None] | None = None

    def begin(self, job: Job) -> None:
        """Begins to wait for the end of the connection."""
        self.task = asyncio.get_running_loop().create_task(self._look(job))

    async def _look(self, job: Job) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        job.cancelled = True
