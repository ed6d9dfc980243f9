"""The gRPC server of one service."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
import grpc.aio

from ..errors import AddressInUse
from ..lifecycle.service import Service
from .methods import Methods

_PING_MS = 20_000
_AGE_MS, _LAST_CALLS_MS = 600_000, 300_000
"""After the first, a client is asked to open another connection. The second is for the calls that still run.

A client that answers pings and reads nothing keeps its calls and their answers no longer than both together.
"""
_LOOK_S = 0.02
_QUIET_S = 0.2
_MOST_QUIET_S = 2.0
"""Seconds. Before the port is closed, calls are refused until none arrives any more. Calls that arrive while
it is closed get CANCELLED, which clients do not repeat.
"""


class RpcServer:
    """A gRPC server on the event loop that runs.

    Args:
        service: What answers. It is started and stopped by another one.
        host: The address to listen on.
        port: The port; 0 for a free one.
        max_calls: The most calls at once, which clients share; others get UNAVAILABLE. None for any number.

    Attributes:
        address: `HOST:PORT`; the port is 0 before the start if none was chosen.
    """

    def __init__(self, service: Service, host: str, port: int, max_calls: int | None = None) -> None:
        self._service, self._host = service, host
        self._methods = Methods(service, max_calls)
        self._server: Any = None
        self.address = self._address(port)

    def _address(self, port: int) -> str:
        return f"[{self._host}]:{port}" if ":" in self._host else f"{self._host}:{port}"

    async def start(self) -> None:
        """Accepts calls. Raises: AddressInUse."""
        server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", self._service.settings.max_body),
                ("grpc.per_message_decompression", 0),  # the server unpacks messages itself
                ("grpc.http2.bdp_probe", 0),  # else each call that waits may hold megabytes of its message
                ("grpc.so_reuseport", 0),  # two servers on one port are an error
                ("grpc.keepalive_time_ms", _PING_MS),  # a client that answers no pings loses its connection
                ("grpc.keepalive_timeout_ms", _PING_MS),
                ("grpc.max_connection_age_ms", _AGE_MS),
                ("grpc.max_connection_age_grace_ms", _LAST_CALLS_MS),
            ],
        )
        server.add_generic_rpc_handlers(self._methods.handlers())
        try:
            port = server.add_insecure_port(self.address)
        except RuntimeError:
            raise AddressInUse(
                f"cannot listen on {self.address} for gRPC; choose another --grpc-port or --host"
            ) from None
        await server.start()
        self._server, self.address = server, self._address(port)

    async def stop(self, seconds: float | None) -> None:
        """Refuses new calls, and ends when those that it has are answered.

        seconds: after which it cancels them; None for at once.
        """
        if self._server is None:
            return
        self._methods.refuse()
        if seconds is not None:
            await self._quiet()
        await self._server.stop(seconds)

    async def _quiet(self) -> None:
        """Waits until the clients know that calls are refused."""
        limit = time.monotonic() + _MOST_QUIET_S
        while (now := time.monotonic()) < limit and now - self._methods.last_call < _QUIET_S:
            await asyncio.sleep(_LOOK_S)
