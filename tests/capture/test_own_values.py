"""Branches on values that a member computes from its own tensors."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from loaded import files_of, seeded
from torch import Tensor, nn

import widepack
from widepack import MemberMismatch
from widepack.errors import CaptureError


class Branching(nn.Module):
    """Branches, counts and asserts on its own buffers and on a tensor in an attribute."""

    ready: Tensor
    steps: Any

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("ready", torch.tensor(True))
        self.register_buffer("steps", torch.tensor(2))
        self.limit = torch.tensor([1.5, 2.0])

    def forward(self, x: Tensor) -> Tensor:
        assert self.ready
        for _ in range(self.steps.item()):
            x = torch.tanh(self.linear(x))
        return x + 1 if (self.limit > 1).all() else x - 1


class BranchOnWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale if self.scale > 0 else x


class BranchOn(nn.Module):
    """Branches on a condition over its buffers `scale` and `mask`."""

    scale: Tensor
    mask: Tensor

    def __init__(self, condition: Callable[[Any], Any], width: int = 6) -> None:
        super().__init__()
        self.condition = condition
        self.linear = nn.Linear(6, width)
        self.register_buffer("scale", torch.tensor(1.0))
        self.register_buffer("mask", torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y * self.scale if self.condition(self) else y - self.mask


X = torch.randn(4, 6, generator=torch.Generator().manual_seed(7))


def saved(folder: Path, *steps: int) -> list[str]:
    """Saves a member for each number of steps."""
    members = [seeded(Branching, i) for i in range(len(steps))]
    for member, n in zip(members, steps):
        member.steps.fill_(n)
    return [str(path) for path in files_of(folder, members)]


def alone(path: str, x: Tensor = X) -> Any:
    member = Branching().eval()
    member.load_state_dict(torch.load(path))
    with torch.no_grad():
        return member(x)


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("share", ["auto", "none"])
def test_the_values_are_literals_that_new_members_must_have(tmp_path: Path, share: str) -> None:
    paths = saved(tmp_path, 2, 2, 3, 2)
    path = tmp_path / "ens.wide"
    widepack.build(paths[:2], path, model=Branching, sample=(X,), budget=0, share=share)
    ens = widepack.load(path)
    for y, one in zip(ens(X), paths):
        torch.testing.assert_close(y, alone(one))
    assert [x.text for x in ens.manifest.entries["forward"].literals] == ["ready", "steps"]
    other = r"value of steps at test_own_values.py:\d+ in forward.*It is 2 in the artifact, and 3 in "
    with pytest.raises(MemberMismatch, match=other):
        ens.swap(0, paths[2])
    with pytest.raises(MemberMismatch, match=other):
        widepack.update(path, {0: paths[2]})
    with pytest.raises(MemberMismatch, match=other):
        widepack.append(path, [paths[2]])
    ens.swap(0, paths[3])
    torch.testing.assert_close(ens(X)[0], alone(paths[3]))


def test_members_that_differ_are_refused_with_both_values(tmp_path: Path) -> None:
    paths = saved(tmp_path, 2, 3)
    with pytest.raises(MemberMismatch, match="steps.*It is 2 in m0, and 3 in m1"):
        widepack.build(paths, tmp_path / "ens.wide", model=Branching, sample=(X,), budget=0)


@pytest.mark.extended
def test_a_fused_module_follows_its_buffers() -> None:
    members = [Branching().eval() for _ in range(2)]
    fused = widepack.fuse(members, X).eval()
    for n in (2, 3):
        dict(fused.named_buffers())["steps"].fill_(n)
        for y, member in zip(fused(X), members):
            member.steps.fill_(n)
            torch.testing.assert_close(y, member(X))


def test_a_value_with_nan_is_captured_once() -> None:
    members = [Branching().eval() for _ in range(2)]
    for member in members:
        del member.limit
        member.register_buffer("limit", torch.tensor([float("nan"), 2.0]))
    fused = widepack.fuse(members, X).eval()
    first = fused.current_entry()
    assert fused.current_entry() is first
    for y, member in zip(fused(X), members):
        torch.testing.assert_close(y, member(X))


def test_a_branch_on_a_weight_that_trains_is_refused() -> None:
    with pytest.raises(CaptureError, match="scale, and it is a parameter, which trains"):
        widepack.fuse([BranchOnWeight() for _ in range(2)], X)


def write_an_item(t: Tensor, x: Tensor) -> None:
    t[0] = x[0, 0]


def write_a_view(t: Tensor, x: Tensor) -> None:
    view = t.detach()
    view[0] = x[0, 0]


def write_by_an_op(t: Tensor, x: Tensor) -> None:
    torch.ops.aten.copy_.default(t.view(2, 3), x[:1].view(2, 3))


def write_data(t: Tensor, x: Tensor) -> None:
    t.data = x[0]


class BranchOnWritten(nn.Module):
    """Branches on a copy of its own buffer, into which it wrote an input."""

    start: Tensor

    def __init__(self, write: Callable[[Tensor, Tensor], None]) -> None:
        super().__init__()
        self.write = write
        self.register_buffer("start", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        t = self.start.clone()
        self.write(t, x)
        return x * 2 if t.sum() > 0 else x


@pytest.mark.parametrize("write", [write_an_item, write_a_view, write_by_an_op, write_data])
def test_a_value_that_an_input_was_written_into_is_not_read(write: Any) -> None:
    with pytest.raises(CaptureError, match="branches on the values of a tensor"):
        widepack.fuse([BranchOnWritten(write) for _ in range(2)], X.abs())


class FirstCall(nn.Module):
    """Keeps the mean of its first call, and a flag that says so."""

    ready: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("ready", torch.tensor(False))
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            self.mean = x.mean(0)
            self.ready = self.ready | True
        y: Tensor = self.linear(x - self.mean)
        return y


def test_a_flag_of_the_first_call_is_no_literal_of_later_calls(tmp_path: Path) -> None:
    """The second call reads the mean of the first one, which a program with the branch would replace."""
    path = str(tmp_path / "0.pt")
    torch.save(FirstCall().state_dict(), path)
    build: Any = widepack.build
    given = {"model": FirstCall, "sample": (X,), "budget": 0}
    with pytest.raises(
        CaptureError, match="of its own ready, and forward changes it.*save the members after a call"
    ):
        build([path, path], tmp_path / "ens.wide", state=("mean",), **given)
    member = FirstCall()
    member(X)
    torch.save(member.state_dict(), path)
    build([path, path], tmp_path / "ens.wide", **given)
    torch.testing.assert_close(widepack.load(tmp_path / "ens.wide")(2 * X)[1], member(2 * X).detach())


def written_view(m: Any) -> Any:
    """The sum is positive whatever the sign of the mask is: a view of a copy was written into."""
    copy = m.mask.clone()
    view = copy.detach()
    copy.mul_(copy)
    return view.sum() > 0


CONDITIONS: dict[str, Callable[[Any], Any]] = {
    "scale > 0": lambda m: m.scale > 0,
    "scale >= 0.5": lambda m: (m.scale >= 0.5).item(),
    "(mask > 0).sum()": lambda m: int((m.mask > 0).sum()) > 3,
    "((mask > -9) & (mask < 9)).all()": lambda m: torch.all((m.mask > -9) & (m.mask < 9)),
    "(mask.abs() == mask).all()": lambda m: torch.equal(m.mask.abs(), m.mask),
    "((mask * 2) - scale).mean() > 0": lambda m: (m.mask * 2 - m.scale).mean() > 0,
    "mask.isnan().any()": lambda m: not torch.isnan(m.mask.detach()).any(),
    "scale": lambda m: m.scale,
}


def members_of(folder: Path, model: Callable[[], nn.Module], *scales: float) -> list[str]:
    """Saves a member for each scale; its mask has the same value everywhere."""
    members = [seeded(model, i) for i in range(len(scales))]
    for member, scale in zip(members, scales):
        member.scale.fill_(scale)
        member.mask.fill_(scale)
    return [str(path) for path in files_of(folder, members)]


def check_members(ens: Any, model: Callable[[], nn.Module], paths: list[str]) -> None:
    for y, path in zip(ens(X), paths):
        member = model()
        member.load_state_dict(torch.load(path))
        with torch.no_grad():
            torch.testing.assert_close(y, member(X))


@pytest.mark.extended
def test_members_with_other_values_and_the_same_branches(tmp_path: Path) -> None:
    def model() -> nn.Module:
        return BranchOn(lambda m: all(bool(one(m)) for one in CONDITIONS.values()))

    paths = members_of(tmp_path, model, 1.0, 2.0, 3.0, -2.0, 10.0, float("nan"), 0.0)
    path = tmp_path / "ens.wide"
    widepack.build(paths[:2], path, model=model, sample=(X,), budget=0)
    ens = widepack.load(path)
    assert [x.text for x in ens.manifest.entries["forward"].literals] == list(CONDITIONS)
    check_members(ens, model, paths[:2])
    ens.swap(0, paths[2])
    check_members(ens, model, [paths[2], paths[1]])
    for other, text in zip(paths[3:], ("scale > 0", "((mask > -9)", "scale > 0", "scale > 0")):
        with pytest.raises(MemberMismatch, match=f"reads {re.escape(text)}.*is True in .*, and False in"):
            ens.swap(0, other)
    check_members(ens, model, [paths[2], paths[1]])
    with pytest.raises(MemberMismatch, match="reads scale > 0 at .*It is True in m0, and False in m3"):
        widepack.build([paths[0], paths[3]], path, model=model, sample=(X,), budget=0, force=True)


def test_a_condition_without_an_expression_needs_equal_values(tmp_path: Path) -> None:
    for condition in (written_view, lambda m: m.mask.cumsum(0)[-1] > 0, lambda m: m.scale.item() > 0):
        model = partial(BranchOn, condition)
        paths = members_of(tmp_path, model, 1.0, -1.0)
        with pytest.raises(MemberMismatch, match="the value of (mask|scale)"):
            widepack.build(paths, tmp_path / "ens.wide", model=model, sample=(X,))


@pytest.mark.extended
def test_members_of_other_shapes_that_take_the_same_branch(tmp_path: Path) -> None:
    def model(state_dict: Any) -> nn.Module:
        return BranchOn(lambda m: (m.mask > 0).all(), len(state_dict["mask"]))

    (tmp_path / "wide").mkdir()
    paths = members_of(tmp_path, partial(model, {"mask": torch.ones(6)}), 1.0, 2.0, -1.0)
    paths += members_of(tmp_path / "wide", partial(model, {"mask": torch.ones(8)}), 3.0)
    path = tmp_path / "ens.wide"
    widepack.build([paths[0], paths[3]], path, model=model, sample=(X,), budget=0)
    ens = widepack.load(path)
    ens.swap(0, paths[1])
    with pytest.raises(MemberMismatch, match="It is True in the artifact, and False"):
        ens.swap(0, paths[2])
