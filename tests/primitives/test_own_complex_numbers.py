"""Tests the types of results of a member's own 0-dim complex number and tensors of other types."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import widepack

OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mul": torch.mul,
    "sub": lambda x, c: c - x,
    "div": torch.div,
    "pow": torch.pow,
    "where": lambda x, c: torch.where(x.real > 0, x, c),
}


class Own(nn.Module):
    def __init__(self, op: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.op = op
        self.c = nn.Buffer(torch.randn((), dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(OPS[self.op](x, self.c))


@pytest.mark.extended(keep=1)
@pytest.mark.parametrize("own", [torch.complex128, torch.complex64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.complex64])
@pytest.mark.parametrize("op", OPS)
def test_types_are_those_of_the_member(op: str, dtype: torch.dtype, own: torch.dtype) -> None:
    x = torch.randint(1, 5, (3, 2)).to(dtype)
    members = [Own(op, own) for _ in range(2)]
    found = widepack.fuse(members, x)(x)
    for i, member in enumerate(members):
        torch.testing.assert_close(found[i], member(x))
