"""Tests members that differentiate through inverses, solutions and factorizations of matrices."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from small_builds import agree, loaded, member
from torch import Tensor, linalg, nn

from widepack import CaptureError, InputError, fuse
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


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("name", OPS)
def test_derivatives_and_their_gradients_are_the_members(name: str) -> None:
    nets: list[Any] = [member(partial(Net, OPS[name]), i).double() for i in range(N)]
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
    make = partial(Net, OPS["inv"])
    ens, first = loaded(make, tmp_path, "x=float32[B,3,3]", count=N, budget=0), member(make, 0)
    agree(ens, make, torch.randn(2, 3, 3))
    singular = (-5 * torch.eye(3) / first.get_parameter("scale").detach()).expand(2, 3, 3)
    with pytest.raises(RuntimeError, match="could not be completed"):
        first(singular.clone())
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
