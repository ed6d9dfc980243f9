"""Tests common code that finds the parts of a module by their class, with a fused module."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
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
    for module in (found, *alone):
        norms_rest(module)
        for part in module.modules():
            if isinstance(part, nn.Dropout2d):
                part.eval()
    torch.testing.assert_close(found(X), torch.stack([m(X) for m in alone]))
    found(X).square().sum().backward()
    assert found.get_submodule("1").weight.grad is None and found.get_submodule("0").weight.grad is not None
    assert found.get_submodule("1").num_batches_tracked.tolist() == [0, 0, 0]


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


CHANGES: dict[str, Callable[[widepack.Fused], object]] = {
    "update_bn": lambda fused: update_bn([X], fused),
    "update_bn of an average": lambda fused: update_bn([X], AveragedModel(fused)),
    "momentum": lambda fused: setattr(fused.get_submodule("1"), "momentum", None),
    "p": lambda fused: setattr(fused.get_submodule("3"), "p", 0.9),
    "apply": lambda fused: fused.apply(lambda part: None),
    "apply of a part": lambda fused: fused.get_submodule("0").apply(lambda part: None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_without_effect_is_refused(change: str, fused: widepack.Fused) -> None:
    before = {name: value.clone() for name, value in fused.state_dict().items()}
    words = "apply would call" if "apply" in change else "was captured with"
    with pytest.raises(UsageError, match=words):
        CHANGES[change](fused)
    assert all(torch.equal(before[name], value) for name, value in fused.state_dict().items())


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
