"""Tests batches: which requests share one, how large it is, and what a bad request in it changes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from asgi import InProcess, Request, Response
from batches import Batches, check, expected, rows, sent, text
from infer import binary_request, infer, read
from loaded import saved
from torch import nn

import widepack
import widepack_serve
from widepack_serve.batching.job import Part

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


@pytest.mark.extended(keep=2)
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
    server = serve(max_delay=0.8, max_batch=4)

    async def spread() -> list[Response | None]:
        tasks = [await sent(server, binary_request(f"plain.{i}", {"x": rows(1, i)})) for i in range(4)]
        return [await t for t in tasks]

    start = time.monotonic()
    server.run(spread())
    assert batches.rows == [4]
    assert time.monotonic() - start < 0.7  # the fourth request fills the batch, which does not wait any more
    infer(server, "plain.0", {"x": rows(1)})
    assert 0.8 <= time.monotonic() - start < 4


class AtLeastFour(nn.Module):
    """A model that takes no fewer than four rows."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.shape[0] >= 4
        y: torch.Tensor = self.head(x).relu()
        return y


def test_rows_of_no_request_are_counted(tmp_path: Path) -> None:
    server = InProcess(widepack_serve.app(saved(AtLeastFour, tmp_path, "x=float32[B,6]", members=3))).start()

    def padding() -> str:
        text = server("GET", "/metrics").body.decode()
        return "".join(r for r in text.splitlines() if r.startswith("widepack_padding_rows_total{"))

    assert infer(server, "ens", {"x": rows(8)}) and infer(server, "ens.m1", {"x": rows(5)})
    assert padding() == ""
    names = [f"m{i}" for i in (0, 0, 0, 1, 0, 2, 2, 1)]  # two members have two rows each, twice
    for total in (4, 8):
        assert infer(server, "ens", {"x": rows(8), "member": names})["output"].shape == (8, 3)
        assert padding() == f'widepack_padding_rows_total{{model="ens"}} {total}.0'
    server.close()
