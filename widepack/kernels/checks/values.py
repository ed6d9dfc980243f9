"""Checks the operands of ops that read places which other operands name, or loop as often as a number says.

Bags, segments and alignments read rows by index. Solvers swap the rows that pivots name. torch checks the
dims of Fourier transforms in its public functions alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .require import (
    LARGEST,
    OperandError,
    between,
    check_of,
    dense,
    integers,
    numbers,
    of_shape,
    readable,
    require,
)

_LEAST = -256.0
_MOST_ORDERS = 100
_MOST_ROUNDS = 2**14
_MOST_REPEATS = 2**40


def _dims(self: Tensor, dim: Sequence[int], normalization: int) -> None:
    rank = dense("self", self).dim()
    places = [d for d in dim if isinstance(d, int) and 0 <= d < rank]
    if not places or len(set(places)) != len(dim) or not all(self.shape[d] for d in places):
        raise OperandError(f"transforms the dims {list(dim)[:8]} of {list(self.shape)}")
    require(normalization in (0, 1, 2), f"normalization is {normalization}; 0, 1 or 2 are possible")


@check_of("_fft_c2c.default")
def c2c(self: Tensor, dim: Sequence[int], normalization: int, forward: bool) -> None:
    """Checks `aten._fft_c2c`."""
    _dims(self, dim, normalization)
    require(self.is_complex(), f"self is {self.dtype}; a complex dtype is needed")


@check_of("_fft_r2c.default")
def r2c(self: Tensor, dim: Sequence[int], normalization: int, onesided: bool) -> None:
    """Checks `aten._fft_r2c`."""
    _dims(self, dim, normalization)
    require(self.is_floating_point(), f"self is {self.dtype}; a floating dtype is needed")


@check_of("_fft_c2r.default")
def c2r(self: Tensor, dim: Sequence[int], normalization: int, last_dim_size: int) -> None:
    """Checks `aten._fft_c2r`."""
    _dims(self, dim, normalization)
    require(self.is_complex(), f"self is {self.dtype}; a complex dtype is needed")
    have = self.shape[dim[-1]]
    if last_dim_size < 1 or last_dim_size // 2 + 1 != have:
        raise OperandError(f"last_dim_size is {last_dim_size}; the last dim has {have} numbers")


def _pivots(matrix: str, a: Tensor, pivots: Tensor, count: int) -> None:
    dense("pivots", pivots)
    require(pivots.dtype is torch.int32, f"pivots is {pivots.dtype}; int32 is needed")
    shape = [*a.shape[:-2], count]
    if list(pivots.shape) != shape:
        raise OperandError(f"pivots is {list(pivots.shape)}; {shape} is needed for this {matrix}")


@check_of("lu_unpack.default", reads_values=True)
def lu_unpack(
    LU_data: Tensor,  # the schema's names
    LU_pivots: Tensor,
    unpack_data: bool = True,
    unpack_pivots: bool = True,
) -> None:
    """Checks `aten.lu_unpack`."""
    dense("LU_data", LU_data)
    require(LU_data.dim() >= 2, "LU_data is not a matrix")
    rows = LU_data.shape[-2]
    _pivots("LU_data", LU_data, LU_pivots, min(LU_data.shape[-2:]))
    if readable(LU_pivots):
        between("LU_pivots", LU_pivots, 1, rows)


@check_of("linalg_lu_solve.default", reads_values=True)
def lu_solve(LU: Tensor, pivots: Tensor, B: Tensor, *, left: bool = True, adjoint: bool = False) -> None:
    """Checks `aten.linalg_lu_solve`."""
    dense("LU", LU)
    dense("B", B)
    require(LU.dim() >= 2 and LU.shape[-1] == LU.shape[-2], "LU is not a square matrix")
    _pivots("LU", LU, pivots, LU.shape[-1])
    if readable(pivots):
        between("pivots", pivots, 1, LU.shape[-1])


@check_of("linalg_ldl_solve.default", reads_values=True)
def ldl_solve(LD: Tensor, pivots: Tensor, B: Tensor, *, hermitian: bool = False) -> None:
    """Checks `aten.linalg_ldl_solve`. A negative pivot stands for a block of two rows."""
    dense("LD", LD)
    dense("B", B)
    require(LD.dim() >= 2 and LD.shape[-1] == LD.shape[-2], "LD is not a square matrix")
    size = LD.shape[-1]
    _pivots("LD", LD, pivots, size)
    if B.shape[:-1] != LD.shape[:-1]:
        raise OperandError(f"B is {list(B.shape)}; {list(LD.shape[:-1])} and a number of columns are needed")
    if not readable(pivots) or not pivots.numel():
        return
    between("pivots", pivots.abs(), 1, size)
    for row in pivots.reshape(-1, size).tolist():
        place = 0
        while place < size:
            alone = row[place] > 0
            paired = place + 1 < size and row[place + 1] < 0
            require(alone or paired, "pivots has a negative number without a second one")
            place += 1 if alone else 2


@check_of("_pdist_forward.default")
def pair_distances(self: Tensor, p: float = 2.0) -> None:
    """Checks `aten._pdist_forward`."""
    dense("self", self, 2)


@check_of("linalg_matrix_power.default")
def matrix_power(self: Tensor, n: int) -> None:
    """Checks `aten.linalg_matrix_power`, whose time grows with the exponent beyond 64 bits."""
    if isinstance(n, int) and abs(n) > LARGEST:
        raise OperandError(f"n is {n}; numbers up to {LARGEST} are possible")


@check_of("mvlgamma.default")
def gamma_terms(self: Tensor, p: Any) -> None:
    """Checks `aten.mvlgamma`, which computes p numbers for each number of its operand."""
    if not isinstance(p, torch.SymInt) and not 1 <= p <= 2**12:
        raise OperandError(f"p is {p}; 1 to {2**12} are possible")


@check_of(
    "_embedding_bag.default",
    "_embedding_bag_forward_only.default",
    "embedding_bag.default",
    "embedding_bag.padding_idx",
    reads_values=True,
    sizes_of=("weight", "per_sample_weights"),
)
def embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = -1,
) -> None:
    """Checks `aten.embedding_bag` and the ops behind it."""
    dense("weight", weight, 2)
    integers("indices", indices, 1)
    integers("offsets", offsets, 1)
    require(mode in (0, 1, 2), f"mode is {mode}; 0, 1 or 2 are possible")
    of_shape("per_sample_weights", per_sample_weights, indices.shape, weight)
    require(offsets.numel() or not (include_last_offset or indices.numel()), "offsets is empty")
    rows = weight.shape[0]
    if isinstance(padding_idx, int):
        require(-rows <= padding_idx < max(rows, 1), f"padding_idx is {padding_idx}; weight has {rows} rows")
    if readable(indices, offsets):
        between("indices", indices, 0, rows - 1)
        _ascending("offsets", offsets, indices.shape[0])
        if include_last_offset and int(offsets[-1]) != indices.shape[0]:
            raise OperandError(f"offsets ends with {int(offsets[-1])}; there are {indices.shape[0]} indices")


def _ascending(name: str, offsets: Tensor, end: int) -> None:
    """Checks offsets along the last dim: from 0 to `end`, never smaller than the one before."""
    between(name, offsets, 0, end)
    if offsets.numel():
        require(bool((offsets[..., :1] == 0).all()), f"{name} does not begin with 0")
        require(bool((offsets.diff(dim=-1) >= 0).all()), f"{name} decreases")


@check_of("copy.default")
def copy(self: Tensor, src: Tensor, non_blocking: bool = False) -> None:
    """Checks `aten.copy`, which reads the memory of a packed weight as if it were a dense tensor."""
    dense("self", self)
    dense("src", src)


@check_of("segment_reduce.default", reads_values=True, sizes_of=("data",))
def segment_reduce(
    data: Tensor,
    reduce: str,
    *,
    lengths: Tensor | None = None,
    indices: Tensor | None = None,
    offsets: Tensor | None = None,
    axis: int = 0,
    unsafe: bool = False,
    initial: Any = None,
) -> None:
    """Checks `aten.segment_reduce`."""
    dense("data", data)
    require(indices is None, "indices is not supported by torch")
    require((lengths is None) != (offsets is None), "one of lengths and offsets is needed")
    require(0 <= axis < data.dim(), f"axis is {axis}; data has {data.dim()} dims")
    name, segments = ("lengths", lengths) if lengths is not None else ("offsets", offsets)
    counts = integers(name, segments, axis + 1)
    shape = list(data.shape[:axis])
    require(list(counts.shape[:axis]) == shape, f"{name} is {list(counts.shape)}; {[*shape, 'S']} is needed")
    require(lengths is not None or counts.shape[axis], "offsets is empty")
    if not readable(counts):
        return
    end = data.shape[axis]
    if lengths is None:
        _ascending(name, counts, end)
        return
    between(name, counts, 0, end)
    sums = counts.sum(-1)
    require(bool((sums == end).all()), f"lengths does not add up to {end}, the size of axis {axis}")


@check_of("ctc_loss.IntList", reads_values=True, sizes_of=("log_probs",))
def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Sequence[int],
    target_lengths: Sequence[int],
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> None:
    """Checks `aten.ctc_loss`."""
    dense("log_probs", log_probs, 2, 3)
    integers("targets", targets, 1, 2)
    batch = log_probs.shape[1] if log_probs.dim() == 3 else 1
    steps, classes = log_probs.shape[0], log_probs.shape[-1]
    require(0 <= blank < classes, f"blank is {blank}; log_probs has {classes} classes")
    numbers("input_lengths", input_lengths, batch, 0, steps)
    numbers("target_lengths", target_lengths, batch, 0)
    if targets.dim() == 2:
        require(targets.shape[0] == batch, f"targets is for {targets.shape[0]} sequences; {batch} are needed")
        numbers("target_lengths", target_lengths, batch, 0, targets.shape[1])
    else:
        total = sum(target_lengths)
        require(total == targets.shape[0], f"target_lengths is for {total} targets of {targets.shape[0]}")
    if readable(targets):
        between("targets", targets, 0, classes - 1)


@check_of("special_zeta.default", reads_values=True)
def zeta(self: Any, other: Any) -> None:
    """Checks `aten.special_zeta`, whose series begins at its second operand and counts up to 9."""
    _start("other", other)


@check_of("polygamma.default", reads_values=True)
def polygamma(n: int, self: Tensor) -> None:
    """Checks `aten.polygamma`, which is a zeta function from order 2."""
    if not isinstance(n, int) or n not in (0, 1):
        _start("self", self)


def _start(name: str, x: Any) -> None:
    dense(name, x)
    if x.dtype not in (torch.float32, torch.float64) or not x.numel() or not readable(x):
        return
    least = float(torch.where(x == x.floor(), 0.0, x).min())  # whole numbers and NaN have no series
    if least < _LEAST:
        raise OperandError(f"{name} contains {least:g}; numbers below {_LEAST:g} must be whole")


@check_of("diff.default")
def differences(
    self: Tensor, n: int = 1, dim: int = -1, prepend: Tensor | None = None, append: Tensor | None = None
) -> None:
    """Checks `aten.diff`, which computes differences n times."""
    if isinstance(n, int) and n > _MOST_ORDERS:
        raise OperandError(f"n is {n}; numbers up to {_MOST_ORDERS} are possible")


@check_of("repeat_interleave.Tensor", reads_values=True)
def repeat_counts(repeats: Tensor, *, output_size: int | None = None) -> None:
    """Checks `aten.repeat_interleave.Tensor`, whose result has as many places as the repeats add up to.

    The kernel computes the sum in 64 bits, where it may wrap around, and writes all repeats.
    """
    integers("repeats", repeats, 1)
    if readable(repeats):
        between("repeats", repeats, 0, _MOST_REPEATS)
        total = float(repeats.double().sum())
        require(
            total <= _MOST_REPEATS, f"repeats add up to {total:.3g}; at most {_MOST_REPEATS} are possible"
        )


@check_of("repeat_interleave.self_Tensor", reads_values=True)
def repeat_interleave(
    self: Tensor, repeats: Tensor, dim: int | None = None, *, output_size: int | None = None
) -> None:
    """Checks `aten.repeat_interleave.self_Tensor`."""
    dense("self", self)
    repeat_counts(repeats)


@check_of("bilinear.default")
def bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """Checks `aten.bilinear`, which computes one feature of the answer after the other."""
    _rounds("weight", dense("weight", weight, 3).shape[0])


@check_of("_trilinear.default")
def trilinear(
    i1: Tensor,
    i2: Tensor,
    i3: Tensor,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int = 1,
) -> None:
    """Checks `aten._trilinear`, which computes one place of `unroll_dim` after the other."""
    for name, x, expand in (("i1", i1, expand1), ("i2", i2, expand2), ("i3", i3, expand3)):
        sizes = list(dense(name, x).shape)
        for dim in sorted(expand):
            sizes.insert(dim, 1)
        if 0 <= unroll_dim < len(sizes):
            _rounds(name, sizes[unroll_dim])


def _rounds(name: str, size: int) -> None:
    if isinstance(size, int) and size > _MOST_ROUNDS:
        raise OperandError(f"{name} has {size} features; up to {_MOST_ROUNDS} are possible")
