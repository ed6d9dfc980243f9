"""Checks the operands of ops that read places which other operands name: bags, segments, alignments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .require import OperandError, between, dense, integers, numbers, of_shape, readable, require


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


def copy(self: Tensor, src: Tensor, non_blocking: bool = False) -> None:
    """Checks `aten.copy`, which reads the memory of a packed weight as if it were a dense tensor."""
    dense("self", self)
    dense("src", src)


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
    found = integers(name, segments, axis + 1)
    shape = list(data.shape[:axis])
    require(list(found.shape[:axis]) == shape, f"{name} is {list(found.shape)}; {[*shape, 'S']} is needed")
    require(lengths is not None or found.shape[axis], "offsets is empty")
    if not readable(found):
        return
    end = data.shape[axis]
    if lengths is None:
        _ascending(name, found, end)
        return
    between(name, found, 0, end)
    sums = found.sum(-1)
    require(bool((sums == end).all()), f"lengths does not add up to {end}, the size of axis {axis}")


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
