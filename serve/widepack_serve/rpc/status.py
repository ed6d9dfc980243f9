"""Translates errors of a request into status codes of gRPC."""

from __future__ import annotations

from grpc import StatusCode

from ..errors import RequestError

CODES = {
    400: StatusCode.INVALID_ARGUMENT,
    401: StatusCode.UNAUTHENTICATED,
    403: StatusCode.PERMISSION_DENIED,
    404: StatusCode.NOT_FOUND,
    408: StatusCode.DEADLINE_EXCEEDED,
    409: StatusCode.FAILED_PRECONDITION,
    413: StatusCode.RESOURCE_EXHAUSTED,
    415: StatusCode.UNIMPLEMENTED,
    500: StatusCode.INTERNAL,
    503: StatusCode.UNAVAILABLE,
    504: StatusCode.DEADLINE_EXCEEDED,
}
"""The status code of each HTTP status that an error of a request has."""
_PUSHBACK = "grpc-retry-pushback-ms"
_MOST = 600
"""The most characters of a message. It is carried among headers, which clients take up to 8 KB."""


def status_of(error: RequestError) -> tuple[StatusCode, str, tuple[tuple[str, str], ...]]:
    """Returns the status code of an error, its message, and the metadata that tells clients when to retry."""
    text = str(error)
    metadata = () if error.retry_after is None else ((_PUSHBACK, str(error.retry_after * 1000)),)
    return CODES[error.status], text if len(text) <= _MOST else f"{text[: _MOST - 3]}...", metadata
