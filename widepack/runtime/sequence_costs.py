"""Computes the costs of ops over the steps of a sequence: recurrent layers, their cells, bags of rows and the
CTC loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from ..ir.limits import integers, recurrent_steps, size, tensors
from .cost_terms import NOTHING, STEP, Cost, count, first_tensor, rate


def recurrent_layer(name: str, args: Mapping[str, Any], result: Any) -> Cost:
    """Recurrent layers of torch: every row with every weight."""
    x, out = args.get("input", args.get("data")), first_tensor(result)
    weights = list(tensors(args.get("params"))) if "params" in args else []
    if not isinstance(x, torch.Tensor) or out is None:
        return NOTHING
    rows = max(1, math.prod(int(n) for n in x.shape[:-1]))
    numbers = sum(w.numel() for w in weights)
    width = sum(int(w.shape[0]) for w in weights if w.dim() == 2)
    work = (
        rows * numbers * rate(x) + recurrent_steps(name, args) * STEP + rows * width + 5 * count(dict(args))
    )
    return Cost(work, rows * width * x.element_size() * 2.0)


def recurrent_cell(name: str, args: Mapping[str, Any], result: Any) -> Cost:
    """One step of a recurrent layer: every row with every weight."""
    x = args.get("input")
    if not isinstance(x, torch.Tensor):
        return NOTHING
    rows = x.numel() // max(1, int(x.shape[-1])) if x.dim() else 1
    weights = [t for t in tensors([args.get("w_ih"), args.get("w_hh")]) if t.dim() == 2]
    width = sum(int(w.shape[0]) for w in weights)
    work = rows * count(weights) * rate(x) + 20.0 * rows * width + count(dict(args))
    return Cost(work, rows * width * x.element_size() * 4.0)


def bag(name: str, args: Mapping[str, Any], result: Any) -> Cost:
    """Bags of rows: every index reads a row, of which a kernel may make a copy."""
    weight, indices = args.get("weight"), args.get("indices")
    if not isinstance(weight, torch.Tensor) or not isinstance(indices, torch.Tensor) or weight.dim() != 2:
        return NOTHING
    read = indices.numel() * int(weight.shape[1])
    room = read * weight.element_size() if weight.dtype is not torch.float32 else 0
    return Cost(
        2.0 * read + 20.0 * indices.numel() + count([dict(args), result]), float(room + size(indices))
    )


def recurrent_steps_of_members(name: str, args: Mapping[str, Any], result: Any) -> Cost:
    """Recurrent ops of widepack: every row of every member with the member's weights."""
    x, h = args.get("x"), args.get("h")
    if not isinstance(x, torch.Tensor) or not isinstance(h, torch.Tensor) or x.dim() != 4 or h.dim() != 3:
        return NOTHING
    weights = count([args.get(k) for k in ("w_x", "w_h", "w_p", "weights")])
    rows = int(x.shape[1]) * int(x.shape[2])
    members = int(h.shape[0])
    work = rows * weights * rate(x) + recurrent_steps(name, args) * STEP + count(dict(args))
    return Cost(work, float(size(list(args.values()))) + 2**24 + rows * members * 16)


def ctc(name: str, args: Mapping[str, Any], result: Any) -> Cost:
    """The CTC loss: a cell for each step and each place of the target, blanks included."""
    x = args.get("log_probs")
    if not isinstance(x, torch.Tensor) or not x.dim():
        return NOTHING
    longest = max(integers(args.get("target_lengths")), default=0)
    cells = x.numel() // max(1, int(x.shape[-1])) * (2 * max(0, longest) + 1)
    return Cost(20.0 * cells + count(dict(args)), 8.0 * cells)
