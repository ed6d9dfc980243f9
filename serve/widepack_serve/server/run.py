"""Opens the socket, and runs one process or several."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

from widepack.errors import UsageError

from ..lifecycle.service import Service
from ..settings import Settings
from .uvicorn_server import UvicornServer

if TYPE_CHECKING:
    from ..rpc.server import RpcServer

_BACKLOG = 2048
_RESTART_S = 1.0
_MORE_S = 10.0


def listening(host: str, port: int, option: str = "--port") -> socket.socket:
    """Returns a socket that listens. option: that of the port. Raises: UsageError if the address cannot be
    used.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = socket.socket(family, socket.SOCK_STREAM)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen(_BACKLOG)
    except (OSError, OverflowError) as e:
        reason = getattr(e, "strerror", None) or e
        raise UsageError(
            f"cannot listen on {host}:{port}: {reason}; choose another {option} or --host"
        ) from None
    found.set_inheritable(True)
    return found


def address_of(listener: socket.socket) -> str:
    """Returns the URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve_here(
    service: Service,
    listener: socket.socket,
    started: Callable[[], None],
    max_connections: int | None,
    rpc: RpcServer | None = None,
) -> None:
    """Serves in this process until a signal ends it."""
    UvicornServer(service, started, max_connections, rpc).run(sockets=[listener])


class Workers:
    """Several processes that serve on one socket. Each loads the artifacts by itself.

    Args:
        settings: Of each process.
        listener: The socket.
        count: How many processes.
        options: Of each process, as JSON: `max_connections`, `json_log`.
    """

    def __init__(
        self, settings: Settings, listener: socket.socket, count: int, options: dict[str, Any]
    ) -> None:
        self._settings, self._listener, self._count = settings, listener, count
        self._options = options
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ending = False

    def run(self, started: Callable[[], None]) -> int:
        """Runs until a signal ends the processes, and starts one again that died.

        started: is called when the processes were started.

        Returns:
            The exit code: 0 if all ended as they should.
        """
        with tempfile.TemporaryDirectory(prefix="widepack-metrics-") as folder:
            for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(sig, self._forward)
            self._processes = [self._start(folder) for _ in range(self._count)]
            started()
            while not self._ending:
                time.sleep(0.1)
                self._replace_dead(folder)
            return self._wait()

    def _start(self, folder: str) -> subprocess.Popen[bytes]:
        document = {
            "settings": self._settings.to_json(),
            "socket": self._listener.fileno(),
            "options": self._options,
        }
        return subprocess.Popen(
            [sys.executable, "-m", "widepack_serve.server.worker", json.dumps(document)],
            pass_fds=[self._listener.fileno()],
            env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": folder},
        )

    def _replace_dead(self, folder: str) -> None:
        for place, process in enumerate(self._processes):
            if process.poll() is None or self._ending:
                continue
            print(
                f"process {process.pid} ended with {process.returncode}; another is started", file=sys.stderr
            )
            time.sleep(_RESTART_S)
            self._processes[place] = self._start(folder)

    def _forward(self, sig: int, _: FrameType | None) -> None:
        """Sends a signal to all processes."""
        self._ending = self._ending or sig != signal.SIGHUP
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(sig)

    def _wait(self) -> int:
        limit = time.monotonic() + self._settings.drain + self._settings.timeout + _MORE_S
        codes = []
        for process in self._processes:
            try:
                codes.append(process.wait(max(limit - time.monotonic(), 0.1)))
            except subprocess.TimeoutExpired:
                process.kill()
                codes.append(process.wait())
        return 0 if not any(codes) else 1
