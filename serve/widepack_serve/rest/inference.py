"""Answers requests for inferences: the body becomes a request, its outputs become a body."""

from __future__ import annotations

import asyncio
import time
from functools import partial

from starlette.types import Receive, Scope, Send

from ..batching.job import Job
from ..catalog.served import ServedModel
from ..errors import RequestError
from ..lifecycle.receiving import Sizes
from ..lifecycle.service import Service
from ..protocol.body import header_length, packed, unpacked
from ..protocol.growing import SMALL, Body
from ..protocol.request import InferRequest, read_request
from ..protocol.response import AnsweredOutput, answer_body
from ..protocol.work import Abandoned, NoSteps, Work
from .receive import Disconnected, client_of_scope, header, read_body
from .send import BINARY, JSON, Headers, closer, send_body

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
    client = client_of_scope(scope)
    start = time.monotonic()
    watch = _Watch(receive)
    try:
        try:
            request = await _received(service, model, scope, receive, watch, client)
        except RequestError as e:
            service.metrics.answered(model, e.status, time.monotonic() - start)
            raise
        model = service.catalog.find(name, version)  # as it is now: another artifact may have come meanwhile
        answered = await service.infer(model, request, watch.begin_job, client)
        body, kind, headers = await _written(service, model, name, request, answered, scope, watch)
    except Abandoned:
        raise Disconnected from None
    finally:
        watch.end()
    large = partial(service.sending.answer, client, close=closer(scope))
    await send_body(send, body, kind, 200, headers, large)


async def _received(
    service: Service, model: ServedModel, scope: Scope, receive: Receive, watch: _Watch, client: str
) -> InferRequest:
    """Reads a request: a small one here, a large one on a thread. Raises: RequestError; Disconnected."""
    settings = service.settings
    with service.receiving.body(client) as held:
        body = await read_body(scope, receive, settings.max_body, settings.receive_timeout, held)
        encoding = header(scope, b"content-encoding")
        text = header(scope, b"inference-header-content-length")
        if len(body) <= SMALL and encoding is None:
            return read_request(body, header_length(text, len(body)))
        watch.begin()

        def read() -> InferRequest:
            work = watch.work
            whole = (
                body if encoding is None else unpacked(body, encoding, settings.max_body, work, sizes.append)
            )
            length = header_length(text, len(whole))
            if len(whole) <= SMALL:
                return read_request(whole, length)
            check = partial(service.checker.check_heads, model)
            return read_request(whole, length, check, work, settings.max_rows)

        sizes = Sizes(held)
        return await service.desk.run(watch.work, read)


async def _written(
    service: Service,
    model: ServedModel,
    name: str,
    request: InferRequest,
    answered: list[AnsweredOutput],
    scope: Scope,
    watch: _Watch,
) -> tuple[Body, bytes, Headers]:
    """Writes an answer: a small one here, a large one on a thread. Returns: its body, media type and headers.

    Raises: RequestError; Abandoned.
    """
    accepted = header(scope, b"accept-encoding")

    def write(work: Work) -> tuple[Body, bytes, Headers]:
        most = service.settings.max_answer
        body, length = answer_body(name, model.artifact.version, request.id, answered, most, work)
        headers: Headers = ()
        if length is not None:
            headers = ((b"inference-header-content-length", b"%d" % length),)
        if accepted is not None and len(body) >= _COMPRESSED:
            body, encoding = packed(body, accepted)
            if encoding:
                headers = (*headers, (b"content-encoding", encoding.encode()))
        return body, JSON if length is None else BINARY, headers

    if sum(o.value.nbytes for o in answered) <= SMALL:
        return write(NoSteps())
    watch.begin()
    return await service.desk.run(watch.work, lambda: write(watch.work))


class _Watch:
    """Notes that a client closes the connection, and ends the work on its request then.

    It begins only when a request takes some time, since most are answered before.

    Attributes:
        work: The work on the request beside the event loop.
    """

    __slots__ = ("_job", "_receive", "_task", "work")

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._task: asyncio.Task[None] | None = None
        self._job: Job | None = None
        self.work = Work()

    def begin(self) -> None:
        """Begins to wait for the end of the connection."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._look())

    def begin_job(self, job: Job) -> None:
        """Begins to wait, and cancels a job at the end of the connection."""
        self._job = job
        job.cancelled = job.cancelled or self.work.abandoned
        self.begin()

    def end(self) -> None:
        """Waits no longer."""
        if self._task is not None:
            self._task.cancel()

    async def _look(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.work.abandoned = True
        if self._job is not None:
            self._job.cancelled = True
