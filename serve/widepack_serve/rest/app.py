"""Makes the ASGI app: its paths, its start and its end."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from ..catalog.metadata import server_metadata
from ..errors import Failed, Forbidden, NotFound, RequestError, TooLarge
from ..lifecycle.documents import all_statistics, repository_index
from ..lifecycle.service import Service
from ..protocol.json_data import BOM
from ..protocol.shown import shown
from .access import check_token
from .models import WrongMethod, answer_of_model, path_parts
from .receive import Disconnected, client_of_scope, header, read_body
from .send import CLOSE, TEXT, send_body, send_document, send_error
from .uploads import received_file

log = logging.getLogger("widepack.serve")
_FILE = "application/octet-stream"
"""The media type of a body that is the checkpoint of a swap."""
_OR_FILE = f"a safetensors file with the header Content-Type: {_FILE}"
_SMALL = 1 << 16
"""The most bytes of a body that is not an inference's."""


class Rest:
    """The interface of one service, as an ASGI app without a life of its own."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._fixed: dict[tuple[str, ...], tuple[str, Callable[[Send], Awaitable[None]]]] = {
            ("v2",): ("GET", self._metadata),
            ("v2", "health", "live"): ("GET", self._live),
            ("v2", "health", "ready"): ("GET", self._ready),
            ("v2", "models", "stats"): ("GET", self._statistics),
            ("metrics",): ("GET", self._metrics),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request. Every error is a JSON object with one sentence."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
            return
        if self._service.draining:
            send = _closing(send)
        try:
            await self._answer(scope, receive, send)
        except Disconnected:
            return

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request. Raises: Disconnected if the client closed the connection."""
        try:
            await self._answer_parts(path_parts(scope), scope, receive, send)
            return
        except Disconnected:
            raise
        except RequestError as e:
            error = e.with_traceback(None)  # its frames hold the body
        except Exception:
            log.exception("a request failed")
            error = Failed("the server failed; its log has the reason")
        await send_error(send, error)

    async def _answer_parts(self, parts: list[str], scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request for a path. Raises: RequestError; Disconnected."""
        if parts[:3] == ["v2", "repository", "models"] and len(parts) == 5:
            await self._change(parts[3], parts[4], scope, receive, send)
            return
        if parts[:2] != ["v2", "health"]:
            check_token(scope, self._service.token)
        if parts == ["v2", "repository", "index"]:
            await self._index(scope, receive, send)
        elif parts[:2] == ["v2", "models"] and len(parts) > 2 and parts[2:] != ["stats"]:
            await answer_of_model(self._service, parts[2:], scope, receive, send)
        else:
            await self._answer_fixed(parts, scope, send)

    async def _answer_fixed(self, parts: list[str], scope: Scope, send: Send) -> None:
        found = self._fixed.get(tuple(parts))
        if found is None:
            raise NotFound(f"there is no path /{'/'.join(parts)[:120]}; GET /v2 describes the server")
        method, answer = found
        if scope["method"] != method and not (method == "GET" and scope["method"] == "HEAD"):
            raise WrongMethod(f"{scope['method']} is not the method of this path; it takes {method}")
        await answer(send)

    # ---------------------------------------------------------------- answers

    async def _metadata(self, send: Send) -> None:
        await send_document(send, server_metadata())

    async def _live(self, send: Send) -> None:
        live = self._service.live
        await send_document(send, {"live": live}, 200 if live else 503)

    async def _ready(self, send: Send) -> None:
        ready = self._service.ready
        await send_document(send, {"ready": ready}, 200 if ready else 503)

    async def _metrics(self, send: Send) -> None:
        await send_body(send, self._service.metrics_text(), TEXT)

    async def _index(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers `POST /v2/repository/index`. `{"ready": true}` leaves out models that are not ready."""
        if scope["method"] != "POST":
            raise WrongMethod(f"{scope['method']} is not the method of this path; it takes POST")
        body = await self._small_body(scope, receive)
        document = _object(body) if body.strip() else {}
        ready = False if document is None else document.get("ready", False)
        if document is None or set(document) - {"ready"} or not isinstance(ready, bool):
            raise RequestError('the body is empty, or the JSON object {"ready": true} or {"ready": false}')
        await send_document(send, repository_index(self._service, ready=ready))

    async def _small_body(self, scope: Scope, receive: Receive) -> bytes:
        """Returns a body that is not an inference's. Raises: RequestError; Disconnected."""
        with self._service.receiving.body(client_of_scope(scope)) as held:
            seconds = self._service.settings.receive_timeout
            return bytes(await read_body(scope, receive, _SMALL, seconds, held))

    async def _statistics(self, send: Send) -> None:
        await send_document(send, {"model_stats": all_statistics(self._service)})

    async def _change(self, name: str, action: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers `POST /v2/repository/models/NAME/load`: a swap of one member. It needs the admin token, not
        the token of other requests.
        """
        admin_token = self._service.admin_token
        admin = admin_token is not None
        check_token(scope, admin_token if admin else self._service.token, admin=admin)
        if scope["method"] != "POST":
            raise WrongMethod(f"{scope['method']} is not the method of this path; it takes POST")
        if action == "unload":
            raise Forbidden("models are not unloaded: end the server instead")
        if action != "load":
            raise NotFound(f"there is no action {action[:40]!r}; known: load")
        if admin_token is None:
            raise Forbidden("swaps are not allowed: start the server with --admin-token-file")
        self._service.catalog.find(name)
        await send_document(send, {"message": await self._swapped(name, scope, receive)})

    async def _swapped(self, name: str, scope: Scope, receive: Receive) -> str:
        """Replaces a member by a file that the body names, or that it is. Returns: a sentence about it.

        Raises: RequestError; Disconnected.
        """
        service = self._service
        if (header(scope, b"content-type") or "").partition(";")[0].strip().lower() != _FILE:
            try:
                body = await self._small_body(scope, receive)
            except TooLarge as e:
                raise TooLarge(f"{e}, but for {_OR_FILE}") from None
            return await service.swap(name, _checkpoint(body))
        with service.uploading(name) as most:
            async with received_file(scope, receive, most, service.settings.receive_timeout) as path:
                return await service.swap_file(name, path, "the checkpoint of the request")


def _object(body: bytes) -> dict[str, Any] | None:
    """Returns a body as a JSON object; None for anything else."""
    try:
        document = orjson.loads(body.removeprefix(BOM))
    except orjson.JSONDecodeError:
        return None
    return document if isinstance(document, dict) else None


def _checkpoint(body: bytes) -> str:
    """Returns the parameter `checkpoint` of the body of a swap. Raises: RequestError."""
    parameters = (_object(body) or {}).get("parameters")
    found = parameters.get("checkpoint") if isinstance(parameters, dict) else None
    if isinstance(parameters, dict) and (more := [k for k in parameters if k != "checkpoint"]):
        raise RequestError(
            f"there is no parameter {shown(more[0], quoted=False)} of a swap; known: checkpoint"
        )
    if not isinstance(found, str):
        raise RequestError(
            f'the body is a JSON object {{"parameters": {{"checkpoint": "FILE"}}}}, or {_OR_FILE}'
        )
    return found


def _closing(send: Send) -> Send:
    """Returns a `send` that asks the client to close the connection, so that it goes to another server."""

    async def sent(message: Any) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], CLOSE]}
        await send(message)

    return sent


class ServeApp(Starlette):
    """The ASGI app. Requests go to `Rest`, which answers every error itself, not through Starlette's layers
    for routes and errors: they take a tenth of the time of a small request. A route of Starlette also cannot
    match every path.

    Args:
        service: What answers requests. It starts and stops with the app.
    """

    def __init__(self, service: Service) -> None:
        super().__init__(lifespan=_lifespan(service))
        self.state.service = service
        self._rest: ASGIApp = Rest(service)
        if origins := service.settings.cors:  # without cookies: a page sends the token itself
            methods, exposed = ("GET", "HEAD", "POST"), ("inference-header-content-length", "retry-after")
            headers = ("authorization", "content-encoding", "content-type", exposed[0])
            self._rest = CORSMiddleware(self._rest, origins, methods, headers, expose_headers=exposed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request, or begins the life of the app."""
        if scope["type"] == "lifespan":
            await super().__call__(scope, receive, send)
        else:
            await self._rest(scope, receive, send)


def _lifespan(service: Service) -> Callable[[Starlette], contextlib.AbstractAsyncContextManager[None]]:
    """Returns what starts the service with the app, and stops it."""

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        service.start()
        try:
            yield
        finally:
            await service.stop()

    return lifespan
