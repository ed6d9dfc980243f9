"""Tests each member's loss, and the weights that each member had at its best score."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
from fusing import Cnn, Mlp, draw, members
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import widepack
from widepack import UsageError, fuse

F64 = torch.float64
N, STEPS = 4, 7


class Two(nn.Module):
    """A model with a tuple as its answer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return self.a(x), {"b": self.b(x)}


def labels(*sizes: int) -> Tensor:
    return torch.randint(0, 3, sizes, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("form", ["one target", "a target each", "packed"])
def test_losses_and_gradients_are_those_of_each_member_alone(form: str) -> None:
    models, x, y = members(Mlp, N, dtype=F64), draw(5, 4, dtype=F64), labels(N, 5)
    fused = fuse(models, x, packed=form == "packed").train()
    targets = [y[0]] * N if form != "a target each" else list(y)
    given = widepack.each(y) if form == "a target each" else y[0]
    losses = fused.losses(cross_entropy, fused(x), given)
    losses.sum().backward()  # type: ignore[no-untyped-call]
    for i, model in enumerate(models):
        own = cross_entropy(model(x), targets[i])
        own.backward()  # type: ignore[no-untyped-call]
        torch.testing.assert_close(losses[i], own)
        for name, p in model.named_parameters():
            grad = fused.get_parameter(name).grad
            assert grad is not None and p.grad is not None
            torch.testing.assert_close(grad[i], p.grad)


def test_an_answer_of_several_tensors_reaches_the_function_as_a_member_returns_it() -> None:
    models, x = members(Two, N, dtype=F64), draw(5, 4, dtype=F64)
    fused = fuse(models, x)

    def loss(answer: tuple[Tensor, dict[str, Tensor]], weight: float) -> Tensor:
        return answer[0].square().mean() + weight * answer[1]["b"].mean()

    expected = torch.stack([loss(model(x), 0.5) for model in models])
    torch.testing.assert_close(fused.losses(loss, fused(x), 0.5), expected)


def test_each_member_has_its_own_function() -> None:
    models, x, y = members(Mlp, N, dtype=F64), draw(5, 4, dtype=F64), labels(5)
    fused = fuse(models, x)
    functions = [partial(cross_entropy, label_smoothing=i / N) for i in range(N)]
    expected = torch.stack([fn(model(x), y) for fn, model in zip(functions, models)])
    torch.testing.assert_close(fused.losses(functions, fused(x), y), expected)
    with pytest.raises(UsageError, match="fn is 3 functions .* one for each of the 4"):
        fused.losses(functions[:3], fused(x), y)


def test_losses_that_are_refused() -> None:
    fused, x = fuse(members(Mlp, N, dtype=F64), draw(5, 4, dtype=F64)), draw(5, 4, dtype=F64)
    y = labels(5)
    refused: list[tuple[Any, ...]] = [
        (lambda a, t: cross_entropy(a, t, reduction="none"), fused(x), y, "the function returned [5] for"),
        (cross_entropy, fused(x)[:3], y, "the answer is [3, 5, 3]; give one value for each of the 4"),
        (cross_entropy, fused(x), widepack.each(y), "a target is [5]; give one value for each of the 4"),
        (lambda a, t: 1.0, fused(x), y, "the function returned float for member 0"),
    ]
    for fn, answers, target, words in refused:
        with pytest.raises(UsageError) as error:
            fused.losses(fn, answers, target)
        assert words in str(error.value)


def best_alone(model: nn.Module, rate: float, x: Tensor, y: Tensor) -> tuple[float, dict[str, Tensor]]:
    """Trains a member alone, and returns its best score and the state that it had then. The last batch is
    that of the scores.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    best, state = math.inf, model.state_dict()
    for step in range(len(x) - 1):
        train_step(model, optimizer, x[step], y[step])
        with torch.no_grad():
            score = float(cross_entropy(model.eval()(x[-1]), y[-1]))
        if score < best:
            best, state = score, copy.deepcopy(model.state_dict())
    return best, state


def train_step(model: Any, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    model.train()
    optimizer.zero_grad()
    answers = model(x)
    loss = model.losses(cross_entropy, answers, y).sum() if answers.dim() == 3 else cross_entropy(answers, y)
    loss.backward()
    optimizer.step()


def test_each_member_has_the_weights_of_its_own_best_epoch() -> None:
    """Rates are so large that members get worse again, each in its own step. Member 2 is removed."""
    models = members(Cnn, N, dtype=F64)
    x, y = draw(STEPS + 1, 6, 3, 6, 6, dtype=F64), labels(STEPS + 1, 6)
    rates = [0.3, 1.0, 0.1, 3.0]
    fused = fuse(models, x[0]).train()
    optimizer = widepack.optim.SGD(fused.parameters(), lr=rates)
    best, steps, removed = widepack.BestMembers(fused), dict.fromkeys(range(N), -1), None
    for step in range(STEPS):
        train_step(fused, optimizer, x[step], y[step])
        fused.eval()
        with torch.no_grad():
            improved = best.update(fused.losses(cross_entropy, fused(x[-1]), y[-1]))
        steps.update(dict.fromkeys(improved, step))
        assert best.waited == {i: step - steps[i] for i in fused.original_numbers} | (
            {} if removed is None else {2: best.waited[2]}
        )
        if step == 4:
            (removed,) = fused.remove(2, optimizer=optimizer)
    best.restore()
    assert len(set(steps.values())) > 1 and removed is not None
    removed.load_state_dict(best.states[2])
    found = dict(zip(fused.original_numbers, fused.unfuse())) | {2: removed}
    for i, model in enumerate(models):
        rows = slice(0, STEPS) if i != 2 else slice(0, 5)
        inputs, targets = (torch.cat([t[rows], t[-1:]]) for t in (x, y))
        score, state = best_alone(model, rates[i], inputs, targets)
        assert best.scores[i] == pytest.approx(score)
        assert list(found[i].state_dict()) == list(state)
        for name, value in found[i].state_dict().items():
            torch.testing.assert_close(value, state[name])


def test_the_larger_score_may_be_better_and_nan_is_never() -> None:
    fused = fuse(members(Mlp, 3, dtype=F64), draw(2, 4, dtype=F64))
    best = widepack.BestMembers(fused, mode="max", device="cpu")
    before = {n: v.clone() for n, v in fused.state_dict().items()}
    assert best.update([0.5, math.nan, 0.1]) == [0, 2]
    with torch.no_grad():
        for p in fused.parameters():
            p.add_(1)
    assert best.update(torch.tensor([0.4, math.nan, 0.2])) == [2]
    assert best.scores == {0: 0.5, 2: pytest.approx(0.2)} and best.waited == {0: 1, 1: 2, 2: 0}
    best.restore()
    for name, value in fused.state_dict().items():
        assert torch.equal(value[0], before[name][0])
        assert torch.equal(value[1:], before[name][1:] + 1), "member 1 has no score, and stays as it is"


def test_what_is_refused() -> None:
    x = draw(2, 4, dtype=F64)
    models = members(Mlp, 3, dtype=F64)
    fused = fuse(models, x)
    best = widepack.BestMembers(fused)
    for scores, words in (([0.1], "each of the 3 members; got 1"), (torch.tensor(1.0), "got one number")):
        with pytest.raises(UsageError, match=words):
            best.update(scores)
    with pytest.raises(UsageError, match="mode is 'best'; it is min for a loss"):
        widepack.BestMembers(fused, mode="best")
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    shared = fuse(models, x, share=["layers.0.*"])
    with pytest.raises(UsageError, match="layers.0.weight trains and is one copy for all members"):
        widepack.BestMembers(shared)
    with pytest.raises(UsageError, match="layers.0.weight is one copy for all members, and the state has an"):
        shared.load_member(1, {n: v + 1 for n, v in models[1].state_dict().items()})
    with pytest.raises(UsageError, match="load_member: .*Missing key"):
        fused.load_member(1, {})
    with pytest.raises(UsageError, match="there is no member 3"):
        fused.load_member(3, models[0].state_dict())
    before = {n: v.clone() for n, v in fused.state_dict().items()}
    fused.load_member(1, models[0].state_dict())
    for name, value in fused.state_dict().items():
        assert torch.equal(value[[0, 2]], before[name][[0, 2]])
        assert torch.equal(value[1], models[0].state_dict()[name])
