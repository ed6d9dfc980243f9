"""Rules of row layouts: convolutions, norms, pools, resampling, recurrent layers and matrix functions."""

from __future__ import annotations

import re
from typing import Any

import torch

from .call import Call, Rule, named
from .layout import EVEN, Layout, RowAxis

_IMAGES = {"aten.im2col.default": 4, "aten.col2im.default": 3}
"""How many dims a batch of images has for an op that also takes one image."""
_DIMS = re.compile(r"([123])d")


def convolution(call: Call) -> Layout:
    """A convolution of `[B, C, ...]`."""
    call.fixed("weight", "bias")
    name = "input" if "input" in call.given else "self"
    call.apart(name, dims=[0])
    axis = call.axis(name)
    if axis is not None and (axis.dim != 0 or call.rank(name) != call.rank("weight")):
        call.unknown("convolves the dim of the rows")
    return axis if axis is not None else call.even()


def norm_of_last(call: Call) -> Layout:
    """A norm over the last dims."""
    call.fixed("weight", "bias")
    name = "input" if "input" in call.given else "self"
    axis = call.axis(name)
    call.apart(name, dims=range(call.rank(name) - len(call.get("normalized_shape"))))
    if axis is not None and axis.dim >= call.rank(name) - len(call.get("normalized_shape")):
        call.mixes("normalizes over the rows")
    return call.several(call.layout(name))


def norm_of_groups(call: Call) -> Layout:
    """A norm over groups of channels of `[B, C, ...]`, or over each channel."""
    call.fixed("weight", "bias", "running_mean", "running_var")
    call.apart("input", dims=[0])
    axis = call.axis("input")
    if axis is not None and axis.dim != 0:
        call.unknown("normalizes in the dim of the rows")
    if call.node.op.startswith("aten.instance_norm") and not call.get("use_input_stats"):
        call.unknown("normalizes by recorded statistics")
    return call.several(call.layout("input"))


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
    name = "self" if "self" in call.given else "input"
    axes = []
    for argument in (name, "indices"):
        axis = call.axis(argument) if argument in call.given else None
        if axis is not None and axis.dim >= call.rank(argument) - many:
            call.unknown("computes in the dim of the rows")
        call.apart(argument, dims=range(call.rank(argument) - many if argument in call.given else 0))
        axes.append(axis)
    found = agreed_or_even(call, axes)
    return call.several(found)


def agreed_or_even(call: Call, axes: list[RowAxis | None]) -> Layout:
    """Returns the one axis that arguments give, or the layout of a value without rows."""
    found = [a for a in axes if a is not None]
    if any(a != found[0] for a in found):
        call.unknown("combines rows in different dims")
    if found:
        return found[0]
    return EVEN if any(layout is EVEN for _, layout in call.tensors()) else None


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
    axes = [x for x in layouts if isinstance(x, RowAxis)]
    if any(a != RowAxis(0, a.before, a.after) or a != axes[0] for a in axes):
        call.unknown("combines rows in different dims")
    return call.several(axes[0] if axes else call.even())


def spectrogram(call: Call) -> Layout:
    """A Fourier transform of windows of signals `[B, L]`."""
    call.fixed("window")
    call.apart("self", dims=[0])
    axis = call.axis("self")
    if axis is not None and (axis.dim != 0 or call.rank("self") != 2):
        call.unknown("transforms the dim of the rows")
    return axis if axis is not None else call.even()


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
    found = [a for a in axes if a is not None]
    if any(a != found[0] for a in found):
        call.mixes("combines each row with all rows")
    return call.several(found[0] if found else None)


RULES: dict[str, Rule] = {
    **named(
        "conv1d conv2d conv3d conv_depthwise3d conv_transpose1d conv_transpose2d conv_transpose3d"
        " convolution",
        convolution,
    ),
    **named("layer_norm native_layer_norm rms_norm", norm_of_last),
    **named("group_norm native_group_norm instance_norm", norm_of_groups),
    **named(
        "_native_batch_norm_legit _native_batch_norm_legit_functional"
        " _native_batch_norm_legit_no_training batch_norm",
        norm_of_batch,
    ),
    **named(
        "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d"
        " adaptive_max_pool3d avg_pool1d avg_pool2d avg_pool3d max_pool1d max_pool1d_with_indices max_pool2d"
        " max_pool2d_with_indices max_pool3d max_pool3d_with_indices max_unpool2d max_unpool3d"
        " upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d"
        " upsample_nearest3d upsample_trilinear3d _upsample_bicubic2d_aa _upsample_bilinear2d_aa"
        " _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d pixel_shuffle"
        " pixel_unshuffle",
        spatial,
    ),
    **named(
        "grid_sampler grid_sampler_2d grid_sampler_3d affine_grid_generator im2col col2im channel_shuffle"
        " native_channel_shuffle",
        in_front,
    ),
    "stft": spectrogram,
    **named("lstm gru rnn_tanh rnn_relu", recurrent),
    **named("lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell", cell),
    **named(
        "linalg_inv linalg_inv_ex inverse linalg_cholesky linalg_cholesky_ex cholesky linalg_det linalg_eigh"
        " linalg_eigvalsh linalg_qr linalg_svd linalg_svdvals linalg_slogdet linalg_matrix_exp logdet"
        " linalg_pinv linalg_lu linalg_lu_factor linalg_solve linalg_solve_ex linalg_solve_triangular"
        " cholesky_solve cholesky_inverse linalg_matrix_power linalg_householder_product",
        matrices,
    ),
}
