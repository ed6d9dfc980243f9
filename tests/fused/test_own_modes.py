"""Tests of fused members whose own `train()` or `eval()` does more than set the mode."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import widepack
from checkpoints.test_eval_mode import Average, Cached, Deployed, Frozen, LowRank, Scaled

X = torch.linspace(-2, 3, 20).reshape(5, 4)


def seeded(make: Any, count: int = 2) -> list[nn.Module]:
    members = []
    for i in range(count):
        torch.manual_seed(i)
        members.append(make())
    return members


class Fast(nn.Linear):
    """Replaces a method in eval mode."""

    def __init__(self) -> None:
        super().__init__(4, 3)

    def train(self, mode: bool = True) -> Fast:
        super().train(mode)
        self.compute = self.slow if mode else self.fast
        return self

    def slow(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)

    def fast(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, 2 * self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x)


def answers(members: list[nn.Module]) -> Tensor:
    with torch.no_grad():
        return torch.stack([m(X) for m in members])


@pytest.mark.parametrize("make", [Average, Scaled])
def test_an_eval_that_changes_answers_is_refused_after_training(make: Any) -> None:
    fused = widepack.fuse(seeded(make), X)
    before = fused(X)
    with pytest.raises(widepack.UsageError, match=rf"eval\(\) of {make.__name__} changes"):
        fused.eval()
    assert fused.training and torch.equal(fused(X), before)
    evaluated = [m.eval() for m in fused.unfuse()]  # the way out
    torch.testing.assert_close(widepack.fuse(evaluated, X)(X), answers([m.eval() for m in seeded(make)]))


@pytest.mark.parametrize("make", [LowRank, Deployed, Cached])
def test_an_eval_that_keeps_the_answers_is_followed(make: Any) -> None:
    fused = widepack.fuse(seeded(make), X)
    torch.testing.assert_close(fused.eval()(X), answers([m.eval() for m in seeded(make)]))
    torch.testing.assert_close(fused.train()(X), answers(seeded(make)))


@pytest.mark.parametrize("make", [LowRank, Cached])
def test_members_that_were_fused_in_eval_mode_do_not_train_otherwise(make: Any) -> None:
    fused = widepack.fuse([m.eval() for m in seeded(make)], X)
    with pytest.raises(widepack.UsageError, match=rf"train\(\) of {make.__name__} changes"):
        fused.train()
    assert not fused.training


def test_an_eval_that_replaces_a_method_is_refused() -> None:
    with pytest.raises(widepack.UsageError, match=r"eval\(\) of Fast changes"):
        widepack.fuse([m.train() for m in seeded(Fast)], X).eval()


def test_a_norm_that_train_keeps_in_eval_mode_stays_so() -> None:
    members = [m.train() for m in seeded(Frozen)]
    fused = widepack.fuse(members, X)
    fused.eval()
    fused.train()
    torch.testing.assert_close(fused(X), answers(members))
    kept = [m.get_buffer("norm.running_mean") for m in fused.unfuse()]
    assert all(torch.equal(mean, torch.zeros(4)) for mean in kept)


class Holder(nn.Module):
    """A network with a part whose own `train()` or `eval()` does more, below a part of torch."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.body = nn.Sequential(make(), nn.Dropout(0.0))
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.body(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("of", ["body", "body.0", "norm"])
@pytest.mark.parametrize("mode", [True, False])
def test_the_mode_of_a_part_follows_the_part_of_the_members(of: str, mode: bool) -> None:
    members = [m.train(not mode) for m in seeded(lambda: Holder(Frozen))]
    fused = widepack.fuse(members, X)
    fused = pickle.loads(pickle.dumps(copy.deepcopy(fused)))
    for module in (fused, *members):
        module.get_submodule(of).train(mode)
        assert module.get_submodule("body.0.norm").training is False
    own = {path: part.training for path, part in members[0].named_modules()}
    assert {path: part.training for path, part in fused.named_modules()} == own
    torch.testing.assert_close(fused(X), answers(members))


@pytest.mark.parametrize("of", ["body", "body.0"])
def test_a_part_whose_own_eval_does_more_than_set_modes_is_refused(of: str) -> None:
    fused = widepack.fuse([m.train() for m in seeded(lambda: Holder(Average))], X)
    with pytest.raises(widepack.UsageError, match=r"eval\(\) of Average, a part .* changes inner.weight"):
        fused.get_submodule(of).eval()
    for part in fused.get_submodule(of).modules():  # the way out
        part.training = False
    fused(X)


def test_the_mode_of_all_parts_also_reaches_a_module_that_was_added() -> None:
    fused = widepack.fuse([m.train() for m in seeded(lambda: Holder(LowRank))], X)
    fused.extra = nn.Sequential(nn.Dropout())
    assert not any(part.training for part in fused.eval().modules())
    torch.testing.assert_close(fused(X), answers([m.eval() for m in seeded(lambda: Holder(LowRank))]))
