"""Opens the socket, and runs one process or several."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from prometheus_client import multiprocess

from widepack.errors import UsageError, WidepackError

from ..errors import AddressInUse
from ..lifecycle.collector import settle
from ..settings import Settings
from .swap_coordinator import SwapCoordinator, send

if TYPE_CHECKING:
    from ..lifecycle.service import Service
    from ..rpc.server import RpcServer

_BACKLOG = 2048
_LOOK_S = 0.1
_RESTART_S = 1.0
_RESTART_MOST_S = 10.0
_MORE_S = 10.0


READY = "ready-"
"""What the name of the file begins with that a process makes when it is ready."""


def listening(host: str, port: int, option: str = "--port", *, shared: bool = False) -> socket.socket:
    """Returns a socket that listens.

    Args:
        host, port: The address; port 0 for a free one.
        option: That of the port, for messages.
        shared: Whether other sockets of this user may listen on the same port: the kernel divides connections
            evenly among them.

    Raises:
        UsageError: There is no such address.
        AddressInUse: Another process uses it, or this user may not.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = socket.socket(family, socket.SOCK_STREAM)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        found.bind(address)
        found.listen(_BACKLOG)
    except (OSError, OverflowError) as e:
        reason = getattr(e, "strerror", None) or e
        unknown = isinstance(e, (socket.gaierror, OverflowError)) or e.errno == errno.EADDRNOTAVAIL
        raise (UsageError if unknown else AddressInUse)(
            f"cannot listen on {host}:{port}: {reason}; choose another {option} or --host"
        ) from None
    found.set_inheritable(True)
    return found


def listening_at(path: str) -> socket.socket:
    """Returns a Unix socket that listens at a path. A socket there that nobody listens on is replaced.

    Raises:
        UsageError: No socket can be at this path.
        AddressInUse: Another process listens there.
    """
    try:
        if stat.S_ISSOCK(os.stat(path).st_mode):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
                other.connect(path)
            raise AddressInUse(f"cannot listen on {path}: another process does; choose another --uds")
        raise UsageError(f"--uds {path} is a file or a folder, not a socket; choose another path")
    except FileNotFoundError:
        pass
    except ConnectionRefusedError:
        os.unlink(path)
    except OSError as e:
        raise UsageError(f"cannot listen on {path}: {e.strerror or e}; choose another --uds") from None
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        found.bind(path)
        found.listen(_BACKLOG)
    except OSError as e:
        found.close()
        raise UsageError(f"cannot listen on {path}: {e.strerror or e}; choose another --uds") from None
    found.set_inheritable(True)
    return found


def address_of(listener: socket.socket) -> str:
    """Returns the URL of a listening socket; `unix:PATH` of a Unix socket."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def end_on_signals() -> None:
    """Ends the process with exit code 0 at SIGTERM, and ignores SIGHUP, while the artifacts are loaded.

    As the first process of a container it would ignore SIGTERM, and SIGHUP would end it elsewhere.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def allow_files(count: int) -> None:
    """Lets this process open more files, as far as the system allows: a connection is one."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if now != resource.RLIM_INFINITY and now < count:
        wanted = count if most == resource.RLIM_INFINITY else min(count, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def serve_here(
    service: Service,
    listener: socket.socket,
    started: Callable[[], None],
    max_connections: int | None,
    rpc: RpcServer | None = None,
    at_end: Callable[[], None] = lambda: None,
) -> None:
    """Serves in this process until a signal ends it.

    A reload that is in progress then is abandoned: the process ends at once, with exit code 0. Python would
    end its thread in the middle of torch's code, which may abort the process. Ctrl-C while the server ends
    does the same: requests that are not answered yet are abandoned. at_end: is called before.
    """
    from .uvicorn_server import UvicornServer  # imports torch, which the parent of workers does not need

    settle()
    if max_connections is not None:
        allow_files(2 * max_connections)
    abandon = partial(_end_at_once, at_end)
    signal.signal(signal.SIGINT, lambda *_: abandon())  # uvicorn puts it back when it has ended
    UvicornServer(service, started, max_connections, rpc, abandon=abandon).run(sockets=[listener])
    if service.loading:
        abandon()


def _end_at_once(at_end: Callable[[], None]) -> None:
    at_end()
    with contextlib.suppress(RuntimeError):  # a signal came while this thread wrote
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)


class Workers:
    """Several processes that serve on one port, each with a socket of its own. Each loads the artifacts by
    itself.

    A process that dies is started again, and new connections go to the others meanwhile. If one ends before
    it was ready for the first time, all end. A swap is made in all processes or in none.

    Args:
        settings: Of each process.
        listener: The socket of the first process, which shares its port.
        count: How many processes.
        options: Of each process, as JSON: `max_connections`, `json_log`.
    """

    def __init__(
        self, settings: Settings, listener: socket.socket, count: int, options: dict[str, Any]
    ) -> None:
        self._settings, self._options = settings, options
        self._listener = listener
        self._address = listener.getsockname()[:2]
        first = listener.dup() if listener.family == socket.AF_UNIX else listener
        self._listeners = [first, *(self._another_listener() for _ in range(count - 1))]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: dict[int, Connection] = {}  # of the processes that live, by their place
        self._ending = False
        self._restart_at: dict[int, float] = {}

    def run(self, started: Callable[[], None]) -> int:
        """Runs until a signal ends the processes.

        started: is called when all processes are ready.

        Returns:
            The exit code: 0 if all ended as they should, 2 if the settings are wrong, else 1.
        """
        with tempfile.TemporaryDirectory(prefix="widepack-serve-") as folder:
            for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(sig, self._forward)
            self._swaps = SwapCoordinator(Path(folder), self._is_ending)
            self._processes = [self._start(place, folder) for place in range(len(self._listeners))]
            if self._all_ready(folder):
                started()
                while not self._ending:
                    self._swap(folder)
                    self._replace_dead(folder)
            return self._wait()

    def _swap(self, folder: str) -> None:
        """Waits a moment for swaps that processes ask for, and makes them."""
        arrived = wait(list(self._connections.values()), _LOOK_S)
        for place, connection in list(self._connections.items()):
            if connection in arrived and not self._swaps.take(connection):
                self._connections.pop(place).close()
        complete = len(self._connections) == len(self._processes) and self._are_ready(folder)
        self._swaps.answer_all(list(self._connections.values()), complete=complete)

    def _another_listener(self) -> socket.socket:
        if self._listener.family == socket.AF_UNIX:
            return self._listener.dup()  # all processes take connections from one queue
        return listening(*self._address, shared=True)

    def _start(self, place: int, folder: str) -> subprocess.Popen[bytes]:
        self._connections[place], other = Pipe()
        files = self._listeners[place].fileno(), other.fileno()
        document = {
            "settings": self._settings.to_json(),
            "socket": files[0],
            "coordinator": files[1],
            "options": self._options,
            "ready": folder,
        }
        with other:
            process = subprocess.Popen(
                [sys.executable, "-m", "widepack_serve.server.worker", json.dumps(document)],
                pass_fds=files,
                env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": folder},
                start_new_session=True,  # Ctrl-C reaches this process alone, which sends it on
            )
        send(self._connections[place], made=self._swaps.made)
        return process

    def _all_ready(self, folder: str) -> bool:
        """Waits until all processes are ready. Returns: whether they are; False if one ended before."""
        while not self._ending:
            if any(p.poll() is not None for p in self._processes):
                self._forward(signal.SIGINT, None)
                return False
            if self._are_ready(folder):
                return True
            time.sleep(_LOOK_S)
        return False

    def _are_ready(self, folder: str) -> bool:
        return all((Path(folder) / f"{READY}{p.pid}").exists() for p in self._processes)

    def _replace_dead(self, folder: str) -> None:
        """Starts processes again that died, each after some time, which grows while they die at once."""
        now = time.monotonic()
        for place, process in enumerate(self._processes):
            if process.poll() is None or self._ending:
                continue
            if place not in self._restart_at:
                was_ready = (Path(folder) / f"{READY}{process.pid}").exists()
                wait = _RESTART_S if was_ready else _RESTART_MOST_S
                self._restart_at[place] = now + wait
                self._listeners[place].close()  # the others get new connections
                multiprocess.mark_process_dead(process.pid, folder)  # type: ignore[no-untyped-call]
                print(
                    f"process {process.pid} ended with {process.returncode}; another starts in {wait:g} s",
                    file=sys.stderr,
                )
            elif now >= self._restart_at[place]:
                del self._restart_at[place]
                try:
                    self._listeners[place] = self._another_listener()
                    self._processes[place] = self._start(place, folder)
                except (OSError, WidepackError) as e:
                    print(f"a process cannot be started: {e}; another try is in 10 s", file=sys.stderr)
                    self._restart_at[place] = now + _RESTART_MOST_S
                    continue
                if self._is_ending():  # the signal came before the process was in the list
                    self._processes[place].send_signal(signal.SIGTERM)

    def _is_ending(self) -> bool:
        return self._ending

    def _forward(self, sig: int, _: FrameType | None) -> None:
        """Sends a signal to all processes."""
        self._ending = self._ending or sig != signal.SIGHUP
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(sig)

    def _wait(self) -> int:
        for listener in (self._listener, *self._listeners):
            listener.close()  # else connections wait here that no process accepts
        for connection in self._connections.values():
            send(connection, close=True)
        limit = time.monotonic() + self._settings.drain + self._settings.timeout + _MORE_S
        codes = []
        for process in self._processes:
            try:
                codes.append(process.wait(max(limit - time.monotonic(), _LOOK_S)))
            except subprocess.TimeoutExpired:
                process.kill()
                codes.append(process.wait())
        fine = (0, -signal.SIGTERM, -signal.SIGINT)  # the last two: while it started
        wrong = [code for code in codes if code not in fine]
        return 0 if not wrong else 2 if 2 in wrong else 1  # not the number of the signal that ended one
