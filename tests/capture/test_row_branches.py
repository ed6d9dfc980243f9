"""Tests branches on whether a mask selected any rows, such as networks for the types of atoms."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from small_builds import built, member, refused
from support import run
from torch import Tensor, nn

import widepack

N = 3
INPUTS = ["x=float32[A,6]", "kind=int64[A]:0..2"]


class Typed(nn.Module):
    """Runs one layer for each kind of row, on the rows of that kind. The last kind has a default."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList([nn.Linear(6, 2) for _ in range(3)])

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        y = torch.zeros(x.shape[0], 2)
        for i, net in enumerate(self.nets):
            rows = (kind == i).nonzero().view(-1)
            if rows.shape[0] > 0:
                y.index_add_(0, rows, net(x.index_select(0, rows)))
        return y


class Opposite(Typed):
    """Asks in other words, and for elements of a selection by a mask."""

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        y = torch.zeros(x.shape[0], 2)
        for i, net in enumerate(self.nets):
            picked = x[kind == i]
            if picked.numel() == 0:
                continue
            y = y + net(picked).sum(0)
        return y


class Gated(Typed):
    """Members select rows of their own."""

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        y: Tensor = self.nets[0](x)
        rows = (y[:, 0] > 0.5).nonzero().view(-1)
        if rows.shape[0] != 0:
            y = y.index_add(0, rows, self.nets[1](x[rows]))
        return y


class Derived(Typed):
    """Sums the rows of each kind, and returns the derivative by x."""

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(super().forward(x, kind).tanh().sum(), x)
        return slope


class Default(Typed):
    """Has another answer where there are no rows: without the branch it is NaN."""

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        rows = (kind == 1).nonzero().view(-1)
        if rows.shape[0] > 0:
            x = x + x[rows].mean(0)
        answer: Tensor = self.nets[0](x)
        return answer


class Always(Typed):
    """Selects rows that are always there, so nothing shows what the program does without."""

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        rows = (kind >= 0).nonzero().view(-1)
        answer: Tensor = self.nets[0](x[rows]) if rows.shape[0] > 0 else self.nets[1](x)
        return answer


class Several(Typed):
    """Compares with another number than 0."""

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        rows = (kind == 1).nonzero().view(-1)
        answer: Tensor = self.nets[0](x[rows] if rows.shape[0] > 1 else x).sum(0)
        return answer


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("make", [Typed, Opposite, Gated, Derived])
def test_selections_may_be_empty(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    members = [member(make, i) for i in range(N)]
    ens = widepack.load(built(make, tmp_path, N, inputs=INPUTS), warmup=False)
    g = torch.Generator().manual_seed(7)
    for kinds in ((0, 1, 2), (0, 2), (1,), (2,)):
        for count in (1, 4, 9):
            calls = [
                (
                    torch.randn(count, 6, generator=g),
                    torch.tensor(kinds)[torch.randint(len(kinds), (count,), generator=g)],
                )
                for _ in range(N)
            ]
            for answer, given in (
                (ens(*calls[0]), [calls[0]] * N),
                (ens.each(*(torch.stack(inputs) for inputs in zip(*calls))), calls),
            ):
                for i, m in enumerate(members):
                    torch.testing.assert_close(answer[i], run(m, given[i], {}), rtol=1e-4, atol=1e-5)


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("make", [Default, Always, Several])
def test_branches_that_change_the_answer_are_refused(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    message = refused(make, tmp_path, inputs=INPUTS)
    assert re.search(r"branches on the values of a tensor.*rows.shape\[0\] >", message)


class Experts(nn.Module):
    """Runs for each expert the rows that choose it, two of three. An expert may have no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, 3)
        self.experts = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        top = self.router(x).softmax(-1).topk(2, -1)
        y = torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            rows, slot = torch.where(top.indices == k)
            if rows.numel() == 0:
                continue
            y[rows] += expert(x[rows]) * top.values[rows, slot, None]
        return y


def test_experts_that_most_rows_choose_are_found_without_rows() -> None:
    members = [member(Experts, i) for i in range(N)]
    g = torch.Generator().manual_seed(7)
    fused = widepack.fuse(members, torch.randn(5, 6, generator=g))
    for count in (2, 9):
        x = torch.randn(count, 6, generator=g)
        expected = torch.stack([run(m, (x,), {}) for m in members])
        torch.testing.assert_close(fused(x).detach(), expected, rtol=1e-4, atol=1e-5)
