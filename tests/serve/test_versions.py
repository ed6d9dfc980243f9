"""Tests that an answer is of one version of each member, and that replaced artifacts leave no trace."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from asgi import InProcess, exchange
from infer import binary_request, infer, read
from loaded import saved
from rpc_client import RpcClient, tensors, with_server
from torch import nn

import widepack
import widepack_serve
from widepack.inference.model import WideModel
from widepack_serve.batching import execution
from widepack_serve.batching.job import Job

MEMBERS, ROWS = 3, 200
Model = tuple[WideModel, list[Path]]
Started = Callable[..., InProcess]


class Versioned(nn.Module):
    """A member whose every answer is its version."""

    def __init__(self) -> None:
        super().__init__()
        self.version = nn.Parameter(torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :1] * 0 + self.version


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Model:
    tmp_path = tmp_path_factory.mktemp("versions")
    ens = saved(Versioned, tmp_path, "x=float32[B,6]", members=MEMBERS)
    files = []
    for number in range(10):
        files.append(tmp_path / f"v{number}.pt")
        torch.save({"version": torch.full((3,), float(number))}, files[-1])
    return ens, files


@pytest.fixture
def model(built: Model) -> Model:
    """Returns a model of members of version 0, and checkpoints of the versions 0 to 9."""
    ens, files = built
    for member in range(MEMBERS):
        ens.swap(member, files[0])
    return built


@pytest.fixture
def started() -> Iterator[Started]:
    """Returns a function that serves models or artifacts."""
    found: list[InProcess] = []

    def start(models: Any, **settings: Any) -> InProcess:
        found.append(InProcess(widepack_serve.app(models, **settings)).start())
        return found[-1]

    yield start
    for one in found:
        one.close()


def request(kind: str, x: torch.Tensor) -> Any:
    if kind == "all":
        return binary_request("ens", {"x": x})
    if kind == "reduced":
        return binary_request("ens", {"x": x}, ["output.mean"])
    if kind == "each":
        return binary_request("ens.each", {"x": x.expand(MEMBERS, *x.shape)})
    if kind == "routed":
        return binary_request("ens", {"x": x, "member": torch.ones(len(x), dtype=torch.int64)})
    return binary_request("ens.1", {"x": x})


@pytest.mark.extended(keep=4)
@pytest.mark.parametrize("kind", ["all", "reduced", "each", "routed", "one"])
@pytest.mark.parametrize("swaps", [1, 5])
def test_a_request_in_parts_is_of_one_version(
    kind: str, swaps: int, model: Model, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Member 1 is replaced after the third batch, and then after every second one."""
    ens, files = model
    batches: list[int] = []

    def run(parts: Sequence[Any]) -> None:
        execution.run_batch(parts)
        batches.append(sum(p.rows for p in parts))
        if len(batches) >= 3 and len(batches) % 2 and len(batches) < 3 + 2 * swaps:
            ens.swap(1, files[1 + len(batches) // 2])

    monkeypatch.setattr("widepack_serve.batching.batcher.run_batch", run)
    server = started(ens, max_batch=16)
    found = read(server.maybe(request(kind, torch.rand(ROWS, 6)))).outputs
    assert sum(batches) > ROWS  # it started again
    (y,) = found.values()
    expected = 1.0 + (1 + 2 * swaps) // 2
    if kind in ("all", "each"):
        assert y.shape == (MEMBERS, ROWS, 3) and set(y[1].flatten().tolist()) == {expected}
    elif kind == "reduced":
        assert len(set(y.flatten().tolist())) == 1
        torch.testing.assert_close(y[0, 0], torch.tensor(expected / MEMBERS))
    else:
        assert y.shape == (ROWS, 3) and set(y.flatten().tolist()) == {expected}


def test_a_call_that_starts_again_keeps_no_part() -> None:
    """A batch may have two parts of a call. The second one is dropped as the first one is."""
    found: list[Any] = []
    model = SimpleNamespace(artifact=SimpleNamespace(name="ens"))
    call: Any = SimpleNamespace(numbers=None, model=model, tensors=[], rows=100)
    job = Job(call, None, lambda outputs, error: found.append((outputs, error)))
    for version, start, stop in ((1, 0, 32), (2, 32, 64), (2, 64, 96)):
        job.add_part(start, [torch.arange(start, stop)], [0], version)
    assert job.again and not found
    job.again = False
    for start, stop in ((0, 50), (50, 100)):
        job.add_part(start, [torch.arange(start, stop)], [0], 2)
    ((outputs, error),) = found
    assert error is None and outputs[0].tolist() == list(range(100))


def test_a_request_that_always_starts_again_ends_with_its_deadline(
    model: Model, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    ens, files = model

    def run(parts: Sequence[Any]) -> None:
        execution.run_batch(parts)
        ens.swap(1, files[int(torch.randint(1, 10, ()))])

    monkeypatch.setattr("widepack_serve.batching.batcher.run_batch", run)
    server = started(ens, max_batch=16, timeout=0.5)
    found = server.maybe(request("one", torch.rand(ROWS, 6)))
    assert found is not None and found.status == 504
    assert "times, since members were replaced meanwhile" in found.error
    assert infer(server, "ens.0", {"x": torch.rand(2, 6)})["output"].shape == (2, 3)


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("wire", ["http", "grpc", "python"])
def test_no_answer_mixes_versions_while_members_are_swapped(
    wire: str, model: Model, started: Started
) -> None:
    ens, files = model
    ended = threading.Event()

    def swap() -> None:
        number = 0
        while not ended.is_set():
            number = (number + 1) % 10
            ens.swap(number % MEMBERS, files[number])

    def pure(y: torch.Tensor) -> bool:
        return all(len(set(one.flatten().tolist())) == 1 for one in (y if y.dim() == 3 else [y]))

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        if wire == "python":
            x = torch.rand(64, 6)
            for _ in range(300):
                assert pure(ens(x)) and pure(ens.each(x.expand(MEMBERS, 64, 6)))
                assert pure(ens.route(x, member=[2] * 64))
                assert len(set(ens.reduce(x, "mean")["mean"].flatten().tolist())) == 1
        elif wire == "http":
            server = started(ens, max_batch=16)

            async def scene() -> None:
                for k in range(40):
                    made = [
                        request(kind, torch.rand(1 + 37 * k % 150, 6)) for kind in ("all", "routed", "one")
                    ]
                    for got in await asyncio.gather(*(exchange(server.app, r) for r in made)):
                        (y,) = read(got).outputs.values()
                        assert pure(y), y

            server.run(scene())
        else:

            async def calls(client: RpcClient) -> None:
                for k in range(40):
                    x = torch.rand(1 + 37 * k % 150, 6)
                    for name in ("ens", "ens.2"):
                        assert pure(tensors(await client.infer(name, ("x", x)))["output"])

            with_server({"ens": ens}, calls, max_batch=16)
    finally:
        ended.set()
        thread.join()


def test_predict_refuses_rows_of_two_versions(model: Model, tmp_path: Path) -> None:
    import numpy

    ens, files = model
    numpy.save(tmp_path / "in.npy", numpy.zeros((20_000, 6), dtype=numpy.float32))
    times: list[int] = []

    def progress(stage: str, done: int, total: int) -> None:
        if len(times) == 1:
            ens.swap(1, files[4])
        times.append(done)

    with pytest.raises(widepack.UsageError, match=r"a member was replaced by `swap` while the rows"):
        widepack.predict(ens, tmp_path / "in.npy", tmp_path / "out.npy", progress=progress)
    assert not (tmp_path / "out.npy").exists() and len(times) > 2
    widepack.predict(ens, tmp_path / "in.npy", tmp_path / "out.npy")


# ---------------------------------------------------------------- replaced artifacts


def mapped_and_removed(folder: Path) -> list[str]:
    return [
        line
        for line in Path("/proc/self/maps").read_text().splitlines()
        if str(folder) in line and line.endswith("(deleted)")
    ]


def test_a_replaced_artifact_is_released(tmp_path: Path, started: Started) -> None:
    saved(lambda: nn.Linear(6, 3), tmp_path, "input=float32[B,6]", members=2)
    (path,) = tmp_path.glob("*.wide")
    server = started({"ens": path}, inline=0.0)
    service, models = server.app.state.service, []
    for k in range(3):
        for name, outputs in (("ens", []), ("ens", ["output.mean"]), ("ens.0", []), ("ens.each", [])):
            x = torch.rand(2, 3 + k, 6) if name == "ens.each" else torch.rand(70, 6)
            assert read(server.maybe(binary_request(name, {"input": x}, outputs))).outputs
        assert server.maybe(binary_request("ens", {"input": torch.rand(2, 7)})) is not None
        models.append(weakref.ref(service.catalog.artifacts["ens"].model))
        torch.save(nn.Linear(6, 3).state_dict(), tmp_path / "new.pt")
        widepack.update(path, {0: tmp_path / "new.pt"})
        server.run(service.reload())
        server.run(asyncio.sleep(0.3))
    gc.collect()
    assert [m() is None for m in models] == [True] * 3
    assert mapped_and_removed(tmp_path) == []
