"""Tests that a call of `route` keeps members apart, in every form of the call.

NaN in the weights or in the rows of one member changes no bit of an answer to another row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from isolating import poisoned
from loaded import saved
from support import Artifacts, quick_first
from torch import Tensor, nn

import cases
import widepack
from inference.small_networks import EvenFromFour, FilledTrunk, Normed, Plain, Trunk
from widepack.inference.routing.padded_rows import PaddedCall, PaddedRows
from widepack.inference.routing.per_row import PerRowProgram
from widepack.inference.routing.router import RoutedCall

MEMBERS = 4
CALLS = [
    [2, 0, 2, 3, 0, 1, 2, 3],  # any order
    [0, 0, 1, 1, 1, 2, 3, 3],  # the rows of a member follow each other
    [3, 1, 1, 3, 1, 3, 3, 1],  # two members
]


class Steps(nn.Module):
    """Sequences with the time first, through a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.fc = nn.GRU(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(self.rnn(x)[0])
        return y


class Packed(nn.Module):
    """A convolution that runs packed for all members."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x)
        return y


@dataclass(frozen=True)
class Form:
    """A network, its input, and the method of the router that runs its calls of several members.

    by_rows: whether such calls read weights by rows. dim: where the rows are, in input and answers.
    """

    make: Callable[[], nn.Module]
    specs: tuple[str, ...]
    shape: tuple[int, ...]
    method: str
    by_rows: bool = False
    dim: int = 0


ROWS, EVEN = ("x=float32[B,6]",), ("x=float32[B,2,5]", "B=4..64")
FORMS = {  # the first, fourth and seventh run by default
    "groups": Form(Plain, ROWS, (8, 6), "_grouped"),
    "groups after a trunk": Form(Trunk, ROWS, (8, 6), "_grouped"),
    "groups of rows in the second dim": Form(Steps, ("x=float32[5,B,6]",), (5, 8, 6), "_grouped", dim=1),
    "padded": Form(Packed, ("x=float32[B,2,5]",), (8, 2, 5), "padded"),
    "groups that are filled up": Form(EvenFromFour, EVEN, (8, 2, 5), "_grouped"),
    "groups that are filled up after a trunk": Form(FilledTrunk, EVEN, (8, 2, 5), "_grouped"),
    "by rows": Form(Plain, ROWS, (8, 6), "_by_rows", by_rows=True),
    "by rows, norms and vectors": Form(Normed, ROWS, (8, 6), "_by_rows", by_rows=True),
    "by rows after a trunk": Form(Trunk, ROWS, (8, 6), "_by_rows", by_rows=True),
}


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lists the methods of routed calls that ran."""
    found: list[str] = []
    for name in ("_by_rows", "_grouped", "_alone"):
        real = getattr(RoutedCall, name)

        def counted(*args: Any, _real: Any = real, _name: str = name) -> Any:
            found.append(_name)
            return _real(*args)

        monkeypatch.setattr(RoutedCall, name, counted)
    run = PaddedCall.run

    def padded(call: PaddedCall, *values: Tensor) -> list[Any]:
        found.append("padded")
        return run(call, *values)

    monkeypatch.setattr(PaddedCall, "run", padded)
    return found


def leaves(answer: Any) -> Sequence[Tensor]:
    """Returns the leaves of an answer that can be NaN."""
    found = (
        answer.values() if isinstance(answer, dict) else answer if isinstance(answer, tuple) else (answer,)
    )
    return [leaf for leaf in found if leaf.is_floating_point()]


def check(right: Any, found: Any, ill: Sequence[int], rows: int, dim: int = 0) -> None:
    """Checks that the ill rows are NaN, and that no bit of another row differs."""
    kept = torch.tensor([r for r in range(rows) if r not in ill])
    for a, b in zip(leaves(right), leaves(found), strict=True):
        assert not a.isnan().any()
        assert torch.equal(b.index_select(dim, kept), a.index_select(dim, kept))
        ill_rows = b.index_select(dim, torch.tensor(ill)).movedim(dim, 0)
        assert ill_rows.isnan().flatten(1).any(1).all(), (
            "the NaN is not in its row, so the test proves nothing"
        )


@pytest.mark.extended(keep=3)
@pytest.mark.parametrize("name", FORMS)
def test_nan_stays_with_its_member(
    name: str, ran: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = FORMS[name]
    monkeypatch.setattr(PerRowProgram, "is_faster", lambda *_: form.by_rows)
    monkeypatch.setattr(PaddedRows, "possible", form.method == "padded")
    for name_of_limit in ("MOST", "_MOST_BY_RULE"):
        monkeypatch.setattr(f"widepack.inference.routing.padded_rows.{name_of_limit}", 100.0)
    torch.manual_seed(0)
    how = {"strategy": ["wide", "packed"]} if form.method == "padded" else {}
    ens = saved(form.make, tmp_path, *form.specs, members=MEMBERS, **how)
    x = torch.randn(form.shape)
    right = [ens.route(x, member=ids) for ids in CALLS]
    assert ran == [form.method] * len(CALLS)
    for j in range(MEMBERS):
        ill = widepack.load(poisoned(tmp_path / "e.wide", j, tmp_path / f"{j}"), verify="off", warmup=False)
        for ids, whole in zip(CALLS, right):
            own = [r for r, i in enumerate(ids) if i == j]
            if not own:  # this member has no rows
                assert all(map(torch.equal, leaves(ill.route(x, member=ids)), leaves(whole)))
                continue
            check(whole, ill.route(x, member=ids), own, len(ids), form.dim)
            for rows in (own, own[:1], own[-1:]):
                changed = x.clone()
                changed.index_fill_(form.dim, torch.tensor(rows), torch.nan)
                check(whole, ens.route(changed, member=ids), rows, len(ids), form.dim)
    assert set(ran) == {form.method}


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("name", ["groups", "groups after a trunk", "groups of rows in the second dim"])
def test_nan_in_a_row_stays_there_in_a_call_of_one_member(name: str, ran: list[str], tmp_path: Path) -> None:
    form = FORMS[name]
    ens, x = saved(form.make, tmp_path, *form.specs, members=2), torch.randn(form.shape)
    right = ens.route(x, member=1)
    for row in (0, 3, 7):
        changed = x.clone()
        changed.select(form.dim, row).fill_(torch.nan)
        check(right, ens.route(changed, member=1), [row], 8, form.dim)
    ill = widepack.load(poisoned(tmp_path / "e.wide", 0, tmp_path / "ill"), verify="off", warmup=False)
    assert torch.equal(ill.route(x, member=1), right) and ill.route(x, member=0).isnan().any()
    assert set(ran) == {"_alone"}


def test_nan_stays_with_its_member_where_heads_have_different_sizes(
    artifacts: Artifacts, ran: list[str], tmp_path: Path
) -> None:
    path, case = artifacts("ragged_heads"), cases.load("ragged_heads")
    ens, ids = widepack.load(path), [0, 2, 1, 1, 2, 0]
    (x, *more), kwargs = case.sample(len(ids), 3)
    right = ens.route(x, *more, member=ids, **kwargs)
    for j in range(case.N):
        ill = widepack.load(poisoned(path, j, tmp_path / f"{j}"), verify="off", warmup=False)
        changed = x.clone()
        changed[[r for r, i in enumerate(ids) if i == j]] = torch.nan
        for found in (
            ill.route(x, *more, member=ids, **kwargs),
            ens.route(changed, *more, member=ids, **kwargs),
        ):
            for a, b, i in zip(right, found, ids, strict=True):
                assert b.isnan().any() if i == j else torch.equal(a, b)
    assert set(ran) == {"_alone"}  # a group by itself for each member


@pytest.mark.parametrize("name", quick_first(["resnet18", "vit", "frozen_trunk"]))
def test_nan_stays_with_its_member_in_networks(name: str, artifacts: Artifacts, tmp_path: Path) -> None:
    path, case = artifacts(name), cases.load(name)
    ens, ids = widepack.load(path), [1, 0, 1, 2, 0]
    (x,), _ = case.sample(len(ids), 3)
    right = ens.route(x, member=ids)
    ill = widepack.load(poisoned(path, 1, tmp_path / "ill"), verify="off", warmup=False)
    check(right, ill.route(x, member=ids), [0, 2], len(ids))
    changed = x.clone()
    changed[2] = torch.nan
    check(right, ens.route(changed, member=ids), [2], len(ids))


@pytest.mark.parametrize("name", quick_first(["encoder", "textcnn", "lstm"]))
def test_nan_in_weights_stays_with_its_member_in_networks_of_ids(
    name: str, artifacts: Artifacts, tmp_path: Path
) -> None:
    path, case = artifacts(name), cases.load(name)
    ens, ids = widepack.load(path), [1, 0, 1, 2, 0]
    args, kwargs = case.sample(len(ids), 3)
    right = ens.route(*args, member=ids, **kwargs)
    ill = widepack.load(poisoned(path, 1, tmp_path / "ill"), verify="off", warmup=False)
    check(right, ill.route(*args, member=ids, **kwargs), [0, 2], len(ids))
