"""Tests limits, deadlines, turns, clients that go, and the life of a server in this process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from asgi import InProcess, Request, Response, exchange
from batches import Batches, check, rows, sent, text
from infer import binary_request, infer, json_request, read

import widepack_serve

# ---------------------------------------------------------------- limits and turns


def test_deadlines(serve: Callable[..., InProcess], batches: Batches) -> None:
    server = serve(timeout=0.4)

    async def scene() -> list[tuple[Response | None, float]]:
        found = []
        with batches.held():
            first = await sent(server, binary_request("plain.0", {"x": rows(1)}))
            start = time.monotonic()
            short = await sent(
                server, json_request("plain.1", {"x": rows(1)}, parameters={"timeout": 50_000})
            )
            usual = await sent(server, json_request("plain.1", {"x": rows(1)}))
            long = await sent(server, json_request("plain.1", {"x": rows(1)}, parameters={"timeout": 10**9}))
            for task in (short, usual, long):
                found.append((await task, time.monotonic() - start))
        found.append((await first, 0.0))
        return found

    short, usual, long, first = server.run(scene())
    for (response, seconds), least in ((short, 0.05), (usual, 0.4), (long, 0.4)):
        assert response is not None
        assert response.status == 504
        assert "waited longer than its timeout, and did not run" in response.error
        assert least <= seconds < least + 0.4
    assert read(first[0]).outputs
    assert batches.rows == [1]
    assert 'widepack_rejected_total{reason="deadline"} 3.0' in server("GET", "/metrics").body.decode()
    assert infer(server, "plain.1", {"x": rows(1)})


def test_a_full_queue(serve: Callable[..., InProcess], batches: Batches) -> None:
    server = serve(max_queue=4)

    async def scene() -> tuple[list[Response | None], Response | None]:
        with batches.held():
            tasks = [await sent(server, binary_request("plain.0", {"x": rows(1)}))]
            tasks += [
                await sent(server, binary_request(f"plain.{i % 4}", {"x": rows(2, i)})) for i in range(2)
            ]
            refused = await exchange(server.app, binary_request("plain.3", {"x": rows(1)}))
        return [await t for t in tasks], refused

    found, refused = server.run(scene())
    assert refused is not None
    assert (refused.status, refused.headers["retry-after"]) == (503, "1")
    assert refused.error == "4 rows wait, and the limit of the queue is 4; try again"
    assert all(read(f).outputs for f in found)
    assert infer(server, "plain.3", {"x": rows(30)})["output"].shape == (30, 3)  # nothing waits
    assert 'widepack_rejected_total{reason="queue_full"} 1.0' in server("GET", "/metrics").body.decode()


def test_clients_that_leave(serve: Callable[..., InProcess], batches: Batches) -> None:
    server = serve()

    async def scene() -> list[Response | None]:
        with batches.held():
            gone = json_request("plain.2", {"x": rows(3)}, leaves_after=0.0)
            tasks = [await sent(server, binary_request("plain.0", {"x": rows(1)}))]
            tasks += [await sent(server, gone) for _ in range(5)]
            tasks += [await sent(server, binary_request("plain.2", {"x": rows(2)}))]
            await asyncio.wait_for(asyncio.gather(*tasks[1:6]), 10)  # also while a batch runs
        return [await t for t in tasks]

    first, *_, last = server.run(scene())
    check(first, "plain", 0, {"x": rows(1)})
    check(last, "plain", 2, {"x": rows(2)})
    assert batches.rows == [1, 2]
    metrics = server("GET", "/metrics").body.decode()
    assert 'widepack_rejected_total{reason="disconnected"} 5.0' in metrics
    assert "widepack_queue_rows 0.0" in metrics


def test_a_tenant_that_floods_lets_others_pass(serve: Callable[..., InProcess], batches: Batches) -> None:
    server = serve(max_batch=16, max_queue=10_000)

    async def scene() -> list[Response | None]:
        with batches.held():
            tasks = [await sent(server, binary_request("plain.0", {"x": rows(1)}))]
            flood = [binary_request("plain.0", {"x": rows(8, i)}) for i in range(40)]
            tasks += [asyncio.ensure_future(exchange(server.app, r)) for r in flood]
            await asyncio.sleep(0.1)
            for i in (1, 2, 3):
                tasks.append(await sent(server, binary_request(f"plain.{i}", {"x": rows(2, i)})))
        return [await t for t in tasks]

    found = server.run(scene())
    for i in (1, 2, 3):
        check(found[40 + i], "plain", i, {"x": rows(2, i)})
    others = [
        k for k, parts in enumerate(batches.parts) for p in parts if p.job.call.numbers not in ([0] * 8, [0])
    ]
    assert len(others) == 3 and max(others) <= 2  # batch 0 was running when they came
    share = [sum(p.rows for p in parts if p.job.call.model.member == 0) for parts in batches.parts]
    assert share[1] <= 10 and max(batches.rows) == 16


def test_a_hot_tenant_gets_what_others_leave(serve: Callable[..., InProcess], batches: Batches) -> None:
    server = serve(max_batch=16)
    server.together(
        [binary_request("plain.0", {"x": rows(4, i)}) for i in range(8)]
        + [binary_request("plain.1", {"x": rows(1)})]
    )
    assert batches.rows[0] == 13  # 3 calls and the other one: a call that fits into a batch is not divided


@pytest.mark.extended
def test_many_tenants_take_turns(serve: Callable[..., InProcess], batches: Batches) -> None:
    server = serve(max_batch=4, max_queue=1000)
    requests = [binary_request(f"plain.{i % 4}", {"x": rows(1, i)}) for i in range(80)]
    found = server.together(requests)
    for i, response in enumerate(found):
        check(response, "plain", i % 4, {"x": rows(1, i)})
    for parts in batches.parts:
        assert len({p.job.call.model.member for p in parts}) >= 2


# ---------------------------------------------------------------- life


def test_drain_and_end(serve: Callable[..., InProcess], batches: Batches) -> None:
    server = serve()
    service = server.app.state.service
    assert server("GET", "/v2/health/ready").json == {"ready": True}
    service.drain()
    for path in ("/v2/health/ready", "/v2/models/plain/ready"):
        health = server("GET", path)
        assert (health.status, health.json["ready"], health.headers["connection"]) == (503, False, "close")
    assert server("GET", "/v2/health/live").status == 200
    assert server("POST", "/v2/repository/index").json[0]["state"] == "UNAVAILABLE"
    last = server.maybe(binary_request("plain", {"x": rows(2)}))
    assert last is not None
    assert (last.status, last.headers["connection"]) == (200, "close")
    assert "widepack_ready 0.0" in server("GET", "/metrics").body.decode()


def test_what_waits_at_the_end_is_answered(wide: dict[str, Path], batches: Batches) -> None:
    server = InProcess(widepack_serve.app({"plain": wide["plain"]})).start()

    async def scene() -> list[Response | None]:
        with batches.held():
            tasks = [await sent(server, binary_request(f"plain.{i}", {"x": rows(1, i)})) for i in range(4)]
            stopping = asyncio.ensure_future(server.app.state.service.stop())
            await asyncio.sleep(0.05)
            tasks.append(await sent(server, binary_request("plain", {"x": rows(1)})))
        await stopping
        return [await t for t in tasks]

    *found, late = server.run(scene())
    for i, response in enumerate(found):
        check(response, "plain", i, {"x": rows(1, i)})
    assert late is not None
    assert (late.status, late.headers["retry-after"]) == (503, "1")
    assert "is shutting down" in late.error
    server.close()


def test_a_server_that_hangs_is_not_alive(serve: Callable[..., InProcess], batches: Batches) -> None:
    server = serve(hang=0.2)

    async def scene() -> list[int]:
        found = []
        request = Request("GET", "/v2/health/live")
        with batches.held():
            task = await sent(server, binary_request("plain", {"x": rows(1)}))
            for _ in range(2):
                answer = await exchange(server.app, request)
                assert answer is not None
                found.append(answer.status)
                await asyncio.sleep(0.3)
            more = await sent(server, binary_request("plain", {"x": rows(1)}))
            answer = await exchange(server.app, request)
            assert answer is not None
            found.append(answer.status)
        await task
        await more
        return found

    assert server.run(scene()) == [200, 503, 503]
    assert server("GET", "/v2/health/live").json == {"live": True}


def test_an_observer_that_fails_stops_no_batch(
    serve: Callable[..., InProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(inline=0.0)
    service = server.app.state.service

    def ran(*_: object) -> None:
        raise OSError(28, "no space left on device")

    monkeypatch.setattr(service.metrics, "ran", ran)
    for _ in range(3):
        assert infer(server, "plain", {"x": rows(1)})


def test_groups_of_one_tenant_take_turns(serve: Callable[..., InProcess], batches: Batches) -> None:
    """A tenant with two lengths of texts, and another that floods with the first of them: nobody starves."""
    server = serve("text", max_batch=4, max_queue=1000)
    requests = [(i % 2, text(1, 3, seed=i)) for i in range(40)] + [
        (1, text(1, 4, seed=40 + i)) for i in range(4)
    ]
    found = server.together([binary_request(f"text.{m}", inputs) for m, inputs in requests])
    for (member, inputs), response in zip(requests, found):
        check(response, "text", member, inputs)
    lengths = [parts[0].job.call.tensors[0].shape[1] for parts in batches.parts]
    assert lengths.index(4) <= 3 and lengths.count(4) == 1
