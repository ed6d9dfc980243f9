"""Defines the output form of all contestants, and compares two outputs.

Every output leaf is `[N, *the member's shape]`, or a list of N where the members' shapes differ. More than
one leaf is a list of leaves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Run = Callable[..., Any]


def leaves(value: Any) -> list[Tensor]:
    """Returns the tensors of an output in order; numbers, strings and None are left out."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (str, bytes)) or value is None:
        return []
    if isinstance(value, Mapping) or (
        callable(getattr(value, "keys", None)) and callable(getattr(value, "values", None))
    ):
        return [leaf for part in value.values() for leaf in leaves(part)]
    if isinstance(value, Sequence):
        return [leaf for part in value for leaf in leaves(part)]
    if dataclasses.is_dataclass(value):
        return [leaf for f in dataclasses.fields(value) for leaf in leaves(getattr(value, f.name))]
    return []


def members_of(value: Any, index: int) -> Any:
    """Returns member `index` of stacked inputs."""
    if isinstance(value, Tensor):
        return value[index]
    if isinstance(value, Mapping):
        return {k: members_of(v, index) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(members_of(v, index) for v in value)
    return value


def stack(outputs: Sequence[Any]) -> Any:
    """Stacks N members' outputs as `[N, ...]`.

    More than one leaf gives a list of leaves. A leaf of different shapes stays a list of N.
    """
    if isinstance(outputs[0], Tensor):
        return _stack(outputs)
    return [_stack(leaf) for leaf in zip(*map(leaves, outputs), strict=True)]


def _stack(tensors: Sequence[Tensor]) -> Tensor | list[Tensor]:
    if any(t.shape != tensors[0].shape for t in tensors):
        return list(tensors)
    return torch.stack(list(tensors))


def difference(got: Any, expected: Any) -> str:
    """Returns the difference between two outputs of all members as text; empty where they are the same.

    Floating-point leaves may differ by a root-mean-square error of sqrt(eps) of their dtype, relative to the
    expected leaf's root mean square: another order of additions passes, and another answer does not. NaN must
    be in the same places; all else must be equal.
    """
    left, right = leaves(got), leaves(expected)
    if len(left) != len(right):
        return f"{len(left)} output tensors, expected {len(right)}"
    for index, (a, b) in enumerate(zip(left, right, strict=True)):
        where = f"output {index}: " if len(right) > 1 else ""
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{where}{list(a.shape)} {a.dtype}, expected {list(b.shape)} {b.dtype}"
        if not (b.is_floating_point() or b.is_complex()):
            if not torch.equal(a, b):
                return f"{where}{int((a != b).sum())} of {b.numel()} values differ"
            continue
        finite = torch.isfinite(b)
        if not torch.equal(finite, torch.isfinite(a)) or not torch.equal(b.isnan(), a.isnan()):
            return f"{where}NaN or infinity in other places"
        wide = torch.complex128 if b.is_complex() else torch.float64
        a64, b64 = a[finite].to(wide), b[finite].to(wide)
        if not b64.numel():
            continue
        error, scale = (float((v.abs() ** 2).mean().sqrt()) for v in (a64 - b64, b64))
        bound = torch.finfo(b.dtype).eps ** 0.5
        if error > bound * scale + torch.finfo(b.dtype).tiny:
            return (
                f"{where}rms error {error:.3g} where the values' rms is {scale:.3g}; the bound is "
                f"{bound:.1e} of it"
            )
    return ""
