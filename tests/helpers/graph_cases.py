"""Members whose calls run by graphs, and checks of these calls on any device: the CPU with a stand-in for
graphs (`graph_stand_in.py`), and a GPU.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from split_models import Cell
from torch import Tensor, nn

import widepack
from widepack.inference.model import WideModel

MEMBERS = 3
SIZES = (1, 2, 3, 5, 7, 8, 13, 16, 31, 33, 64, 65, 80)


class TwoAnswers(nn.Module):
    """Answers a dict. Its rows are independent, and one output has them in its second dim."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.norm, self.head = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: Tensor, shift: Tensor) -> dict[str, Tensor]:
        h = self.norm(self.trunk(x)).relu() + shift
        return {"logits": self.head(h), "hidden": h.transpose(0, 1), "same": x * 2}

    def encode(self, x: Tensor) -> Tensor:
        y: Tensor = self.trunk(x)
        return y


class Centered(nn.Module):
    """Mixes the rows of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x)
        return y - y.mean(0)


class Steps(nn.Module):
    """Has another dynamic dim."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.fc = nn.Embedding(20, 6), nn.Linear(6, 3)

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.fc(self.words(ids).tanh())
        return y.mean(1)


class FromOne(nn.Module):
    """Takes numbers from 1 on: a row of zeros is no input."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 3)

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.words(ids - 1)
        return y


class Conv(nn.Module):
    """Has a convolution that runs packed for all members, so that routed rows run padded."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x).relu())
        return y


def one() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


class Bags(nn.Module):
    """Has an op whose operands are checked by their values on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.fc = nn.EmbeddingBag(20, 6), nn.Linear(6, 3)

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.fc(self.bag(ids))
        return y


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))


CASES: dict[str, tuple[Callable[[], nn.Module], list[str], dict[str, Any]]] = {
    "two": (
        TwoAnswers,
        ["x=float32[B,6]", "forward:shift=float32[8]"],
        {"entries": ["forward", "encode"]},
    ),
    "centered": (Centered, ["x=float32[B,4]"], {}),
    "steps": (Steps, ["ids=int64[B,T]:0..19"], {}),
    "carried": (Cell, ["x=float32[B,4]", "h=float32[B,3]"], {"state": ["h=1"]}),
    "bags": (Bags, ["ids=int64[B,5]:0..19"], {}),
    "dropping": (dropping, ["input=float32[B,4]"], {"dropout": "on"}),
    "from_one": (FromOne, ["ids=int64[B,2]:1..20"], {}),
    "conv": (Conv, ["x=float32[B,3,8,8]"], {"strategy": ["wide", "packed"]}),
    "one": (one, ["input=float32[B,4]"], {}),
    "fixed": (Centered, ["x=float32[4,4]"], {}),
}


def artifact(folder: Path, name: str) -> Path:
    """Returns the artifact of a case, with the checkpoints `0.pt` to `2.pt` and `new.pt` beside it."""
    make, inputs, options = CASES[name]
    place = folder / name
    if not (place / "e.wide").is_dir():
        place.mkdir()
        for seed, file in enumerate([*map(str, range(MEMBERS)), "new"]):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                torch.save(make().state_dict(), place / f"{file}.pt")
        files = [place / f"{i}.pt" for i in range(MEMBERS)]
        how = {"pt2": False, "budget": 0, "strategy": "wide", **options}
        widepack.build(files, place / "e.wide", model=make, inputs=inputs, **how)
    return place / "e.wide"


def exact(case: str, ens: WideModel, member: int, *values: Tensor, method: str = "forward") -> Any:
    """Returns the answer of one member alone, in float64."""
    module = CASES[case][0]().eval().double()
    module.load_state_dict({k: v.cpu().double() for k, v in ens.state_dict(member).items()})
    given = [v.cpu().double() if v.is_floating_point() else v.cpu() for v in values]
    with torch.no_grad():
        return getattr(module, method)(*given)


def check_equal(found: Any, truth: Any) -> None:
    """Compares an answer in float32 with one in float64."""
    if isinstance(truth, dict):
        assert set(found) == set(truth)
        for name in truth:
            check_equal(found[name], truth[name])
    elif isinstance(truth, tuple):
        for a, b in zip(found, truth, strict=True):
            check_equal(a, b)
    else:
        torch.testing.assert_close(found.cpu().double(), truth, rtol=1e-5, atol=1e-5)


def of_member(answer: Any, member: int) -> Any:
    """Returns one member's part of an answer."""
    if isinstance(answer, dict):
        return {k: v[member] for k, v in answer.items()}
    return tuple(v[member] for v in answer) if isinstance(answer, tuple) else answer[member]


def drawn(seed: int, *shape: int, device: str = "cpu") -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def drawn_ids(seed: int, *shape: int, device: str = "cpu") -> Tensor:
    return torch.randint(0, 20, shape, generator=torch.Generator().manual_seed(seed)).to(device)


def check_patterns(ens: WideModel, device: str, sizes: Sequence[int] = SIZES) -> None:
    """Checks calls of every pattern at many batches. Answers are compared at the end, so that one which a
    later call overwrote is found.
    """
    calls: list[tuple[Any, int, tuple[Tensor, ...]]] = []
    for seed, rows in enumerate(sizes):
        x, xs = drawn(seed, rows, 6, device=device), drawn(seed + 100, MEMBERS, rows, 6, device=device)
        shift, shifts = drawn(seed + 200, 8, device=device), drawn(seed + 300, MEMBERS, 8, device=device)
        shared, each = ens(x, shift), ens.each(xs, shifts)
        mixed = ens(x, shift=widepack.each(shifts))
        for i in range(MEMBERS):
            calls += [(of_member(shared, i), i, (x, shift)), (of_member(each, i), i, (xs[i], shifts[i]))]
            calls.append((of_member(mixed, i), i, (x, shifts[i])))
    for answer, i, values in calls:
        check_equal(answer, exact("two", ens, i, *values))


def check_entries(ens: WideModel, device: str) -> None:
    """Checks calls of two entries that alternate."""
    kept = []
    for seed, rows in enumerate((4, 3, 8, 4)):
        x, shift = drawn(seed, rows, 6, device=device), drawn(seed, 8, device=device)
        kept.append((x, shift, ens.encode(x), ens(x, shift)))
    for x, shift, encoded, answer in kept:
        for i in range(MEMBERS):
            check_equal(encoded[i], exact("two", ens, i, x, method="encode"))
            check_equal(of_member(answer, i), exact("two", ens, i, x, shift))


def stream(device: str) -> AbstractContextManager[object]:
    return torch.cuda.stream(torch.cuda.Stream()) if device.startswith("cuda") else nullcontext()  # type: ignore[no-untyped-call]


@contextmanager
def frequent_switches() -> Iterator[None]:
    """Lets Python change the running thread often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def in_threads(work: Callable[[int], None], count: int) -> None:
    """Runs a function in threads. Raises: the first error of any."""
    errors: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as e:  # noqa: BLE001  # it is raised below
            errors.append(e)

    threads = [threading.Thread(target=guarded, args=(k,)) for k in range(count)]
    with frequent_switches():
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    if errors:
        raise errors[0]


def check_threads(ens: WideModel, device: str, threads: int = 8, calls: int = 25) -> None:
    """Checks that threads with calls of many sizes get their own answers."""
    found: list[list[tuple[Tensor, Tensor, Any]]] = [[] for _ in range(threads)]

    def work(number: int) -> None:
        with stream(device):
            for k in range(calls):
                rows = SIZES[(number + 3 * k) % 9]
                x = drawn(1000 * number + k, rows, 6, device=device)
                shift = drawn(number, 8, device=device)
                answer = ens(x, shift)["logits"] if number % 2 else ens.encode(x)
                found[number].append((x, shift, answer.cpu()))

    in_threads(work, threads)
    for number, rows_of in enumerate(found):
        assert len(rows_of) == calls
        for x, shift, answer in rows_of:
            for i in range(MEMBERS):
                if number % 2:
                    check_equal(answer[i], exact("two", ens, i, x, shift)["logits"])
                else:
                    check_equal(answer[i], exact("two", ens, i, x, method="encode"))


def check_swaps(ens: WideModel, folder: Path, device: str) -> None:
    """Checks that answers after a swap are those of the new member, for captured batches and a new one."""
    shift = drawn(1, 8, device=device)
    before = {rows: ens(drawn(rows, rows, 6, device=device), shift) for rows in (4, 6)}
    ens.swap(1, folder / "new.pt")
    for rows in (4, 6, 16):
        x = drawn(rows, rows, 6, device=device)
        answer = ens(x, shift)
        for i in range(MEMBERS):
            check_equal(of_member(answer, i), exact("two", ens, i, x, shift))
        if rows in before:
            assert not torch.allclose(answer["logits"][1], before[rows]["logits"][1])
            assert torch.equal(answer["logits"][0], before[rows]["logits"][0])
    ens.swap(1, folder / "1.pt")
    for rows, old in before.items():
        assert torch.equal(ens(drawn(rows, rows, 6, device=device), shift)["logits"], old["logits"])


def check_swaps_during_calls(ens: WideModel, folder: Path, device: str, threads: int = 4) -> None:
    """Checks that every answer of a member is of its old or its new weights."""
    x, shift = drawn(5, 5, 6, device=device), drawn(1, 8, device=device)
    answers: list[list[Tensor]] = [[] for _ in range(threads)]
    stop = threading.Event()

    def work(number: int) -> None:
        if number == threads:
            try:
                while not all(answers):
                    stop.wait(0.005)
                for k in range(12):
                    ens.swap(
                        k % MEMBERS, folder / ("new.pt" if k // MEMBERS % 2 == 0 else f"{k % MEMBERS}.pt")
                    )
            finally:
                stop.set()
            return
        with stream(device):
            while not stop.is_set():
                answers[number].append(ens(x, shift)["logits"].cpu())

    in_threads(work, threads + 1)
    old = ens(x, shift)["logits"].cpu()
    for i in range(MEMBERS):
        ens.swap(i, folder / "new.pt")
    new = ens(x, shift)["logits"].cpu()
    seen = set()
    for y in (y for out in answers for y in out):
        which = tuple(
            "old" if torch.equal(y[i], old[i]) else "new" if torch.equal(y[i], new[i]) else "neither"
            for i in range(MEMBERS)
        )
        assert "neither" not in which
        seen.add(which)
    assert len(seen) > 1, "no call came between the swaps, so the test proves nothing"
