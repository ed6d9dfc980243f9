"""Draws fleets for tests: a base, and members that are merged low-rank fine-tunes of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def drawn_fleet(
    shape: Sequence[int], ranks: Sequence[int], dtype: torch.dtype, strength: float, seed: int = 0
) -> tuple[Tensor, list[Tensor]]:
    """Returns a base and one member for each rank.

    strength: the norm of a fine-tune, as a share of the base's. The merge is as PEFT does it: in float32, or
    float64 for float64; a 16-bit one rounds the product of the factors first.
    """
    generator = torch.Generator().manual_seed(seed)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    rows, columns = shape[0], int(torch.Size(shape[1:]).numel())
    base = (torch.randn(rows, columns, generator=generator, dtype=wide) * 0.03).to(dtype)
    members = []
    for rank in ranks:
        left = torch.randn(rows, rank, generator=generator, dtype=wide)
        right = torch.randn(rank, columns, generator=generator, dtype=wide)
        if rank:
            left *= strength * base.to(wide).norm() / (left @ right).norm()
        delta = (left @ right).to(dtype)
        members.append((base.to(wide) + delta.to(wide)).to(dtype).reshape(tuple(shape)))
    return base.reshape(tuple(shape)), members


def relative_error(found: Tensor, exact: Tensor) -> float:
    """Returns the Frobenius norm of the difference, as a share of that of the exact tensor."""
    return float((found.double() - exact.double()).norm() / exact.double().norm())
