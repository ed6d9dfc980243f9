"""A uvicorn server that drains after SIGTERM and reloads after SIGHUP, with a gRPC server beside it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from widepack.errors import WidepackError

from ..lifecycle.service import Service
from ..rest.app import ServeApp
from .http_protocol import protocol_class
from .listener import last_connections

if TYPE_CHECKING:
    from ..rpc.server import RpcServer

_BACKLOG = 2048
_MORE_S = 5.0
_LAST_S = 1.0
"""For how long requests on open connections are still answered after the last connection was accepted."""


class UvicornServer(uvicorn.Server):
    """A uvicorn server for one service.

    The first SIGTERM makes the server not ready, and it answers for `settings.drain` seconds more, so that a
    load balancer sends requests elsewhere. Then it refuses connections, answers the requests on those that
    clients have opened, and ends. SIGINT and a second SIGTERM skip the wait. SIGINT after that ends the
    process at once.

    Args:
        service: What answers.
        started: Is called when connections are accepted.
        max_connections: The most open connections, which clients share; others get 503.
        rpc: A gRPC server of the same service; None for none.
        abandon: Ends the process at once.
    """

    def __init__(
        self,
        service: Service,
        started: Callable[[], None] | None = None,
        max_connections: int | None = None,
        rpc: RpcServer | None = None,
        *,
        abandon: Callable[[], None],
    ) -> None:
        settings = service.settings
        super().__init__(
            uvicorn.Config(
                ServeApp(service),
                http=protocol_class(settings.receive_timeout, settings.send_timeout, max_connections),
                loop="uvloop",
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                date_header=False,
                backlog=_BACKLOG,
                timeout_graceful_shutdown=int(settings.timeout + _MORE_S),
            )
        )
        self._service, self._on_start, self._rpc, self._abandon = service, started, rpc, abandon
        self._end_at: float | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accepts connections, and listens for SIGHUP."""
        await super().startup(sockets)
        if not self.started:
            return
        if self._rpc is not None:
            try:
                await self._rpc.start()
            except WidepackError:
                await self.shutdown(sockets)
                raise
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._service.begin_reload)
        if self._on_start is not None:
            self._on_start()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begins to end. The process ends with exit code 0, not by the signal."""
        drain = self._service.settings.drain
        if sig == signal.SIGTERM and drain and self._end_at is None:
            self._service.drain()
            self._end_at = time.monotonic() + drain
        elif self.should_exit and sig == signal.SIGINT:
            self._abandon()
        else:
            self._service.drain()
            self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuses connections, and ends when all requests are answered. The service stops last.

        Connections that clients have opened already get answers: uvicorn alone resets those that it has not
        accepted, and those whose request it has not read.
        """
        rest = self._service.settings.timeout + _MORE_S
        rpc = None if self._rpc is None else asyncio.ensure_future(self._rpc.stop(rest))
        listeners = [s.dup() for s in sockets or []]
        for server in self.servers:
            server.close()
        for one in sockets or []:
            one.close()
        for listener in listeners:
            for connection in await last_connections(listener):
                with contextlib.suppress(OSError):
                    await asyncio.get_running_loop().connect_accepted_socket(self._protocol, connection)
        limit = time.monotonic() + _LAST_S
        while self.server_state.connections and time.monotonic() < limit:
            await asyncio.sleep(0.02)
        if rpc is not None:
            await rpc
        await super().shutdown()

    def _protocol(self) -> asyncio.Protocol:
        """Returns the protocol of a new connection."""
        config = self.config
        make: Callable[..., asyncio.Protocol] = config.http_protocol_class
        return make(config=config, server_state=self.server_state, app_state=self.lifespan.state)

    async def on_tick(self, counter: int) -> bool:
        """Ends after the time of the drain. uvicorn calls it ten times a second."""
        if self._end_at is not None and time.monotonic() >= self._end_at:
            self.should_exit = True
        return await super().on_tick(counter)
