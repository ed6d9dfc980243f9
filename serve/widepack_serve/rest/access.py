"""Checks the token of each request."""

from __future__ import annotations

from starlette.types import Scope

from ..lifecycle.tokens import check_bearer
from .receive import header


def check_token(scope: Scope, token: str | None, *, admin: bool = False) -> None:
    """Checks the bearer token of a request, in constant time.

    Args:
        scope: Of the request.
        token: The right one; None if no token is needed.
        admin: Whether it is the admin token.

    Raises:
        Unauthorized: The request has no token.
        Forbidden: It has a wrong one.
    """
    check_bearer(header(scope, b"authorization"), token, "the header Authorization", admin=admin)
