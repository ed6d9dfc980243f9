"""Compares clipping for each member with torch, member by member."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from optim.stepping import N, numbers, of_member, parameters
from widepack import UsageError
from widepack.optim import (
    clip_grad_norm_,
)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf"), 3.0])
@pytest.mark.parametrize("most", [1.0, [0.5, 100.0, 2.0]], ids=["one", "each"])
def test_gradients_are_clipped_by_each_members_own_norm(norm_type: float, most: Any) -> None:
    params = parameters()
    unused = nn.Parameter(torch.zeros(N, 2))
    gradients = numbers(5)
    for g in gradients:
        g[1] *= 1e-3
    for p, g in zip(params, gradients):
        p.grad = g.clone()
    norms = clip_grad_norm_([*params, unused], most, norm_type)
    for i in range(N):
        alone = [nn.Parameter(p[i].clone()) for p in numbers(0)]
        for p, g in zip(alone, gradients):
            p.grad = g[i].clone()
        norm = torch.nn.utils.clip_grad_norm_(alone, of_member(most, i), norm_type)
        torch.testing.assert_close(norms[i], norm)
        for p, a in zip(params, alone):
            assert p.grad is not None and a.grad is not None
            torch.testing.assert_close(p.grad[i], a.grad)


def test_a_norm_that_is_not_finite_reaches_no_other_member() -> None:
    p = nn.Parameter(torch.zeros(3, 2))
    gradient = torch.tensor([[torch.inf, 0.0], [3.0, 4.0], [torch.nan, 1.0]])
    p.grad = gradient.clone()
    with pytest.raises(
        UsageError, match=r"the norm of member 0 is inf, and 1 others are not finite; no grad"
    ):
        clip_grad_norm_(p, 1.0, error_if_nonfinite=True)
    assert torch.equal(p.grad.nan_to_num(7), gradient.nan_to_num(7))
    norms = clip_grad_norm_(p, 1.0)
    torch.testing.assert_close(p.grad[1], torch.tensor([0.6, 0.8]), rtol=1e-5, atol=0)
    assert norms[1] == 5.0
    assert clip_grad_norm_([nn.Parameter(torch.zeros(2))], 1.0).shape == (0,)


def test_the_norm_may_be_the_text_inf() -> None:
    p = nn.Parameter(torch.zeros(2, 2))
    p.grad = torch.tensor([[1.0, -3.0], [2.0, 0.0]])
    assert clip_grad_norm_([p], 10.0, "inf").tolist() == [3.0, 2.0]


def test_messages() -> None:
    weight = nn.Parameter(torch.zeros(N, 2))
    weight.grad = torch.ones(N, 2)
    calls: list[tuple[Any, Any, Any, str]] = [
        ([weight], [1.0, 2.0], 2.0, "give a number of at least 0, or 3 of them"),
        ([weight], -1.0, 2.0, "max_norm is -1.0"),
        ([weight], "a", 2.0, "max_norm is 'a'"),
        ({"a": weight}, 1.0, 2.0, "parameters is a dict; give a tensor, or tensors as"),
        (nn.Linear(2, 2), 1.0, 2.0, "parameters is a Linear"),
        (["a"], 1.0, 2.0, "parameters has a str"),
        (2.0, 1.0, 2.0, "parameters is a float"),
        ([], 1.0, "two", "norm_type is 'two'; give a number such as 2.0, or 'inf'"),
    ]
    for params, most, norm_type, words in calls:
        with pytest.raises(UsageError) as found:
            clip_grad_norm_(params, most, norm_type)
        assert words in str(found.value) and "\n" not in str(found.value)
