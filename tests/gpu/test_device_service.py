"""Tests a model that serves calls on a device: swaps, threads, streams, subsets of members, and training."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch
from fusing import Cnn, copies, draw, ids, members
from torch import nn

import widepack
from widepack import build, load

N = 4


def net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 36, 16),
        nn.ReLU(),
        nn.Linear(16, 5),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with the artifact `e.wide` of the members `0.pt` to `3.pt`, and with `new.pt`."""
    place = tmp_path_factory.mktemp("service")
    for seed, name in enumerate([*(f"{i}" for i in range(N)), "new"]):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            torch.save(net().state_dict(), place / f"{name}.pt")
    build(
        [place / f"{i}.pt" for i in range(N)],
        place / "e.wide",
        model=lambda: net().eval(),
        inputs=["input=float32[B,3,6,6]"],
        pt2=False,
    )
    return place


def stream(device: str) -> AbstractContextManager[object]:
    return torch.cuda.stream(torch.cuda.Stream()) if device.startswith("cuda") else nullcontext()  # type: ignore[no-untyped-call]


def wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.current_stream().synchronize()


def test_a_swap_changes_only_its_member(folder: Path, device: str) -> None:
    ens = load(folder / "e.wide", device=device)
    x = draw(8, 3, 6, 6).to(device)
    before = ens(x)
    ens.swap(1, folder / "new.pt")
    after = ens(x)
    others = [0, 2, 3]
    assert torch.equal(after[others], before[others])
    alone = net().eval()
    alone.load_state_dict(torch.load(folder / "new.pt"))
    with torch.no_grad():
        torch.testing.assert_close(after[1].cpu(), alone(x.cpu()), rtol=1e-4, atol=1e-5)
    ens.swap(1, folder / "1.pt")
    assert torch.equal(ens(x), before)


def test_answers_of_threads_with_one_stream_each_are_of_one_version(folder: Path, device: str) -> None:
    ens = load(folder / "e.wide", device=device, warmup=False)
    given = draw(16, 3, 6, 6)
    wrong: list[str] = []
    answers: list[list[torch.Tensor]] = []
    stop = threading.Event()

    def call(out: list[torch.Tensor]) -> None:
        with stream(device):  # the first call binds the program while others wait for it
            x = given.to(device)
            while not stop.is_set():
                y = ens(x)
                wait(device)
                out.append(y.cpu())

    def call_and_record_errors(out: list[torch.Tensor]) -> None:
        try:
            call(out)
        except Exception as error:  # noqa: BLE001  # the test fails with the error of a thread
            wrong.append(f"{type(error).__name__}: {error}")

    for _ in range(4):
        answers.append([])
    threads = [threading.Thread(target=call_and_record_errors, args=(out,)) for out in answers]
    for t in threads:
        t.start()
    while not all(answers) and not wrong:
        stop.wait(0.01)
    for k in range(16):
        ens.swap(k % N, folder / ("new.pt" if k // N % 2 == 0 else f"{k % N}.pt"))
    stop.set()
    for t in threads:
        t.join()
    assert not wrong
    x = given.to(device)
    old = ens(x).cpu()
    for i in range(N):
        ens.swap(i, folder / "new.pt")
    new = ens(x).cpu()
    seen = set()
    for y in (y for out in answers for y in out):
        which = tuple(
            0 if torch.equal(y[i], old[i]) else 1 if torch.equal(y[i], new[i]) else -1 for i in range(N)
        )
        assert -1 not in which
        seen.add(which)
    assert len(seen) > 1, "no call came between the swaps, so the test proves nothing"


def test_a_subset_of_the_members(folder: Path, device: str) -> None:
    x = draw(4, 3, 6, 6).to(device)
    torch.testing.assert_close(
        load(folder / "e.wide", device=device, members=[3, 1])(x),
        load(folder / "e.wide", device=device)(x)[[3, 1]],
        rtol=1e-5,
        atol=1e-6,
    )


def test_a_fused_module_trains_as_its_members(device: str) -> None:
    originals = [m.to(device).train() for m in members(Cnn, dtype=torch.float64)]
    data = [
        (draw(6, 3, 8, 8, seed=s, dtype=torch.float64).to(device), (ids(3, 6, seed=s) % 4).to(device))
        for s in range(5)
    ]
    fused = widepack.fuse(originals, data[0][0])
    alone = copies(originals)
    for i, m in enumerate(alone):
        opt = torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9)
        for x, y in data:
            opt.zero_grad()
            torch.autograd.backward(nn.functional.cross_entropy(m(x), y[i]))
            opt.step()
    opt = torch.optim.SGD(fused.train().parameters(), lr=0.05, momentum=0.9)
    for x, y in data:
        opt.zero_grad()
        out = fused(x)
        torch.autograd.backward([nn.functional.cross_entropy(out[i], y[i]) for i in range(3)])
        opt.step()
    for i, m in enumerate(fused.unfuse()):
        for key, value in m.state_dict().items():
            torch.testing.assert_close(value, alone[i].state_dict()[key], rtol=1e-8, atol=1e-8)
