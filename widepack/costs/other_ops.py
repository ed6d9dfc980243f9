"""Counts operations of ops without a FLOP formula: elementwise ops, reductions, norms and pools.

1. An op of `PER_ELEMENT` does a fixed number of operations for each element of its first result.
2. A pool does one for each element of its window and each element of its result.
3. torch tags elementwise ops as `pointwise`: one for each element of the result.
4. torch tags sums and the like as `reduction`: one for each element that is read.
5. An embedding bag does one for each element of the rows that it adds up.
6. A Fourier transform of n complex numbers does 5 * log2(n) for each, one of real numbers half of that.
7. An op of `MOVES` copies, makes, gathers or orders values, and does none.
8. Any other op is not counted: None. It is named where totals are shown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..ir.values import known
from ..registry.flop_formulas import tensors_in


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


PER_ELEMENT: dict[str, int] = {
    "_softmax": 5,
    "_safe_softmax": 5,
    "_log_softmax": 5,
    "_weight_norm_interface": 3,
    "native_layer_norm": 5,
    "native_group_norm": 5,
    "native_batch_norm": 4,
    "_native_batch_norm_legit": 4,
    "_native_batch_norm_legit_no_training": 4,
    "_batch_norm_with_update": 4,
    "_fused_rms_norm": 4,
    "_thnn_fused_lstm_cell": 9,
    "_thnn_fused_gru_cell": 9,
    "cumsum": 1,
    "cumprod": 1,
    "logcumsumexp": 3,
    "upsample_nearest1d": 1,
    "upsample_nearest2d": 1,
    "upsample_nearest3d": 1,
    "upsample_linear1d": 3,
    "upsample_bilinear2d": 7,
    "upsample_trilinear3d": 15,
    "upsample_bicubic2d": 35,
    "_upsample_bilinear2d_aa": 7,
    "_upsample_bicubic2d_aa": 35,
    "grid_sampler_2d": 11,
    "glu": 2,
    "linalg_vector_norm": 2,
    "addcmul": 3,
    "addcdiv": 3,
    "_masked_softmax": 5,
    "_native_batch_norm_legit_functional": 4,
    "_logcumsumexp": 3,
    **dict.fromkeys(
        _names(
            """
        _prelu_kernel binary_cross_entropy binary_cross_entropy_with_logits complex cummax cummin dequantize
        floor_divide hardswish huber_loss masked_fill mse_loss polar rrelu_with_noise_functional rsub
        smooth_l1_loss soft_margin_loss elu_backward gelu_backward hardswish_backward leaky_relu_backward
        mish_backward sigmoid_backward silu_backward softplus_backward tanh_backward threshold_backward
        """
        ),
        1,
    ),
}
"""Operations for each element of the first result, or of the first argument where that is larger."""
_POOLS = ("avg_pool", "fractional_max_pool", "max_pool")
_ADAPTIVE = ("_adaptive_avg_pool", "adaptive_avg_pool", "adaptive_max_pool", "mkldnn_adaptive_avg_pool")
MOVES = _names(
    """
    _local_scalar_dense _resize_output_ _stack _to_copy _unique _unique2 _unsafe_index
    affine_grid_generator alias_copy arange argsort as_strided_copy as_strided_scatter bartlett_window
    bernoulli binomial blackman_window block_diag bucketize cat cauchy channel_shuffle clone col2im
    constant_pad_nd copy copy_ count_nonzero diag_embed diagonal_scatter embedding empty_like
    expand_copy exponential eye fft_fftfreq fft_rfftfreq fill fill_ flip full full_like gather geometric
    hamming_window hann_window im2col index index_add index_copy index_fill index_put index_put_
    index_select is_pinned is_same_size isin kaiser_window kthvalue lift lift_fresh_copy linspace
    log_normal logspace masked_fill_ masked_scatter masked_select max_unpool2d max_unpool3d median mode
    multinomial narrow_copy native_channel_shuffle native_dropout new_empty new_full new_ones new_zeros
    nonzero nonzero_static normal normal_ ones ones_like pack_convolution pack_convolutions pack_linear
    pack_lstm permute_copy pixel_shuffle pixel_unshuffle poisson put rand rand_like randint randint_like
    randn randn_like randperm reflection_pad1d reflection_pad2d reflection_pad3d repeat
    repeat_interleave replication_pad1d replication_pad2d replication_pad3d resize_ roll rot90
    scalar_tensor scatter scatter_add scatter_reduce searchsorted select_copy select_scatter set_
    slice_copy slice_scatter sort split_copy split_with_sizes_copy squeeze_copy stack t_copy take topk
    transpose_copy tril tril_indices triu triu_indices unbind_copy unfold_backward unfold_copy uniform
    uniform_ unique_consecutive unique_dim unique_dim_consecutive unsafe_split unsafe_split_with_sizes
    unsqueeze_copy view_as_complex_copy view_as_real_copy view_copy where zero_ zeros zeros_like
    """
)
"""Ops that only copy, make, gather or order values."""
_READS_RESULT = _names("_unsafe_index embedding gather index index_select take take_along_dim")
_BAGS = _names("_embedding_bag _embedding_bag_forward_only embedding_bag")
"""Ops that add up rows of a table."""
_TRANSFORMS = {"_fft_c2c": 5.0, "_fft_r2c": 2.5, "_fft_c2r": 2.5}
"""Operations for each element and each power of two in the size of a Fourier transform."""


def other_ops(name: str, op: Any, args: Sequence[Any], result: Any) -> Any:
    """Returns the number of operations of a kernel, or None if it is not counted.

    name: without library and overload, for example `native_layer_norm`.
    """
    made, read = list(tensors_in(result)), list(tensors_in(args))
    if name in PER_ELEMENT:
        return PER_ELEMENT[name] * made[0].numel()
    if name.startswith(_ADAPTIVE):
        return read[0].numel()
    if name.startswith(_POOLS):
        window = [args[1]] if isinstance(args[1], int) else list(args[1])
        spatial = int(name.split("pool")[1][0])
        return made[0].numel() * math.prod(window) ** (spatial if len(window) == 1 else 1)
    tags = getattr(op, "tags", ())
    if name in MOVES:
        return 0
    if name in _BAGS:
        return _rows_of_bags(read)
    if name in _TRANSFORMS:
        return _of_transform(_TRANSFORMS[name], made[0] if name == "_fft_c2r" else read[0], args[1])
    if torch.Tag.pointwise in tags:
        return made[0].numel()
    if (torch.Tag.reduction in tags or name == "trace") and read:
        return read[0].numel()
    return None


def looked_up(name: str, args: Any, result: Any) -> Any:
    """Returns how many elements of its first argument an op looks up; None if it reads the whole.

    name: without library and overload.
    """
    if name in _BAGS:
        return _rows_of_bags(list(tensors_in(args)))
    made = next(tensors_in(result), None)
    return made.numel() if name in _READS_RESULT and made is not None else None


def _rows_of_bags(read: Sequence[Tensor]) -> Any:
    """Returns the number of elements in the rows of a table [R, W] at the places [P]."""
    table, places = read[:2]
    return places.numel() * table.shape[1]


def _of_transform(each: float, numbers: Tensor, dims: Sequence[int]) -> Any:
    """Returns the operations of a Fourier transform over dims; None if a size of them is a symbol.

    numbers: the argument, or the result where that is real.
    """
    sizes = [known(numbers.shape[d]) for d in dims]
    if None in sizes:
        return None
    return math.ceil(each * sum(math.log2(n) for n in sizes if n)) * numbers.numel()


def reads_numbers(args: Any) -> bool:
    """Whether an op reads floating or complex tensors, so that leaving it out makes totals too small."""
    return any(isinstance(t, Tensor) and (t.is_floating_point() or t.is_complex()) for t in tensors_in(args))
