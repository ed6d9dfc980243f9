"""Answers the methods of the service."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from ..catalog.metadata import model_metadata, server_metadata
from ..errors import Busy, Failed, RequestError
from ..lifecycle.documents import all_statistics, model_statistics, repository_index
from ..lifecycle.service import Service
from ..lifecycle.time_limit import TimeLimit
from ..lifecycle.tokens import check_bearer
from ..protocol.response import AnsweredOutput
from .answer import answer_message
from .messages import CLASSES, parsed
from .receive import all_binary, read_message
from .schema import METHODS, SERVICE
from .status import status_of

log = logging.getLogger("widepack.serve")
_OPEN = ("ServerLive", "ServerReady")
"""The methods that need no token."""
_INFER = "ModelInfer"
_AUTHORIZATION = "authorization"


class Methods:
    """The methods of the service. Each takes a message and the context of the call, and returns the fields
    of its answer, or the answer.

    Attributes:
        last_call: When a call last arrived, by `time.monotonic`.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._refusing = False
        self.last_call = 0.0

    def refuse(self) -> None:
        """Refuses calls from now on, except those about health. Calls that run go on."""
        self._refusing = True
        self.last_call = time.monotonic()

    def handlers(self) -> Any:
        """Returns what a server of gRPC needs to answer the methods."""
        answers: dict[str, Callable[[Any, Any], Awaitable[Any]]] = {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ModelReady": self._model_ready,
            "ServerMetadata": self._server_metadata,
            "ModelMetadata": self._model_metadata,
            "ModelInfer": self._model_infer,
            "RepositoryIndex": self._repository_index,
            "ModelStatistics": self._model_statistics,
        }
        return grpc.method_handlers_generic_handler(
            SERVICE, {name: self._handler(name, answers[name]) for name in METHODS}
        )

    def _handler(self, name: str, answer: Callable[[Any, Any], Awaitable[Any]]) -> Any:
        """Returns the handler of a method.

        It takes a stream of bytes with one message: a call is checked before its message is read, a message
        that does not arrive is an error, and so is a broken one. Clients see no difference.
        """

        async def handled(messages: AsyncIterator[bytes], context: Any) -> bytes | None:
            self.last_call = time.monotonic()
            try:
                if name not in _OPEN:
                    self._check_call(context)
                found = await answer(await self._message(name, messages), context)
                if isinstance(found, dict):
                    found = CLASSES[f"{name}Response"](**found)
                return bytes(found.SerializeToString())
            except RequestError as e:
                error = e
            except Exception:
                log.exception("a request failed")
                error = Failed("the server failed; its log has the reason")
            await context.abort(*status_of(error))
            return None

        return grpc.stream_unary_rpc_method_handler(handled)

    async def _message(self, name: str, messages: AsyncIterator[bytes]) -> Any:
        """Returns the message of a call of a method. Raises: RequestError if there is none, or none that can
        be read.
        """
        try:
            with TimeLimit(self._service.settings.receive_timeout, "message"):
                data = await anext(messages, None)
            if data is None:
                raise RequestError("the call has no message")
            return parsed(f"{name}Request", data)
        except RequestError as e:
            if name == _INFER:
                self._service.metrics.unreadable(e.status)
            raise

    def _check_call(self, context: Any) -> None:
        """Checks the token of a call. Raises: RequestError."""
        if self._refusing:
            raise Busy("the server is shutting down; send the request to another one")
        check_bearer(_given_token(context), self._service.token, "the metadata authorization")

    # ---------------------------------------------------------------- answers

    async def _server_live(self, _: Any, __: Any) -> dict[str, Any]:
        return {"live": self._service.live}

    async def _server_ready(self, _: Any, __: Any) -> dict[str, Any]:
        return {"ready": self._service.ready}

    async def _model_ready(self, message: Any, _: Any) -> dict[str, Any]:
        self._service.catalog.find(message.name, message.version)
        return {"ready": self._service.ready}

    async def _server_metadata(self, _: Any, __: Any) -> dict[str, Any]:
        return server_metadata()

    async def _model_metadata(self, message: Any, _: Any) -> dict[str, Any]:
        return model_metadata(self._service.catalog.find(message.name, message.version))

    async def _model_infer(self, message: Any, context: Any) -> Any:
        model = self._service.catalog.find(message.model_name, message.model_version)
        start = time.monotonic()
        try:
            request = all_binary(read_message(message, context.time_remaining()))
        except RequestError as e:
            self._service.metrics.answered(model, e.status, time.monotonic() - start)
            raise
        names, outputs = await self._service.infer(model, request)
        binary = {o.name: o.binary for o in request.outputs}
        return answer_message(
            message.model_name,
            model.artifact.version,
            request.id,
            [AnsweredOutput(n, value, binary.get(n, request.binary)) for n, value in zip(names, outputs)],
        )

    async def _repository_index(self, message: Any, _: Any) -> dict[str, Any]:
        rows = repository_index(self._service)
        return {"models": [] if message.ready and not self._service.ready else rows}

    async def _model_statistics(self, message: Any, _: Any) -> dict[str, Any]:
        service = self._service
        if not message.name:
            return {"model_stats": all_statistics(service)}
        return {
            "model_stats": [model_statistics(service, service.catalog.find(message.name, message.version))]
        }


def _given_token(context: Any) -> str | None:
    """Returns the metadata `authorization` of a call; None without it."""
    for key, value in context.invocation_metadata() or ():
        if key == _AUTHORIZATION:
            return str(value)
    return None
