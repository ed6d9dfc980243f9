"""Bounds the results whose size only values determine: `nonzero`, a mask as index, `repeat_interleave`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..ir import ops
from ..ir.limits import integers, tensors
from ..ir.op_traits import UNKNOWN_SIZE
from .cost_terms import broadcast_count

_MASKS = (torch.bool, torch.uint8)
_SELECTIONS = frozenset(
    f"aten.{n}"
    for n in (
        "masked_select",
        "_unique",
        "_unique2",
        "unique_consecutive",
        "unique_dim",
        "unique_dim_consecutive",
    )
)


def needs_values(op: str, args: Sequence[Any]) -> bool:
    """Whether only values determine the size of this call's result. Among indices only masks do."""
    if op == "aten.index.Tensor" and len(args) == 2:
        return any(t.dtype in _MASKS for t in tensors(args[1]))
    return ops.of_values(op)


def result_bytes(op: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float | None:
    """The most bytes that a result may have whose size only values determine.

    Reads the values. None for any other op.
    """
    given = ops.bind(op, tuple(args), dict(kwargs))
    x = next(tensors(dict(given)), None)
    if x is None:
        return None
    name = op.rpartition(".")[0]
    if op == "aten.repeat_interleave.Tensor":
        return 8.0 * _total(x)
    if op == "aten.repeat_interleave.self_Tensor":
        return _repeated(x, given)
    if name in ("aten.nonzero", "aten.argwhere"):
        return 8.0 * x.numel() * max(1, x.dim())
    if name in _SELECTIONS:
        return 3.0 * 16 * broadcast_count(given)
    if name in ("aten.index", "aten.index_put"):
        return _indexed(x, given)
    if name in UNKNOWN_SIZE:
        return 16.0 * broadcast_count(given)
    if name == "aten._local_scalar_dense":
        return 0.0
    return _by_numbers(name, x, given)


def _by_numbers(name: str, x: torch.Tensor, given: Mapping[str, Any]) -> float | None:
    """The bound for ops whose result is as large as a number among their arguments or in their tensor."""
    if name == "aten.bincount":
        return 8.0 * max(_largest(x) + 1, int(given.get("minlength", 0)))
    if name == "aten.one_hot":
        classes = given.get("num_classes", -1)
        return 8.0 * x.numel() * (classes if isinstance(classes, int) and classes >= 0 else _largest(x) + 1)
    if name == "aten.istft":
        lengths = [0, *integers(given.get("length")), *integers(given.get("n_fft"))]
        return 16.0 * x.numel() + 8.0 * max(lengths)
    if name == "aten.histogram":
        return 16.0 * (x.numel() + max([0, *integers(given.get("bins"))]))
    return None


def _repeated(x: torch.Tensor, given: Mapping[str, Any]) -> float | None:
    repeats, dim = given.get("repeats"), given.get("dim")
    if not isinstance(repeats, torch.Tensor):
        return None
    rows = x.numel() if not isinstance(dim, int) else int(x.shape[dim]) if -x.dim() <= dim < x.dim() else 1
    total = _total(repeats) * (rows if repeats.numel() == 1 else 1)
    return float(x.element_size() * total * (x.numel() // max(1, rows) if rows else 0)) + 8.0 * total


def _indexed(x: torch.Tensor, given: Mapping[str, Any]) -> float:
    indices = list(tensors(given.get("indices")))
    masks = [t for t in indices if t.dtype in _MASKS]
    others = [t for t in indices if t.dtype not in _MASKS]
    rows = max([int(t.count_nonzero()) for t in masks] + [t.numel() for t in others] + [1])
    if masks and len(indices) > 1:  # several indices may read one place more than once
        joint = math.prod(max(1, t.numel()) for t in others) if len(others) > 1 else rows
        return float(x.element_size() * max(rows, joint) * max(1, x.numel()))
    return float(x.element_size() * x.numel()) + 64.0 * rows


def _largest(x: torch.Tensor) -> int:
    return int(x.max()) if x.numel() and not x.dtype.is_floating_point and not x.dtype.is_complex else 0


def _total(x: torch.Tensor) -> int:
    if x.dtype.is_floating_point or x.dtype.is_complex or not x.numel():
        return 0
    return int(x.to(torch.float64).clamp_min(0).sum().clamp_max(2.0**62))
