"""Tests calls at sizes that no verification ran: the answers are the members' own, or the call is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from loaded import built
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import widepack
from widepack import InputError

N = 3


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


class OverTheBatch(nn.Module):
    """Ops along the batch and along a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.layer(x)
        return y.cumsum(1), y - y.mean(0), y.softmax(0), x.sort(1)[0], y.roll(1, 0)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x, need_weights=False)[0])  # type: ignore[no-any-return]


class Ragged(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.trunk, self.head = nn.Linear(4, 6), nn.Linear(6, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(x).relu()).log_softmax(-1)  # type: ignore[no-any-return]


def ragged(state_dict: Mapping[str, Tensor] | None = None) -> nn.Module:
    return Ragged(3 if state_dict is None else state_dict["head.weight"].shape[0])


def close(got: Any, want: Any) -> None:
    for g, w in zip(got if isinstance(got, tuple) else (got,), want if isinstance(want, tuple) else (want,)):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5)


def of_member(answer: Any, i: int) -> Any:
    return tuple(a[i] for a in answer) if isinstance(answer, tuple) else answer[i]


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        (Mlp, "x=float32[B,4]"),
        (OverTheBatch, "x=float32[B,T,4]"),
        (Attention, "x=float32[B,T,4]"),
    ],
)
def test_any_size_is_answered_as_by_the_members(tmp_path: Path, make: Any, inputs: str) -> None:
    torch.manual_seed(0)
    modules = [make().eval() for _ in range(N)]
    ens = widepack.load(built(tmp_path, make, modules, inputs))
    lengths = [(1,), (2,), (5,), (37,)] if "T" in inputs else [()]
    for batch in (1, 2, 63, 65, 511):
        for length in lengths:
            xs = torch.randn(N, batch, *length, 4)
            with torch.no_grad():
                together, each = ens(xs[0]), ens.each(xs)
                for i, m in enumerate(modules):
                    close(of_member(together, i), m(xs[0]))
                    close(of_member(each, i), m(xs[i]))
                close(ens[1](xs[0]), modules[1](xs[0]))
    empty, one = (torch.zeros(N, batch, *lengths[0], 4) for batch in (0, 1))
    calls: list[tuple[Callable[[torch.Tensor], Any], int]]
    calls = [(lambda x: ens(x[0]), 1), (ens.each, 1), (lambda x: ens[0](x[0]), 0)]
    for call, dim in calls:  # without rows: of the same shape and dtype otherwise
        for got, like in zip(pytree.tree_leaves(call(empty)), pytree.tree_leaves(call(one))):
            like = like.narrow(dim, 0, 0)
            assert (got.shape, got.dtype, got.stride()) == (like.shape, like.dtype, like.stride())


@pytest.mark.extended
def test_ragged_members_at_any_size_and_after_a_swap(tmp_path: Path) -> None:
    torch.manual_seed(0)
    modules: list[nn.Module] = [Ragged(c) for c in (3, 5, 10)]
    ens = widepack.load(built(tmp_path, ragged, modules, "x=float32[B,4]"))

    def check() -> None:
        for batch in (1, 2, 65, 700):
            xs = torch.randn(N, batch, 4)
            with torch.no_grad():
                together, each = ens(xs[0]), ens.each(xs)
                for i, m in enumerate(modules):
                    close(together[i], m(xs[0]))
                    close(each[i], m(xs[i]))
                    close(ens[i](xs[0]), m(xs[0]))

    check()
    modules[1] = Ragged(5)
    torch.save(modules[1].state_dict(), tmp_path / "same.pt")
    ens.swap(1, tmp_path / "same.pt")
    check()
    torch.save(Ragged(7).state_dict(), tmp_path / "none.pt")
    with pytest.raises(widepack.MemberMismatch, match=r"none.pt does not fit the artifact's members"):
        ens.swap(1, tmp_path / "none.pt")
    with pytest.raises(
        widepack.MemberMismatch, match=r"h.*\[5, 6\], the member's \[10, 6\].*a swap cannot change shapes"
    ):
        ens.swap(2, tmp_path / "same.pt")
    check()
    for answer in (ens(torch.zeros(0, 4)), ens.each(torch.zeros(N, 0, 4))):
        assert [list(y.shape) for y in answer] == [[0, *y.shape[1:]] for y in ens(torch.zeros(1, 4))]
    with pytest.raises(InputError, match="the members' outputs differ in shape"):
        ens.mean(torch.zeros(2, 4))
    rows = [torch.zeros(b, 4) for b in (2, 3, 2)]
    with pytest.raises(InputError, match=r"one shape.*got a list of 3 with shapes \[2, 4\], \[3, 4\]"):
        ens.each(rows)
