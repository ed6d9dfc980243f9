"""Decomposes ops that the format does not have, where torch has no decomposition or one that fails.

`run_decompositions` gets this table. An op of another library is looked up only if that library is imported
already. Each decomposition follows the op's definition, so it also works in float64, in which programs are
verified. `backward_passes.py` has those of backward passes.

| op | meaning |
|---|---|
| `aten._grouped_mm`, `transformers.grouped_mm_fallback` | y[s] = x[s] W[g], where g is the group of row s |
| `aten.ldexp` | x 2^e |
| `aten.bitwise_left_shift`, `..._right_shift` of a number by a tensor | the same of a tensor without dims |
| `aten.triangular_solve` | `linalg.solve_triangular`, and a copy of the matrix |
| `aten.margin_ranking_loss`, `aten.hinge_embedding_loss` | the same; torch's expect a text as reduction |
| `aten.std_mean.dim` | the overload with a correction; torch's own decomposition expects other arguments |
| `aten.normal_functional` (`torch.empty(...).normal_()`) | mean + std times a draw of `randn_like` |
| `aten.lu_unpack` of one half | that of both halves |
| `aten.new_empty_strided` (of a backward pass) | `new_empty`, and a permutation for another memory order |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...ir.torch_internals import aten_packet
from ...kernels.experts import FEW
from .backward_passes import backward_table


def grouped_mm(
    x: Tensor,
    weight: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Any:
    """Rows `[S, K]`, matrices `[G, K, O]` and the groups' ends `[G]` give `[S, O]`.

    Rows behind the last end are 0. Other forms of the op are not decomposed.
    """
    if offs is None or bias is not None or x.ndim != 2 or weight.ndim != 3:
        return NotImplemented
    groups = weight.shape[0]
    group = torch.searchsorted(offs, torch.arange(x.shape[0], dtype=offs.dtype, device=x.device), right=True)
    index = group.clamp_max(groups - 1)
    few = bool(groups < FEW)
    y = torch.ops.widepack.expert_mm.default(x, weight, index, few)
    y = torch.where((group < groups).unsqueeze(1), y, 0.0)
    return y if out_dtype is None else y.to(out_dtype)


def ldexp(x: Tensor, exponent: Tensor) -> Tensor:
    """x 2^exponent."""
    return x * torch.pow(2.0, exponent)


def shifted(op: Callable[[Tensor, Tensor], Tensor]) -> Callable[[int, Tensor], Tensor]:
    """Returns a decomposition that shifts a number by a tensor, in the dtype that both promote to."""
    return lambda number, by: op(
        torch.scalar_tensor(number, dtype=torch.result_type(number, by), device=by.device), by
    )


def std_mean(
    x: Tensor, dim: list[int] | None, unbiased: bool = True, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """Standard deviation and mean over dims."""
    std, mean = torch.ops.aten.std_mean.correction(x, dim, correction=int(unbiased), keepdim=keepdim)
    return std, mean


def triangular_solve(
    b: Tensor, a: Tensor, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> tuple[Tensor, Tensor]:
    """The solution and a copy of the matrix, each with the broadcast batch of both inputs."""
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])  # type: ignore[no-untyped-call]
    a, b = a.expand(*batch, *a.shape[-2:]), b.expand(*batch, *b.shape[-2:])
    solved = torch.linalg.solve_triangular(
        a.mT if transpose else a, b, upper=upper is not transpose, unitriangular=unitriangular
    )
    return solved, a.clone()


def lu_unpack(lu: Tensor, pivots: Tensor, unpack_data: bool = True, unpack_pivots: bool = True) -> Any:
    """The permutation and both factors, also where a caller wants only one of these halves."""
    if unpack_data and unpack_pivots:
        return NotImplemented
    return torch.ops.aten.lu_unpack.default(lu, pivots)


def new_empty_strided(
    x: Tensor, size: list[int], stride: list[int], *, dtype: torch.dtype | None = None, **options: Any
) -> Any:
    """A tensor without values. Memory with gaps or repeated numbers is not decomposed."""
    order = sorted(range(len(size)), key=lambda d: stride[d], reverse=True)
    empty = x.new_empty([size[d] for d in order], dtype=dtype)
    if order == sorted(order):
        return empty if list(empty.stride()) == list(stride) else NotImplemented
    y = empty.permute([order.index(d) for d in range(len(size))])
    return y if list(y.stride()) == list(stride) else NotImplemented


def reduced(loss: Tensor, reduction: int) -> Tensor:
    """Returns a loss as it is (0), its mean (1), or its sum (2)."""
    return loss.mean() if reduction == 1 else loss.sum() if reduction == 2 else loss


def margin_ranking_loss(
    first: Tensor, second: Tensor, target: Tensor, margin: float = 0.0, reduction: int = 1
) -> Tensor:
    """max(0, margin - target (first - second))."""
    return reduced((-target * (first - second) + margin).clamp_min(0), reduction)


def hinge_embedding_loss(x: Tensor, target: Tensor, margin: float = 1.0, reduction: int = 1) -> Tensor:
    """x where the target is 1, and max(0, margin - x) where it is -1. Other targets have the sum of both."""
    zero = torch.zeros_like(x)
    of_others = torch.where(target != 1, (margin - x).clamp_min(0), zero)
    of_ones = torch.where(target != -1, x, zero)
    return reduced(of_others + of_ones, reduction)


def normal(x: Tensor, mean: float = 0.0, std: float = 1.0, **_: Any) -> Tensor:
    """A draw of a normal distribution, in the shape and dtype of x."""
    return torch.randn_like(x) * std + mean


def decomposition_table() -> dict[Any, Callable[..., Any]]:
    """Returns op -> decomposition, for the ops that exist in this process."""
    table: dict[Any, Callable[..., Any]] = {
        **backward_table(),
        aten_packet("_grouped_mm").default: grouped_mm,
        torch.ops.aten.ldexp.Tensor: ldexp,
        torch.ops.aten.bitwise_left_shift.Scalar_Tensor: shifted(torch.bitwise_left_shift),
        torch.ops.aten.bitwise_right_shift.Scalar_Tensor: shifted(torch.bitwise_right_shift),
        torch.ops.aten.std_mean.dim: std_mean,
        torch.ops.aten.new_empty_strided.default: new_empty_strided,
        torch.ops.aten.margin_ranking_loss.default: margin_ranking_loss,
        torch.ops.aten.hinge_embedding_loss.default: hinge_embedding_loss,
        torch.ops.aten.triangular_solve.default: triangular_solve,
        torch.ops.aten.lu_unpack.default: lu_unpack,
        aten_packet("normal_functional").default: normal,
    }
    of_transformers = getattr(torch.ops.transformers, "grouped_mm_fallback", None)
    if of_transformers is not None:
        table[of_transformers.default] = grouped_mm
    return table
