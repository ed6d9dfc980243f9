"""Tests which calls share a batch: divided calls, calls that expire, and figures along the rows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from asgi import InProcess, Response
from batches import Batches, rows, sent
from infer import binary_request, read
from loaded import saved
from torch import nn

import widepack_serve
from widepack.inference.model import WideModel

Started = Callable[..., InProcess]


@pytest.fixture
def started() -> Iterator[Started]:
    """Returns a function that serves a loaded model as `ens`."""
    found: list[InProcess] = []

    def start(model: WideModel, **settings: Any) -> InProcess:
        found.append(InProcess(widepack_serve.app(model, **settings)).start())
        return found[-1]

    yield start
    for one in found:
        one.close()


def answers(server: InProcess, batches: Batches, counts: list[int]) -> list[Response | None]:
    """Sends requests of some rows while a batch is held back."""

    async def all_of_them() -> list[Response | None]:
        with batches.held():
            tasks = [
                await sent(server, binary_request(f"ens.{i % 2}", {"input": rows(n, i)}))
                for i, n in enumerate(counts)
            ]
        return [await t for t in tasks]

    return server.run(all_of_them())


def test_calls_are_divided_into_parts_that_the_model_takes(
    tmp_path: Path, started: Started, batches: Batches
) -> None:
    ens = saved(lambda: nn.Linear(6, 3), tmp_path, "input=float32[B,6]", "B=3..512", members=2)
    server = started(ens, max_batch=16)
    counts = [3, 15, 3, 35, 4]
    for i, (count, response) in enumerate(zip(counts, answers(server, batches, counts))):
        y = read(response).outputs["output"]
        torch.testing.assert_close(y, ens[i % 2](rows(count, i)), rtol=1e-5, atol=1e-6)
    pieces = [p.rows for parts in batches.parts for p in parts]
    assert min(pieces) >= 3 and sum(pieces) == sum(counts)
    assert max(batches.rows) <= 16


def test_a_call_with_as_many_rows_as_a_batch_is_not_divided(
    tmp_path: Path, started: Started, batches: Batches
) -> None:
    ens = saved(lambda: nn.Linear(6, 3), tmp_path, "input=float32[B,6]", members=2)
    server = started(ens, max_batch=16)
    for response in answers(server, batches, [5, 16, 9, 16]):
        assert response is not None and response.status == 200
    assert all(p.whole for parts in batches.parts for p in parts)


def test_expired_calls_leave_the_queue(tmp_path: Path, started: Started, batches: Batches) -> None:
    ens = saved(lambda: nn.Linear(6, 3), tmp_path, "input=float32[B,6]", members=2)
    server = started(ens, max_queue=4)

    async def expire_and_send() -> tuple[list[int], int]:
        with batches.held():
            first = await sent(server, binary_request("ens.0", {"input": rows(1)}))
            late = [
                await sent(
                    server, binary_request("ens.0", {"input": rows(1)}, parameters={"timeout": 30_000})
                )
                for _ in range(4)
            ]
            expired = [(await t).status for t in late]  # type: ignore[union-attr]
            after = await sent(server, binary_request("ens.1", {"input": rows(2)}))
            await asyncio.sleep(0.05)
            assert not after.done()
        await first
        last = await after
        return expired, 0 if last is None else last.status

    assert server.run(expire_and_send()) == ([504] * 4, 200)


class Steps(nn.Module):
    """Answers `[T, B, 5]`: the rows are in the second dim."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 5)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(input)
        return y


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize(
    ("name", "options", "status"),
    [
        ("output.mean", {"of": "softmax", "dim": 1}, 400),
        ("output.vote", {"dim": -2}, 400),
        ("output.entropy", {"of": "softmax", "dim": 1}, 400),
        ("output.mean", {"of": "softmax", "dim": 0}, 200),
        ("output.vote", {"dim": 2}, 200),
        ("output.std", {"dim": 1}, 200),
        ("output.entropy", {"of": "sigmoid", "dim": 1}, 200),
    ],
)
def test_figures_do_not_run_over_the_rows(
    tmp_path: Path, started: Started, name: str, options: dict[str, Any], status: int
) -> None:
    ens = saved(Steps, tmp_path, "input=float32[4,B,6]", members=3)
    server = started(ens)
    x = torch.randn(4, 3, 6, generator=torch.Generator().manual_seed(0))
    response = server.maybe(binary_request("ens", {"input": x}, [{"name": name, "parameters": options}]))
    assert response is not None and response.status == status
    if status == 400:
        assert "is the batch" in response.json["error"]
        return
    figure = name.partition(".")[2]
    expected = ens.reduce(x, figure, of=options.get("of"), dim=options["dim"])[figure]
    torch.testing.assert_close(read(response).outputs[name], expected)
