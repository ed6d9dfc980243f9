"""Tests `max_pool2d` as maxima of slices: the numbers of torch's kernel, in the same memory order."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from widepack.ir.ops import direct
from widepack.kernels import pooling
from widepack.kernels.pooling import max_pool2d

PLAIN = torch.ops.aten.max_pool2d.default


@st.composite
def windows(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """Draws a window, a stride and a padding."""
    window = [draw(st.integers(1, 3)) for _ in range(2)]
    stride = draw(st.one_of(st.just([]), st.lists(st.integers(1, 4), min_size=1, max_size=2)))
    padding = [draw(st.integers(0, k // 2)) for k in window]
    return window, stride, padding


@settings(max_examples=60, deadline=None)
@given(
    call=windows(),
    shape=st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(3, 9), st.integers(3, 9)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    last=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_answer_is_that_of_torch(
    call: tuple[list[int], list[int], list[int]],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    last: bool,
    seed: int,
) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    x.view(-1)[seed % x.numel()] = (math.nan, math.inf, -math.inf)[seed % 3]
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(pooling, "LEAST", 0)
        patch.setattr(pooling, "LEAST_LAST", 0)
        y, want = max_pool2d(x, *call), PLAIN(x, *call)
    assert y.untyped_storage().nbytes() == y.nbytes or call[0] == [1, 1]
    assert y.dtype == want.dtype and y.shape == want.shape
    assert torch.equal(y.isnan(), want.isnan()) and torch.equal(y.nan_to_num(), want.nan_to_num())


@pytest.mark.parametrize("last", [True, False])
def test_the_memory_order_is_that_of_the_input(last: bool) -> None:
    order = torch.channels_last if last else torch.contiguous_format
    x = torch.randn(4, 64, 32, 34).contiguous(memory_format=order)
    with torch.inference_mode():
        y = max_pool2d(x, [2, 2])
    assert y.is_contiguous(memory_format=order) and torch.equal(y, PLAIN(x, [2, 2]))


def test_programs_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def maximum(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
        seen.append(a.dim())
        return a

    monkeypatch.setattr(torch, "maximum", maximum)
    x = torch.randn(4, 64, 32, 32)
    with torch.inference_mode():
        direct("aten.max_pool2d.default", ())(x, [2, 2])
    assert seen, "the op of a program is the replacement"


def test_gradients_are_those_of_torch_also_where_numbers_are_equal() -> None:
    x = torch.zeros(4, 64, 32, 32, requires_grad=True)
    max_pool2d(x, [2, 2]).sum().backward()  # type: ignore[no-untyped-call]
    other = torch.zeros(4, 64, 32, 32, requires_grad=True)
    PLAIN(other, [2, 2]).sum().backward()
    assert x.grad is not None and other.grad is not None and torch.equal(x.grad, other.grad)


@pytest.mark.parametrize(
    "call",
    [
        ([2, 2], [2, 2], [2, 2]),
        ([0, 2],),
        ([40, 40],),
        ([2, 2], [0, 0]),
        ([2, 2], [2, 2], [0, 0], [0, 0]),
        ([2, 2, 2],),
    ],
    ids=str,
)
def test_wrong_operands_are_refused_by_torch(call: tuple[Any, ...]) -> None:
    x = torch.randn(4, 64, 32, 32)
    with torch.inference_mode(), pytest.raises((RuntimeError, ValueError)):
        max_pool2d(x, *call)
