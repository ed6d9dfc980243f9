"""Answers the methods of the service."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any
from urllib.parse import unquote

import grpc

from ..batching.shared_limit import SharedLimit, client_of
from ..catalog.metadata import model_config, model_metadata, server_metadata
from ..catalog.served import ServedModel
from ..errors import Busy, Failed, NotFound, RequestError, TooLarge, TooSlow
from ..lifecycle.documents import all_statistics, model_statistics, repository_index
from ..lifecycle.receiving import PartialBody, Sizes
from ..lifecycle.service import Service
from ..lifecycle.time_limit import TimeLimit
from ..lifecycle.tokens import check_bearer
from ..protocol.body import unpacked
from ..protocol.growing import SMALL, Body
from ..protocol.request import InferRequest
from ..protocol.work import NoSteps, Work
from .answer import answer_message
from .arrival import Arrival, Turns
from .messages import CLASSES, parsed
from .packed import encoding_of
from .raw_inputs import InferMessage, infer_message
from .receive import all_binary, read_message
from .schema import SERVICE
from .standard import HEALTH, HEALTH_CLASSES, REFLECTION, REFLECTION_CLASSES, reflected
from .status import status_of
from .wire import Broken, FieldCount, of_inference

log = logging.getLogger("widepack.serve")
_OPEN = ("ServerLive", "ServerReady")
"""The methods that need no token."""
_INFER = "ModelInfer"
_AUTHORIZATION = "authorization"
_FEW = 1 << 10
"""The most fields of a message that is read on the event loop, and of one besides the members of its rows."""
_AT_ONCE = 1 << 12
"""The most bytes of an answer that is not counted: as many as there are calls may be unread."""
_SLOWEST = 1e6
"""Bytes in a second. A client that reads its answer more slowly may lose it."""


_MOST_QUESTIONS, _QUESTION_S = 1000, 5.0
"""How many questions a call about the services may have, and seconds between two of them."""
_WATCH_S = 0.5
"""Seconds between two looks at the health that a client watches."""
_UNKNOWN = "SERVICE_UNKNOWN"


class NoMessage(RequestError):
    """Raised for a call that has no further message."""


class Methods:
    """The methods of all services.

    Args:
        service: What answers.
        max_calls: The most calls at once, which clients share; None for any number.

    Attributes:
        last_call: When a call last arrived, by `time.monotonic`.
    """

    def __init__(self, service: Service, max_calls: int | None = None) -> None:
        self._service = service
        self._calls = None if max_calls is None else SharedLimit(max_calls)
        self._turns = Turns(lambda: service.metrics.rejected("receiving_full"))
        self._refusing = False
        self.last_call = 0.0

    def refuse(self) -> None:
        """Refuses calls from now on, except those about health. Calls that run go on."""
        self._refusing = True
        self.last_call = time.monotonic()

    def handlers(self) -> tuple[Any, ...]:
        """Returns what a server of gRPC needs to answer the methods of all services."""
        answers: dict[str, Callable[[Any], dict[str, Any]]] = {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ModelReady": self._model_ready,
            "ServerMetadata": self._server_metadata,
            "ModelMetadata": self._model_metadata,
            "ModelConfig": self._model_config,
            "RepositoryIndex": self._repository_index,
            "ModelStatistics": self._model_statistics,
        }
        methods = {
            name: self._handler(partial(self._one, name, answer), is_open=name in _OPEN)
            for name, answer in answers.items()
        }
        methods[_INFER] = self._handler(self._infer)
        make = grpc.method_handlers_generic_handler
        return (
            make(SERVICE, methods),
            make(
                f"{HEALTH}.Health",
                {
                    "Check": self._handler(self._check_health, is_open=True),
                    "Watch": self._handler(self._watch_health, is_open=True),
                },
            ),
            *(
                make(f"{name}.ServerReflection", {"ServerReflectionInfo": self._handler(self._reflect)})
                for name in REFLECTION
            ),
        )

    def _handler(self, answer: Callable[[Any, str], Awaitable[None]], *, is_open: bool = False) -> Any:
        """Returns the handler of a method.

        It takes and sends streams of bytes, with one message each but for reflection and `Watch`: a call is
        checked before its message is read, a message that does not arrive is an error, so is a broken one,
        and the handler knows when its answer was taken. Clients see no difference.

        answer: reads the message of a call of a client, and sends the answer. is_open: whether it needs no
        token.
        """

        async def handled(_: Any, context: Any) -> None:
            self.last_call = time.monotonic()
            client = _client(context)
            admitted = self._enter(client)
            try:
                await answered(context, client, admitted)
            finally:
                if admitted:
                    self._leave(client)

        async def answered(context: Any, client: str, admitted: bool) -> None:
            try:
                if not admitted:
                    raise Busy("too many calls run at once (--max-connections); try again")
                if not is_open:
                    self._check_call(context)
                await answer(context, client)
                return
            except RequestError as e:
                error = e.with_traceback(None)  # its frames hold the request and the answer
            except Exception:
                log.exception("a request failed")
                error = Failed("the server failed; its log has the reason")
            await context.abort(*status_of(error))

        return grpc.stream_stream_rpc_method_handler(handled)

    def _enter(self, client: str) -> bool:
        """Counts a call of a client. Returns: whether it may run."""
        if self._calls is None:
            return True
        if not self._calls.admits(client, 1):
            self._service.metrics.rejected("calls_full")
            return False
        self._calls.add(client, 1)
        return True

    def _leave(self, client: str) -> None:
        """Counts a call no longer."""
        if self._calls is not None:
            self._calls.remove(client, 1)

    async def _one(
        self, name: str, answer: Callable[[Any], dict[str, Any]], context: Any, client: str
    ) -> None:
        """Answers a method with one small message. Raises: RequestError."""
        # A question about health has no fields. It waits for no other message of its client.
        data = b"" if name in _OPEN else await self._small(context, client)
        found = CLASSES[f"{name}Response"](**answer(parsed(CLASSES[f"{name}Request"], data)))
        await self.send(bytes(found.SerializeToString()), context, client)

    async def send(self, data: bytes, context: Any, client: str) -> None:
        """Sends an answer. A client that does not take it in time, or that holds too many, loses the call.

        Raises: TooSlow; Busy.
        """
        if len(data) <= _AT_ONCE:
            await context.write(data)
            return
        self._service.sending.check_kept(client, len(data))
        seconds = self._service.settings.send_timeout + len(data) / _SLOWEST
        sending = asyncio.ensure_future(context.write(data))
        sending.add_done_callback(_forget)  # it is not cancelled: gRPC would keep its bytes
        dropped = asyncio.get_running_loop().create_future()

        def drop() -> None:
            if not dropped.done():
                dropped.set_result(None)

        with self._service.sending.answer(client, len(data), drop):
            await asyncio.wait([sending, dropped], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if not sending.done():
            self._service.sending.keep(client, len(data), sending)
            raise TooSlow(f"the answer of {len(data)} bytes was not read in time")

    async def _bytes(
        self, context: Any, client: str, held: PartialBody, most_seconds: float = math.inf
    ) -> bytes:
        """Returns the next message of a call as it came. Raises: RequestError; NoMessage if there is none.

        It is read from the context: the iterator over messages would keep it until the collector of garbage
        runs, since gRPC keeps the call in a cycle.
        """
        settings = self._service.settings
        with TimeLimit(min(settings.receive_timeout, most_seconds), "message"):
            async with Arrival(self._turns, client, held, settings.max_body) as arrival:
                data = await context.read()
                arrival.bytes = 0 if data is grpc.aio.EOF else len(data)
        if data is grpc.aio.EOF:
            raise NoMessage("the call has no message")
        return bytes(data)

    async def _small(self, context: Any, client: str, most_seconds: float = math.inf) -> Body:
        """Returns the message of a call that is no inference. Raises: RequestError."""
        with self._service.receiving.body(client) as held:
            data = await self._bytes(context, client, held, most_seconds)
            if len(data) > SMALL:
                raise TooLarge(f"the message has {len(data)} bytes; the limit of this method is {SMALL}")
            return unpacked(data, encoding_of(data), SMALL)

    def _check_call(self, context: Any) -> None:
        """Checks the token of a call. Raises: RequestError."""
        if self._refusing:
            raise Busy("the server is shutting down; send the request to another one")
        check_bearer(_given_token(context), self._service.token, "the metadata authorization")

    # ---------------------------------------------------------------- answers

    def _server_live(self, _: Any) -> dict[str, Any]:
        return {"live": self._service.live}

    def _server_ready(self, _: Any) -> dict[str, Any]:
        return {"ready": self._service.ready}

    def _model_ready(self, message: Any) -> dict[str, Any]:
        self._service.catalog.find(message.name, message.version)
        return {"ready": self._service.ready}

    def _server_metadata(self, _: Any) -> dict[str, Any]:
        return server_metadata()

    def _model_metadata(self, message: Any) -> dict[str, Any]:
        found = model_metadata(self._service.catalog.find(message.name, message.version))
        for row in found["inputs"]:
            row.pop("parameters", None)  # the message has no place for them
        return found

    def _model_config(self, message: Any) -> dict[str, Any]:
        return {"config": model_config(self._service.catalog.find(message.name, message.version))}

    async def _check_health(self, context: Any, client: str) -> None:
        """Answers `Check` of the health service: for the server and for its service of inferences. Names of
        models would tell callers without the token what is served. Raises: RequestError.
        """
        service = await self._asked_health(context, client)
        if (status := self._health_of(service)) == _UNKNOWN:
            raise NotFound(f"there is no service {service[:80]!r}; known: {SERVICE}")
        await self._send_health(status, context, client)

    async def _watch_health(self, context: Any, client: str) -> None:
        """Answers `Watch` of the health service: as `Check`, and again whenever it changes. Raises: Busy at
        the end of the server; RequestError.
        """
        service, sent = await self._asked_health(context, client), ""
        while True:
            if (status := self._health_of(service)) != sent:
                sent = status
                await self._send_health(status, context, client)
            if self._refusing:
                raise Busy("the server is shutting down")
            await asyncio.sleep(_WATCH_S)

    async def _asked_health(self, context: Any, client: str) -> str:
        """Returns the service that a question about health names. Raises: RequestError."""
        return str(parsed(HEALTH_CLASSES["HealthCheckRequest"], await self._small(context, client)).service)

    def _health_of(self, service: str) -> str:
        if service not in ("", SERVICE):
            return _UNKNOWN
        return "SERVING" if self._service.ready else "NOT_SERVING"

    async def _send_health(self, status: str, context: Any, client: str) -> None:
        found = HEALTH_CLASSES["HealthCheckResponse"](status=status)
        await self.send(bytes(found.SerializeToString()), context, client)

    async def _reflect(self, context: Any, client: str) -> None:
        """Answers questions about services and messages, one after another. Raises: RequestError."""
        for _ in range(_MOST_QUESTIONS):
            try:
                data = await self._small(context, client, _QUESTION_S)
            except NoMessage:
                return
            found = reflected(parsed(REFLECTION_CLASSES["ServerReflectionRequest"], data))
            await self.send(bytes(found.SerializeToString()), context, client)

    async def _infer(self, context: Any, client: str) -> None:
        """Answers a request for an inference. Large messages are read and written on a thread.

        Raises: RequestError.
        """
        work = Work()
        try:
            with self._service.receiving.body(client) as held:
                model, name, request = await self._received(context, client, work, held)
            found = await self._answered(model, name, all_binary(request), work, client)
            await self.send(found, context, client)
        finally:
            work.abandoned = True

    async def _received(
        self, context: Any, client: str, work: Work, held: PartialBody
    ) -> tuple[ServedModel, str, InferRequest]:
        """Reads a request. Returns: its model, the name of it, and the request. Raises: RequestError."""
        service = self._service
        try:
            message, large = await self._message(context, client, work, held)
        except RequestError as e:
            service.metrics.unreadable(e.status)
            raise
        name = message.fields.model_name
        model = service.catalog.find(name, message.fields.model_version)
        start, remaining = time.monotonic(), context.time_remaining()
        check = partial(service.checker.check_heads, model) if large else None
        read = partial(read_message, message, remaining, check, work if large else NoSteps())
        try:
            request = await service.desk.run(work, read) if large else read()
        except RequestError as e:
            service.metrics.answered(model, e.status, time.monotonic() - start)
            raise
        return model, name, request

    async def _message(
        self, context: Any, client: str, work: Work, held: PartialBody
    ) -> tuple[InferMessage, bool]:
        """Returns the message of a call, if it has not too many fields, and whether it is large.

        Raises: RequestError."""
        settings, sizes = self._service.settings, Sizes(held)
        data = await self._bytes(context, client, held)
        encoding = encoding_of(data)
        if len(data) > SMALL:
            held.add(len(data))
        elif not encoding:
            try:
                return self._parsed(data, _FEW, NoSteps()), False
            except TooLarge:
                pass

        def read() -> tuple[InferMessage, bool]:
            body = unpacked(data, encoding, settings.max_body, work, sizes.append)
            return self._parsed(body, settings.max_rows + _FEW, work), len(body) > SMALL

        return await self._service.desk.run(work, read)

    def _parsed(self, data: Body, most: int, work: Work) -> InferMessage:
        """Returns the message of an inference. most: of its fields. Raises: RequestError."""
        try:
            (count := FieldCount(most, work)).check(data, of_inference(self._service.settings.max_values))
        except Broken:
            raise RequestError(f"the message is not a {_INFER}Request of the protocol") from None
        return infer_message(data, count)

    async def _answered(
        self, model: ServedModel, name: str, request: InferRequest, work: Work, client: str
    ) -> bytes:
        """Runs a request. Returns: the bytes of its answer. Raises: RequestError."""
        answered = await self._service.infer(model, request, None, client)

        def write(steps: Work) -> bytes:
            found = answer_message(name, model.artifact.version, request.id, answered, steps)
            return bytes(found.SerializeToString())

        if sum(o.value.nbytes for o in answered) <= SMALL:
            return write(NoSteps())
        return await self._service.desk.run(work, lambda: write(work))

    def _repository_index(self, message: Any) -> dict[str, Any]:
        if message.repository_name:
            raise RequestError("repository_name: there is one repository, which has no name")
        return {"models": repository_index(self._service, ready=message.ready)}

    def _model_statistics(self, message: Any) -> dict[str, Any]:
        service = self._service
        if not message.name:
            return {"model_stats": all_statistics(service)}
        return {
            "model_stats": [model_statistics(service, service.catalog.find(message.name, message.version))]
        }


def _forget(sending: asyncio.Future[None]) -> None:
    """Reads the error of a write, if it has one: the client has gone then."""
    if not sending.cancelled():
        sending.exception()


def _client(context: Any) -> str:
    """Returns who called: the address without the port, such as `127.0.0.1` of `ipv4:127.0.0.1:5000`."""
    kind, _, rest = unquote(str(context.peer())).partition(":")
    if kind not in ("ipv4", "ipv6"):
        return kind
    return client_of(rest.rpartition(":")[0].strip("[]"))


def _given_token(context: Any) -> str | None:
    """Returns the metadata `authorization` of a call; None without it."""
    for key, value in context.invocation_metadata() or ():
        if key == _AUTHORIZATION:
            return str(value)
    return None
