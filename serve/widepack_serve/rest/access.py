"""Checks the token of each request."""

from __future__ import annotations

import hmac

from starlette.types import Scope

from ..errors import Forbidden, Unauthorized
from .receive import header

_SCHEME = "bearer "


def check_token(scope: Scope, token: str | None) -> None:
    """Checks the bearer token of a request, in constant time.

    Args:
        scope: Of the request.
        token: The right one; None if no token is needed.

    Raises:
        Unauthorized: The request has no token.
        Forbidden: It has a wrong one.
    """
    if token is None:
        return
    given = header(scope, b"authorization")
    if given is None or not given.lower().startswith(_SCHEME):
        raise Unauthorized("this server needs a token: send the header Authorization: Bearer TOKEN")
    if not hmac.compare_digest(given[len(_SCHEME) :].strip().encode("utf-8"), token.encode("utf-8")):
        raise Forbidden("the token is wrong")
