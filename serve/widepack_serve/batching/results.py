"""Gives outputs and errors to those that wait for them."""

from __future__ import annotations

import asyncio
import logging

import torch

from widepack.errors import InputError, UsageError

from ..errors import Failed, RequestError
from .job import Outputs

log = logging.getLogger("widepack.serve")

Result = tuple[asyncio.Future[Outputs], Outputs | None, Exception | None]
"""What waits, and its outputs or its error."""


def set_result(future: asyncio.Future[Outputs], outputs: Outputs | None, error: Exception | None) -> None:
    """Ends a future, on the thread of its event loop. One that has ended stays as it is."""
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    elif outputs is not None:
        future.set_result(outputs)


def translated(error: Exception) -> Exception:
    """Returns an error of a model as one for the client."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, (InputError, UsageError)):
        return RequestError(str(error))
    log.error("a batch failed", exc_info=error)
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return Failed("there is not enough memory for this request")
    return Failed(f"the model failed: {type(error).__name__}")
