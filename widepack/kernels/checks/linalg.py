"""Checks the operands of linear algebra: solvers swap the rows that another operand, the pivots, names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .require import LARGEST, OperandError, between, dense, readable, require


def _pivots(matrix: str, a: Tensor, pivots: Tensor, count: int) -> None:
    dense("pivots", pivots)
    require(pivots.dtype is torch.int32, f"pivots is {pivots.dtype}; int32 is needed")
    shape = [*a.shape[:-2], count]
    if list(pivots.shape) != shape:
        raise OperandError(f"pivots is {list(pivots.shape)}; {shape} is needed for this {matrix}")


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


def lu_solve(LU: Tensor, pivots: Tensor, B: Tensor, *, left: bool = True, adjoint: bool = False) -> None:
    """Checks `aten.linalg_lu_solve`."""
    dense("LU", LU)
    dense("B", B)
    require(LU.dim() >= 2 and LU.shape[-1] == LU.shape[-2], "LU is not a square matrix")
    _pivots("LU", LU, pivots, LU.shape[-1])
    if readable(pivots):
        between("pivots", pivots, 1, LU.shape[-1])


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


def pair_distances(self: Tensor, p: float = 2.0) -> None:
    """Checks `aten._pdist_forward`."""
    dense("self", self, 2)


def matrix_power(self: Tensor, n: int) -> None:
    """Checks `aten.linalg_matrix_power`, whose time grows with the exponent beyond 64 bits."""
    if isinstance(n, int) and abs(n) > LARGEST:
        raise OperandError(f"n is {n}; numbers up to {LARGEST} are possible")


def gamma_terms(self: Tensor, p: Any) -> None:
    """Checks `aten.mvlgamma`, which computes p numbers for each number of its operand."""
    if not isinstance(p, torch.SymInt) and not 1 <= p <= 2**12:
        raise OperandError(f"p is {p}; 1 to {2**12} are possible")
