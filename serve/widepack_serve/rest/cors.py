"""Lets pages of other origins call the server from a browser (CORS)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.types import Scope, Send

from .receive import header
from .send import Headers

_ALLOWED: Headers = (
    (b"access-control-allow-methods", b"GET, HEAD, POST"),
    (
        b"access-control-allow-headers",
        b"authorization, content-encoding, content-type, inference-header-content-length",
    ),
    (b"access-control-max-age", b"600"),
)
_EXPOSED: Headers = ((b"access-control-expose-headers", b"inference-header-content-length, retry-after"),)


class Cors:
    """Names an allowed origin in answers, and answers the questions of browsers before a request.

    Args:
        origins: The allowed origins, such as `https://app.example.org`; `*` for any. Browsers send no cookies
            and no stored passwords with these requests: a page sends the token itself.
    """

    def __init__(self, origins: Sequence[str]) -> None:
        self._origins = frozenset(origins)

    def headers(self, scope: Scope) -> Headers:
        """Returns the headers of the answer to a request; none without `origins`."""
        if not self._origins:
            return ()
        origin, vary = header(scope, b"origin"), (b"vary", b"origin")
        if "*" in self._origins:
            return (b"access-control-allow-origin", b"*"), *_EXPOSED
        if origin not in self._origins:
            return (vary,)  # a cache must not give this answer to a page that is allowed
        return (b"access-control-allow-origin", origin.encode("latin-1")), vary, *_EXPOSED

    def is_question(self, scope: Scope) -> bool:
        """Returns whether a browser asks if a page may send a request."""
        asked = header(scope, b"access-control-request-method") is not None
        return bool(self._origins) and scope["method"] == "OPTIONS" and asked

    async def answer(self, scope: Scope, send: Send) -> None:
        """Answers such a question. A browser whose page is not allowed finds no origin in the answer."""
        headers = [*self.headers(scope), *_ALLOWED]
        await send({"type": "http.response.start", "status": 204, "headers": headers})
        await send({"type": "http.response.body", "body": b""})


def with_headers(send: Send, headers: Headers) -> Send:
    """Returns a `send` that adds headers to the answer."""

    async def sent(message: Any) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], *headers]}
        await send(message)

    return sent
