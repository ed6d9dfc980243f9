"""Tests clients that never read their answers: over sockets, with HTTP and gRPC."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
import torch
from command_server import ServeProcess, command_server
from infer import binary_request
from rpc_client import infer_message
from stopped_client import StoppedClient

from widepack_serve.rpc.messages import CLASSES
from widepack_serve.rpc.schema import SERVICE

X = torch.rand(200_000, 6)
ANSWER = 4 * len(X) * 3 * 4
MB = 1_000_000


OPTIONS = (
    *("--send-timeout", "1s", "--max-sending", "24MB", "--max-answer", "12MB", "--grpc-port", "0"),
    *("--max-batch", "20000", "--max-rows", "400000", "--drain", "0s"),
)


@pytest.fixture(scope="module")
def server(wide: dict[str, Path]) -> Iterator[ServeProcess]:
    with command_server(wide["plain"], *OPTIONS) as started:
        yield started


def memory(server: ServeProcess) -> int:
    rows = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
    return next(int(r.split()[1]) for r in rows if r.startswith("RssAnon")) * 1024


def asked(server: ServeProcess, x: torch.Tensor = X, address: str = "127.0.0.1") -> socket.socket:
    """Returns a connection that has sent a request, and reads little."""
    request = binary_request("plain", {"x": x})
    assert isinstance(request.body, bytes)
    headers = "".join(f"{k}: {v}\r\n" for k, v in request.headers.items())
    head = f"POST {request.path} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(request.body)}\r\n{headers}\r\n"
    host, port = server.http.split(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(20)
    connection.bind((address, 0))
    connection.connect((host, int(port)))
    connection.sendall(head.encode() + request.body)
    return connection


def whole(connection: socket.socket) -> int:
    """Returns how many bytes come before the connection ends, or until an answer is complete."""
    size, limit = 0, 1 << 62
    with connection:
        while size < limit:
            try:
                part = connection.recv(1 << 16)
            except ConnectionError:
                break
            if not part:
                break
            if not size:
                head, _, _ = part.partition(b"\r\n\r\n")
                length = next(r for r in head.split(b"\r\n") if r.lower().startswith(b"content-length"))
                limit = len(head) + 4 + int(length.split(b":")[1])
            size += len(part)
    return size


def test_answers_that_nobody_reads_are_dropped(server: ServeProcess) -> None:
    assert whole(asked(server)) > ANSWER  # the server is warm
    before, most = memory(server), 0
    connections: list[socket.socket] = []
    senders = [threading.Thread(target=lambda: connections.append(asked(server))) for _ in range(8)]
    for one in senders:
        one.start()
    start = time.monotonic()
    while time.monotonic() - start < 3:
        most = max(most, memory(server))
        time.sleep(0.02)
    for one in senders:
        one.join()
    assert whole(asked(server, address="127.0.0.2")) > ANSWER  # another client gets its answer
    time.sleep(4)
    assert all(whole(c) < ANSWER for c in connections)
    assert most - before < 200 * MB
    assert memory(server) - before < 8 * ANSWER


def test_a_client_that_reads_slowly_gets_all(server: ServeProcess) -> None:
    connection = asked(server, X[:4000])
    size = 0
    for _ in range(10):
        time.sleep(0.2)  # longer together than the timeout
        size += len(connection.recv(8192))
    assert size + whole_rest(connection, 4 * 4000 * 3 * 4 - size) > 4 * 4000 * 3 * 4 - 1


def whole_rest(connection: socket.socket, least: int) -> int:
    size = 0
    with connection:
        while size < least and (part := connection.recv(1 << 16)):
            size += len(part)
    return size


@pytest.mark.extended
def test_answers_that_a_stopped_client_does_not_take_are_dropped(wide: dict[str, Path]) -> None:
    """Its messages end together: meanwhile each counts as the largest one."""
    with command_server(
        wide["plain"], *OPTIONS, "--max-queue", "80000", "--max-receiving", "600MB"
    ) as server:
        check_stopped_clients(server)


def check_stopped_clients(server: ServeProcess) -> None:
    message = infer_message("plain", ("x", X)).SerializeToString()

    async def call() -> None:
        options = (("grpc.max_receive_message_length", -1),)
        async with grpc.aio.insecure_channel(server.grpc, options=options) as channel:
            answer = await channel.unary_unary(f"/{SERVICE}/ModelInfer")(message, timeout=60)
        assert CLASSES["ModelInferResponse"].FromString(answer).outputs

    def largest_until_refused() -> int:
        """Returns the memory at its largest until a call is refused, because of what is kept."""
        most, start = 0, time.monotonic()
        while time.monotonic() - start < 60:
            most = max(most, memory(server))
            try:
                asyncio.run(call())
            except grpc.aio.AioRpcError as error:
                if "were not read in time and are still kept" in str(error):
                    return most
                assert "rows wait" in str(error)  # the eight calls are not computed yet
                time.sleep(0.1)
        pytest.fail("answers that nobody reads are not counted")

    asyncio.run(call())
    before = memory(server)
    for _ in range(2):
        with StoppedClient(server.grpc) as client:
            client.send("ModelInfer", [message] * 8)
            assert largest_until_refused() - before < 300 * MB
            assert memory(server) - before < 300 * MB
        time.sleep(1)
        asyncio.run(call())  # what was kept for the client is gone with its connection
