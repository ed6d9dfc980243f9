"""Tests `widepack serve` over sockets: what only a wire has, and the end of the server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import orjson
import pytest
import torch
from command_server import ServeProcess, command_server
from infer import document

from widepack_serve.server.http_protocol import JoinedWrites

BODY = orjson.dumps(document({"x": torch.arange(12.0).reshape(2, 6) / 9}))
PATH = "/v2/models/plain.fold1/infer"
READY = b"GET /v2/health/ready HTTP/1.1\r\nHost: a\r\n\r\n"


@pytest.fixture(scope="module")
def server(wide: dict[str, Path]) -> Iterator[ServeProcess]:
    with command_server(wide["plain"], "--drain", "1s", "--max-connections", "40") as started:
        yield started


def post(body: bytes = BODY, version: str = "1.1", headers: str = "") -> bytes:
    head = f"POST {PATH} HTTP/{version}\r\nHost: a\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
    return head.encode() + body


def connected(server: ServeProcess) -> socket.socket:
    host, port = server.http.split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def answer(connection: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """Returns the next answer on a connection. Raises: ConnectionError if there is none."""
    data = b""
    while b"\r\n\r\n" not in data:
        part = connection.recv(1)
        if not part:
            raise ConnectionResetError
        data += part
    lines = data.decode().split("\r\n")
    rows = [line.partition(":") for line in lines[1:] if line]
    headers = {name.lower(): value.strip() for name, _, value in rows}
    body = b""
    while len(body) < int(headers["content-length"]):
        body += connection.recv(int(headers["content-length"]) - len(body))
    return int(lines[0].split()[1]), headers, body


def asked(server: ServeProcess, *data: bytes) -> tuple[int, dict[str, str], bytes]:
    with connected(server) as connection:
        for part in data:
            connection.sendall(part)
            time.sleep(0.01)
        return answer(connection)


@pytest.mark.extended
def test_many_requests_on_one_connection(server: ServeProcess) -> None:
    with connected(server) as connection:
        first = None
        for _ in range(5):
            connection.sendall(post())
            status, _, body = answer(connection)
            assert status == 200
            assert first in (None, body)
            first = body


def test_requests_in_a_pipeline_are_answered_in_order(server: ServeProcess) -> None:
    with connected(server) as connection:
        connection.sendall(post() + READY + post(b"{}") + post())
        assert [answer(connection)[0] for _ in range(4)] == [200, 200, 400, 200]


def test_chunks(server: ServeProcess) -> None:
    head = f"POST {PATH} HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    chunks = [b"%x\r\n%s\r\n" % (len(p), p) for p in (BODY[:9], BODY[9:10], BODY[10:])]
    status, _, body = asked(server, head, *chunks, b"0\r\n\r\n")
    assert (status, body) == (200, asked(server, post())[2])


class RecordingTransport:
    """Notes what is written, and in how many parts at once."""

    def __init__(self) -> None:
        self.written: list[list[bytes]] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        self.written.append([data])

    def writelines(self, parts: list[bytes]) -> None:
        self.written.append(parts)

    def close(self) -> None:
        self.closed = True


def test_the_head_of_an_answer_is_written_with_its_body() -> None:
    transport = RecordingTransport()
    joined = JoinedWrites(cast(asyncio.Transport, transport))
    joined.write(b"head")
    assert transport.written == []
    for part in (b"", b"body", b"more"):
        joined.write(part)
    joined.close()
    assert transport.written == [[b"head", b""], [b"body"], [b"more"]] and transport.closed


def test_http_1_0_closes_the_connection(server: ServeProcess) -> None:
    with connected(server) as connection:
        connection.sendall(post(version="1.0"))
        assert answer(connection)[0] == 200
        assert connection.recv(1) == b""


def test_a_client_that_waits_for_100_continue(server: ServeProcess) -> None:
    head, body = post(headers="Expect: 100-continue\r\n").split(b"\r\n\r\n")
    with connected(server) as connection:
        connection.sendall(head + b"\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 100")
        connection.sendall(body)
        assert answer(connection)[0] == 200


def test_head_and_other_methods(server: ServeProcess) -> None:
    with connected(server) as connection:
        connection.sendall(b"HEAD /v2/health/ready HTTP/1.1\r\nHost: a\r\n\r\n")
        time.sleep(0.3)
        head = connection.recv(1000)
        assert head.startswith(b"HTTP/1.1 200") and head.endswith(b"\r\n\r\n")
        connection.sendall(b"BREW /v2 HTTP/1.1\r\nHost: a\r\n\r\n")
        assert answer(connection)[0] == 400


def test_what_is_no_http(server: ServeProcess) -> None:
    for data in (
        b"hello\r\n\r\n",
        b"\x16\x03\x01\x02\x00",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /\x00 HTTP/1.1\r\n\r\n",
    ):
        with connected(server) as connection:
            connection.sendall(data + b"\r\n" * 3)
            assert connection.recv(1000).startswith((b"HTTP/1.1 400", b"HTTP/1.1 404", b""))
    upgrade = "GET /v2 HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    status, _, body = asked(server, upgrade.encode())
    assert status == 200 and orjson.loads(body)["name"] == "widepack"  # as HTTP/1.1 without the upgrade
    assert asked(server, post())[0] == 200


def test_clients_that_close_their_side_or_go(server: ServeProcess) -> None:
    for data in (post(), post()[:-9], post()[:20], b""):
        for abrupt in (False, True):
            connection = connected(server)
            connection.sendall(data)
            if abrupt:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
            else:
                connection.shutdown(socket.SHUT_WR)
            connection.close()
    assert asked(server, post())[0] == 200


@pytest.mark.extended
def test_too_many_connections_get_503(server: ServeProcess) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(45):
            stack.enter_context(connected(server))
        time.sleep(0.3)
        assert asked(server, post())[0] == 503
    time.sleep(0.3)
    assert asked(server, post())[0] == 200


@pytest.mark.extended
def test_slow_requests_are_ended(wide: dict[str, Path]) -> None:
    """A head or a body that does not arrive in time: 408. A connection that sends nothing is closed."""
    words = "did not arrive within 0.5 seconds"
    with command_server(wide["plain"], "--receive-timeout", "500ms") as server:
        for first in (b"", post()):
            with connected(server) as connection:
                if first:
                    connection.sendall(first)
                    assert answer(connection)[0] == 200
                for byte in post()[:20]:  # each byte comes in time, the head as a whole does not
                    connection.sendall(bytes([byte]))
                    time.sleep(0.02)
                status, headers, body = answer(connection)
                assert (status, headers["connection"]) == (408, "close")
                assert orjson.loads(body) == {"error": f"the head of the request {words}"}
                assert connection.recv(1) == b""
        with connected(server) as connection:
            connection.sendall(post()[:-1])
            status, headers, body = answer(connection)
            assert (status, headers["connection"]) == (408, "close")
            assert orjson.loads(body) == {"error": f"the body {words}"}
        for first in (b"", post(), post() + b"\r\n"):
            with connected(server) as connection:
                connection.sendall(first)
                if first:
                    assert answer(connection)[0] == 200
                connection.settimeout(8)
                assert connection.recv(1) == b""
        with connected(server) as connection:
            for _ in range(4):  # the time of each request is its own
                connection.sendall(post()[:50])
                time.sleep(0.3)
                connection.sendall(post()[50:])
                assert answer(connection)[0] == 200


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_the_end_under_load_loses_no_request(workers: int, wide: dict[str, Path]) -> None:
    """Every request that is sent on an open connection is answered; then the port is closed."""
    answered: list[int] = []
    lost: list[Exception] = []

    def client(server: ServeProcess) -> None:
        connection: socket.socket | None = None
        while True:
            try:
                connection = connection or connected(server)
            except OSError:
                return  # nobody listens any more
            try:
                connection.sendall(post())
                status, headers, _ = answer(connection)
            except OSError as e:
                lost.append(e)
                return
            answered.append(status)
            if headers.get("connection") == "close":
                connection.close()
                connection = None

    more = ["--workers", str(workers)] if workers > 1 else []
    with command_server(wide["plain"], "--drain", "1s", *more) as server:
        threads = [threading.Thread(target=client, args=(server,)) for _ in range(8)]
        for thread in threads:
            thread.start()
        time.sleep(0.5)
        before = len(answered)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        assert asked(server, READY)[0] == 503
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
        assert server.process.wait(30) == 0
    assert not lost
    assert set(answered) == {200} and len(answered) > before > 10


@pytest.mark.extended
def test_idle_connections_do_not_delay_the_end(wide: dict[str, Path]) -> None:
    with command_server(wide["plain"], "--drain", "0") as server:
        idle = [connected(server) for _ in range(3)]
        idle[0].sendall(post())
        assert answer(idle[0])[0] == 200
        idle[1].sendall(post()[:30])
        start = time.monotonic()
        idle[2].close()
        os.kill(server.process.pid, signal.SIGTERM)
        with contextlib.suppress(ConnectionError):
            assert idle[0].recv(1) == b""
        assert time.monotonic() - start < 5
        for connection in idle:
            connection.close()
        assert server.process.wait(30) == 0


@pytest.mark.parametrize(
    "more", [(), ("--grpc-port", "0"), pytest.param(("--workers", "2"), marks=pytest.mark.slow)]
)
def test_a_second_ctrl_c_ends_the_server_at_once(more: tuple[str, ...], wide: dict[str, Path]) -> None:
    with command_server(wide["plain"], "--drain", "0s", *more) as server, connected(server) as waiting:
        waiting.sendall(post()[:30])
        for _ in range(2):
            server.process.send_signal(signal.SIGINT)
            time.sleep(0.05)
        assert server.process.wait(20) == 0
        assert server.process.stderr is not None
        assert server.process.stderr.read() == ""


@pytest.mark.slow
def test_a_process_that_ends_alone_leaves_the_others_open(wide: dict[str, Path]) -> None:
    with command_server(wide["plain"], "--drain", "0", "--workers", "2") as server:
        children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
        assert len(children) == 2
        os.kill(int(children[0]), signal.SIGTERM)
        limit = time.monotonic() + 20
        while Path(f"/proc/{children[0]}/stat").exists() and time.monotonic() < limit:
            time.sleep(0.05)
        time.sleep(0.3)
        for _ in range(20):
            start = time.monotonic()
            assert asked(server, post())[0] == 200
            assert time.monotonic() - start < 2
