"""Tests new members of models with code in `load_state_dict`, and with extra state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from loaded import files_of, seeded
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import widepack
from widepack import MemberMismatch, UsageError

X = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x)


class LargeOnly(Net):
    """Its load changes large weights only: none of those that the artifact is built from."""

    def __init__(self) -> None:
        super().__init__()
        self.a.register_load_state_dict_pre_hook(self.halve)

    @staticmethod
    def halve(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        if state[prefix + "weight"].max() > 10:
            state[prefix + "weight"] = state[prefix + "weight"] / 2


class LargeOnlyAfter(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_post_hook(self.clamp)

    @staticmethod
    def clamp(module: Any, keys: Any) -> None:
        with torch.no_grad():
            module.a.weight.clamp_(-10, 10)


class LargeOnlyByMethod(Net):
    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        LargeOnly.halve(self, state, f"{prefix}a.")
        super()._load_from_state_dict(state, prefix, *rest)


class Doubles(Net):
    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        state[f"{prefix}a.weight"] = state[f"{prefix}a.weight"] * 2
        super()._load_from_state_dict(state, prefix, *rest)


class Scaled(Net):
    """Forward reads a number of the extra state."""

    def __init__(self, scale: float = 2.0) -> None:
        super().__init__()
        self.scale = scale

    def get_extra_state(self) -> dict[str, float]:
        return {"scale": self.scale}

    def set_extra_state(self, state: dict[str, float]) -> None:
        self.scale = state["scale"]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Counted(Scaled):
    """Forward reads no extra state."""

    def forward(self, x: Tensor) -> Tensor:
        return Net.forward(self, x)


class Shifted(Net):
    """Forward reads a tensor of the extra state, which each member has of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = torch.rand(3)

    def get_extra_state(self) -> dict[str, Tensor]:
        return {"shift": self.shift}

    def set_extra_state(self, state: dict[str, Tensor]) -> None:
        self.shift = state["shift"]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.shift


def files(
    folder: Path, make: Callable[[], nn.Module], last: Callable[[Any], object] = lambda m: None
) -> list[Path]:
    """Writes three checkpoints, and returns their paths. last: changes the third before it is written."""
    members = [seeded(make, i) for i in range(3)]
    last(members[2])
    return files_of(folder, members)


def alone(make: Callable[[], nn.Module], path: Path) -> nn.Module:
    module = make()
    module.load_state_dict(torch.load(path, weights_only=False))
    return module.eval()


def built(folder: Path, paths: list[Path], make: Callable[[], nn.Module]) -> Path:
    widepack.build(paths[:2], folder / "e.wide", model=make, sample=(X,), pt2=False, targets=("cpu",))
    return folder / "e.wide"


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("make", [LargeOnly, LargeOnlyAfter, LargeOnlyByMethod])
def test_code_that_changes_the_new_weights_only(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    paths = files(tmp_path, make, lambda m: m.a.weight.data.mul_(100))
    path = built(tmp_path, paths, make)
    ens = widepack.load(path)
    with pytest.raises(MemberMismatch, match="has code of its own that runs when it loads a state dict"):
        ens.swap(1, paths[2])
    with pytest.raises(MemberMismatch, match="name the model, whose code does it"):
        widepack.update(path, {"m1": paths[2]})
    with pytest.raises(MemberMismatch, match="name the model, whose code does it"):
        widepack.append(path, [paths[2]])
    ens.swap(1, paths[2], model=make)
    torch.testing.assert_close(ens(X)[1], alone(make, paths[2])(X))
    widepack.append(path, [paths[2]], model=make)
    torch.testing.assert_close(widepack.load(path)(X)[2], alone(make, paths[2])(X))
    fresh = make()
    fresh.load_state_dict(ens.state_dict(0))
    torch.testing.assert_close(fresh(X), ens(X)[0])


def test_hooks_of_torch_convert_names_only(tmp_path: Path) -> None:
    def make() -> nn.Module:
        net = Net()
        parametrizations.weight_norm(net.a)
        return net

    paths = files(tmp_path, make)
    ens = widepack.load(built(tmp_path, paths, make))
    ens.swap(1, paths[2])
    torch.testing.assert_close(ens(X)[1], alone(make, paths[2])(X))


def test_a_state_that_the_model_would_change_is_not_given(tmp_path: Path) -> None:
    ens = widepack.load(built(tmp_path, files(tmp_path, Doubles), Doubles))
    with pytest.raises(UsageError, match="member m0: load_state_dict of the model changes state dicts"):
        ens.state_dict(0)
    assert sorted(ens.stored_state(0)) == ["a.bias", "a.weight"]


def test_extra_state_that_forward_reads_is_named(tmp_path: Path) -> None:
    paths = files(tmp_path, Scaled, lambda m: setattr(m, "scale", 3.0))
    path = built(tmp_path, paths, Scaled)
    words = r"its extra state \(_extra_state\) differs from that of the artifact's members, and forward"
    with pytest.raises(MemberMismatch, match=f"member m2: {words}"):
        widepack.append(path, [paths[2]], model=Scaled)
    with pytest.raises(MemberMismatch, match=f"member m1: {words}"):
        widepack.update(path, {"m1": paths[2]}, model=Scaled)


def test_extra_state_that_forward_does_not_read(tmp_path: Path) -> None:
    paths = files(tmp_path, Counted, lambda m: setattr(m, "scale", 3.0))
    path = built(tmp_path, paths, Counted)
    widepack.append(path, [paths[2]], model=Counted)
    ens = widepack.load(path)
    torch.testing.assert_close(ens(X)[2], alone(Counted, paths[2])(X))
    assert ens.state_dict(2)["_extra_state"] == {"scale": 3.0}


def test_tensors_of_extra_state_are_named(tmp_path: Path) -> None:
    paths = files(tmp_path, Shifted)
    path = built(tmp_path, paths, Shifted)
    words = r"constants that differ from member to member \(shift\). They are the extra state"
    for model in (None, Shifted):
        with pytest.raises(MemberMismatch, match=words):
            widepack.load(path).swap(1, paths[2], model=model)
        with pytest.raises(MemberMismatch, match=words):
            widepack.append(path, [paths[2]], model=model)
