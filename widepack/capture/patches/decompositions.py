"""Decomposes ops that the format does not have, where torch has no decomposition or one that fails.

`run_decompositions` gets this table. An op of another library is looked up only if that library is imported
already. Each decomposition follows the op's definition, so it also works in float64, in which programs are
verified.

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

A member that takes derivatives has ops of backward passes. Each decomposition of these is of ops that can be
differentiated again:

| op: the backward pass of | in place of it |
|---|---|
| `convolution`, by its input | a (transposed) convolution with the same weight |
| `convolution` of one group, by its weight | a convolution, with channels in place of the batch |
| `avg_pool`, `adaptive_avg_pool`, `upsample`, `replication_pad` | a product with a matrix for each dim |
| `adaptive_max_pool`, `max_pool3d` | `scatter_add` by the indices that forward found |
| `_cdist_forward`, `_pdist_forward` | for p = 2 a product with the points; else all differences |
| `hardshrink`, `softshrink` | the gradient where the answer is not 0 |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...ir.torch_internals import aten_packet
from ...kernels.experts import FEW

_Along = Callable[[int, Tensor], Tensor]


def convolution_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> Any:
    """The derivatives by input, weight and bias. One by the weight of several groups is not decomposed."""
    by_input, by_weight, by_bias = output_mask
    rank = weight.ndim - 2
    stride, padding, dilation = (_of_rank(v, rank) for v in (stride, padding, dilation))
    if (by_weight and groups > 1) or (
        transposed and any(more >= s for more, s in zip(output_padding, stride))
    ):
        return NotImplemented
    slope = None
    if by_input:
        rest = [0] * rank
        if not transposed:
            sizes = zip(x.shape[2:], weight.shape[2:], stride, padding, dilation)
            rest = [0 if s == 1 else (n + 2 * p - d * (k - 1) - 1) % s for n, k, s, p, d in sizes]
        slope = torch.ops.aten.convolution.default(
            grad, weight, None, stride, padding, dilation, not transposed, rest, groups
        )
    of_weight = None
    if by_weight:
        image, window = (v.transpose(0, 1) for v in ((grad, x) if transposed else (x, grad)))
        of_weight = torch.ops.aten.convolution.default(
            image, window, None, dilation, padding, stride, False, [0] * rank, 1
        ).transpose(0, 1)
        for d, k in enumerate(weight.shape[2:], 2):  # by index: a slice adds a condition on dynamic sizes
            if isinstance(of_weight.shape[d], torch.SymInt) or of_weight.shape[d] != k:
                of_weight = of_weight.index_select(d, torch.arange(k, device=weight.device))
        of_weight = of_weight.contiguous()
    total = grad.sum([0, *range(2, grad.ndim)]) if by_bias else None
    return slope, of_weight, total


def _of_rank(values: Sequence[int], rank: int) -> list[int]:
    """Returns one number for each dim: a list of one number stands for all."""
    return [*values] * (rank if len(values) == 1 else 1)


def through(grad: Tensor, sizes: Sequence[int], along: _Along) -> Tensor:
    """The derivative of a linear op that works along each of the last dims.

    sizes: the input's last dims. along: gives the op's answer along one of them, for channels `[1, n, n]`.
    The answer for unit vectors is the op's matrix.
    """
    for k, n in enumerate(sizes):
        units = torch.eye(n, dtype=grad.dtype, device=grad.device)
        matrix = along(k, units.unsqueeze(0)).squeeze(0)
        dim = k - len(sizes)
        grad = (grad.movedim(dim, -1) @ matrix.t()).movedim(-1, dim)
    return grad.contiguous()


def avg_pool_backward(
    rank: int,
    grad: Tensor,
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Tensor:
    """The derivative of `avg_pool2d` or `avg_pool3d`."""
    kernel, padding = _of_rank(kernel, rank), _of_rank(padding, rank)
    stride = _of_rank(stride, rank) if stride else kernel
    divisor = None if divisor_override is None else 1

    def along(k: int, units: Tensor) -> Tensor:
        options = [1, kernel[k]], [1, stride[k]], [0, padding[k]], ceil_mode, count_include_pad, divisor
        pooled: Tensor = torch.ops.aten.avg_pool2d.default(units.unsqueeze(2), *options)
        return pooled.squeeze(2)

    slope = through(grad, x.shape[-rank:], along)
    return slope if divisor_override is None else slope / divisor_override


def adaptive_avg_pool_backward(rank: int, grad: Tensor, x: Tensor) -> Tensor:
    """The derivative of `adaptive_avg_pool2d` or `adaptive_avg_pool3d`."""
    outs = grad.shape[-rank:]
    pool = aten_packet("_adaptive_avg_pool2d").default
    return through(grad, x.shape[-rank:], lambda k, units: pool(units.unsqueeze(2), [1, outs[k]]).squeeze(2))


def upsample_backward(
    op: Callable[..., Tensor],
    corners: bool,
    grad: Tensor,
    output_size: Sequence[int],
    input_size: Sequence[int],
    *options: Any,
) -> Tensor:
    """The derivative of an upsampling. op: the same along one dim. corners: it has `align_corners`."""
    sizes = input_size[2:]
    align, scales = (options[:1], options[1:]) if corners else ((), options)

    def along(k: int, units: Tensor) -> Tensor:
        return op(units, [output_size[k]], *align, scales[k] if k < len(scales) else None)

    return through(grad, sizes, along)


def _bicubic_row(units: Tensor, size: list[int], align_corners: bool, scale: float | None) -> Tensor:
    y: Tensor = torch.ops.aten.upsample_bicubic2d.default(
        units.unsqueeze(2), [1, *size], align_corners, None, scale
    )
    return y.squeeze(2)


def replication_pad_backward(rank: int, grad: Tensor, x: Tensor, padding: Sequence[int]) -> Tensor:
    """The derivative of `replication_pad`. padding: for the last dim first."""

    def along(k: int, units: Tensor) -> Tensor:
        first = 2 * (rank - 1 - k)
        padded: Tensor = torch.ops.aten.replication_pad1d.default(units, list(padding[first : first + 2]))
        return padded

    return through(grad, x.shape[-rank:], along)


def to_places(rank: int, grad: Tensor, x: Tensor, indices: Tensor) -> Tensor:
    """The derivative of a maximum over windows. indices: where the maxima are, in the flat last dims."""
    flat = torch.zeros_like(x).flatten(-rank)
    return flat.scatter_add(-1, indices.flatten(-rank), grad.flatten(-rank)).reshape(x.shape)


def max_pool3d_backward(grad: Tensor, x: Tensor, *options: Any) -> Tensor:
    """The derivative of `max_pool3d`. The last option is the indices."""
    return to_places(3, grad, x, options[-1])


def cdist_backward(grad: Tensor, x1: Tensor, x2: Tensor, p: float, distance: Tensor) -> Tensor:
    """The derivative of distances `[..., P, R]` by `x1 [..., P, M]`. It is 0 where a distance is 0.

    For p = 2 it is the form that torch has for more than 25 points, so that it rounds as the member's own.
    """
    apart = torch.where(distance == 0, 1.0, distance)
    if p == 2:
        weight = torch.where(distance == 0, 0.0, grad / apart)
        return x1 * weight.sum(-1, keepdim=True) - weight @ x2
    difference = x1.unsqueeze(-2) - x2.unsqueeze(-3)
    grad, distance, apart = grad.unsqueeze(-1), distance.unsqueeze(-1), apart.unsqueeze(-1)
    slopes = difference.sign() * grad
    if p == 0:
        slopes = torch.zeros_like(slopes)
    elif math.isinf(p):
        slopes = torch.where(difference.abs() == distance, slopes, 0.0)
    elif p != 1:
        share = torch.where(difference == 0, 1.0, difference.abs()) / apart
        slopes = torch.where(distance == 0, 0.0, slopes * share.pow(p - 1))
    return slopes.sum(-2)


def pdist_backward(grad: Tensor, x: Tensor, p: float, distance: Tensor) -> Tensor:
    """The derivative of the distances of all pairs of rows, `[n (n - 1) / 2]`, by the rows `[n, M]`."""
    n = x.shape[0]
    rows = torch.arange(n, device=x.device)
    first = torch.minimum(rows.unsqueeze(1), rows)
    second = torch.maximum(rows.unsqueeze(1), rows)
    pair = first * (2 * n - first - 1) // 2 + second - first - 1
    pair = torch.where(first == second, grad.shape[0], pair)  # the last place: 0
    table = torch.nn.functional.pad(torch.stack([grad, distance]), (0, 1))[:, pair]
    return cdist_backward(table[0], x, x, p, table[1])


def shrink_backward(grad: Tensor, x: Tensor, bound: float) -> Tensor:
    """The derivative of `hardshrink` and `softshrink`."""
    return torch.where(x.abs() <= bound, 0.0, grad)


def backward_table() -> dict[Any, Callable[..., Any]]:
    """Returns op -> decomposition."""
    aten = aten_packet
    table: dict[Any, Callable[..., Any]] = {
        aten("convolution_backward").default: convolution_backward,
        aten("max_pool3d_with_indices_backward").default: max_pool3d_backward,
        aten("_cdist_backward").default: cdist_backward,
        aten("_pdist_backward").default: pdist_backward,
        aten("hardshrink_backward").default: shrink_backward,
        aten("softshrink_backward").default: shrink_backward,
        aten("upsample_bicubic2d_backward").default: partial(upsample_backward, _bicubic_row, True),
    }
    for rank in (2, 3):
        table[aten(f"avg_pool{rank}d_backward").default] = partial(avg_pool_backward, rank)
        table[aten(f"_adaptive_avg_pool{rank}d_backward").default] = partial(adaptive_avg_pool_backward, rank)
        table[aten(f"adaptive_max_pool{rank}d_backward").default] = partial(to_places, rank)
    linear = aten("upsample_linear1d").default
    for rank, name in enumerate(("linear1d", "bilinear2d", "trilinear3d"), 1):
        table[aten(f"upsample_{name}_backward").default] = partial(upsample_backward, linear, True)
        table[aten(f"replication_pad{rank}d_backward").default] = partial(replication_pad_backward, rank)
        for kind in ("upsample_nearest", "_upsample_nearest_exact"):
            row = aten(f"{kind}1d").default
            table[aten(f"{kind}{rank}d_backward").default] = partial(upsample_backward, row, False)
    return table


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
