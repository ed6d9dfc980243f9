"""Checks the operands of ops whose kernels read or write outside of them.

torch checks the operands of most ops. The ops of `CHECKS` trust what their public functions check before,
or what another operand says: a forged program, or a call with unusual sizes, would read the memory of other
values, or end the process. A check has the parameters of its op and runs at every call, before the kernel.

| file | ops |
|---|---|
| `require.py` | Provides the error and the conditions that checks share |
| `attention.py` | attention on a CPU |
| `convolutions.py` | torch's convolutions |
| `convolution_sizes.py` | literals and sizes of widepack's own convolutions |
| `experts.py` | widepack's own ops of experts |
| `fourier.py` | the ops behind Fourier transforms |
| `int8.py` | widepack's ops over int8 weights |
| `linalg.py` | solvers that read pivots |
| `lookups.py` | bags of embeddings, segments, CTC |
| `norms.py` | batch, group and weight normalization |
| `own_ops.py` | widepack's own ops |
| `pools.py` | pools over one dim, fractional pools |
| `recurrent.py` | LSTM, GRU and plain RNN layers |
| `resampling.py` | upsampling, sampling at a grid |
| `sequences.py` | the lengths of packed sequences |
| `series.py` | ops that loop as often as a value or a number says |

`scripts/stress/fence` runs every op of the allow-list with drawn operands behind guard pages.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from . import attention, convolutions, fourier, linalg, lookups, norms, pools, recurrent, resampling, series
from .require import OperandError as OperandError

Check = Callable[..., None]

CHECKS: dict[str, Check] = {
    "aten._scaled_dot_product_flash_attention_for_cpu.default": attention.flash_attention,
    "aten.scaled_dot_product_attention.default": attention.attention,
    "aten._masked_softmax.default": attention.masked_softmax,
    "aten._pdist_forward.default": linalg.pair_distances,
    "aten.linalg_matrix_power.default": linalg.matrix_power,
    "aten.mvlgamma.default": linalg.gamma_terms,
    "aten._fft_c2c.default": fourier.c2c,
    "aten._fft_c2r.default": fourier.c2r,
    "aten._fft_r2c.default": fourier.r2c,
    "aten.linalg_ldl_solve.default": linalg.ldl_solve,
    "aten.linalg_lu_solve.default": linalg.lu_solve,
    "aten.lu_unpack.default": linalg.lu_unpack,
    "aten._embedding_bag.default": lookups.embedding_bag,
    "aten._embedding_bag_forward_only.default": lookups.embedding_bag,
    "aten.embedding_bag.default": lookups.embedding_bag,
    "aten.embedding_bag.padding_idx": lookups.embedding_bag,
    "aten._trilinear.default": series.trilinear,
    "aten.bilinear.default": series.bilinear,
    "aten.copy.default": lookups.copy,
    "aten.ctc_loss.IntList": lookups.ctc_loss,
    "aten.diff.default": series.differences,
    "aten.fractional_max_pool2d.default": pools.fractional_max_pool,
    "aten.fractional_max_pool3d.default": pools.fractional_max_pool,
    "aten.max_pool1d.default": pools.max_pool1d,
    "aten.repeat_interleave.Tensor": series.repeat_counts,
    "aten.repeat_interleave.self_Tensor": series.repeat_interleave,
    "aten.segment_reduce.default": lookups.segment_reduce,
    "aten._native_batch_norm_legit.no_stats": norms.batch_norm_without_statistics,
    "aten._native_batch_norm_legit_functional.default": norms.batch_norm,
    "aten._native_batch_norm_legit_no_training.default": norms.batch_norm,
    "aten._weight_norm.default": norms.weight_norm,
    "aten._weight_norm_interface.default": norms.weight_norm_kernel,
    "aten.native_group_norm.default": norms.group_norm,
    "aten.polygamma.default": series.polygamma,
    "aten.special_zeta.default": series.zeta,
    "aten.gru.data": partial(recurrent.layer_packed, gates=3),
    "aten.gru.input": partial(recurrent.layer, gates=3),
    "aten.lstm.data": recurrent.lstm_packed,
    "aten.lstm.input": recurrent.lstm,
    "aten.rnn_relu.data": partial(recurrent.layer_packed, gates=1),
    "aten.rnn_relu.input": partial(recurrent.layer, gates=1),
    "aten.rnn_tanh.data": partial(recurrent.layer_packed, gates=1),
    "aten.rnn_tanh.input": partial(recurrent.layer, gates=1),
}
"""The check of each op by its name in programs. widepack's own ops have theirs in their definitions."""

for _name in [
    "conv1d.default",
    "conv1d.padding",
    "conv2d.default",
    "conv2d.padding",
    "conv3d.default",
    "conv3d.padding",
    "conv_transpose1d.default",
    "conv_transpose2d.input",
    "conv_transpose3d.input",
    "convolution.default",
]:
    CHECKS[f"aten.{_name}"] = convolutions.convolution

for _name, _spatial, _corners in (
    ("_upsample_bicubic2d_aa", 2, True),
    ("_upsample_bilinear2d_aa", 2, True),
    ("_upsample_nearest_exact1d", 1, False),
    ("_upsample_nearest_exact2d", 2, False),
    ("_upsample_nearest_exact3d", 3, False),
    ("upsample_bicubic2d", 2, True),
    ("upsample_bilinear2d", 2, True),
    ("upsample_linear1d", 1, True),
    ("upsample_nearest1d", 1, False),
    ("upsample_nearest2d", 2, False),
    ("upsample_nearest3d", 3, False),
    ("upsample_trilinear3d", 3, True),
):
    CHECKS[f"aten.{_name}.default"] = resampling.upsample(
        _spatial, corners=_corners, smooth=_name.endswith("_aa")
    )
    CHECKS[f"aten.{_name}.vec"] = resampling.upsample_list(_spatial, corners=_corners)

for _name in ("grid_sampler", "grid_sampler_2d", "grid_sampler_3d"):
    CHECKS[f"aten.{_name}.default"] = resampling.grid_sampler

OF_VALUES = frozenset(
    {
        "aten._embedding_bag.default",
        "aten._embedding_bag_forward_only.default",
        "aten.ctc_loss.IntList",
        "aten.embedding_bag.default",
        "aten.embedding_bag.padding_idx",
        "aten.fractional_max_pool2d.default",
        "aten.fractional_max_pool3d.default",
        "aten.gru.data",
        "aten.linalg_ldl_solve.default",
        "aten.linalg_lu_solve.default",
        "aten.lstm.data",
        "aten.lu_unpack.default",
        "aten.polygamma.default",
        "aten.special_zeta.default",
        "aten.rnn_relu.data",
        "aten.rnn_tanh.data",
        "aten.repeat_interleave.Tensor",
        "aten.repeat_interleave.self_Tensor",
        "aten.segment_reduce.default",
    }
)
"""Ops whose check reads values. A compiler traces sizes alone, so its code would run without the check."""

_BAG = ("weight", "per_sample_weights")
OF_SIZES: dict[str, tuple[str, ...]] = {
    "aten._embedding_bag.default": _BAG,
    "aten._embedding_bag_forward_only.default": _BAG,
    "aten.ctc_loss.IntList": ("log_probs",),
    "aten.embedding_bag.default": _BAG,
    "aten.embedding_bag.padding_idx": _BAG,
    "aten.fractional_max_pool2d.default": ("self",),
    "aten.fractional_max_pool3d.default": ("self",),
    "aten.segment_reduce.default": ("data",),
}
"""Operands of ops of `OF_VALUES` whose sizes and types alone are checked."""
