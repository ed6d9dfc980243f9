"""Tests requests that arrive at the same time: shared batches, limits, deadlines, turns, clients that go."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import wire_models
from asgi import InProcess, Request, Response, exchange
from infer import binary_request, infer, json_request, read

import widepack
import widepack_serve
from widepack_serve.batching import execution
from widepack_serve.batching.job import Part

PLAIN = wire_models.MODELS["plain"]


class Batches:
    """Records the batches that run, and can hold them back.

    Attributes:
        parts: The parts of each batch.
    """

    def __init__(self) -> None:
        self.parts: list[list[Part]] = []
        self._free = threading.Event()
        self._free.set()

    def run(self, parts: Sequence[Part]) -> None:
        self._free.wait(20)
        self.parts.append(list(parts))
        execution.run_batch(parts)

    @property
    def rows(self) -> list[int]:
        """The rows of each batch."""
        return [sum(p.rows for p in parts) for parts in self.parts]

    @contextmanager
    def held(self) -> Iterator[None]:
        """Batches wait in this block."""
        self._free.clear()
        try:
            yield
        finally:
            self._free.set()


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> Batches:
    found = Batches()
    monkeypatch.setattr("widepack_serve.batching.batcher.run_batch", found.run)
    return found


@pytest.fixture
def serve(wide: dict[str, Path]) -> Iterator[Callable[..., InProcess]]:
    """Returns a function that starts a server of an artifact with settings."""
    started: list[InProcess] = []

    def start(name: str = "plain", **settings: Any) -> InProcess:
        started.append(InProcess(widepack_serve.app({name: wide[name]}, **settings)).start())
        return started[-1]

    yield start
    for one in started:
        one.close()


def rows(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))


def text(count: int, words: int = 5, seed: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        "ids": torch.randint(20, (count, words), generator=g),
        "x": torch.randn(count, 4, generator=g),
        "loud": torch.rand(count, generator=g) > 0.5,
    }


def expected(name: str, member: int, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        found = wire_models.MODELS[name].member(member)(**inputs)
    return dict(found) if isinstance(found, dict) else {"output": found}


def check(response: Response | None, name: str, member: int, inputs: dict[str, torch.Tensor]) -> None:
    for key, value in expected(name, member, inputs).items():
        torch.testing.assert_close(read(response).outputs[key], value, rtol=1e-4, atol=1e-5)


async def sent(server: InProcess, request: Request) -> asyncio.Task[Response | None]:
    """Sends a request, and returns its task when the request waits."""
    task = asyncio.ensure_future(exchange(server.app, request))
    await asyncio.sleep(0.02)
    return task


# ---------------------------------------------------------------- shared batches


@pytest.mark.parametrize("inline", [0.0, 10.0])
def test_one_bad_request_among_32(inline: float, serve: Callable[..., InProcess], batches: Batches) -> None:
    server = serve("text", inline=inline)
    calls = [(i % 3, text(1 + i % 2, seed=i)) for i in range(32)]
    calls[17][1]["ids"][0, 2] = 20
    requests = [binary_request(f"text.{m}", inputs) for m, inputs in calls]
    for _ in range(2):  # the second time, the time of a batch is known
        batches.parts.clear()
        found = server.together(requests)
        assert batches.rows[0] == 48 and len(batches.parts) < 16  # all in one batch, then in halves
        for k, ((member, inputs), response) in enumerate(zip(calls, found)):
            if k == 17:
                assert response is not None and response.status == 400
                assert "cannot run on these rows" in response.error
            else:
                check(response, "text", member, inputs)
    metrics = server("GET", "/metrics").body.decode()
    assert 'widepack_requests_total{code="400",entry="forward",model="text"} 2.0' in metrics


@pytest.mark.parametrize("model", ["plain", "plain.{}", "routed", "plain.each"])
def test_rows_that_are_no_numbers_change_no_bit_of_others(
    model: str, serve: Callable[..., InProcess], batches: Batches
) -> None:
    server = serve()

    def requests(bad: float) -> list[Request]:
        made = []
        for i in range(16):
            x = rows(1 + i % 3, i)
            if i % 5 == 2:
                x[0] = bad
            inputs = {"x": x.repeat(4, 1, 1) if model == "plain.each" else x}
            if model == "routed":
                inputs["member"] = torch.tensor([i % 4, 3, 1][: len(x)])
            made.append(binary_request("plain" if model == "routed" else model.format(i % 4), inputs))
        return made

    fine = [read(r).outputs["output"] for r in server.together(requests(1.0))]
    spoiled = [read(r).outputs["output"] for r in server.together(requests(float("nan")))]
    assert batches.rows == [sum(1 + i % 3 for i in range(16))] * 2
    for i, (a, b) in enumerate(zip(fine, spoiled)):
        if i % 5 == 2:
            assert bool(b[..., 0, :].isnan().all())
            a, b = a[..., 1:, :], b[..., 1:, :]
        assert torch.equal(a, b)


def test_an_error_of_the_model_is_of_one_request(
    serve: Callable[..., InProcess], batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, real = serve(), batches.run

    def run(parts: Sequence[Part]) -> None:
        if any(bool((p.job.call.tensors[0] == 7.0).any()) for p in parts):
            raise RuntimeError("a kernel failed")
        real(parts)

    monkeypatch.setattr("widepack_serve.batching.batcher.run_batch", run)
    inputs = [rows(2, i) for i in range(8)]
    inputs[3][0, 0] = 7.0
    found = server.together([binary_request(f"plain.{i % 4}", {"x": x}) for i, x in enumerate(inputs)])
    for i, (x, response) in enumerate(zip(inputs, found)):
        if i == 3:
            assert response is not None
            assert (response.status, response.error) == (500, "the model failed: RuntimeError")
        else:
            check(response, "plain", i % 4, {"x": x})


def test_other_sizes_do_not_share_a_batch(serve: Callable[..., InProcess], batches: Batches) -> None:
    server = serve("text")
    calls = [(i % 3, text(2, 3 + i % 4, seed=i)) for i in range(24)]
    found = server.together([binary_request(f"text.{m}", inputs) for m, inputs in calls])
    for (member, inputs), response in zip(calls, found):
        check(response, "text", member, inputs)
    assert sorted(batches.rows) == [12] * 4
    for parts in batches.parts:
        assert len({p.job.call.tensors[0].shape[1] for p in parts}) == 1


def test_models_of_one_artifact_share_a_queue_but_not_a_batch_where_the_answers_differ(
    serve: Callable[..., InProcess], batches: Batches
) -> None:
    server, x = serve(), rows(2)
    requests = [
        binary_request("plain.1", {"x": x}),
        binary_request("plain", {"x": x, "member": torch.tensor([0, 3])}),
        binary_request("plain.fold2", {"x": x}),  # these three run as one batch
        binary_request("plain", {"x": x}),
        binary_request("plain", {"x": x}, ["output"]),  # the same as the one before
        binary_request("plain", {"x": x}, ["output.mean"]),
        binary_request("plain.encode.1", {"x": x}),
        binary_request("plain.each", {"x": x.repeat(4, 1, 1)}),
    ]
    answers = [read(r).outputs for r in server.together(requests)]
    assert sorted(batches.rows) == [2, 2, 2, 4, 6]
    torch.testing.assert_close(answers[5]["output.mean"], answers[3]["output"].mean(0))


def test_models_without_independent_rows_run_alone(serve: Callable[..., InProcess], batches: Batches) -> None:
    server, x = serve("mixing"), rows(3)
    server.together([binary_request("mixing", {"x": x})] * 3 + [binary_request("mixing.1", {"x": x})] * 2)
    assert [len(parts) for parts in batches.parts] == [1] * 5


# ---------------------------------------------------------------- sizes of batches


@pytest.mark.parametrize("model", ["plain", "plain.2", "routed", "plain.each", "figures"])
def test_a_request_that_is_larger_than_a_batch(
    model: str, serve: Callable[..., InProcess], batches: Batches
) -> None:
    server, x = serve(max_batch=8), rows(51)
    inputs = {"x": x.repeat(4, 1, 1) if model == "plain.each" else x}
    ids = torch.arange(51) * 3 % 4
    if model == "routed":
        inputs["member"] = ids
    names = ["output.mean", "output.vote", "output"] if model == "figures" else []
    small = [binary_request("plain.1", {"x": rows(1, 60 + i)}) for i in range(3)]
    name = "plain" if model in ("routed", "figures") else model
    big, *others = server.together([binary_request(name, inputs, names), *small])
    assert max(batches.rows) == 8 and len(batches.rows) >= 7
    for i, response in enumerate(others):
        check(response, "plain", 1, {"x": rows(1, 60 + i)})
    got = read(big).outputs
    whole = torch.stack([expected("plain", m, {"x": x})["output"] for m in range(4)])
    if model == "figures":
        torch.testing.assert_close(got["output.mean"], whole.mean(0), rtol=1e-4, atol=1e-5)
        assert got["output.vote"].shape == (51,)
    truth = {
        "routed": whole[ids, torch.arange(51)],
        "plain.2": whole[2],
    }.get(model, whole)
    torch.testing.assert_close(got["output"], truth, rtol=1e-4, atol=1e-5)


def test_a_large_request_with_one_bad_row_fails_once(
    serve: Callable[..., InProcess], batches: Batches
) -> None:
    server, inputs = serve("text", max_batch=4), text(30)
    inputs["ids"][13, 0] = 99
    bad, good = server.together([binary_request("text.1", inputs), binary_request("text.2", text(2, seed=3))])
    assert bad is not None and bad.status == 400
    check(good, "text", 2, text(2, seed=3))
    assert infer(server, "text.1", text(1))["logits"].shape == (1, 5)
    assert "widepack_queue_rows 0.0" in server("GET", "/metrics").body.decode()


def test_max_batch_1_has_the_bits_of_a_call_alone(
    serve: Callable[..., InProcess], batches: Batches, wide: dict[str, Path]
) -> None:
    server, ens = serve(max_batch=1), widepack.load(wide["plain"])
    inputs = [rows(1, i) for i in range(24)]
    found = server.together([binary_request(f"plain.{i % 4}", {"x": x}) for i, x in enumerate(inputs)])
    for i, (x, response) in enumerate(zip(inputs, found)):
        assert torch.equal(read(response).outputs["output"], ens.route(x, member=[i % 4]))
    found = server.together([binary_request("plain", {"x": x}) for x in inputs])
    for x, response in zip(inputs, found):
        assert torch.equal(read(response).outputs["output"], ens(x))
    assert set(batches.rows) == {1}


def test_a_delay_fills_batches(serve: Callable[..., InProcess], batches: Batches) -> None:
    server = serve(max_delay=0.2, max_batch=4)

    async def spread() -> list[Response | None]:
        tasks = [await sent(server, binary_request(f"plain.{i}", {"x": rows(1, i)})) for i in range(4)]
        return [await t for t in tasks]

    start = time.monotonic()
    server.run(spread())
    assert batches.rows == [4]  # the fourth request fills the batch, which does not wait any more
    infer(server, "plain.0", {"x": rows(1)})
    assert 0.2 <= time.monotonic() - start < 2


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
    assert batches.rows[0] == 16


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
