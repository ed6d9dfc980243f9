"""Compares steps of whole networks with N optimizers of torch, and finds those of torch that mix members."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import widepack
from optim.stepping import N, numbers, options_of
from widepack import fuse, primitives


def of_torch(
    make: Callable[[list[Tensor]], torch.optim.Optimizer], closure: bool = False
) -> list[tuple[Tensor, Tensor]]:
    """Returns the parameters after six steps of all members together, and of single members, stacked."""

    def run(values: Callable[[int], list[Tensor]]) -> list[Tensor]:
        params: list[Tensor] = [nn.Parameter(p) for p in values(0)]
        optimizer = make(params)
        for k in range(6):
            for p, g in zip(params, values(1 + k), strict=True):
                p.grad = g
            if closure:
                optimizer.step(lambda: sum(float(p.detach().square().sum()) for p in params))
            else:
                optimizer.step()
        return [p.detach() for p in params]

    alone = [run(lambda k, i=i: [v[i].clone() for v in numbers(k)]) for i in range(N)]  # type: ignore[misc]
    return list(zip(run(numbers), map(torch.stack, zip(*alone))))


BY_NUMBER: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    ("Adam", {"weight_decay": 0.1, "amsgrad": True}),
    ("AdamW", {}),
    ("Adamax", {}),
    ("NAdam", {"momentum_decay": 0.01}),
    ("RAdam", {"lr": 0.1}),
    ("Adagrad", {"lr_decay": 0.1}),
    ("Adadelta", {}),
    ("RMSprop", {"centered": True, "momentum": 0.5}),
    ("Rprop", {}),
    ("ASGD", {"t0": 2.0}),
]


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize(("name", "options"), BY_NUMBER, ids=[n for n, _ in BY_NUMBER])
def test_elementwise_optimizers_of_torch_update_each_member_as_alone(
    name: str, options: dict[str, Any], foreach: bool
) -> None:
    for k, (wide, alone) in enumerate(
        of_torch(lambda p: getattr(torch.optim, name)(p, foreach=foreach, **options))
    ):
        torch.testing.assert_close(wide, alone, rtol=1e-12, atol=1e-12)
        assert not torch.allclose(wide, numbers(0)[k])


def test_optimizers_that_mix_the_members() -> None:
    """Optimizers with one norm, or one decision, over all members (docs/how-to/rates-per-member.md)."""

    def differ(pairs: list[tuple[Tensor, Tensor]]) -> bool:
        return not all(torch.allclose(a, b, rtol=1e-3) for a, b in pairs)

    assert differ(of_torch(lambda p: torch.optim.Adafactor(p, lr=0.1)))
    assert differ(of_torch(lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=1), closure=True))
    with pytest.raises(ValueError, match="Muon only supports 2D parameters"):
        torch.optim.Muon([nn.Parameter(numbers(0)[2])])

    wide = nn.Parameter(torch.zeros(3, 2))
    wide.grad = torch.tensor([[30.0, 40.0], [0.3, 0.4], [0.0, 0.0]])
    torch.nn.utils.clip_grad_norm_([wide], 1.0)
    # the norm of this member alone is 0.5, which is not clipped
    assert float(wide.grad[1].norm()) < 0.011

    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    optimizer = torch.optim.SGD([wide], lr=1.0)
    scaler.scale(torch.zeros(()))
    wide.grad = torch.tensor([[torch.inf, 0.0], [1.0, 1.0], [1.0, 1.0]])
    scaler.step(optimizer)
    assert not wide.detach().any()


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(1),
        nn.Linear(4 * 16, 3),
    )


class Transformer(nn.Module):
    """A transformer block and a head. The layers may be wide layers."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.first, self.second = nn.LayerNorm(8), nn.LayerNorm(8)
        self.up, self.down, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 3)
        nn.init.normal_(
            self.attention.in_proj_bias
        )  # the gradient of the keys' bias is rounding error, which Adam turns into steps

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        x = x + self.down(torch.nn.functional.gelu(self.up(self.second(x))))
        result: Tensor = self.head(x.mean(-2))
        return result


def widened(modules: list[nn.Module]) -> nn.Module:
    """Returns a copy of the first member in which wide layers replace its layers."""
    wide = copy.deepcopy(modules[0])
    for name, child in list(wide.named_children()):
        parts = [m.get_submodule(name) for m in modules]
        if isinstance(child, nn.Flatten):
            setattr(wide, name, nn.Flatten(2))
        elif list(child.parameters()):
            setattr(wide, name, getattr(primitives, f"Wide{type(child).__name__}").from_modules(parts))
    return wide


SIZES: dict[Any, tuple[int, ...]] = {cnn: (5, 2, 6, 6), Transformer: (4, 5, 8)}
SGD_RATES = {"lr": [0.05, 0.01, 0.02], "momentum": 0.9, "weight_decay": [0.0, 1e-3, 1e-2]}
ADAM_RATES = {"lr": [1e-2, 1e-3, 3e-3], "weight_decay": [1e-2, 0.0, 1e-3]}
TWENTY: list[tuple[str, Any, torch.dtype, float, dict[str, Any]]] = [
    *(("SGD", make, torch.float32, 1e-5, SGD_RATES) for make in SIZES),
    *(("Adam", make, torch.float64, 1e-8, ADAM_RATES) for make in SIZES),
    ("AdamW", cnn, torch.float64, 1e-8, {"lr": [1e-2, 1e-3, 3e-3]}),
    ("AdamW", Transformer, torch.float64, 1e-8, {**ADAM_RATES, "weight_decay": [1e-2, 0.0, 0.3]}),
]
"""The optimizer, the network, the dtype, the bound, and a rate for each member."""
each_network = pytest.mark.parametrize(
    ("name", "make", "dtype", "bound", "rates"), TWENTY, ids=[f"{t[0]}-{t[1].__name__}" for t in TWENTY]
)


@each_network
def test_twenty_steps_equal_those_of_each_member_alone(
    name: str, make: Any, dtype: torch.dtype, bound: float, rates: dict[str, Any]
) -> None:
    twenty_steps(
        name, make, dtype, bound, rates, lambda modules, _: widened(modules), lambda wide, x: wide(x)
    )


@pytest.mark.slow
@each_network
def test_twenty_steps_of_a_fused_module_equal_those_of_each_member_alone(
    name: str, make: Any, dtype: torch.dtype, bound: float, rates: dict[str, Any]
) -> None:
    def fused(modules: list[nn.Module], x: Tensor) -> nn.Module:
        return fuse(modules, x, validate=False)

    twenty_steps(name, make, dtype, bound, rates, fused, lambda wide, x: wide.each(x))


def twenty_steps(
    name: str, make: Any, dtype: torch.dtype, bound: float, rates: dict[str, Any], widen: Any, run: Any
) -> None:
    modules, shape = [], SIZES[make]
    for i in range(N):
        torch.manual_seed(i)
        modules.append(make().to(dtype))
    wide = widen(modules, torch.randn(shape).to(dtype))
    optimizer = getattr(widepack.optim, name)(wide.parameters(), **rates)
    own = [getattr(torch.optim, name)(m.parameters(), **options_of(rates, i)) for i, m in enumerate(modules)]
    g = torch.Generator().manual_seed(9)
    for _ in range(20):
        x = torch.randn((N, *shape), generator=g).to(dtype)
        target = torch.randint(0, 3, (N, shape[0]), generator=g)
        optimizer.zero_grad()
        y = run(wide, x)
        sum((nn.functional.cross_entropy(y[i], target[i]) for i in range(N)), torch.zeros(())).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        for i, m in enumerate(modules):
            own[i].zero_grad()
            nn.functional.cross_entropy(m(x[i]), target[i]).backward()  # type: ignore[no-untyped-call]
            own[i].step()
    expected = [{**dict(m.named_parameters()), **dict(m.named_buffers())} for m in modules]
    for key, value in (*wide.named_parameters(), *wide.named_buffers()):
        stacked = torch.stack([of_one[key] for of_one in expected])
        torch.testing.assert_close(value, stacked, rtol=bound, atol=bound)
