"""Tests gradients that are zero but for rounding: of a bias whose terms cancel in a norm after it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import widepack
from widepack.errors import VerificationError
from widepack.fused.gradients import ExactGradients, Gradients, compare_gradients, terms_of


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
