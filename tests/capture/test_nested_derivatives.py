"""Tests members that nest functions of `torch.func`, or differentiate what does not depend on the input."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from small_builds import agree, loaded
from torch import Tensor, nn
from torch.func import grad, jacrev, jvp, vjp

from widepack import fuse
from widepack.capture.derivatives import UnseenResult, weights_fixed
from widepack.capture.explain import explain
from widepack.capture.export import refuse_unseen
from widepack.ir.torch_internals import function_transforms

N = 3
WRAP, UNWRAP = "_wrap_for_grad", "_unwrap_for_grad"
Style = Callable[["Net", Tensor], Any]


class Net(nn.Module):
    def __init__(self, style: Style) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 8), nn.Linear(8, 1)
        self.style = style

    def energy(self, x: Tensor) -> Tensor:
        found: Tensor = self.outer(self.inner(x).tanh()).sum()
        return found

    def forward(self, x: Tensor) -> Any:
        return self.style(self, x)


def autograd_of_grad(net: Net, x: Tensor) -> Tensor:
    x = x.requires_grad_(True)
    (found,) = torch.autograd.grad(grad(net.energy)(x).sin().sum(), x, create_graph=True)
    return found


def unused(net: Net, x: Tensor) -> Tensor:
    """The derivative by an argument that the function does not use: zeros."""
    found: Tensor = net.inner(x) + grad(lambda y, z: net.energy(y), argnums=1)(x, x.sin()).sum()
    return found


NESTED: dict[str, Style] = {
    "grad(grad)": lambda net, x: grad(lambda x: grad(net.energy)(x).sin().sum())(x),
    "grad(grad(grad))": lambda net, x: grad(lambda x: grad(lambda x: grad(net.energy)(x).sum())(x).sum())(x),
    "jvp(grad)": lambda net, x: jvp(grad(net.energy), (x,), (x.cos(),))[1],
    "vjp(grad)": lambda net, x: vjp(grad(net.energy), x)[1](x.cos())[0],
    "grad(jvp)": lambda net, x: grad(lambda x: jvp(net.energy, (x,), (x.detach().cos(),))[1])(x),
    "jacrev(grad)": lambda net, x: jacrev(grad(net.energy))(x[0]),
    "autograd(grad)": autograd_of_grad,
}
CONSTANT: dict[str, Style] = {
    "argument": unused,
    "both": lambda net, x: sum(grad(lambda y, z: net.energy(y), argnums=(0, 1))(x, x.sin())),
    "vjp": lambda net, x: net.inner(x) + vjp(lambda y: x * 2, x)[1](x)[0].sum(),
    "jvp": lambda net, x: net.inner(x) + jvp(lambda y: torch.ones_like(y) * 3, (x,), (x,))[1].sum(),
}


def members(style: Style) -> list[Net]:
    nets = []
    for i in range(N):
        torch.manual_seed(i)
        nets.append(Net(style).eval())
    return nets


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("how", [*NESTED, *CONSTANT])
def test_members_answer_for_every_batch(how: str, tmp_path: Path) -> None:
    style = (NESTED | CONSTANT)[how]
    make = partial(Net, style)
    ens = loaded(make, tmp_path, "x=float32[B,3]", count=N, budget=0)
    for batch in 1, 4, 7:
        agree(ens, make, torch.randn(batch, 3))


@pytest.mark.extended
@pytest.mark.parametrize("how", NESTED)
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_gradients_flow_through_functions_of_torch_func(how: str, mode: str) -> None:
    """torch.func frees nothing that an outer derivative needs, also in eval mode."""
    nets = [net.train(mode == "train") for net in members(NESTED[how])]
    x = torch.randn(5, 3)
    fused = fuse(nets, (x,)).train(mode == "train")
    fused(x.clone()).square().sum().backward()
    found = dict(fused.named_parameters())
    for i, net in enumerate(nets):
        net(x.clone()).square().sum().backward()
        for name, value in net.named_parameters():
            ours, theirs = found[name].grad, value.grad
            if theirs is None:
                assert ours is None or not ours[i].any()
            else:
                assert ours is not None
                torch.testing.assert_close(ours[i], theirs)


class OwnLevel(Net):
    """Uses what torch.func is made of, which no export follows."""

    def forward(self, x: Tensor) -> Any:
        functions: Any = function_transforms()
        with functions.grad_increment_nesting() as level:
            inside = torch.zeros_like(getattr(functions, WRAP)(x, level))
            zeros = getattr(functions, UNWRAP)(inside, level)
        return self.inner(x) + zeros.sum()


def test_a_constant_without_values_is_captured_below_autograd() -> None:
    nets = [OwnLevel(unused).eval() for _ in range(N)]
    x = torch.randn(4, 3)
    for net, answer in zip(nets, fuse(nets, (x,))(x)):
        torch.testing.assert_close(answer, net(x))


def test_a_constant_without_values_is_refused_with_its_line() -> None:
    net = OwnLevel(unused).eval()
    with weights_fixed(net):
        exported = torch.export.export(net, (torch.randn(4, 3),), strict=False)
    with pytest.raises(UnseenResult) as e:
        refuse_unseen(exported, net)
    message = explain(e.value, net)
    assert "test_nested_derivatives.py" in message and "torch.zeros_like" in message
