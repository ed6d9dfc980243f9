"""Rules of row layouts: convolutions, norms, pools, resampling, recurrent layers and matrix functions."""

from __future__ import annotations

import re
from typing import Any

import torch

from .call import Call
from .families import agreed_or_even, before_last, in_first
from .layout import EVEN, Layout, RowAxis

_IMAGES = {"aten.im2col.default": 4, "aten.col2im.default": 3}
"""How many dims a batch of images has for an op that also takes one image."""
_DIMS = re.compile(r"([123])d")


def convolution(call: Call) -> Layout:
    """A convolution of `[B, C, ...]`."""
    name = "input" if "input" in call.given else "self"
    return in_first(call, name, call.rank("weight"), fixed=("weight", "bias"))


def norm_of_last(call: Call) -> Layout:
    """A norm over the last dims."""
    name = "input" if "input" in call.given else "self"
    many = len(call.get("normalized_shape"))
    why = "normalizes over the rows"
    return before_last(call, [name], many=many, why=why, is_mix=True, fixed=("weight", "bias"))


def norm_of_groups(call: Call) -> Layout:
    """A norm over groups of channels of `[B, C, ...]`, or over each channel."""
    if call.node.op.startswith("aten.instance_norm") and not call.get("use_input_stats"):
        call.unknown("normalizes by recorded statistics")
    return in_first(call, "input", fixed=("weight", "bias", "running_mean", "running_var"))


def norm_of_batch(call: Call) -> Layout:
    """A batch norm. Only with recorded statistics are the rows apart."""
    call.fixed("weight", "bias", "running_mean", "running_var")
    axis = call.axis("input")
    trains = call.get("training") if "training" in call.given else "no_training" not in call.node.op
    if trains:
        call.apart("input", dims=())
    if axis is not None and (trains or axis.dim == 1):
        call.mixes("normalizes over the rows") if trains else call.unknown("normalizes the dim of the rows")
    layout = call.layout("input")
    if isinstance(call.result, torch.Tensor):
        return layout
    return [layout, *([None] * (len(call.result) - 1))]


def spatial(call: Call) -> Layout:
    """An op on the last 1, 2 or 3 dims, as the op's name says: pools, resampling."""
    match = _DIMS.search(call.node.op)
    many = int(match[1]) if match else 3  # pixels also move between channels
    names = [n for n in ("self", "input", "indices") if n in call.given]
    return before_last(call, names, many=many, why="computes in the dim of the rows")


def prelu(call: Call) -> Layout:
    """A slope for each channel."""
    call.fixed("weight")
    axis = call.axis("self")
    if axis is not None and axis.dim == 1:
        call.unknown("its weight follows the rows")
    return call.layout("self")


def in_front(call: Call) -> Layout:
    """An op on images or columns whose first dim is the batch: grids, columns, shuffles."""
    axes = []
    for name in call.given:
        call.apart(name, dims=[0])
    for tensor, layout in call.tensors():
        if tensor.dim() < _IMAGES.get(call.node.op, 0):
            call.unknown("has no dim of the batch")
        if (
            layout is not None
            and layout is not EVEN
            and not (isinstance(layout, RowAxis) and layout.dim == 0)
        ):
            call.unknown("computes in the dim of the rows")
        if layout is None and tensor.dim() and any(x is not None for _, x in call.tensors()):
            call.unknown("combines rows with a value of no row")
        axes.append(layout if isinstance(layout, RowAxis) else None)
    return call.several(agreed_or_even(call, axes))


def recurrent(call: Call) -> Layout:
    """A recurrent layer over sequences."""
    if "batch_sizes" in call.given:
        call.unknown("runs packed sequences")
    axis = call.axis("input")
    states = call.given["hx"] if isinstance(call.given["hx"], (list, tuple)) else [call.given["hx"]]
    layouts: list[Any] = [call.layouts[s.name] for s in states]
    call.fixed("params")
    batch = 0 if call.get("batch_first") else 1
    call.apart("input", dims=[batch])
    wrong = axis is not None and (axis.dim != batch or call.rank("input") != 3)
    if wrong or any(isinstance(x, RowAxis) and x.dim != 1 for x in layouts):
        call.unknown("runs along the rows")
    own = axis or next((x for x in layouts if isinstance(x, RowAxis)), None)
    if own is None:
        return [call.even(i) for i in range(len(call.result))]
    if not own.plain or any(isinstance(x, RowAxis) and not x.plain for x in layouts):
        found = {(x.before, x.after) for x in (axis, *layouts) if isinstance(x, RowAxis)}
        if len(found) > 1:
            call.unknown("combines rows in different orders")
    return [
        RowAxis(batch, own.before, own.after),
        *(RowAxis(1, own.before, own.after) for _ in call.result[1:]),
    ]


def cell(call: Call) -> Layout:
    """One step of a recurrent layer: rows are in dim 0 of the input and of the states."""
    states = call.given["hx"] if isinstance(call.given["hx"], (list, tuple)) else [call.given["hx"]]
    layouts = [call.layout("input"), *(call.layouts[s.name] for s in states)]
    call.fixed("w_ih", "w_hh", "b_ih", "b_hh")
    call.apart("input", "hx", dims=[0])
    why = "combines rows in different dims"
    found = call.agreed(layouts, call.unknown, why)
    if found is not None and found.dim != 0:
        call.unknown(why)
    return call.several(found or call.even())


def spectrogram(call: Call) -> Layout:
    """A Fourier transform of windows of signals `[B, L]`."""
    return in_first(call, "self", rank=2, fixed=("window",))


def matrices(call: Call) -> Layout:
    """A function of the matrices in the last two dims, which keeps the dims before."""
    axes = []
    for tensor, layout in call.tensors():
        if layout is EVEN or (isinstance(layout, RowAxis) and layout.dim >= tensor.dim() - 2):
            call.unknown("computes with matrices in which the rows are")
        if not (layout is None or isinstance(layout, RowAxis)):
            call.unknown("computes with the number of the row")
        axes.append(layout if isinstance(layout, RowAxis) else None)
    ranks = {t.dim() for t, _ in call.tensors()}
    if len(ranks) > 1:
        call.unknown("computes with matrices of different numbers of dims")
    return call.several(call.agreed(axes, call.mixes, "combines each row with all rows"))
