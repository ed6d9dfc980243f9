"""Tests the op `member_products`: answers, derivatives, operands, and the plans that use it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import widepack
from widepack.ir import ops
from widepack.kernels import member_products
from widepack.kernels.checks.require import OperandError

OP = torch.ops.widepack.member_products
LARGE = (130, 190, 170)  # rows, inputs, outputs of a product that runs through oneDNN


def operands(
    members: int,
    rows: int,
    inputs: int,
    outputs: int,
    of_all: bool = False,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows + 3 * inputs + 7 * outputs)
    shapes = (1 if of_all else members, rows, inputs), (members, outputs, inputs), (members, outputs)
    return tuple(torch.randn(s, generator=generator, dtype=dtype) for s in shapes)  # type: ignore[return-value]


def reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = x.double() @ weight.double().mT
    return y if bias is None else y + bias.double().unsqueeze(1)


def close(y: Tensor, expected: Tensor, inputs: int) -> None:
    error = (y.double() - expected).abs().max()
    assert error <= 4 * torch.finfo(y.dtype).eps * inputs**0.5 * expected.abs().max()


def test_the_large_sizes_are_large() -> None:
    assert LARGE[0] * LARGE[1] * LARGE[2] >= member_products.LEAST
    assert min(LARGE) >= member_products.NARROW


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("of_all", [False, True], ids=["each", "shared"])
@pytest.mark.parametrize("sizes", [(5, 4, 6), LARGE, (0, 4, 6)], ids=["small", "large", "empty"])
def test_answers_and_derivatives_are_those_of_the_product(
    sizes: tuple[int, int, int], of_all: bool, biased: bool
) -> None:
    x, weight, bias = (v.requires_grad_() for v in operands(3, *sizes, of_all))
    y = OP(x, weight, bias if biased else None)
    assert y.is_contiguous()
    double = [v.detach().double().requires_grad_() for v in (x, weight, bias)]
    expected = reference(double[0], double[1], double[2] if biased else None)
    if not expected.numel():
        assert y.shape == expected.shape
        return
    close(y, expected, sizes[1])
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    torch.autograd.backward(y, g)
    torch.autograd.backward(expected, g.double())
    for own, exact in zip((x, weight, bias), double):
        assert (own.grad is None) == (exact.grad is None)
        if own.grad is not None and exact.grad is not None:
            close(own.grad, exact.grad, max(sizes) * 3)


@settings(max_examples=60, deadline=None)
@given(
    members=st.integers(1, 4),
    sizes=st.tuples(*[st.sampled_from((1, 3, 64, 65, 130, 260))] * 3),
    of_all=st.booleans(),
    layout=st.sampled_from(("rows", "columns", "gaps", "gaps of columns")),
)
def test_any_sizes_and_memory_orders(
    members: int, sizes: tuple[int, int, int], of_all: bool, layout: str
) -> None:
    x, weight, bias = operands(members, *sizes, of_all)
    if layout == "columns":
        weight = weight.mT.contiguous().mT
    elif layout == "gaps":
        weight = torch.cat([weight, weight], 2)[..., : sizes[1]]
    elif layout == "gaps of columns":
        weight = torch.cat([weight.mT, weight.mT], 2).mT[:, : sizes[2]]
    close(OP(x, weight, bias), reference(x, weight, bias), sizes[1])


def test_derivatives_have_derivatives() -> None:
    for of_all in (False, True):
        values = [v.requires_grad_() for v in operands(2, 3, 4, 5, of_all, torch.float64)]
        assert torch.autograd.gradcheck(OP, values)
        assert torch.autograd.gradgradcheck(OP, values)


def test_a_bias_of_one_number_in_memory_is_read_by_its_stride() -> None:
    """oneDNN ignores strides: it read the numbers behind the one."""
    x, weight, _ = operands(2, *LARGE)
    numbers = torch.arange(1000.0)
    bias = numbers[:1].expand(2, weight.shape[1])
    close(OP(x, weight, bias), reference(x, weight, bias), x.shape[2])


def test_infinite_and_missing_numbers_stay() -> None:
    x, weight, bias = operands(2, *LARGE)
    x[0, 0, 0], x[1, 2, 3] = float("inf"), float("nan")
    y = OP(x, weight, bias)
    assert y[1, 2].isnan().all()
    assert not y[0, 0].isfinite().any()
    assert y[0, 1:].isfinite().all()


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((2, 5, 4), (3, 6, 4), (3, 6)), "x is for 2 members; 3 are needed"),
        (((3, 5, 3), (3, 6, 4), (3, 6)), "x is"),
        (((3, 5, 4), (3, 6, 4), (3, 5)), "bias is"),
        (((3, 5, 4), (6, 4), (3, 6)), "weight"),
    ],
)
def test_operands_of_other_sizes_are_refused(shapes: Any, message: str) -> None:
    with pytest.raises(OperandError, match=message):
        ops.function(member_products.PRODUCTS)(*(torch.zeros(s) for s in shapes))


def network(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(96, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3)
    )


def used(fused: Any) -> set[str]:
    return {n.op for runner in fused.current_entry().runners for n in runner.program.nodes}


def test_large_layers_that_train_run_through_onednn() -> None:
    torch.manual_seed(0)
    models = [network(256).double().float() for _ in range(3)]
    fused = widepack.fuse(models, torch.randn(4, 96)).train()
    fused(torch.randn(4, 96))
    assert member_products.PRODUCTS not in used(fused)
    x = torch.randn(256, 96)
    y = fused(x)
    assert member_products.PRODUCTS in used(fused)
    y.square().mean().backward()
    for i, model in enumerate(models):
        exact = model.double()
        exact(x.double()).square().mean().div(3).backward()
        for name, p in exact.named_parameters():
            assert p.grad is not None
            found = fused.get_parameter(name).grad
            assert found is not None
            close(found[i], p.grad, 10_000)


def test_narrow_layers_keep_their_strategies() -> None:
    fused = widepack.fuse([network(32) for _ in range(2)], torch.randn(512, 96)).train()
    fused(torch.randn(512, 96))
    assert member_products.PRODUCTS not in used(fused)


@pytest.mark.parametrize("strategy", ["wide", "loop"])
def test_a_requested_region_stays(strategy: str) -> None:
    models, x = [network(256) for _ in range(2)], torch.randn(256, 96)
    fused = widepack.fuse(models, x, strategy=strategy).train()
    fused(x)
    assert (member_products.PRODUCTS in used(fused)) == (strategy == "wide")


@pytest.mark.filterwarnings("ignore:`torch.jit.* is deprecated")  # torch.func, where it is imported
def test_transforms_run_other_ops() -> None:
    """`torch.func` and forward mode have no rules for widepack's own ops."""
    torch.manual_seed(0)
    models, x = [network(256) for _ in range(2)], torch.randn(256, 96)
    fused = widepack.fuse(models, x).train()
    weights = {name: p.detach() for name, p in fused.named_parameters()}

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        y: Tensor = torch.func.functional_call(fused, weights, (x,))
        return y.square().mean()

    mapped = torch.vmap(lambda x: torch.func.grad(loss)(weights, x))(x.expand(2, -1, -1))
    torch.autograd.backward(fused(x).square().mean())
    assert member_products.PRODUCTS in used(fused)
    directions = {name: torch.ones_like(p) for name, p in weights.items()}
    slope = torch.func.jvp(lambda w: loss(w, x), (weights,), (directions,))[1]
    expected = torch.zeros(())
    for name, p in fused.named_parameters():
        assert p.grad is not None
        torch.testing.assert_close(mapped[name][1], p.grad, rtol=1e-4, atol=1e-6)
        expected = expected + p.grad.sum()
    torch.testing.assert_close(slope, expected, rtol=1e-3, atol=1e-4)


def test_autocast_runs_other_ops() -> None:
    models = [network(256) for _ in range(2)]
    x = torch.randn(256, 96)
    fused = widepack.fuse(models, x).train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = fused(x)
        expected = torch.stack([m(x) for m in models])
    assert y.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(y, expected, rtol=0.05, atol=0.02)
    torch.autograd.backward(y.float().square().mean())
    assert all(p.grad is not None and p.grad.isfinite().all() for p in fused.parameters())


class Patches(nn.Module):
    """A small convolution before large linear layers, as vision transformers have it."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 256, 8, 8)
        self.layers = nn.Sequential(nn.Linear(256, 1024), nn.Tanh(), nn.Linear(1024, 256), nn.Linear(256, 4))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(self.patches(x).flatten(2).mT)
        return y


def test_networks_of_mostly_linear_layers_run_wide() -> None:
    fused = widepack.fuse([Patches() for _ in range(4)], torch.randn(32, 3, 32, 32)).train()
    fused(torch.randn(32, 3, 32, 32))
    assert member_products.PRODUCTS in used(fused)
    assert "loop" not in used(fused)
