"""Compares fused training in bfloat16 by autocast, with accumulated gradients, and of members that take
a derivative in forward, with each member alone.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fusing import Cnn, Mlp, Transformer, copies, draw, ids, members, same_gradients, stacked, train
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import widepack
from widepack import fuse

STEPS = 20


class Series(nn.Module):
    """A GRU and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(4, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])  # type: ignore[no-any-return]


SHAPES: dict[Any, tuple[int, ...]] = {Mlp: (8, 4), Cnn: (8, 3, 6, 6), Series: (8, 5, 4), Transformer: (4, 5)}


def inputs(model: Any, step: int, dtype: torch.dtype) -> Tensor:
    """Returns the inputs of three members."""
    shape = (3, *SHAPES[model])
    return ids(*shape, seed=step) if model is Transformer else draw(*shape, seed=step, dtype=dtype)


def loss(answers: Tensor, step: int) -> Tensor:
    """Returns the mean loss of one member: answers [*, classes]."""
    flat = answers.flatten(0, -2)
    return cross_entropy(
        flat.float() if answers.dtype == torch.bfloat16 else flat, ids(len(flat), seed=step) % 3
    )


def autocast(enabled: bool) -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled)


def train_alone(modules: list[Any], model: Any, dtype: torch.dtype, mixed: bool, parts: int = 1) -> Tensor:
    """Returns the weights and statistics of members that were trained one after the other, as one vector."""
    trained = [m.train().to(dtype) for m in copies(modules)]
    for i, module in enumerate(trained):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
        for step in range(STEPS):
            optimizer.zero_grad()
            for part in range(parts):
                with autocast(mixed):
                    value = loss(module(inputs(model, step + 100 * part, dtype)[i]), step + part) / parts
                torch.autograd.backward(value)
            optimizer.step()
    return vector(trained)


def train_fused(modules: list[Any], model: Any, dtype: torch.dtype, mixed: bool, parts: int = 1) -> Tensor:
    fused = widepack.fuse([m.train() for m in copies(modules)], inputs(model, 0, dtype)[0], validate=False)
    optimizer = torch.optim.SGD(fused.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(parts):
            with autocast(mixed):
                answers = fused.each(inputs(model, step + 100 * part, dtype))
                total = torch.stack([loss(y, step + part) for y in answers]).sum() / parts
            torch.autograd.backward(total)
        optimizer.step()
    return vector(fused.unfuse())


def vector(modules: list[Any]) -> Tensor:
    values = [v.double().flatten() for m in modules for v in m.state_dict().values() if v.is_floating_point()]
    return torch.cat(values)


def rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize(
    ("model", "parts"),
    [(Mlp, 1), (Cnn, 1), (Cnn, 4), (Series, 1), pytest.param(Transformer, 1, marks=pytest.mark.slow)],
    ids=lambda v: getattr(v, "__name__", v),
)
def test_twenty_steps_under_autocast_are_as_exact_as_those_of_each_member_alone(
    model: Any, parts: int
) -> None:
    """Both are compared with the members alone in float64. `parts`: the gradients of so many are added."""
    modules = members(model)
    right = train_alone(modules, model, torch.float64, False, parts)
    alone = rms(train_alone(modules, model, torch.float32, True, parts) - right)
    plain = rms(train_alone(modules, model, torch.float32, False, parts) - right)
    fused = rms(train_fused(modules, model, torch.float32, True, parts) - right)
    assert alone > 20 * plain  # autocast has an effect
    assert fused <= 1.5 * alone, (fused, alone)
    assert fused > 20 * plain  # and it has one on the fused module


@pytest.mark.extended
@pytest.mark.parametrize("model", [Mlp, Cnn])
def test_accumulated_gradients_are_those_of_each_member_alone(model: Any) -> None:
    modules = [m.train() for m in members(model, dtype=torch.float64)]
    fused = widepack.fuse(modules, inputs(model, 0, torch.float64)[0], validate=False)
    alone = copies(modules)
    optimizer = widepack.optim.AdamW(fused.parameters(), lr=[0.01, 0.02, 0.03])
    own = [torch.optim.AdamW(m.parameters(), lr=0.01 * (i + 1)) for i, m in enumerate(alone)]
    for step in range(3):
        for o in (optimizer, *own):
            o.zero_grad()
        for part in range(4):
            xs = inputs(model, 10 * step + part, torch.float64)
            torch.autograd.backward(torch.stack([loss(y, part) for y in fused.each(xs)]).sum() / 4)
            for m, x in zip(alone, xs):
                torch.autograd.backward(loss(m(x), part) / 4)
        same_gradients(fused, alone, rtol=1e-9, atol=1e-12)
        for o in (optimizer, *own):
            o.step()
    for name, value in stacked(alone).items():
        torch.testing.assert_close(fused.state_dict()[name], value, rtol=1e-8, atol=1e-8)
    assert not torch.equal(vector(alone), vector(modules))


class Image(nn.Module):
    """A norm that is a part under two names, and weights of 2, 3 and 4 dims."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv1d(4, 2, 2)
        self.trunk = nn.Sequential(self.conv, self.norm, nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.trunk(x).flatten(2))
        return y


@pytest.mark.extended
def test_a_norm_under_two_names_and_a_memory_format_train() -> None:
    members = [Image() for _ in range(2)]
    alone, batches = copies(members), [torch.randn(4, 3, 6, 6)] * 3
    fused = widepack.fuse(members, batches[0])
    nn.Sequential(fused).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    train(fused, batches)
    for member, again in zip(alone, fused.unfuse(), strict=True):
        train(member.to(memory_format=torch.channels_last), batches)
        for name, value in again.state_dict().items():
            torch.testing.assert_close(value, member.state_dict()[name], rtol=1e-4, atol=1e-6)


# ---------------------------------------------------------------- derivatives in forward


COUNT = 2
NORMS: dict[str, Any] = {
    "batch norm": lambda: nn.BatchNorm1d(8),
    "momentum of none": lambda: nn.BatchNorm1d(8, momentum=None),
    "no statistics": lambda: nn.BatchNorm1d(8, affine=False, track_running_stats=False),
    "images": lambda: nn.Sequential(nn.Unflatten(1, (2, 2, 2)), nn.BatchNorm2d(2), nn.Flatten()),
    "instance norm": lambda: nn.Sequential(nn.Unflatten(1, (2, 4)), nn.InstanceNorm1d(2), nn.Flatten()),
}


class Force(nn.Module):
    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(6, 8), norm(), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_(True)
        energy = self.outer(self.norm(self.inner(x)).tanh()).sum()
        return torch.autograd.grad(energy, x, create_graph=True)[0]


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("strategy", ["auto", "loop"])
@pytest.mark.parametrize("norm", NORMS)
def test_the_gradients_of_a_force_are_the_members(norm: str, strategy: str) -> None:
    torch.manual_seed(0)
    members = [Force(NORMS[norm]).double().train() for _ in range(COUNT)]
    fused = fuse(members, torch.randn(8, 6).double(), strategy=strategy)
    for rows in (8, 5):
        x = torch.randn(rows, 6).double()
        answers = fused(x)
        answers.square().sum().backward()
        for i, member in enumerate(members):
            expected = member(x)
            torch.testing.assert_close(answers[i], expected)
            expected.square().sum().backward()
    same_gradients(fused, members)
    for name, value in stacked(members).items():
        torch.testing.assert_close(fused.state_dict()[name], value)
