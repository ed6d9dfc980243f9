"""Defines work that is done in steps, so that it can be ended, and lets other threads run in between."""

from __future__ import annotations

import time

from ..errors import RequestError


class Abandoned(RequestError):
    """Raised in work that nobody waits for any more."""


class Work:
    """Work on one request.

    Attributes:
        abandoned: Whether nobody waits for its result any more. Any thread may set it.
    """

    __slots__ = ("abandoned",)

    def __init__(self) -> None:
        self.abandoned = False

    def step(self) -> None:
        """Lets other threads run. It is called about once a millisecond. Raises: Abandoned."""
        if self.abandoned:
            raise Abandoned("nobody waits for the answer")
        time.sleep(0)


class NoSteps(Work):
    """Work on a request that is so small that it has no steps."""

    __slots__ = ()

    def step(self) -> None:
        """Does nothing."""
