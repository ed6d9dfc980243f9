"""Members that were trained with fake quantization, with their observers off."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from loaded import built
from torch import nn
from torch.ao import quantization as qat

import widepack
from widepack.capture.patches import fake_quantize

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*reduce_range.*:UserWarning")
X = torch.randn(9, 4, generator=torch.Generator().manual_seed(5)) * 3


def qconfig(fused: bool, per_channel: bool) -> qat.QConfig:
    kind: Any = qat.FusedMovingAvgObsFakeQuantize if fused else qat.FakeQuantize
    of_weight: Any = (
        qat.MovingAveragePerChannelMinMaxObserver if per_channel else qat.MovingAverageMinMaxObserver
    )
    scheme = torch.per_channel_symmetric if per_channel else torch.per_tensor_symmetric
    return qat.QConfig(  # type: ignore[no-untyped-call]
        activation=kind.with_args(
            observer=qat.MovingAverageMinMaxObserver, quant_min=0, quant_max=127, dtype=torch.quint8
        ),
        weight=kind.with_args(
            observer=of_weight, quant_min=-128, quant_max=127, dtype=torch.qint8, qscheme=scheme
        ),
    )


def make(config: qat.QConfig, seed: int = 0, observe: bool = False) -> nn.Module:
    torch.manual_seed(seed)
    net: Any = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)).train()
    net.qconfig = config
    prepared: nn.Module = qat.prepare_qat(net)  # type: ignore[no-untyped-call]
    prepared(torch.randn(64, 4))
    if not observe:
        prepared.apply(qat.disable_observer)
    return prepared


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize(
    ("fused", "per_channel"), [(True, True), (False, True), (True, False), (False, False)]
)
def test_a_build_answers_as_each_member(tmp_path: Path, fused: bool, per_channel: bool) -> None:
    config = qconfig(fused, per_channel)
    members = [make(config, i).eval() for i in range(2)]
    path = built(tmp_path, lambda: make(config).eval(), members, "input=float32[B,4]")
    answers = widepack.load(path)(X)
    for y, member in zip(answers, members, strict=True):
        torch.testing.assert_close(y, member(X).detach(), atol=1e-6, rtol=1e-6)


@pytest.mark.extended
@pytest.mark.parametrize("fused", [True, False])
def test_fake_quantization_trains_as_each_member_alone(fused: bool) -> None:
    members = [make(qconfig(fused, True), i) for i in range(2)]
    alone, wide = copy.deepcopy(members), widepack.fuse(members, X)

    def train(model: nn.Module, count: int | None = None) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(5):
            x = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            y = model(x)
            each = [y] if count is None else [y[i] for i in range(count)]
            torch.stack([(v - 1).square().mean() for v in each]).sum().backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    train(wide, 2)
    for member, trained in zip(alone, wide.unfuse(), strict=True):
        before = {name: p.detach().clone() for name, p in member.named_parameters()}
        train(member)
        for name, p in trained.named_parameters():
            want = member.get_parameter(name).detach()
            assert not torch.allclose(before[name], want, atol=1e-4)
            torch.testing.assert_close(p.detach(), want, atol=1e-6, rtol=1e-5)


def test_fake_quantization_that_is_off_is_left_out() -> None:
    members = [make(qconfig(True, True), i).eval() for i in range(2)]
    for member in members:
        member.apply(qat.disable_fake_quant)
    wide = widepack.fuse(members, X)
    with torch.no_grad():
        for y, member in zip(wide(X), members, strict=True):
            torch.testing.assert_close(y, member(X), atol=1e-6, rtol=1e-6)


def test_members_that_observe_are_refused_with_the_way_out() -> None:
    members = [make(qconfig(True, True), i, observe=True).eval() for i in range(2)]
    with pytest.raises(widepack.CaptureError, match="since 0.weight_fake_quant observes") as caught:
        widepack.fuse(members, X)
    assert "--state" not in str(caught.value)
    assert "model.apply(torch.ao.quantization.disable_observer)" in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_plain_ops_are_those_of_torch(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    for _ in range(20):
        scale = torch.rand(6, generator=draw) * 0.1 + 0.001
        zero = torch.randint(0, 120, (6,), generator=draw, dtype=torch.int32)
        x = torch.randn(6, 50, generator=draw, dtype=dtype) * 5
        x[:, :9] = (torch.randint(-20, 20, (6, 9), generator=draw) + 0.5) * scale[:, None]  # ties
        x[0, 9:13] = torch.tensor([float("inf"), -float("inf"), float("nan"), 1e30])
        for call, ours, options in (
            (torch.fake_quantize_per_channel_affine, fake_quantize.per_channel, (scale, zero, 0, 0, 127)),
            (
                torch.fake_quantize_per_tensor_affine,
                fake_quantize.per_tensor,
                (scale[:1], zero[:1], -128, 127),
            ),
        ):
            given, mine = (x.clone().requires_grad_() for _ in range(2))
            y, t = ours(mine, *options), call(given, *options)
            assert torch.equal(y, t)
            y.sum().backward()
            t.sum().backward()  # type: ignore[no-untyped-call]
            assert mine.grad is not None and given.grad is not None and torch.equal(mine.grad, given.grad)
