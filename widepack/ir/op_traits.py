"""Lists what is known of ops by name, without running them: recurrent ops, and the class of each op's cost.

A name here has no overload: `aten.linear` stands for `aten.linear.default`. Every op of the format's
allow-list has a cost class in this table, is a view by its schema, or is one of Python's operators; a test
checks that. `runtime/op_costs.py` computes costs from these classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

CostClass = Literal[
    "linear",
    "sort",
    "slow",
    "slowest",
    "fourier",
    "product",
    "contraction",
    "convolution",
    "member convolutions",
    "attention",
    "grouped linear",
    "factored",
    "layer chain",
    "bilinear",
    "recurrent",
    "recurrent steps",
    "pool",
    "pair",
    "distance",
    "cubic",
    "spectral",
    "window",
    "ctc",
    "multivariate gamma",
    "series",
    "cell",
    "bag",
    "class pairs",
    "differences",
    "matrix power",
]


def _aten(text: str) -> frozenset[str]:
    """`mm bmm` as `aten.mm`, `aten.bmm`."""
    return frozenset(f"aten.{word}" for word in text.split())


RECURRENT_LAYERS = _aten("lstm gru rnn_tanh rnn_relu")
"""The recurrent layers of torch, all steps in one call."""
RECURRENT_STEPS = frozenset(
    {f"widepack.{cell}_{kind}" for cell in ("rnn", "gru", "lstm") for kind in ("steps", "training")}
    | {"widepack.packed_lstm"}
)
"""The recurrent layers of widepack: all steps of all members in one call."""

READS_LITTLE = _aten(
    """
        diagonal embedding empty_like full_like gather index index_select narrow_copy new_empty new_full
        new_ones new_zeros ones_like rand_like randint_like randn_like select_copy slice_copy sym_numel
        sym_size sym_storage_offset sym_stride take take_along_dim unbind_copy zeros_like
    """
)
"""Ops that read only as much of their arguments as they return, or only sizes."""

UNKNOWN_SIZE = _aten("_dirichlet_grad _logcumsumexp _masked_softmax dequantize native_norm")
"""Ops for which torch has no kernel on the meta device. Their results have the size of their arguments."""

CLASS_NAMES: Mapping[CostClass, frozenset[str]] = {
    # One pass over what is read and written.
    "linear": _aten(
        """
        __and__ __or__ __xor__ _conj_physical _local_scalar_dense _log_softmax _logcumsumexp
        _masked_softmax _native_batch_norm_legit _native_batch_norm_legit_functional
        _native_batch_norm_legit_no_training _prelu_kernel _sample_dirichlet _softmax _stack
        _standard_gamma _thnn_fused_gru_cell _thnn_fused_lstm_cell _to_copy _unsafe_view
        _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d _weight_norm
        _weight_norm_interface abs acos add addcdiv addcmul affine_grid_generator alias_copy all amax
        amin aminmax any arange arctan2 as_strided_scatter asin atan atleast_1d bartlett_window
        binomial bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor
        blackman_window block_diag broadcast_tensors cartesian_prod cat ceil celu channel_shuffle clamp
        clamp_max clamp_min clone col2im column_stack conj_physical constant_pad_nd copy copysign cos
        cosh count_nonzero cumsum deg2rad dequantize diag diag_embed diagonal_scatter div divide dstack
        elu embedding empty empty_like eq erf erfc exp exp2 expand_copy expm1 eye feature_alpha_dropout
        feature_dropout fill flip floor floor_divide fmax fmin frac frexp full full_like gather ge gelu
        glu gradient group_norm gt hamming_window hann_window hardshrink hardsigmoid hardswish hardtanh
        heaviside hstack hypot im2col index index_add index_copy index_fill index_select instance_norm
        isclose isfinite isinf isnan isneginf isposinf layer_norm le leaky_relu lerp lift
        lift_fresh_copy linalg_cross linspace log log10 log1p log2 log_sigmoid log_softmax logaddexp
        logaddexp2 logical_and logical_not logical_or logical_xor logspace logsumexp lt masked_fill
        masked_scatter masked_select max max_unpool2d max_unpool3d maximum mean meshgrid min minimum
        mish mul multi_margin_loss multiply nan_to_num nanmean nansum narrow_copy
        native_channel_shuffle native_group_norm native_layer_norm native_norm ne neg new_empty
        new_full new_ones new_zeros nextafter nll_loss nll_loss2d nll_loss_forward nll_loss_nd
        nonzero_static norm_except_dim one_hot ones ones_like pad permute_copy pixel_shuffle
        pixel_unshuffle poisson prelu prod put rad2deg randint randint_like reciprocal reflection_pad1d
        reflection_pad2d reflection_pad3d relu relu6 repeat repeat_interleave replication_pad1d
        replication_pad2d replication_pad3d rms_norm roll rot90 round rrelu_with_noise_functional rsqrt
        rsub scalar_tensor scatter scatter_add select_copy select_scatter selu sgn sigmoid sign signbit
        silu sin sinc sinh slice_copy slice_scatter softmax softplus softshrink special_erf
        special_expm1 special_log1p split_copy split_with_sizes_copy sqrt square squeeze_copy stack std
        std_mean sub subtract sum sym_numel sym_size sym_storage_offset sym_stride t_copy take
        take_along_dim tanh threshold tile trace transpose_copy tril tril_indices triu triu_indices
        true_divide trunc type_as unbind_copy unfold_copy unsafe_chunk unsafe_split
        unsafe_split_with_sizes unsqueeze_copy upsample_bilinear2d upsample_linear1d upsample_nearest1d
        upsample_nearest2d upsample_nearest3d var var_mean view_as_complex_copy view_as_real_copy
        view_copy vstack where xlogy zeros zeros_like
        elu_backward gelu_backward hardswish_backward leaky_relu_backward mish_backward
        sigmoid_backward silu_backward softplus_backward tanh_backward
        threshold_backward
        """
    )
    | {
        "widepack.sequence_lengths",
        "widepack.pack_convolution",
        "widepack.pack_convolutions",
        "widepack.pack_linear",
        "widepack.pack_lstm",
        "widepack.int8_scales",
        "widepack.int8_weight",
    },
    # Comparisons of numbers, accumulation in order, and scattered writes.
    "sort": _aten(
        """
        _unique _unique2 argsort argwhere bincount bucketize cummax cummin cumprod grid_sampler
        grid_sampler_2d grid_sampler_3d histc histogram index_put index_reduce kthvalue logcumsumexp
        median mode multinomial nanmedian nanquantile nonzero quantile randperm scatter_reduce
        searchsorted segment_reduce sort topk unique_consecutive unique_dim unique_dim_consecutive
        """
    ),
    # Many operations for each number: special functions, random draws, interpolation, and reductions whose
    # kernels take one number after the other.
    "slow": _aten(
        """
        _adaptive_avg_pool2d _adaptive_avg_pool3d _safe_softmax _upsample_bicubic2d_aa
        _upsample_bilinear2d_aa acosh adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
        adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d alpha_dropout angle argmax argmin
        asinh atan2 atanh bernoulli cauchy complex cross_entropy_loss digamma dropout erfinv
        exponential float_power fmod frobenius_norm geometric i0 kaiser_window lgamma
        linalg_vector_norm log_normal logit native_dropout norm normal polar pow rand rand_like randn
        randn_like remainder renorm rrelu special_airy_ai special_bessel_j0 special_bessel_j1
        special_bessel_y0 special_bessel_y1 special_entr special_erfcx special_i0e special_i1
        special_i1e special_log_ndtr special_modified_bessel_i0 special_modified_bessel_i1
        special_modified_bessel_k0 special_modified_bessel_k1 special_ndtri
        special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1 special_spherical_bessel_j0
        special_xlog1py tan uniform upsample_bicubic2d upsample_trilinear3d
        """
    ),
    # Many divisions for each number.
    "slowest": _aten(
        """
        _dirichlet_grad gcd lcm
        """
    ),
    # Series of up to 2000 terms for each number.
    "series": _aten(
        """
        igamma igammac polygamma special_zeta
        """
    ),
    # One step of a recurrent layer.
    "cell": _aten(
        """
        gru_cell lstm_cell rnn_relu_cell rnn_tanh_cell
        """
    ),
    # Sums of rows that indices name.
    "bag": _aten(
        """
        _embedding_bag _embedding_bag_forward_only embedding_bag
        """
    ),
    # Each class against each other class.
    "class pairs": _aten("multilabel_margin_loss"),
    # Differences of differences.
    "differences": _aten("diff"),
    # Products of a matrix with itself, as often as a number or the matrix says.
    "matrix power": _aten("linalg_matrix_exp linalg_matrix_power"),
    # Fourier transforms.
    "fourier": _aten(
        """
        _fft_c2c _fft_c2r _fft_r2c fft_fft fft_fft2 fft_fftfreq fft_fftn fft_fftshift fft_hfft fft_hfft2
        fft_hfftn fft_ifft fft_ifft2 fft_ifftn fft_ifftshift fft_ihfft fft_ihfft2 fft_ihfftn fft_irfft
        fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftfreq fft_rfftn
        """
    ),
    # Matrix products.
    "product": _aten(
        """
        addbmm addmm addmv addr baddbmm bmm dot ger linear matmul mm mv outer vdot
        """
    ),
    # Sums of products over any dims.
    "contraction": _aten(
        """
        einsum tensordot
        """
    ),
    # Convolutions.
    "convolution": _aten(
        """
        conv1d conv2d conv3d conv_depthwise3d conv_tbc conv_transpose1d conv_transpose2d
        conv_transpose3d convolution
        """
    )
    | {"widepack.convolution"},
    # The convolution of each member.
    "member convolutions": frozenset({"widepack.member_convs"}),
    # Attention: the scores of each query and key.
    "attention": _aten(
        """
        _scaled_dot_product_efficient_attention _scaled_dot_product_flash_attention
        _scaled_dot_product_flash_attention_for_cpu scaled_dot_product_attention
        """
    )
    | {"widepack.masked_attention"},
    # Products of all members in one call.
    "grouped linear": frozenset(
        {
            "widepack.linear",
            "widepack.streamed_linear",
            "widepack.expert_linear",
            "widepack.grouped_experts",
            "widepack.expert_mm",
            "widepack.member_products",
            "widepack.int8_linear",
        }
    ),
    # Products with a base and thin factors.
    "factored": frozenset({"widepack.delta_linear", "widepack.factored_weight"}),
    # Linear layers and activations, one after the other.
    "layer chain": frozenset({"widepack.mlp_chain"}),
    # Products of three operands.
    "bilinear": _aten(
        """
        _trilinear bilinear
        """
    ),
    "recurrent": RECURRENT_LAYERS,
    "recurrent steps": RECURRENT_STEPS,
    # Windows of fixed size.
    "pool": _aten(
        """
        avg_pool1d avg_pool2d avg_pool3d fractional_max_pool2d fractional_max_pool3d
        max_pool1d max_pool1d_with_indices max_pool2d
        max_pool2d_with_indices max_pool3d max_pool3d_with_indices
        """
    ),
    # Two operands that broadcast to each other, then a sum.
    "pair": _aten(
        """
        binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss cosine_similarity
        dist hinge_embedding_loss huber_loss isin kl_div l1_loss linalg_vecdot margin_ranking_loss mse_loss
        pairwise_distance poisson_nll_loss smooth_l1_loss soft_margin_loss triplet_margin_loss
        """
    ),
    # Every row against every row.
    "distance": _aten(
        """
        _cdist_forward _euclidean_dist _pdist_forward cdist corrcoef cov pdist
        """
    ),
    # Linear algebra with a fixed number of operations.
    "cubic": _aten(
        """
        _linalg_det _linalg_slogdet _linalg_solve_ex cholesky cholesky_inverse cholesky_solve inverse
        kron linalg_cholesky linalg_cholesky_ex linalg_det linalg_householder_product linalg_inv
        linalg_inv_ex linalg_ldl_factor linalg_ldl_solve linalg_lu linalg_lu_factor linalg_lu_solve
        linalg_qr linalg_slogdet linalg_solve linalg_solve_ex
        linalg_solve_triangular logdet lu_unpack
        """
    ),
    # Linear algebra that iterates: eigenvalues and singular values.
    "spectral": _aten(
        """
        _linalg_eigh _linalg_svd linalg_cond linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh
        linalg_lstsq linalg_matrix_norm linalg_matrix_rank linalg_norm linalg_pinv linalg_svd
        linalg_svdvals nuclear_norm
        """
    ),
    # Short-time Fourier transforms, which write out every window.
    "window": _aten(
        """
        istft stft
        """
    ),
    "ctc": _aten("ctc_loss"),
    "multivariate gamma": _aten("mvlgamma"),
}
"""The names of the ops of each class. No op is in two."""

_CLASS_OF: dict[str, CostClass] = {name: kind for kind, names in CLASS_NAMES.items() for name in names}


def cost_class(name: str) -> CostClass | None:
    """The cost class of an op, by its name without overload; None for an op that is not in the table."""
    return _CLASS_OF.get(name)


def is_recurrent_layer(op: str) -> bool:
    """Whether an op, by its name with overload, is a recurrent layer of torch."""
    return op.rpartition(".")[0] in RECURRENT_LAYERS
