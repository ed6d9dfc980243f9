"""Tests calls of `route` that run padded: when they do, and that each row is its member's own answer."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from loaded import saved
from torch import Tensor, nn

import widepack
from widepack.inference.model import WideModel
from widepack.inference.routing.padded_rows import PaddedCall, PaddedRows, RowPrices
from widepack.inference.routing.row_groups import padding_rows
from widepack.inference.single_members import GROUP_MS
from widepack.planning.plan import Plan

MEMBERS = 6


class Conv(nn.Module):
    """Two convolutions that run packed for all members, and an input that all rows share."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 3)

    def forward(self, x: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        y = self.second((self.first(x) + shift).relu())
        return y, y.mean((2, 3)).transpose(0, 1)


INPUTS = ("x=float32[B,3,8,8]", "shift=float32[8,1,1]")


@pytest.fixture(scope="module")
def ens(tmp_path_factory: pytest.TempPathFactory) -> WideModel:
    return saved(Conv, tmp_path_factory.mktemp("conv"), *INPUTS, members=MEMBERS)


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[PaddedCall | None]:
    """Returns a list that receives what `PaddedRows.call` returned for each call of several members."""
    found: list[PaddedCall | None] = []
    call = PaddedRows.call

    def recorded(self: PaddedRows, *args: object) -> PaddedCall | None:
        found.append(call(self, *args))  # type: ignore[arg-type]
        return found[-1]

    monkeypatch.setattr(PaddedRows, "call", recorded)
    return found


def drawn(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 3, 8, 8, generator=g), torch.randn(8, 1, 1, generator=g)


def evenly(rows: int, seed: int) -> list[int]:
    """Returns members that have about the same number of rows, in random order."""
    numbers = [i % MEMBERS for i in range(rows)]
    random.Random(seed).shuffle(numbers)
    return numbers


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("rows", [4, 6, 13, 32])
def test_each_row_is_its_members_own_answer(ens: WideModel, used: list[PaddedCall | None], rows: int) -> None:
    x, shift = drawn(rows, rows)
    numbers = evenly(rows, rows)
    before = padding_rows()
    maps, means = ens.route(x, shift, member=numbers)
    assert used and used[-1] is not None
    assert padding_rows() - before == MEMBERS * -(-rows // MEMBERS) - rows
    for row, number in enumerate(numbers):
        exact = _exact(ens, number, x[row : row + 1], shift)
        torch.testing.assert_close(maps[row].double(), exact[0][0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(means[:, row].double(), exact[1][:, 0], rtol=1e-5, atol=1e-5)


def _exact(ens: WideModel, number: int, x: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a member's answer in float64."""
    member = Conv().double()
    member.load_state_dict({k: v.double() for k, v in ens.state_dict(number).items()})
    with torch.no_grad():
        found: tuple[Tensor, Tensor] = member(x.double(), shift.double())
    return found


def test_another_number_of_rows_is_refused(ens: WideModel, used: list[PaddedCall | None]) -> None:
    x, shift = drawn(12, 3)
    ens.route(x, shift, member=evenly(12, 3))
    call = used[-1]
    assert call is not None
    program, dims = call.program, call.dims

    class Longer:
        def run(self, *values: Tensor) -> list[Tensor]:
            return [torch.cat([y, y], 1 + dim) for y, dim in zip(program.run(*values), dims)]

    with pytest.raises(widepack.ArtifactError, match=r"output 0 of a program is \[6, 4, .* for 2 rows"):
        replace(call, program=Longer()).run(x, shift)  # type: ignore[arg-type]


def test_unequal_groups_and_single_members_are_not_padded(
    ens: WideModel, used: list[PaddedCall | None]
) -> None:
    x, shift = drawn(16, 1)
    ens.route(x, shift, member=[0] * 13 + [1, 2, 3])
    assert used == [None]
    ens.route(x, shift, member=2)
    assert used == [None]


@pytest.mark.extended
def test_a_swap_is_followed(tmp_path: Path, used: list[PaddedCall | None]) -> None:
    ens = saved(Conv, tmp_path, *INPUTS, members=MEMBERS)
    x, shift = drawn(12, 3)
    numbers = evenly(12, 3)
    before = ens.route(x, shift, member=numbers)[0]
    torch.manual_seed(99)
    torch.save(Conv().state_dict(), tmp_path / "new.pt")
    ens.swap(2, tmp_path / "new.pt")
    after = ens.route(x, shift, member=numbers)[0]
    assert used[-1] is not None
    changed = [row for row, number in enumerate(numbers) if number == 2]
    others = [row for row in range(12) if row not in changed]
    assert torch.equal(before[others], after[others])
    for row in changed:
        exact = _exact(ens, 2, x[row : row + 1], shift)[0][0]
        torch.testing.assert_close(after[row].double(), exact, rtol=1e-5, atol=1e-5)


def test_a_trunk_that_all_members_share_is_not_padded(tmp_path: Path, used: list[PaddedCall | None]) -> None:
    class Trunk(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Conv2d(8, 4, 3)
            with torch.random.fork_rng():
                torch.manual_seed(7)
                self.trunk = nn.Conv2d(3, 8, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.head(self.trunk(x).relu())
            return y

    ens = saved(Trunk, tmp_path, "x=float32[B,3,8,8]", members=MEMBERS)
    ens.route(drawn(12, 4)[0], member=evenly(12, 4))
    assert used == []


def _plan(at: int, **times: float) -> Plan:
    return Plan("cpu", "each", (1, None), (), machine="this", at=at, times_ms=times)


def test_prices_lie_between_the_measured_ones() -> None:
    prices = RowPrices([_plan(8, loop=80.0, wide=20.0), _plan(2, loop=30.0, wide=10.0)], 10)
    assert prices.known
    assert prices.padded(1) == 10.0
    assert prices.padded(5) == 15.0
    assert prices.padded(16) == 40.0
    assert prices.groups({0: 2, 4: 8}) == pytest.approx(3.0 + 8.0 + 2 * GROUP_MS)
    assert not RowPrices([replace(_plan(8, wide=1.0), times_ms={"wide": 1.0})], 10).known


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize(("wide", "padded"), [(1.0, True), (50.0, False)])
def test_measured_times_go_before_the_rule(
    tmp_path: Path,
    used: list[PaddedCall | None],
    monkeypatch: pytest.MonkeyPatch,
    wide: float,
    padded: bool,
) -> None:
    measured: Callable[..., list[Plan]] = lambda *_: [_plan(2, loop=20.0, wide=wide)]  # noqa: E731
    monkeypatch.setattr("widepack.inference.programs.program_source.ProgramSource.stored_plans", measured)
    ens = saved(Conv, tmp_path, *INPUTS, members=MEMBERS)
    ens.route(*drawn(12, 5), member=evenly(12, 5))
    assert (used[-1] is not None) == padded


def test_members_of_a_subset_answer_the_same(tmp_path: Path) -> None:
    saved(Conv, tmp_path, *INPUTS, members=MEMBERS)
    ens = widepack.load(tmp_path / "e.wide", members=[1, 3])
    x, shift = drawn(6, 6)
    y = ens.route(x, shift, member=[0, 1, 0, 1, 0, 1])[0]
    torch.testing.assert_close(y[:1], ens[0](x[:1], shift)[0])
