"""Tests common code that finds the parts of a module by their class, with a fused module."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.optim.swa_utils import AveragedModel, update_bn

import widepack
from widepack import UsageError

X = torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(5))


def net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout2d(0.4), nn.Flatten(), nn.Linear(64, 2)
    )


def members() -> list[nn.Module]:
    made = []
    for i in range(3):
        torch.manual_seed(i)
        made.append(net())
    return made


@pytest.fixture(scope="module")
def fused() -> widepack.Fused:
    return widepack.fuse(members(), X)


def norms_rest(module: nn.Module) -> None:
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.eval()
            for p in part.parameters():
                p.requires_grad_(False)


def test_frozen_batch_norms(fused: widepack.Fused) -> None:
    """The usual code of fine-tuning: norms in eval mode, everything else in train mode."""
    found, alone = copy.deepcopy(fused).train(), [m.train() for m in members()]
    every: list[nn.Module] = [found, *alone]
    for module in every:
        norms_rest(module)
        for part in module.modules():
            if isinstance(part, nn.Dropout2d):
                part.eval()
    torch.testing.assert_close(found(X), torch.stack([m(X) for m in alone]))
    found(X).square().sum().backward()
    assert found.get_submodule("1").weight.grad is None and found.get_submodule("0").weight.grad is not None
    assert found.get_buffer("1.num_batches_tracked").tolist() == [0, 0, 0]


def test_dropout_of_an_evaluation(fused: widepack.Fused) -> None:
    """The usual code of Monte Carlo dropout: all in eval mode, but dropout."""
    found = copy.deepcopy(fused).eval()
    assert torch.equal(found(X), found(X))
    for part in found.modules():
        if isinstance(part, nn.Dropout2d):
            part.train()
    first, second = found(X), found(X)
    assert not torch.equal(first, second)
    torch.testing.assert_close(
        torch.stack([found(X) for _ in range(400)]).mean(0), found.eval()(X), rtol=0.2, atol=0.2
    )


pruned: Callable[..., object] = prune.l1_unstructured
CHANGES: dict[str, Callable[[widepack.Fused], object]] = {
    "update_bn": lambda fused: update_bn([X], fused),
    "update_bn of an average": lambda fused: update_bn([X], AveragedModel(fused)),
    "update_bn by hand": lambda fused: setattr(fused.get_submodule("1"), "momentum", None),
    "a stride": lambda fused: setattr(fused.get_submodule("0"), "stride", (2, 2)),
    "another layer": lambda fused: fused.set_submodule("2", nn.Tanh()),
    "another layer by name": lambda fused: fused.add_module("2", nn.Tanh()),
    "a layer in a part": lambda fused: fused.get_submodule("0").add_module("more", nn.Tanh()),
    "a parametrization": lambda fused: parametrizations.weight_norm(fused.get_submodule("5"), "weight"),
    "pruning": lambda fused: pruned(fused.get_submodule("5"), "weight", 0.5),
    "an initialisation": lambda fused: cast("Any", fused.get_submodule("1")).reset_parameters(),
    "eps": lambda fused: setattr(fused.get_submodule("1"), "eps", 1.0),
    "p": lambda fused: setattr(fused.get_submodule("3"), "p", 0.9),
    "apply": lambda fused: fused.apply(lambda part: None),
    "apply of a part": lambda fused: fused.get_submodule("0").apply(lambda part: None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_without_effect_is_refused(change: str, fused: widepack.Fused) -> None:
    before = {name: value.clone() for name, value in fused.state_dict().items()}
    words = {"apply": "apply would call", "an initialisation": "the weights of all members"}.get(
        change.partition(" of ")[0], "captured with"
    )
    with pytest.raises(UsageError, match=words):
        CHANGES[change](fused)
    assert all(torch.equal(before[name], value) for name, value in fused.state_dict().items())


def test_the_old_weight_norm_is_refused(fused: widepack.Fused) -> None:
    with pytest.warns(FutureWarning), pytest.raises(UsageError, match="captured with"):
        nn.utils.weight_norm(copy.deepcopy(fused).get_submodule("5"), "weight")


@pytest.mark.parametrize("name", ["0", "1", "3"])
def test_a_part_is_not_called(name: str, fused: widepack.Fused) -> None:
    with pytest.raises(UsageError, match="is not called by itself"):
        fused.get_submodule(name)(X)


class OwnNorm(nn.BatchNorm2d):
    """Is a class of a user."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


def test_a_part_of_a_class_of_the_user() -> None:
    def make() -> nn.Module:
        return nn.Sequential(OwnNorm(3), nn.LayerNorm(6))

    fused = widepack.fuse([make() for _ in range(2)], X)
    assert isinstance(fused.get_submodule("0"), nn.BatchNorm2d) and not isinstance(
        fused.get_submodule("1"), nn.LayerNorm
    )
    assert "OwnNorm" in repr(fused)


def test_copies_and_files(fused: widepack.Fused) -> None:
    saved = io.BytesIO()
    torch.save(fused, saved)
    saved.seek(0)
    for other in (copy.deepcopy(fused), torch.load(saved, weights_only=False)):
        assert isinstance(other.get_submodule("1"), nn.BatchNorm2d) and repr(other) == repr(fused)
        other.load_state_dict(fused.state_dict())
    torch.testing.assert_close(other.eval()(X), copy.deepcopy(fused).eval()(X))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.factor = nn.Linear(6, 2), 2.0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x) * self.factor
        return y


def test_a_setting_of_the_member_itself() -> None:
    fused = widepack.fuse([Scaled() for _ in range(2)], X)
    for name, value in {"factor": 3.0, "fc": nn.Linear(6, 2)}.items():
        with pytest.raises(UsageError, match="a change would have no effect"):
            setattr(fused, name, value)
    fused.note = "mine"
    fused.loss = nn.MSELoss()
    fused.fc.label = "head"
    assert fused.note == "mine" and fused.fc.label == "head"
    fused.fc.bias = nn.Parameter(torch.ones(2, 2))
    assert torch.equal(fused.member(0).get_parameter("fc.bias"), torch.ones(2))
