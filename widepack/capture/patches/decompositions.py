"""Ops that the format does not have and torch does not take apart, or cannot, in ATen: what `run_decompositions` is told of them.

| op | what it is |
|---|---|
| `aten._grouped_mm`, `transformers.grouped_mm_fallback` | y[s] = x[s] W[g], where g is the group that row s lies in: a mixture's experts over rows sorted by expert |
| `aten.ldexp` | x 2^e |
| `aten.bitwise_left_shift`, `aten.bitwise_right_shift` of a number by a tensor (`1 << x`) | the same of a tensor without dims |
| `aten.triangular_solve` | `linalg.solve_triangular`, and a copy of the matrix |
| `aten.std_mean.dim` | its form with a correction: torch's own way takes other arguments than it is given |

An op of a library is looked up when it is there: nothing is imported. Each is put by its meaning, so that float64, in which it is verified, takes it too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_MANY = 32  # groups, from which a row's own matrix costs less to read than a product with all matrices costs to reckon (about 12 bytes against 2 flops a group)


def grouped_mm(x: Tensor, weight: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Any:
    """Rows `[S, K]`, matrices `[G, K, O]`, the groups' ends `[G]` -> `[S, O]`; rows behind the last end are 0. Other forms are left as they are."""
    if offs is None or bias is not None or x.ndim != 2 or weight.ndim != 3:
        return NotImplemented
    groups, out = weight.shape[0], weight.shape[2]
    group = torch.searchsorted(offs, torch.arange(x.shape[0], dtype=offs.dtype, device=x.device), right=True)
    own = group.clamp_max(groups - 1)
    if groups < _MANY:
        every = torch.mm(x, weight.permute(1, 0, 2).flatten(1)).view(-1, groups, out)
        y = every.gather(1, own[:, None, None].expand(-1, 1, out)).squeeze(1)
    else:
        y = torch.bmm(x.unsqueeze(1), weight.index_select(0, own)).squeeze(1)
    y = torch.where((group < groups).unsqueeze(1), y, 0.0)
    return y if out_dtype is None else y.to(out_dtype)


def ldexp(x: Tensor, exponent: Tensor) -> Tensor:
    return x * torch.pow(2.0, exponent)


def shifted(op: Callable[[Tensor, Tensor], Tensor]) -> Callable[[int, Tensor], Tensor]:
    """A number shifted by a tensor: the number takes the type that both come to."""
    return lambda number, by: op(torch.scalar_tensor(number, dtype=torch.result_type(number, by), device=by.device), by)


def std_mean(x: Tensor, dim: list[int] | None, unbiased: bool = True, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    std, mean = torch.ops.aten.std_mean.correction(x, dim, correction=int(unbiased), keepdim=keepdim)
    return std, mean


def triangular_solve(b: Tensor, a: Tensor, upper: bool = True, transpose: bool = False, unitriangular: bool = False) -> tuple[Tensor, Tensor]:
    """The solution, and the matrix as it was given, each with the batch of both."""
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])  # type: ignore[no-untyped-call]
    a, b = a.expand(*batch, *a.shape[-2:]), b.expand(*batch, *b.shape[-2:])
    solved = torch.linalg.solve_triangular(a.mT if transpose else a, b, upper=upper is not transpose, unitriangular=unitriangular)
    return solved, a.clone()


def known_ways() -> dict[Any, Callable[..., Any]]:
    """Op -> the same in ATen, of those ops that are there."""
    ways: dict[Any, Callable[..., Any]] = {
        torch.ops.aten._grouped_mm.default: grouped_mm,
        torch.ops.aten.ldexp.Tensor: ldexp,
        torch.ops.aten.bitwise_left_shift.Scalar_Tensor: shifted(torch.bitwise_left_shift),
        torch.ops.aten.bitwise_right_shift.Scalar_Tensor: shifted(torch.bitwise_right_shift),
        torch.ops.aten.std_mean.dim: std_mean,
        torch.ops.aten.triangular_solve.default: triangular_solve,
    }
    theirs = getattr(torch.ops.transformers, "grouped_mm_fallback", None)
    if theirs is not None:
        ways[theirs.default] = grouped_mm
    return ways
