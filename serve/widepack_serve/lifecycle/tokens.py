"""Checks the token of a request, for REST and gRPC."""

from __future__ import annotations

import hmac

from ..errors import Forbidden, Unauthorized

_SCHEME = "bearer "


def check_bearer(given: str | None, token: str | None, place: str, *, admin: bool = False) -> None:
    """Checks a bearer token, in constant time.

    Args:
        given: What the request has in that place; None for nothing.
        token: The right token; None if no token is needed.
        place: Where a request has its token, in messages.
        admin: Whether the right one is the admin token, in messages.

    Raises:
        Unauthorized: The request has no token.
        Forbidden: It has a wrong one.
    """
    if token is None:
        return
    needs = "this action needs the admin token (--admin-token-file)" if admin else "this server needs a token"
    if given is None or not given.lower().startswith(_SCHEME):
        raise Unauthorized(f"{needs}: send {place}: Bearer TOKEN")
    if not hmac.compare_digest(given[len(_SCHEME) :].strip().encode("utf-8"), token.encode("utf-8")):
        raise Forbidden(f"the token is wrong{f': {needs}' if admin else ''}")
