"""Tests wide layers as modules: extraction of members, training, copies, pickles, and repeated calls."""

from __future__ import annotations

import copy
import pickle
import pickletools

import pytest
import torch
from layer_cases import CASES
from torch import nn
from wide_layers import (
    FIRST,
    N,
    answers,
    assert_members,
    calls,
    members,
    stacked,
    wide_call,
    wide_layer_of,
)

from widepack import UsageError


@pytest.mark.parametrize(
    "name", [n if n in FIRST.values() else pytest.param(n, marks=pytest.mark.slow) for n in CASES]
)
def test_extracted_modules_equal_the_original_modules(name: str) -> None:
    alone = [m.eval() for m in members(CASES[name].make)]
    for m in alone:
        for p in list(m.parameters())[:1]:
            p.requires_grad_(False)
    wide_layer = wide_layer_of(alone)
    assert [n for n, _ in wide_layer.named_parameters()] == [n for n, _ in alone[0].named_parameters()]
    assert list(wide_layer.state_dict()) == list(alone[0].state_dict())
    for back, m in zip(wide_layer.to_modules(), alone, strict=True):
        assert type(back) is type(m) and repr(back) == repr(m) and back.training == m.training
        assert {k: v for k, v in vars(back).items() if isinstance(v, (int, float, str, tuple))} == {
            k: v for k, v in vars(m).items() if isinstance(v, (int, float, str, tuple))
        }
        for (n, p), (other, q) in zip(back.named_parameters(), m.named_parameters(), strict=True):
            assert (
                n == other
                and torch.equal(p, q)
                and p.requires_grad == q.requires_grad
                and p.data_ptr() != q.data_ptr()
            )
        for (n, b), (other, c) in zip(back.named_buffers(), m.named_buffers(), strict=True):
            assert n == other and torch.equal(b, c)
    args, kwargs = calls(CASES[name])[0]
    assert_members(
        stacked([answers(wide_layer.to_modules()[0], args, kwargs)[0]]),
        [answers(alone[0], args, kwargs)[0]],
        0.0,
    )


def test_extracted_modules_have_the_trained_weights() -> None:
    wide_layer = wide_layer_of(members(lambda: nn.BatchNorm1d(4)))
    before = wide_layer.to_modules()
    wide_layer.train()(torch.randn(N, 5, 4, dtype=torch.float64)).sum().backward()
    torch.optim.SGD(wide_layer.parameters(), 0.1).step()
    after = wide_layer.to_modules()
    for a, b in zip(after, before):
        assert not torch.equal(a.bias, b.bias)  # type: ignore[arg-type]
        assert not torch.equal(a.running_mean, b.running_mean)  # type: ignore[arg-type]
    assert torch.equal(torch.stack([a.bias for a in after]), wide_layer.bias)  # type: ignore[arg-type,misc]
    assert all(a.training for a in after)


def test_a_wide_layer_trains_as_its_modules() -> None:
    alone = members(lambda: nn.Conv1d(4, 6, 3))
    wide_layer = wide_layer_of(alone)
    wide, optimizers_of_members = (
        torch.optim.SGD(wide_layer.parameters(), 0.1),
        [torch.optim.SGD(m.parameters(), 0.1) for m in alone],
    )
    for _ in range(5):
        inputs = torch.randn(N, 2, 4, 7, dtype=torch.float64)
        wide.zero_grad()
        wide_layer(inputs).square().sum().backward()
        wide.step()
        for m, o, g in zip(alone, optimizers_of_members, inputs):
            o.zero_grad()
            m(g).square().sum().backward()
            o.step()
    for back, m in zip(wide_layer.to_modules(), alone):
        for p, q in zip(back.parameters(), m.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-11, atol=1e-11)


def test_a_wide_layer_is_a_module() -> None:
    """It can be copied, pickled, cast, nested in other modules and printed, and it has a state dict."""
    wide_layer = wide_layer_of(members(lambda: nn.Linear(4, 5)), "bmm")
    assert (
        repr(wide_layer) == "WideLinear(3 members, in_features=4, out_features=5, bias=True, strategy='bmm')"
    )
    inputs = torch.randn(N, 2, 4, dtype=torch.float64)
    wide_layer(inputs)
    for other in (copy.deepcopy(wide_layer), pickle.loads(pickle.dumps(wide_layer))):
        assert torch.equal(other(inputs), wide_layer(inputs)) and other.strategy == "bmm"
        assert other.weight is not wide_layer.weight
    fresh_one = wide_layer_of([nn.Linear(4, 5).double() for _ in range(N)])
    fresh_one.load_state_dict(wide_layer.state_dict())
    assert torch.equal(fresh_one(inputs), wide_layer(inputs))
    single = copy.deepcopy(wide_layer).float()
    assert (
        single(inputs.float()).dtype == torch.float32 and single.to_modules()[0].weight.dtype == torch.float32
    )
    net = nn.Sequential(wide_layer, nn.ReLU(), wide_layer_of(members(lambda: nn.Linear(5, 2))))
    assert net(inputs).shape == (N, 2, 2)
    assert "WideLinear(3 members, in_features=5" in repr(net)
    assert "embed_dim=8, num_heads=2, kdim=3" in repr(wide_layer_of([nn.MultiheadAttention(8, 2, kdim=3)]))
    assert "WideLSTM(1 members, 4, 6, num_layers=2" in repr(wide_layer_of([nn.LSTM(4, 6, 2)]))


def test_pickles_name_public_modules() -> None:
    wide_layer = wide_layer_of(members(lambda: nn.MultiheadAttention(4, 2)))
    names = {
        text for op, text, _ in pickletools.genops(pickle.dumps(wide_layer)) if op.name == "SHORT_BINUNICODE"
    }
    assert "widepack.primitives" in names
    assert not [
        n for n in names if isinstance(n, str) and n.startswith(("widepack.layers", "widepack.fused"))
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning"
)  # Dynamo traces the cached function
def test_a_compiled_wide_layer_answers_as_the_wide_layer() -> None:
    for name in ("Linear", "LayerNorm", "GroupNorm"):
        wide_layer = wide_layer_of(members(CASES[name].make))
        (inputs,) = wide_call(calls(CASES[name]))[0]
        torch.testing.assert_close(
            torch.compile(wide_layer, backend="eager", fullgraph=True)(inputs), wide_layer(inputs)
        )


def test_different_calls_have_different_recorded_steps() -> None:
    """Recorded steps depend on sizes, strides, dtypes, kinds and options. A second call gives the same
    answer.
    """
    alone = members(lambda: nn.Conv2d(4, 6, 3))
    wide_layer = wide_layer_of(alone)
    base = torch.randn(N, 2, 4, 8, 8, dtype=torch.float64)
    turned = base.transpose(3, 4)
    for inputs in (
        base,
        turned,
        base[:, :1],
        base.expand(N, 2, 4, 8, 8),
        base[0].expand(N, 2, 4, 8, 8),
        base[..., ::2, :],
        base[:, :0],
    ):
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                expected = [m(g) for m, g in zip(alone, inputs)]
                for _ in range(2):
                    assert_members(wide_layer(inputs), expected)
    pooled, other = wide_layer_of([nn.MaxPool2d(2)] * N), wide_layer_of([nn.MaxPool2d(2, stride=1)] * N)
    assert pooled(base).shape != other(base).shape
    before = wide_layer(base)
    with torch.no_grad():
        wide_layer.weight.mul_(2)  # type: ignore[operator]
        wide_layer.bias.zero_()  # type: ignore[operator]
    assert not torch.allclose(wide_layer(base), before)
    assert_members(wide_layer(base), [m(b) for m, b in zip(wide_layer.to_modules(), base)])


def test_an_expanded_input_counts_as_shared() -> None:
    """Strategies of a Shared input also apply to an expanded input, unless its gradient is computed."""
    alone = members(lambda: nn.Linear(4, 5))
    wide_layer = wide_layer_of(alone, "one_gemm")
    value = torch.randn(2, 4, dtype=torch.float64)
    assert_members(wide_layer(value.expand(N, 2, 4)), [m(value) for m in alone])
    with pytest.raises(UsageError, match="one_gemm"):
        wide_layer(value.repeat(N, 1, 1))
    value.requires_grad_()
    wide_layer.strategy = "auto"
    (grad,) = torch.autograd.grad(wide_layer(value.expand(N, 2, 4)).sum(), value)
    torch.testing.assert_close(grad, torch.stack([m.weight.sum(0) for m in alone]).sum(0).expand(2, 4))  # type: ignore[operator]
