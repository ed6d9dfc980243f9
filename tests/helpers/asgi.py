"""Drives an ASGI app in this process: requests without a socket, one after the other or at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import unquote

import orjson

T = TypeVar("T")
LIMIT_S = 30.0
"""Seconds after which a request counts as hanging."""


@dataclass(frozen=True)
class Response:
    """What an app answered.

    Attributes:
        status: The HTTP status.
        headers: The headers, with names in lower case.
        body: The bytes.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return orjson.loads(self.body)

    @property
    def error(self) -> str:
        """The sentence of a refusal."""
        found: str = self.json["error"]
        return found


@dataclass
class Request:
    """A request of a client.

    Attributes:
        method: The HTTP method.
        path: The path as it is on the wire, percent-encoded.
        body: The bytes; or parts of them, as they arrive.
        headers: The headers.
        gap: Seconds before each part.
        gate: What the last part waits for.
        leaves_after: Seconds after the body at which the client closes the connection; None if it waits.
        cut: Whether the client closes the connection before the last part.
    """

    method: str
    path: str
    body: bytes | Sequence[bytes] = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    gap: float = 0.0
    gate: asyncio.Event | None = None
    leaves_after: float | None = None
    cut: bool = False


class _Exchange:
    """One request and its answer: the two callables that the app is given."""

    def __init__(self, request: Request) -> None:
        body = request.body
        self._parts = [bytes(body)] if isinstance(body, (bytes, bytearray)) else list(body)
        self._request = request
        self._at = 0
        self.done = asyncio.Event()
        self.messages: list[Any] = []

    async def receive(self) -> Any:
        if self._at < len(self._parts):
            if self._request.gap:
                await asyncio.sleep(self._request.gap)
            self._at += 1
            last = self._at == len(self._parts)
            if last and self._request.gate is not None:
                await self._request.gate.wait()
            if last and self._request.cut:
                return {"type": "http.disconnect"}
            return {"type": "http.request", "body": self._parts[self._at - 1], "more_body": not last}
        if self._request.leaves_after is not None:
            await asyncio.sleep(self._request.leaves_after)
        else:
            await self.done.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.messages.append(message)
        if message["type"] == "http.response.body" and not message.get("more_body"):
            self.done.set()


async def exchange(app: Any, request: Request) -> Response | None:
    """Sends a request to an app.

    Returns: its answer; None if it sends none, as for a client that closed the connection.
    """
    raw, _, query = request.path.partition("?")
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": unquote(raw),
        "raw_path": raw.encode("latin-1"),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(k.lower().encode(), v.encode("latin-1")) for k, v in request.headers.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
        "state": {},
    }
    one = _Exchange(request)
    await asyncio.wait_for(app(scope, one.receive, one.send), LIMIT_S)
    if not one.messages:
        return None
    start, *rest = one.messages
    assert start["type"] == "http.response.start"
    assert [m["type"] for m in rest] == ["http.response.body"] * len(rest) and rest
    headers = {k.decode(): v.decode("latin-1") for k, v in start["headers"]}
    return Response(start["status"], headers, b"".join(m.get("body", b"") for m in rest))


class InProcess:
    """A started app on an event loop of its own.

    Args:
        app: The ASGI app. It starts with the first call of `start`, and ends with `close`.
    """

    def __init__(self, app: Any) -> None:
        self.app = app
        self._loop = asyncio.new_event_loop()
        self._messages: asyncio.Queue[Any] = asyncio.Queue()
        self._answers: asyncio.Queue[Any] = asyncio.Queue()
        self._life: asyncio.Task[None] | None = None

    def start(self) -> InProcess:
        """Starts the app."""
        self.run(self._start())
        return self

    async def _start(self) -> None:
        scope = {"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}
        self._life = asyncio.ensure_future(self.app(scope, self._messages.get, self._answers.put))
        await self._messages.put({"type": "lifespan.startup"})
        answer = await self._answers.get()
        assert answer["type"] == "lifespan.startup.complete", answer

    def close(self) -> None:
        """Ends the app and the loop."""
        self.run(self._stop())
        self._loop.close()

    async def _stop(self) -> None:
        assert self._life is not None
        await self._messages.put({"type": "lifespan.shutdown"})
        answer = await self._answers.get()
        assert answer["type"] == "lifespan.shutdown.complete", answer
        await self._life

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on the loop of the app."""
        return self._loop.run_until_complete(work)

    def maybe(self, request: Request) -> Response | None:
        """Sends a request. Returns: the answer; None if there is none."""
        return self.run(exchange(self.app, request))

    def __call__(
        self, method: str, path: str, body: bytes | Sequence[bytes] = b"", **headers: str
    ) -> Response:
        """Sends a request, and returns the answer. headers: their names with `_` for `-`."""
        named = {k.replace("_", "-"): v for k, v in headers.items()}
        found = self.maybe(Request(method, path, body, named))
        assert found is not None
        return found

    def together(self, requests: Sequence[Request]) -> list[Response | None]:
        """Sends requests at the same time. Returns: their answers in order."""
        return self.run(_gathered([exchange(self.app, r) for r in requests]))


async def _gathered(works: Sequence[Awaitable[T]]) -> list[T]:
    return list(await asyncio.gather(*works))
