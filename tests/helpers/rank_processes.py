"""What the processes of the tests of `widepack.distributed` run. Each function runs on every rank."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import widepack
from widepack import InputError, UsageError, WidepackError
from widepack.distributed.rank_model import RankModel
from widepack.reduction.figures import FIGURES


def start(work: Callable[..., None], count: int, folder: Path, *args: Any) -> None:
    """Runs `work(rank, *args)` in processes over loopback. Raises: what a process raised."""
    store = folder / f"store-{time.time_ns()}"
    mp.spawn(_process, (work, count, store, args), nprocs=count)  # type: ignore[attr-defined, no-untyped-call]


def _process(rank: int, work: Callable[..., None], count: int, store: Path, args: tuple[Any, ...]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
    work(rank, *args)


def close(found: Any, wanted: Any) -> None:
    if isinstance(wanted, Tensor):
        torch.testing.assert_close(found, wanted)
    elif isinstance(wanted, (list, tuple)):
        for a, b in zip(found, wanted, strict=True):
            close(a, b)
    else:
        assert list(found) == list(wanted)
        for name in wanted:
            close(found[name], wanted[name])


def refused(kind: type[Exception], call: Callable[[], Any]) -> str:
    """Returns the message of the error that a call raises."""
    try:
        call()
    except kind as e:
        return str(e)
    raise AssertionError("the call was not refused")


def answers(rank: int, path: Path, figures: bool = False) -> None:
    """Every form of call answers as the whole artifact, on every rank; inputs are those of rank 0."""
    ens, whole = widepack.distributed.load(path, timeout=60), widepack.load(path)
    assert isinstance(ens, RankModel) and ens.rank == rank and ens.members == whole.members
    torch.manual_seed(5)
    x, xs = torch.randn(4, 6), torch.randn(5, 4, 6)
    mine, own = (x, xs) if rank == 0 else (torch.full_like(x, 9), torch.full_like(xs, 9))
    close(ens(mine), whole(x))
    close(ens.each(own), whole.each(xs))
    close(ens.encode(mine), whole.encode(x))
    close(ens.route(mine, member=[4, 0, 4, 2]), whole.route(x, member=[4, 0, 4, 2]))
    close(ens.route(mine, member="m0"), whole.route(x, member=0))  # rank 1 has no row
    names = ["mean", "std", "min", "vote", "entropy", "mutual_information", "disagreement"]
    if figures:
        names = ["quantile(0.3)" if n == "quantile" else n for n in FIGURES]
        for options in ({"members": [0, 1]}, {"members": ["m4"]}):  # one rank has no member that counts
            close(
                ens.reduce(mine, *names[:4], of="softmax", **options),
                whole.reduce(x, *names[:4], of="softmax", **options),
            )
        close(
            ens.reduce(mine, "mean", "std", "votes", weights=[1, 0, 2, 3, 1]),
            whole.reduce(x, "mean", "std", "votes", weights=[1, 0, 2, 3, 1]),
        )
    close(ens.reduce(mine, *names, of="softmax"), whole.reduce(x, *names, of="softmax"))
    close(ens.encode.std(mine), whole.encode.std(x))
    place = ens.parts[rank].start
    assert torch.equal(ens.member(place)(x)["logits"], whole.member(place)(x)["logits"])
    assert list(ens.state_dict(place)) == list(whole.state_dict(place))
    other = ens.parts[1 - rank].start
    for far in (lambda: ens.member(other), lambda: ens.state_dict(other)):
        assert f"member m{other} is on rank {1 - rank}, this is rank {rank}" in refused(UsageError, far)
    ens.close()
    assert "was closed" in refused(WidepackError, lambda: ens(x))


def refusals(rank: int, path: Path) -> None:
    """A call that one rank refuses runs on no rank, and the next call is right."""
    ens, whole = widepack.distributed.load(path, timeout=60), widepack.load(path)
    x = torch.ones(4, 6)
    text = refused(InputError, lambda: ens(x if rank == 0 else x[:, :3]))
    assert ("rank 1 refused call" in text) if rank == 0 else ("x has 3 at axis 1" in text), text
    text = refused(InputError, lambda: ens(x if rank == 0 else x[:2]))
    assert ("rank 1 made another call than rank 0" in text and "float32[4, 6]" in text) or rank == 1
    refused(InputError, lambda: ens(x) if rank == 0 else ens.mean(x))
    refused(InputError, lambda: ens.route(x, member=[0, 1, 2, rank]))
    close(ens(x), whole(x))


def swaps(rank: int, path: Path, new: Path, bad: Path) -> None:
    ens, whole = widepack.distributed.load(path, timeout=60), widepack.load(path)
    x = torch.ones(4, 6)
    report, other = ens.swap("m4", new), whole.swap("m4", new)
    assert (report.member, report.weights, report.bytes) == (other.member, other.weights, other.bytes)
    assert ens.checkpoints == whole.checkpoints
    close(ens(x), whole(x))
    text = refused(widepack.MemberMismatch, lambda: ens.swap("m4", bad))
    assert text.startswith("rank 1: ") == (rank == 0)
    close(ens(x), whole(x))


def states(rank: int, path: Path) -> None:
    ens, whole = widepack.distributed.load(path, timeout=60), widepack.load(path)
    x = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(1))
    mine, theirs = ens.state(B=5), whole.state(B=5)
    for step in x:
        y, mine = ens(step, state=mine)
        z, theirs = whole(step, state=theirs)
        close([y, mine], [z, theirs])


def lists(rank: int, path: Path) -> None:
    ens, whole = widepack.distributed.load(path, timeout=60), widepack.load(path)
    x = torch.randn(4, 1, 16, 16, generator=torch.Generator().manual_seed(1))
    close(ens(x), whole(x))
    close(ens.route(x, member=[2, 0, 1, 0]), whole.route(x, member=[2, 0, 1, 0]))


def traffic(rank: int, path: Path) -> None:
    """`reduce(x, "mean")` moves the inputs and one leaf of one member's form, not the members' answers."""
    ens = widepack.distributed.load(path, timeout=60)
    x = torch.randn(64, 6)
    ens.encode(x)
    moved: dict[str, int] = {}

    def counted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def collective(*args: Any) -> Any:
            tensor = args[1] if name == "all_gather" else args[0]
            moved[name] = moved.get(name, 0) + tensor.nbytes
            return real(*args)

        return collective

    for name in ("broadcast", "all_reduce", "all_gather"):
        setattr(dist, name, counted(name, getattr(dist, name)))
    leaf = 64 * 8 * 4  # [B, 8] float32
    agreements = 2 * 3 * 8
    ens.encode.reduce(x, "mean")
    assert moved == {"broadcast": x.nbytes, "all_reduce": leaf, "all_gather": agreements}, moved
    moved.clear()
    ens.encode.reduce(x, "std")  # first answer, distance from it, squared distances
    assert moved == {"broadcast": x.nbytes, "all_gather": 3 * leaf + agreements}, moved
    moved.clear()
    ens.encode(x)
    most = max(len(p) for p in ens.parts)
    assert moved == {"broadcast": x.nbytes, "all_gather": most * leaf + agreements}, moved


def death(rank: int, path: Path, timeout: float, stopped: bool) -> None:
    """Rank 1 ends, or does not answer: the call of rank 0 raises within the timeout."""
    ens = widepack.distributed.load(path, timeout=timeout)
    x = torch.ones(4, 6)
    ens(x)
    if rank == 1:
        if stopped:
            time.sleep(4 * timeout)
        os._exit(0)
    began = time.monotonic()
    text = refused(WidepackError, lambda: ens.mean(x, of="softmax"))
    seconds = time.monotonic() - began
    assert seconds < timeout + 5, seconds
    assert "one has ended, or did not answer within" in text
    began = time.monotonic()
    assert refused(WidepackError, lambda: ens(x)) == text  # at once
    assert time.monotonic() - began < 1
    os._exit(0)  # without the shutdown of the group, which waits for the other rank
