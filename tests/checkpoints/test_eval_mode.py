"""Tests of members whose own `train()` or `eval()` does more than set the mode."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import widepack
from checkpoints.loading_models import QUICK
from widepack.checkpoints.eval_mode import has_own_mode
from widepack.checkpoints.factory import Factory
from widepack.checkpoints.loading import MemberLoader
from widepack.errors import MemberMismatch, UsageError

INPUT = torch.linspace(-2, 3, 20).reshape(5, 4)


class LowRank(nn.Linear):
    """`eval()` merges a low-rank update into the weight."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.down = nn.Parameter(torch.randn(2, 4))
        self.up = nn.Parameter(torch.randn(3, 2))
        self.merged = False

    def train(self, mode: bool = True) -> LowRank:
        super().train(mode)
        if mode == self.merged:
            self.weight.data += (-1 if mode else 1) * (self.up @ self.down)
            self.merged = not mode
        return self

    def forward(self, input: Tensor) -> Tensor:
        y = F.linear(input, self.weight, self.bias)
        return y if self.merged else y + input @ self.down.t() @ self.up.t()


class Average(nn.Module):
    """`eval()` puts an average in the place of the weight."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)
        self.register_buffer("average", torch.randn(3, 4))

    def eval(self) -> Average:
        super().eval()
        self.inner.weight.data.copy_(self.average)
        return self

    def forward(self, input: Tensor) -> Tensor:
        return self.inner(input)  # type: ignore[no-any-return]


class Deployed(nn.Module):
    """`eval()` makes one layer of two."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 3), nn.Linear(4, 3)
        self.sum: nn.Linear | None = None

    def eval(self) -> Deployed:
        super().eval()
        if self.sum is None:
            self.sum = nn.Linear(4, 3).eval()
            self.sum.weight.data = self.one.weight.data + self.two.weight.data
            self.sum.bias.data = self.one.bias.data + self.two.bias.data
        return self

    def forward(self, input: Tensor) -> Tensor:
        one: Tensor = self.one(input) + self.two(input) if self.sum is None else self.sum(input)
        return one


class Cached(nn.Module):
    """`eval()` computes a plain tensor from the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))
        self.unit: Tensor | None = None

    def train(self, mode: bool = True) -> Cached:
        super().train(mode)
        self.unit = None if mode else F.normalize(self.weight.detach(), dim=0)
        return self

    def forward(self, input: Tensor) -> Tensor:
        return input @ (F.normalize(self.weight, dim=0) if self.unit is None else self.unit)


class Scaled(nn.Module):
    """`eval()` reads a number from the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)
        self.scale = 1.0

    def train(self, mode: bool = True) -> Scaled:
        super().train(mode)
        self.scale = 1.0 if mode else 1.0 + float(self.inner.bias.abs().sum() > 0)
        return self

    def forward(self, input: Tensor) -> Tensor:
        return self.inner(input) / self.scale  # type: ignore[no-any-return]


class Frozen(nn.Module):
    """`train()` keeps the norm in eval mode, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.inner = nn.Linear(4, 3)

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, input: Tensor) -> Tensor:
        return self.inner(self.norm(input))  # type: ignore[no-any-return]


def saved(folder: Path, make: Callable[[], nn.Module], seeds: list[int]) -> list[Path]:
    paths = []
    for seed in seeds:
        torch.manual_seed(seed)
        paths.append(folder / f"{seed}.pt")
        torch.save(make().state_dict(), paths[-1])
    return paths


def loaded(make: Callable[[], nn.Module], path: Path) -> nn.Module:
    """The user's way: load, then `eval()`."""
    module = make()
    module.load_state_dict(torch.load(path))
    return module.eval()


def answers(members: list[nn.Module]) -> Tensor:
    with torch.no_grad():
        return torch.stack([m(INPUT) for m in members])


@pytest.mark.parametrize(
    ("make", "name"), [(LowRank, "weight"), (Average, "inner.weight"), (Deployed, "sum.weight")]
)
def test_an_eval_that_changes_weights_is_refused(tmp_path: Path, make: Any, name: str) -> None:
    paths = saved(tmp_path, make, [0, 1])
    with pytest.raises(UsageError, match=rf"0\.pt.*eval\(\) of {make.__name__} changes the weights {name}"):
        widepack.build(paths, tmp_path / "e.wide", model=make, **QUICK)
    assert not (tmp_path / "e.wide").exists()


@pytest.mark.parametrize("make", [LowRank, Average, Deployed])
def test_whole_modules_in_eval_mode_are_the_way_out(tmp_path: Path, make: Any) -> None:
    members = [loaded(make, path) for path in saved(tmp_path, make, [0, 1])]
    files = [tmp_path / f"whole{i}.pt" for i in range(2)]
    for file, member in zip(files, members):
        torch.save(member, file)
    widepack.build(files, tmp_path / "e.wide", trust_pickle=True, **QUICK)
    torch.testing.assert_close(widepack.load(tmp_path / "e.wide")(INPUT), answers(members))


def test_a_pickled_module_in_train_mode_is_refused(tmp_path: Path) -> None:
    torch.save(LowRank(), tmp_path / "whole.pt")
    with pytest.raises(UsageError, match="changes the weights weight"):
        widepack.build([tmp_path / "whole.pt"], tmp_path / "e.wide", trust_pickle=True, **QUICK)


@pytest.mark.parametrize("make", [Cached, Scaled, Frozen])
def test_an_eval_that_keeps_the_weights_reads_the_loaded_ones(tmp_path: Path, make: Any) -> None:
    paths = saved(tmp_path, make, [0, 1])
    widepack.build(paths, tmp_path / "e.wide", model=make, **QUICK)
    ens = widepack.load(tmp_path / "e.wide")
    torch.testing.assert_close(ens(INPUT), answers([loaded(make, path) for path in paths]))
    own = torch.load(paths[1])
    assert all(torch.equal(value, own[name]) for name, value in ens.state_dict(1).items())


def test_what_eval_reads_from_the_weights_is_compared_for_a_new_member(tmp_path: Path) -> None:
    paths = saved(tmp_path, Scaled, [0, 1])
    state = torch.load(paths[0])
    state["inner.bias"].zero_()  # so that eval() keeps the scale 1
    torch.save(state, tmp_path / "new.pt")
    wide = tmp_path / "e.wide"
    widepack.build(paths, wide, model=Scaled, **QUICK)
    ens = widepack.load(wide)
    with pytest.raises(MemberMismatch, match=r"eval\(\), and what it makes of these weights is not known"):
        ens.swap(1, tmp_path / "new.pt")
    with pytest.raises(MemberMismatch, match=r"eval\(\) of the model sets scale"):
        ens.swap(1, tmp_path / "new.pt", model=Scaled)
    with pytest.raises(widepack.WidepackError):
        widepack.append(wide, [tmp_path / "new.pt"], model=Scaled)
    (good,) = saved(tmp_path, Scaled, [7])
    widepack.append(wide, [good], model=Scaled)
    members = [loaded(Scaled, path) for path in [*paths, good]]
    torch.testing.assert_close(widepack.load(wide)(INPUT), answers(members))


class Filled(Scaled):
    """`eval()` writes what it reads into a dict that is there from the beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = {"all": [1.0]}

    def train(self, mode: bool = True) -> Filled:
        nn.Module.train(self, mode)
        self.scales["all"][0] = 1.0 if mode else 1.0 + float(self.inner.bias.abs().sum() > 0)
        return self

    def forward(self, input: Tensor) -> Tensor:
        return self.inner(input) / self.scales["all"][0]  # type: ignore[no-any-return]


def test_what_eval_writes_into_a_dict_is_compared_for_a_new_member(tmp_path: Path) -> None:
    paths = saved(tmp_path, Filled, [0, 1])
    state = torch.load(paths[0])
    state["inner.bias"].zero_()  # so that eval() keeps the scale 1
    torch.save(state, tmp_path / "new.pt")
    widepack.build(paths, tmp_path / "e.wide", model=Filled, **QUICK)
    ens = widepack.load(tmp_path / "e.wide")
    torch.testing.assert_close(ens(INPUT), answers([loaded(Filled, path) for path in paths]))
    with pytest.raises(MemberMismatch, match=r"eval\(\), and what it makes of these weights is not known"):
        ens.swap(1, tmp_path / "new.pt")


def test_a_mode_that_sets_nothing_else_needs_no_model_for_a_new_member(tmp_path: Path) -> None:
    paths = saved(tmp_path, Frozen, [0, 1, 2])
    widepack.build(paths[:2], tmp_path / "e.wide", model=Frozen, **QUICK)
    ens = widepack.load(tmp_path / "e.wide")
    ens.swap(1, paths[2])
    torch.testing.assert_close(ens(INPUT), answers([loaded(Frozen, paths[i]) for i in (0, 2)]))


def test_a_module_with_the_modes_of_torch_is_made_once(tmp_path: Path) -> None:
    from widepack.checkpoints.discovery import open_all, places_of

    made = []

    def make() -> nn.Module:
        made.append(nn.Linear(4, 3))
        return made[-1]

    assert not has_own_mode(make())
    assert has_own_mode(nn.Sequential(Frozen()))
    made.clear()
    loader = MemberLoader(Factory("make", make, {}))
    for checkpoint in open_all(places_of([str(p) for p in saved(tmp_path, lambda: nn.Linear(4, 3), [0, 1])])):
        loader.load(checkpoint)
    assert len(made) == 1
    assert loader.plain
