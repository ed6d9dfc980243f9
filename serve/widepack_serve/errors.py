"""Defines the errors of a request, with the status that the client gets, and that of an address in use.

RequestError                400; the root
|-- Unauthorized            401: no token
|-- Forbidden               403: a wrong token
|-- NotFound                404: an unknown path, model or version
|-- TooSlow                 408: the body did not arrive in time
|-- Conflict                409: a checkpoint that does not fit the member
|-- TooLarge                413: a body over the limit
|-- UnknownEncoding         415
|-- Failed                  500: an error of the server
|-- Busy                    503: the queue is full, or the server drains; with the seconds to wait
`-- DeadlinePassed          504: the request waited longer than its deadline
"""

from __future__ import annotations

from widepack_artifacts.errors import WidepackError


class RequestError(WidepackError):
    """Raised for a request that the server refuses. The message is one sentence for the client.

    Attributes:
        status: The HTTP status.
        retry_after: Seconds after which a client may try again; None if that would not help.
    """

    status = 400
    retry_after: int | None = None


class AddressInUse(WidepackError):
    """Raised if a server cannot listen on an address that exists: another process uses it, or this user may
    not. Exit code 1, since nothing is wrong with the command line.
    """


class Unauthorized(RequestError):
    """Raised for a request without a token."""

    status = 401


class Forbidden(RequestError):
    """Raised for a request with a wrong token, or for an action that the server does not allow."""

    status = 403


class NotFound(RequestError):
    """Raised for a path, a model or a version that does not exist."""

    status = 404


class TooSlow(RequestError):
    """Raised for a body that does not arrive in time."""

    status = 408


class Conflict(RequestError):
    """Raised for a checkpoint that does not fit the member."""

    status = 409


class TooLarge(RequestError):
    """Raised for a body over the limit."""

    status = 413


class UnknownEncoding(RequestError):
    """Raised for a content encoding that the server does not know."""

    status = 415


class Failed(RequestError):
    """Raised for an error of the server. The client did nothing wrong."""

    status = 500


class Busy(RequestError):
    """Raised if the queue is full, or if the server drains."""

    status = 503
    retry_after = 1


class DeadlinePassed(RequestError):
    """Raised for a request that waited longer than its deadline. It did not run."""

    status = 504
