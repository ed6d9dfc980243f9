"""Tests members that differentiate through inverses, solutions and factorizations of matrices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, linalg, nn

from widepack import CaptureError, InputError, build, fuse, load
from widepack.ir.torch_internals import aten_packet

N = 3
Op = Callable[[Tensor], Tensor]
OPS: dict[str, Op] = {
    "inv": linalg.inv,
    "solve": lambda a: linalg.solve(a, a.sin()),
    "cholesky": lambda a: linalg.cholesky(a @ a.mT),
    "cholesky_solve": lambda a: torch.cholesky_solve(a, linalg.cholesky(a @ a.mT)),
    "lu_factor": lambda a: linalg.lu_factor(a).LU,
    "lu_solve": lambda a: linalg.lu_solve(*linalg.lu_factor(a), a.sin()),
    "several": lambda a: linalg.inv(a) @ linalg.solve(a, a.sin()) + linalg.matrix_power(a, -2),
}


class Net(nn.Module):
    """The derivative by a cell, as of the stress of a crystal."""

    def __init__(self, op: Op) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(3, 3))
        self.op = op

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_(True)
        y = self.op(x * self.scale + 5 * torch.eye(3, dtype=x.dtype))
        (found,) = torch.autograd.grad(y.tanh().sum(), x, create_graph=True)
        return found


def members(op: Op) -> list[Net]:
    nets = []
    for i in range(N):
        torch.manual_seed(i)
        nets.append(Net(op).eval())
    return nets


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("name", OPS)
def test_derivatives_and_their_gradients_are_the_members(name: str) -> None:
    nets = [net.double() for net in members(OPS[name])]
    x = torch.randn(4, 3, 3, dtype=torch.float64)
    fused = fuse(nets, (x,))
    answer = fused(x.clone())
    answer.square().sum().backward()
    gradient = dict(fused.named_parameters())["scale"].grad
    assert gradient is not None
    for i, net in enumerate(nets):
        alone = net(x.clone())
        alone.square().sum().backward()
        torch.testing.assert_close(answer[i], alone)
        torch.testing.assert_close(gradient[i], net.scale.grad)


def test_an_artifact_raises_an_error_for_a_singular_matrix(tmp_path: Path) -> None:
    nets = members(OPS["inv"])
    paths = [tmp_path / f"{i}.pt" for i in range(N)]
    for net, path in zip(nets, paths):
        torch.save(net.state_dict(), path)
    inputs = ("x=float32[B,3,3]",)
    build(
        paths,
        tmp_path / "a.wide",
        model=lambda: Net(OPS["inv"]),
        inputs=inputs,
        targets=("cpu",),
        pt2=False,
        race=False,
    )
    ens = load(tmp_path / "a.wide")
    x = torch.randn(2, 3, 3)
    for net, answer in zip(nets, ens(x)):
        torch.testing.assert_close(answer, net(x.clone()).detach())
    singular = (-5 * torch.eye(3) / nets[0].scale.detach()).expand(2, 3, 3)
    with pytest.raises(RuntimeError, match="could not be completed"):
        nets[0](singular.clone())
    with pytest.raises(InputError, match="linalg_inv_ex.*could not be completed"):
        ens(singular)


class Printing(nn.Module):
    """Has another effect, which no program has."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_(True)
        aten_packet("_print").default("inside")
        (found,) = torch.autograd.grad(linalg.inv(x + 5 * torch.eye(3)).sum(), x)
        return found


def test_other_effects_are_refused() -> None:
    with pytest.raises(CaptureError, match="side effect"):
        fuse([Printing() for _ in range(N)], (torch.randn(2, 3, 3),))
