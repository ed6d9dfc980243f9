"""Tests members that are frozen: nothing of them changes while the others train as before."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from fusing import Cnn, copies, draw, members, stacked
from torch import nn

import widepack
from widepack import UsageError, fuse

OPTIMIZERS: list[Any] = [
    lambda p: widepack.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    lambda p: widepack.optim.AdamW(p, lr=[0.01, 0.02, 0.03]),
    lambda p: widepack.optim.Adadelta(p, weight_decay=0.1),
    lambda p: widepack.optim.RMSprop(p, momentum=0.9, weight_decay=0.1),
    lambda p: widepack.optim.Adagrad(p, lr=[0.01, 0.02, 0.03]),
    lambda p: torch.optim.SGD(p, lr=0.1),
]


def train(fused: Any, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> None:
    for k in range(first, first + steps):
        optimizer.zero_grad()
        fused.each(draw(3, 4, 3, 6, 6, seed=k)).square().mean((1, 2)).sum().backward()
        optimizer.step()


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize(
    "make", OPTIMIZERS, ids=["sgd", "adamw", "adadelta", "rmsprop", "adagrad", "torch-sgd"]
)
def test_a_frozen_member_does_not_change_and_the_others_train_as_before(make: Any) -> None:
    modules = [m.train() for m in members(Cnn)]
    fused = fuse(modules, draw(4, 3, 6, 6), validate=False)
    reference = copy.deepcopy(fused)
    optimizer, usual = make(fused.parameters()), make(reference.parameters())
    train(fused, optimizer, 1)
    train(reference, usual, 1)
    before = {n: v.clone() for n, v in fused.state_dict().items()}
    assert fused.freeze(-1) is fused
    assert list(fused.frozen_members) == [2]
    train(fused, optimizer, 2, 1)
    train(reference, usual, 2, 1)
    for name, value in fused.state_dict().items():
        assert torch.equal(value[2], before[name][2]), name
        torch.testing.assert_close(value[:2], reference.state_dict()[name][:2])
        assert not torch.equal(value[:2], before[name][:2]), name
    assert all(p.grad is not None and not p.grad[2].any() for p in fused.parameters())
    fused.unfreeze()
    train(fused, optimizer, 1, 3)
    assert not fused.frozen_members
    assert all(not torch.equal(v[2], before[n][2]) for n, v in fused.state_dict().items())


@pytest.mark.extended
def test_gradients_of_inputs_flow_through_a_frozen_member() -> None:
    fused = fuse([m.train() for m in members(Cnn)], draw(4, 3, 6, 6), validate=False).freeze(0)
    x = draw(3, 4, 3, 6, 6).requires_grad_()
    fused.each(x).square().sum().backward()
    assert x.grad is not None and all(g.any() for g in x.grad)


@pytest.mark.extended
def test_eval_mode_copies_and_pickles_keep_what_is_frozen() -> None:
    modules = members(Cnn)
    fused = fuse(copies(modules), draw(4, 3, 6, 6), validate=False).freeze(1, 2)
    x = draw(4, 3, 6, 6)
    with torch.no_grad():
        torch.testing.assert_close(fused(x)[1], modules[1](x))
    for other in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        assert other.frozen_members == (1, 2)
        before = stacked(other.unfuse())
        other.train()
        train(other, widepack.optim.AdamW(other.parameters(), lr=0.1), 1)
        after = stacked(other.unfuse())
        assert all(torch.equal(after[n][1:], v[1:]) for n, v in before.items())
        assert all(not torch.equal(after[n][0], v[0]) for n, v in before.items())


def test_a_copy_keeps_the_marks_of_shared_weights() -> None:
    models = [nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)) for _ in range(3)]
    for m in models[1:]:
        m[0].load_state_dict(models[0][0].state_dict())
    fused = copy.deepcopy(fuse(models, torch.randn(2, 4), share=["0.*"], validate=False))
    with pytest.raises(UsageError, match="one weight for all members"):
        widepack.optim.SGD(fused.parameters(), lr=[0.1, 0.2, 0.3])


def test_messages() -> None:
    fused = fuse(members(Cnn), draw(4, 3, 6, 6), validate=False)
    with pytest.raises(UsageError, match="there is no member 3; there are 3"):
        fused.freeze(3)
    drops = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    passes = fuse(drops.eval(), draw(2, 4), n=3, dropout="on", validate=False)
    with pytest.raises(UsageError, match="none can be frozen"):
        passes.freeze(0)


def test_members_of_a_loaded_artifact_are_refused(tmp_path: Any) -> None:
    models = [nn.Linear(4, 2).eval() for _ in range(2)]
    x = draw(2, 4)
    fuse(models, x, validate=False).save(tmp_path / "ens.wide", pt2=False)
    ens = widepack.load(tmp_path / "ens.wide")
    for given, n in ((list(ens), None), (ens[0], 3)):
        with pytest.raises(UsageError) as found:
            fuse(given, x, n=n)
        assert "models[0] is member 0 of a loaded artifact, which is a program that does not train" in str(
            found.value
        )
    with pytest.raises(UsageError, match="models is a loaded artifact"):
        fuse(ens, x)
    for i, model in enumerate(models):
        model.load_state_dict(ens.state_dict(i))
    torch.testing.assert_close(fuse(models, x)(x), ens(x).clone())
