"""Tests comparisons that cannot run, which give an error of widepack with a solution, and gradients of zero
but for rounding: of a bias whose terms cancel in a norm after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import widepack
from widepack.errors import VerificationError
from widepack.fused.gradients import ExactGradients, Gradients, compare_gradients, terms_of
from widepack.kernels import onednn


class Bounds(nn.Module):
    """Calls `linspace`, which has no derivative by its bounds in torch."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.Parameter(torch.rand(())), nn.Parameter(torch.rand(()) + 2)
        self.weight = nn.Parameter(torch.rand(8))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + torch.linspace(self.low, self.high, 8)


class Noise(nn.Module):
    """Needs standard deviations as input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + torch.normal(self.weight * 0, x)


class NoiseOfWholeNumbers(Noise):
    """Needs whole numbers as input. Drawn inputs are not valid ones."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.where(x == x.round(), x, -1.0))


class Statistics(nn.Module):
    """Returns all results of a batch norm. Statistics of the batch exist only in training."""

    def __init__(self, training: bool) -> None:
        super().__init__()
        self.weight, self.bias, self.batch = (
            nn.Parameter(torch.rand(8)),
            nn.Parameter(torch.rand(8)),
            training,
        )
        self.register_buffer("mean", torch.randn(8))
        self.register_buffer("var", torch.rand(8) + 0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        statistics = (None, None) if self.batch else (self.mean, self.var)
        found: tuple[Tensor, ...] = torch.ops.aten.native_batch_norm(
            x, self.weight, self.bias, *statistics, self.batch, 0.1, 1e-5
        )
        return found


def test_an_op_without_a_derivative() -> None:
    """The members can be called without derivatives, and so can the fused module."""
    members = [Bounds() for _ in range(3)]
    x = torch.randn(4, 8)
    fused = widepack.fuse(members, x)
    torch.testing.assert_close(fused(x), torch.stack([m(x) for m in members]))
    fused(x).sum().backward()
    assert all(p.grad is None or not p.grad.any() for n, p in fused.named_parameters() if n != "weight")


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("training", [True, False])
def test_drawn_inputs_stay_within_the_range_of_the_sample(training: bool) -> None:
    """A standard deviation is not negative."""
    torch.manual_seed(0)
    x = torch.rand(4, 8)
    fused = widepack.fuse([Noise().train(training) for _ in range(3)], x)
    assert fused(x).shape == fused.each(x.expand(3, 4, 8)).shape == (3, 4, 8)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("draw", [
    lambda mean, std: torch.normal(mean, std),
    lambda mean, std: torch.normal(mean=mean, std=std),
    lambda mean, std: torch.poisson(input=mean),
    lambda mean, std: torch.normal(1.0, 2.0, mean.shape) * std,
])  # fmt: skip  # one line a draw
def test_draws_without_a_derivative(draw: Callable[[Tensor, Tensor], Tensor], training: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean, self.std = nn.Parameter(torch.rand(8) + 1), nn.Parameter(torch.rand(8))

        def forward(self, x: Tensor) -> Tensor:
            return draw(self.mean + 0 * x, self.std + 0 * x) + self.mean**2

    fused = widepack.fuse([Net().train(training) for _ in range(2)], torch.randn(4, 8), dropout="on")
    fused(torch.randn(4, 8)).sum().backward()
    mean = fused.get_parameter("mean")
    torch.testing.assert_close(mean.grad, 8 * mean.detach())


def test_members_that_refuse_drawn_inputs() -> None:
    x = torch.randint(0, 3, (4, 8)).float()
    members = [NoiseOfWholeNumbers() for _ in range(3)]
    torch.manual_seed(0)
    with pytest.raises(VerificationError, match="cannot be compared .*std >= 0.0.*\n.*validate=False"):
        widepack.fuse(members, x)(x)
    assert widepack.fuse(members, x, validate=False)(x).shape == (3, 4, 8)


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("training", [True, False])
def test_statistics_of_a_batch_norm_are_results(training: bool) -> None:
    x = torch.randn(4, 8)
    members = [Statistics(training) for _ in range(3)]
    for wide, modules in zip(widepack.fuse(members, x)(x), zip(*[m(x) for m in members])):
        torch.testing.assert_close(wide, torch.stack(modules))


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("rows", [2, 3])
def test_gradients_that_are_zero_but_for_rounding_are_accepted(rows: int) -> None:
    """The bias before a BatchNorm has no effect, and its gradient is the rounding error of large numbers."""
    for seed in range(2):
        torch.manual_seed(seed)
        models = [
            nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 3))
            for _ in range(4)
        ]
        widepack.fuse([m.train() for m in models], torch.randn(rows, 20)).train()(torch.randn(rows, 20))


@pytest.mark.parametrize(
    ("wide", "wide_exact", "right"),
    [
        (1.05, 1.0, True),  # rounding decided otherwise at a near-tie
        (1.05, 1.05, False),  # the program is wrong
        (1.5, 1.0, False),  # no near-tie changes so much
    ],
)
def test_a_near_tie_that_rounding_decides_is_no_failure(wide: float, wide_exact: float, right: bool) -> None:
    """The gradients differ in float32 alone."""
    own: Gradients = {"w": torch.ones(3), "b": torch.zeros(1)}
    exact = ExactGradients(
        0,
        lambda: {n: None if v is None else v.double() for n, v in own.items()},
        lambda: {"w": torch.full((2, 3), wide_exact, dtype=torch.float64)},
    )
    computed: Gradients = {"w": torch.full((3,), wide), "b": torch.zeros(1)}
    if right:
        assert compare_gradients(0, computed, own, own, exact) == {"w"}
    else:
        with pytest.raises(VerificationError, match="the gradient of w of member 0 differs"):
            compare_gradients(0, computed, own, own, exact)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("own_value", [1.0, torch.nan])
def test_a_gradient_that_is_not_finite_is_refused(value: float, own_value: float) -> None:
    """Also where another gradient of the member leaves its dtype, and float64 has it."""
    own: Gradients = {"w": torch.ones(3), "b": torch.tensor([own_value])}
    exact = ExactGradients(
        0,
        lambda: {"w": torch.ones(3, dtype=torch.float64), "b": torch.ones(1, dtype=torch.float64)},
        lambda: {"w": torch.ones(2, 3, dtype=torch.float64), "b": torch.ones(2, 1, dtype=torch.float64)},
    )
    assert compare_gradients(0, {"w": torch.ones(3), "b": torch.ones(1)}, own, own, exact) == set()
    with pytest.raises(VerificationError, match="the gradient of w of member 0 differs"):
        compare_gradients(0, {"w": torch.tensor([1, value, 1]), "b": torch.ones(1)}, own, own, exact)


def test_a_kernel_of_float32_that_is_wrong_by_little_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64 another kernel runs, so equal gradients there prove nothing. Other inputs differ again."""
    right = onednn.linear

    def wrong(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return right(x, weight, bias) * (1.0 if torch.is_grad_enabled() else 1.03)

    monkeypatch.setattr(onednn, "linear", wrong)
    members = [nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)) for _ in range(2)]
    with pytest.raises(VerificationError, match="differs from its module's"):
        widepack.fuse(members, torch.randn(128, 256))


def test_shared_weights_have_an_error_of_widepack_too() -> None:
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1.0

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 2

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.head(Scaled.apply(self.trunk(x)))  # type: ignore[no-untyped-call]
            return y

    first = Net()
    other = Net()
    other.trunk.load_state_dict(first.trunk.state_dict())
    with pytest.raises(VerificationError):
        widepack.fuse([first, other], torch.randn(3, 4), share=["trunk.*"])


# ---------------------------------------------------------------- gradients that are zero but for rounding


def module(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))


def gradients(dtype: torch.dtype, seed: int) -> tuple[Gradients, dict[str, float]]:
    net, x = module(seed).to(dtype), torch.randn(4096, 4, generator=torch.Generator().manual_seed(seed))
    names = [n for n, _ in net.named_parameters()]
    with terms_of(net, names) as terms:
        ((net(x.to(dtype)) * 300 * x[:, :1].to(dtype)).sum()).backward()
    return {n: p.grad for n, p in net.named_parameters()}, dict(terms)


@pytest.mark.parametrize("seed", range(8))
def test_a_gradient_is_compared_with_the_size_of_its_terms(seed: int) -> None:
    own, _ = gradients(torch.float32, seed)
    exact, terms = gradients(torch.float64, seed)
    bias, truth = own["0.bias"], exact["0.bias"]
    assert bias is not None and truth is not None
    assert float(truth.abs().max()) < 1e-9 * terms["0.bias"]

    def compare(error: float) -> None:
        wide: Gradients = {**own, "0.bias": truth.float() + error}
        small: Gradients = {"0.bias": bias}  # no neighbour hides it
        compare_gradients(0, wide, small, small, ExactGradients(0, lambda: {"0.bias": truth}, dict, terms))

    compare(10 * torch.finfo(torch.float32).eps * terms["0.bias"])
    with pytest.raises(VerificationError, match=r"gradient of 0\.bias"):
        compare(terms["0.bias"] / 4096)  # one term of the sum is lost


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.extended) for s in range(1, 8))])
@pytest.mark.parametrize("dropout", [0.0, pytest.param(0.3, marks=pytest.mark.extended)])
def test_fuse_takes_biases_before_norms(seed: int, dropout: float) -> None:
    def make(number: int) -> nn.Module:
        torch.manual_seed(number)
        return nn.Sequential(
            nn.Conv2d(3, 8, 3),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Flatten(),
            nn.Linear(288, 4),
        ).train()

    x = torch.rand(32, 3, 8, 8)
    fused = widepack.fuse([make(10 * seed + i) for i in range(3)], x)
    fused.train()
    fused(x)
