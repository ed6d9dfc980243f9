"""Tests that one client, or one large request, does not keep others waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from asgi import InProcess, Response, exchange
from batches import Batches, check, rows, sent
from infer import binary_request, read

from widepack_serve.batching.shared_limit import SharedLimit, client_of
from widepack_serve.errors import Busy, TooSlow
from widepack_serve.lifecycle.sending import Sending
from widepack_serve.rpc.methods import Methods

# ---------------------------------------------------------------- large requests


def test_parts_of_a_large_request_take_turns_with_others(
    serve: Callable[..., InProcess], batches: Batches
) -> None:
    server = serve(max_batch=8, max_queue=64)

    async def scene() -> list[Response | None]:
        with batches.held():
            tasks = [await sent(server, binary_request("plain.0", {"x": rows(1)}))]
            tasks += [await sent(server, binary_request("plain.1", {"x": rows(800, 1)})) for _ in range(3)]
            tasks += [await sent(server, binary_request("plain.1", {"x": rows(4, i)})) for i in range(8)]
            tasks += [await sent(server, binary_request("plain.2", {"x": rows(4, i)})) for i in range(2)]
        return [await t for t in tasks]

    _, *found = server.run(scene())
    for seed, count, response in [(1, 800, r) for r in found[:3]] + [(i, 4, found[3 + i]) for i in range(8)]:
        check(response, "plain", 1, {"x": rows(count, seed)})
    last = {id(p.job): k for k, parts in enumerate(batches.parts) for p in parts if p.whole}
    assert len(last) == 11 and max(last.values()) < 20  # of over 300 batches


def test_a_large_request_counts_as_one_batch(serve: Callable[..., InProcess], batches: Batches) -> None:
    server = serve(max_batch=8, max_queue=32)

    async def scene() -> list[int]:
        with batches.held():
            tasks = [await sent(server, binary_request("plain.0", {"x": rows(1)}))]
            tasks += [await sent(server, binary_request("plain.1", {"x": rows(500)})) for _ in range(2)]
            tasks += [await sent(server, binary_request("plain.1", {"x": rows(4)})) for _ in range(5)]
        return [r.status for r in [await t for t in tasks] if r is not None]

    assert server.run(scene()) == [200] * 7 + [503]


@pytest.mark.parametrize("why", ["deadline", "disconnect"])
def test_a_large_request_ends_between_its_parts(
    why: str, serve: Callable[..., InProcess], batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(max_batch=8, timeout=0.5 if why == "deadline" else 20.0)
    request = binary_request("plain.1", {"x": rows(8 * 400)})
    if why == "disconnect":
        request.leaves_after = 0.4
    run = batches.run

    def slow(parts: object) -> None:
        import time

        time.sleep(0.01)
        run(parts)  # type: ignore[arg-type]

    monkeypatch.setattr("widepack_serve.batching.batcher.run_batch", slow)
    found = server.maybe(request)
    assert found is not None and found.status == 504
    if why == "deadline":
        assert "the request did not end within its timeout: " in found.error
        assert "of its 3200 rows ran" in found.error
    ran = len(batches.parts)
    assert 2 <= ran < 200
    read(server.maybe(binary_request("plain.1", {"x": rows(1)})))
    assert len(batches.parts) <= ran + 2
    assert (
        f'widepack_rejected_total{{reason="{why if why == "deadline" else "disconnected"}"}} 1.0'
        in server("GET", "/metrics").body.decode()
    )


def test_answers_over_the_limit(serve: Callable[..., InProcess], batches: Batches) -> None:
    server = serve(max_batch=8, max_answer=4_000)
    for request in (
        binary_request("plain", {"x": rows(8 * 100)}),
        binary_request("plain", {"x": rows(100)}),
    ):
        found = server.maybe(request)
        assert found is not None and found.status == 413
        assert "and the limit is 4000 (--max-answer)" in found.error
    assert len(batches.parts) <= 4  # the size is known after the first part
    assert read(server.maybe(binary_request("plain", {"x": rows(80)}))).outputs["output"].shape == (4, 80, 3)
    text = binary_request("plain.1", {"x": rows(300)}, parameters={})
    found = server.maybe(text)
    assert found is not None and found.status in (200, 413)


# ---------------------------------------------------------------- clients


def test_a_client_gets_its_share_of_a_full_queue(serve: Callable[..., InProcess], batches: Batches) -> None:
    server = serve(max_queue=16)

    async def from_client(address: str, count: int) -> asyncio.Task[Response | None]:
        async def app(scope: dict[str, object], receive: object, send: object) -> None:
            await server.app({**scope, "client": (address, 7)}, receive, send)

        task = asyncio.ensure_future(exchange(app, binary_request("plain.1", {"x": rows(count)})))
        await asyncio.sleep(0.02)
        return task

    async def scene() -> list[int]:
        with batches.held():
            tasks = [await from_client("10.0.0.1", 1)]
            tasks += [await from_client("10.0.0.1", 4) for _ in range(5)]
            tasks += [await from_client("10.0.0.2", 4) for _ in range(3)]
            tasks += [await from_client("10.0.0.3", 4) for _ in range(2)]
        return [r.status for r in [await t for t in tasks] if r is not None]

    assert server.run(scene()) == [200, 200, 200, 200, 200, 503, 200, 200, 503, 200, 503]


def test_shares_of_a_limit() -> None:
    limit = SharedLimit(100)
    assert limit.admits("a", 100) and not limit.admits("a", 101)
    limit.add("a", 100)
    assert limit.admits("b", 50) and not limit.admits("b", 51) and not limit.admits("a", 1)
    limit.add("b", 50)
    assert limit.largest() == "a" and limit.total == 150
    limit.remove("a", 100)
    assert limit.admits("b", 50) and limit.largest() == "b"
    limit.remove("b", 50)
    assert limit.largest() is None and limit.total == 0


def test_addresses_of_one_client() -> None:
    assert client_of("10.0.0.1") == "10.0.0.1" and client_of("unix") == "unix"
    assert client_of("2001:db8:1:2:3::4") == client_of("2001:db8:1:2::9%eth0") != client_of("2001:db8:1:3::9")
    assert client_of("::ffff:10.0.0.1") == "10.0.0.1" and client_of("a:b") == "a:b"


def test_answers_that_grpc_keeps_count_until_they_are_gone() -> None:
    """The connection of the client lives, and it reads nothing."""

    async def scene() -> None:
        taken = asyncio.get_running_loop().create_future()
        context = SimpleNamespace(write=lambda data: taken)
        sending = Sending(150_000, lambda: None)
        service: Any = SimpleNamespace(settings=SimpleNamespace(send_timeout=0.01), sending=sending)
        methods = Methods(service)
        for client in ("a", "a", "b"):  # the last one has its share
            with pytest.raises(TooSlow, match="the answer of 70000 bytes was not read in time"):
                await methods.send(bytes(70_000), context, client)
        for client in ("a", "b"):
            with pytest.raises(Busy, match="answers of 210000 bytes were not read in time"):
                await methods.send(bytes(70_000), context, client)
        assert not sending.bytes
        taken.set_result(None)  # its connection ended
        await asyncio.sleep(0)
        for _ in range(3):
            await methods.send(bytes(70_000), context, "a")

    asyncio.run(scene())


def test_the_client_with_most_unread_bytes_loses_its_oldest_answer() -> None:
    closed: list[str] = []
    sending = Sending(100, lambda: closed.append("counted"))
    first, second = (sending.answer("a", 40, lambda k=k: closed.append(k)) for k in ("a1", "a2"))  # type: ignore[misc]
    other = sending.answer("b", 30, lambda: closed.append("b"))
    assert closed == [] and sending.bytes == 110  # within the share of b
    third = sending.answer("a", 40, lambda: closed.append("a3"))
    assert closed == ["counted", "a1", "counted", "a2"]
    assert first.dropped and second.dropped and not third.dropped
    for one in (first, other, third):
        with one:
            pass
    assert sending.bytes == 0


def test_a_model_of_rows_that_depend_on_each_other_is_not_divided(server: InProcess) -> None:
    x = torch.rand(300, 6)
    assert read(server.maybe(binary_request("mixing.1", {"x": x}))).outputs["output"].shape == (300, 3)
