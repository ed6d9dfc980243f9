"""Holds what is known of each op beside its strategies and samples: one record an op.

A name here has no overload: `aten.linear` stands for `aten.linear.default`. The table below has the ops of
the format, by family, so that a load knows what an op costs without importing strategies. An op with a file
of its own in `primitives` has its record there.

An op that torch tags as pointwise has the record `OpRecord(rows="pointwise", ops=1)` without a line, and one
that torch tags as a reduction `OpRecord(rows="reduction")`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

import torch

from . import ops as op_names


@dataclass(frozen=True, slots=True)
class OpRecord:
    """What is known of an op.

    cost: the class of its cost, which has a formula or a weight in `runtime/op_costs.py`.
    rows: what it does with the rows of a batch, by the names in `rows/walk.py`; "": no rule says it.
    ops: operations for each number of its first result, beside FLOP. 0: it copies, makes, gathers or orders
        values. None: one for each number that an op makes, or a reduction reads, by torch's tags; that of no
        other op is known.
    reads: how much it reads of its first argument: "all"; "result": as many numbers as it returns; "sizes".
    once: why it runs once for each member, for ops and overloads that have no strategy.
    unguarded: whether it reads or writes at indices, and compiled code cannot check them: no form of the op
        in `backends/index_flags.py` does.
    """

    cost: str = "linear"
    rows: str = ""
    ops: int | None = None
    reads: Literal["all", "result", "sizes"] = "all"
    once: str = ""
    unguarded: bool = False

    def of(self, names: str | Iterable[str]) -> None:
        """Makes this the record of ops, in the place of another.

        names: Of the ops, without overload, in a list or in a text with spaces between them. `sum` means
            `aten.sum`; `mylib::op` is an op of another library.
        """
        for name in names.split() if isinstance(names, str) else names:
            dotted = name.replace("::", ".")
            RECORDS[dotted if "." in dotted else f"aten.{dotted}"] = self


RECORDS: dict[str, OpRecord] = {}


def record(op: str) -> OpRecord:
    """Returns the record of an op. op: its name in programs, with overload.

    Strategies are imported only for an op that neither the table nor torch's tags know.
    """
    name = op if op in RECORDS else op.rpartition(".")[0]
    if name not in RECORDS:
        tagged = by_tags(op_names.resolve(op))
        if tagged is not None or op_names.returns_view(op):
            return tagged or OpRecord()
        if name.startswith("aten."):
            import_module("widepack.primitives")  # its file has the record
    return RECORDS.get(name) or OpRecord(cost="fourier" if "_fft" in name else "linear")


def by_tags(op: Any) -> OpRecord | None:
    """Returns the record of an op without a line in the table, by torch's tags; None if they say nothing."""
    tags = getattr(op, "tags", ())
    if torch.Tag.pointwise in tags:
        return _POINTWISE
    return _REDUCTION if torch.Tag.reduction in tags else None


_POINTWISE = OpRecord(rows="pointwise", ops=1)
_REDUCTION = OpRecord(rows="reduction")

RECURRENT_LAYERS = frozenset(f"aten.{name}" for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"))
"""The recurrent layers of torch, all steps in one call."""
RECURRENT_STEPS = frozenset(
    {f"widepack.{cell}_{kind}" for cell in ("rnn", "gru", "lstm") for kind in ("steps", "training")}
    | {"widepack.packed_lstm"}
)
"""The recurrent layers of widepack: all steps of all members in one call."""
UNKNOWN_SIZE = frozenset(
    f"aten.{name}"
    for name in ("_dirichlet_grad", "_logcumsumexp", "_masked_softmax", "dequantize", "native_norm")
)
"""Ops for which torch has no kernel on the meta device. Their results have the size of their arguments."""


def is_recurrent_layer(op: str) -> bool:
    """Whether an op, by its name with overload, is a recurrent layer of torch."""
    return op.rpartition(".")[0] in RECURRENT_LAYERS


_DECIDED = "the result is a number, or values decide its size: members differ from there on"
_ONE_TENSOR = "counts or ranges that torch accepts for one tensor only"
_LAYOUT = "depends on the memory layout"
_DRAWS = "draws random numbers: one draw for each member"
_INNER = "an inner form of an op that has strategies, in decomposed programs"
_RARE = "rare in networks"
_PACKED = "recurrent over packed sequences: each step has other rows"
_REFUSES_NAN = "a decomposition that refuses NaN in every strategy"

# ---------------------------------------------------------------- each number alone

OpRecord(rows="pointwise", ops=1).of("""
    __and__ __or__ arctan2 divide isclose log_sigmoid multiply special_erf special_expm1 special_log1p
    subtract _prelu_kernel elu_backward floor_divide hardswish hardswish_backward leaky_relu_backward
    masked_fill mish_backward rsub softplus_backward
""")
OpRecord(rows="pointwise", ops=3).of("addcdiv addcmul")
OpRecord(rows="pointwise", ops=1, once=_RARE).of("dequantize")
OpRecord(ops=1, once=_DRAWS).of("rrelu_with_noise_functional")
OpRecord(rows="prelu", ops=1).of("prelu")
# many operations for each number
OpRecord(cost="slow", rows="pointwise", ops=1).of("""
    acosh angle asinh atan2 atanh complex digamma erfinv float_power fmod i0 lgamma logit polar pow remainder
    rrelu special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1 special_entr
    special_erfcx special_i0e special_i1 special_i1e special_log_ndtr special_modified_bessel_i0
    special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1 special_ndtri
    special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1 special_spherical_bessel_j0
    special_xlog1py tan
""")
OpRecord(cost="slowest", rows="pointwise", ops=1).of("gcd lcm")
OpRecord(cost="slowest", once=_DRAWS).of("_dirichlet_grad")
OpRecord(cost="series", rows="pointwise", ops=1).of("igamma igammac polygamma special_zeta")
OpRecord(cost="multivariate gamma", rows="pointwise", ops=1).of("mvlgamma")

# ---------------------------------------------------------------- values that are made, copied or drawn

OpRecord(rows="pointwise", ops=0).of("_conj _neg_view conj imag real resolve_conj resolve_neg copy fill")
OpRecord(rows="pointwise", ops=0, once=_DECIDED).of("where")
OpRecord(rows="cast", ops=0).of("""
    _to_copy alias alias_copy clone contiguous detach lift lift_fresh lift_fresh_copy type_as
""")
OpRecord(rows="same_content", ops=0).of("empty full ones scalar_tensor zeros")
OpRecord(rows="same_content", ops=0, reads="sizes").of("""
    empty_like full_like new_empty new_full new_ones new_zeros ones_like zeros_like
""")
OpRecord(rows="arange", ops=0).of("arange")
OpRecord(ops=0).of("""
    bartlett_window blackman_window eye hamming_window hann_window is_pinned is_same_size logspace
    tril_indices triu_indices _resize_output_ copy_ fill_ index_put_ masked_fill_ normal_ poisson randint
    resize_ set_ uniform_ zero_ widepack.int8_scales widepack.int8_weight widepack.pack_convolution
    widepack.pack_convolutions widepack.pack_inner_product widepack.pack_inner_products widepack.pack_linear
    widepack.pack_lstm widepack.sequence_lengths
""")
OpRecord(ops=0, once=_DECIDED).of("linspace _local_scalar_dense")
OpRecord(reads="sizes").of("sym_numel sym_size")
OpRecord(reads="sizes", once=_LAYOUT).of("sym_storage_offset sym_stride")
OpRecord(ops=0, reads="sizes").of("randint_like")
OpRecord(cost="slow", ops=0, reads="sizes").of("rand_like randn_like")
OpRecord(cost="slow", ops=0).of("""
    bernoulli cauchy exponential geometric kaiser_window log_normal normal rand randn uniform
""")
OpRecord(cost="slow", rows="pointwise", ops=0).of("alpha_dropout dropout native_dropout")
OpRecord(ops=0).of("feature_alpha_dropout feature_dropout")
OpRecord(ops=0, once=_DRAWS).of("binomial")
OpRecord(once=_DRAWS).of("_sample_dirichlet _standard_gamma")
OpRecord(cost="sort", ops=0).of("multinomial randperm")

# ---------------------------------------------------------------- other shapes and orders, parts, joins

OpRecord(rows="reshape", ops=0).of("_unsafe_view flatten ravel reshape reshape_as unflatten view view_copy")
OpRecord(rows="reshape", once=_LAYOUT).of("view_as")
OpRecord(rows="moved", ops=0).of("""
    adjoint mH mT movedim numpy_T permute permute_copy swapaxes swapdims t t_copy transpose transpose_copy
    unsqueeze unsqueeze_copy view_as_complex view_as_complex_copy view_as_real view_as_real_copy
""")
OpRecord(rows="squeeze", ops=0).of("squeeze")
OpRecord(rows="squeeze", ops=0, once=_LAYOUT).of("squeeze_copy")
OpRecord(rows="expand", ops=0).of("expand expand_as expand_copy")
OpRecord(rows="broadcast").of("broadcast_tensors")
OpRecord(rows="repeat", ops=0).of("repeat tile")
OpRecord(rows="repeat_interleave", ops=0, once=_DECIDED).of("repeat_interleave")
OpRecord(rows="select").of("select")
OpRecord(rows="select", ops=0, reads="result").of("select_copy")
OpRecord(rows="part").of("narrow slice")
OpRecord(rows="part", ops=0, reads="result").of("narrow_copy slice_copy")
OpRecord(rows="parts", ops=0).of("""
    chunk split split_copy split_with_sizes split_with_sizes_copy unsafe_chunk unsafe_split
    unsafe_split_with_sizes
""")
OpRecord(rows="unbind").of("unbind")
OpRecord(rows="unbind", ops=0, reads="result").of("unbind_copy")
OpRecord(rows="diagonal", reads="result").of("diagonal")
OpRecord(rows="diag_embed", ops=0).of("diag_embed")
OpRecord(rows="unfold").of("unfold")
OpRecord(rows="matrix_part", ops=0).of("tril triu")
OpRecord(rows="cat", ops=0).of("cat")
OpRecord(rows="stack", ops=0).of("_stack stack")
OpRecord(rows="pad", ops=0).of("""
    constant_pad_nd pad reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d
    replication_pad3d
""")
OpRecord(rows="along", ops=0).of("flip roll")
OpRecord(rows="spatial", ops=0).of("pixel_shuffle pixel_unshuffle")
OpRecord(rows="spatial", ops=0, unguarded=True).of("max_unpool2d max_unpool3d")
OpRecord(rows="in_front", ops=0).of("""
    affine_grid_generator channel_shuffle col2im im2col native_channel_shuffle
""")
OpRecord(rows="getitem").of("operator.getitem")
OpRecord(ops=0).of("""
    as_strided_copy atleast_1d column_stack diag diagonal_scatter dstack hstack meshgrid rot90 unfold_backward
    unfold_copy vstack
""")
OpRecord(ops=0, once=_LAYOUT).of("as_strided as_strided_scatter")
OpRecord(ops=0, once=_LAYOUT, unguarded=True).of("put")
OpRecord(ops=0, once=_RARE).of("block_diag cartesian_prod")

# ---------------------------------------------------------------- reading and writing at indices

OpRecord(rows="embedding", ops=0, reads="result").of("embedding")
OpRecord(rows="gather", ops=0, reads="result").of("gather take_along_dim")
OpRecord(rows="index", ops=0, reads="result").of("index")
OpRecord(rows="index_select", ops=0, reads="result").of("index_select")
OpRecord(ops=0, reads="result").of("_unsafe_index")
OpRecord(ops=0, reads="result", once=_LAYOUT, unguarded=True).of("take")
OpRecord(rows="one_hot", ops=0).of("one_hot")
OpRecord(rows="scatter", ops=0).of("scatter scatter_add")
OpRecord(cost="sort", rows="scatter", ops=0).of("scatter_reduce")
OpRecord(rows="index_write", ops=0).of("index_add index_copy")
OpRecord(rows="index_write", ops=0, once=_RARE).of("index_fill")
OpRecord(cost="sort", rows="index_write").of("index_reduce")
OpRecord(cost="sort", rows="index_put", ops=0).of("index_put")
OpRecord(rows="slice_write", ops=0).of("slice_scatter")
OpRecord(rows="part_write", ops=0).of("select_scatter")
OpRecord(rows="of_all", ops=0).of("masked_scatter")
OpRecord(rows="of_all", ops=0, once=_DECIDED).of("masked_select nonzero_static")
OpRecord(cost="sort", rows="of_all", ops=0, once=_DECIDED).of("""
    _unique _unique2 nonzero unique_consecutive unique_dim unique_dim_consecutive
""")
OpRecord(cost="sort", rows="of_all", once=_DECIDED).of("argwhere bincount")
OpRecord(cost="pair", rows="membership", ops=0).of("isin")
OpRecord(cost="sort", rows="membership", ops=0, once=_ONE_TENSOR).of("bucketize searchsorted")

# ---------------------------------------------------------------- along dims

OpRecord(rows="reduction").of("max min nanmean")
OpRecord(rows="reduction", ops=0).of("count_nonzero")
OpRecord(cost="slow", rows="reduction").of("argmax argmin frobenius_norm norm")
OpRecord(cost="slow", rows="reduction", ops=2).of("linalg_vector_norm")
OpRecord(cost="sort", rows="reduction").of("nanmedian nanquantile quantile")
OpRecord(cost="sort", rows="reduction", ops=0).of("kthvalue median mode")
OpRecord(cost="sort", rows="along", ops=0).of("argsort sort topk")
OpRecord(rows="along", ops=5).of("log_softmax softmax _log_softmax _softmax")
OpRecord(cost="slow", rows="along", ops=5).of("_safe_softmax")
OpRecord(ops=5, once=_INNER).of("_masked_softmax")
OpRecord(rows="along", ops=1).of("cumsum")
OpRecord(cost="sort", rows="along", ops=1).of("cummax cummin cumprod")
OpRecord(cost="sort", rows="along", ops=3).of("logcumsumexp")
OpRecord(rows="along", ops=3).of("_logcumsumexp")
OpRecord(rows="along", ops=2).of("glu")
OpRecord(cost="differences", rows="along").of("diff")
OpRecord(once=_RARE).of("gradient")
OpRecord(cost="slow", rows="renorm").of("renorm")
OpRecord(rows="of_all").of("trace")
OpRecord(cost="sort", rows="of_all").of("histc")
OpRecord(cost="sort", rows="of_all", once=_ONE_TENSOR).of("histogram")
OpRecord(cost="sort", once=_ONE_TENSOR).of("segment_reduce")
OpRecord(cost="fourier", rows="along").of("""
    fft_fft fft_fft2 fft_fftn fft_fftshift fft_hfft fft_ifft fft_ifft2 fft_ifftn fft_ifftshift fft_ihfft
    fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftn
""")
OpRecord(cost="fourier", rows="along", once=_INNER).of("_fft_c2c _fft_c2r _fft_r2c")
OpRecord(cost="fourier", ops=0).of("fft_fftfreq fft_rfftfreq")
OpRecord(cost="fourier", once=_RARE).of("fft_hfft2 fft_hfftn fft_ihfft2 fft_ihfftn")
OpRecord(cost="window").of("istft")
OpRecord(cost="window", rows="spectrogram").of("stft")

# ---------------------------------------------------------------- norms, pools, resampling, losses

OpRecord(rows="norm_of_last", ops=5).of("layer_norm rms_norm native_layer_norm")
OpRecord(ops=4).of("_fused_rms_norm")
OpRecord(rows="norm_of_groups", ops=5).of("group_norm instance_norm native_group_norm")
OpRecord(rows="norm_of_batch", ops=4).of("""
    batch_norm native_batch_norm _batch_norm_with_update _native_batch_norm_legit
    _native_batch_norm_legit_functional _native_batch_norm_legit_no_training
""")
OpRecord(ops=3).of("_weight_norm")
OpRecord(ops=3, once=_INNER).of("_weight_norm_interface")
OpRecord(once=_INNER).of("native_norm norm_except_dim")
OpRecord(cost="slow", rows="spatial").of("""
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d
    adaptive_max_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d
""")
OpRecord(cost="pool", rows="spatial").of("""
    avg_pool1d avg_pool2d avg_pool3d max_pool1d max_pool1d_with_indices max_pool2d max_pool2d_with_indices
    max_pool3d max_pool3d_with_indices
""")
OpRecord(cost="pool").of("fractional_max_pool2d fractional_max_pool3d")
OpRecord(rows="spatial", ops=1).of("""
    upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d
    _upsample_nearest_exact2d _upsample_nearest_exact3d
""")
OpRecord(rows="spatial", ops=3).of("upsample_linear1d")
OpRecord(rows="spatial", ops=7).of("upsample_bilinear2d")
OpRecord(cost="slow", rows="spatial", ops=7).of("_upsample_bilinear2d_aa")
OpRecord(cost="slow", rows="spatial", ops=15).of("upsample_trilinear3d")
OpRecord(cost="slow", rows="spatial", ops=35).of("_upsample_bicubic2d_aa upsample_bicubic2d")
OpRecord(cost="sort", rows="in_front", ops=11).of("grid_sampler grid_sampler_2d")
OpRecord(cost="sort", rows="in_front").of("grid_sampler_3d")
OpRecord(cost="pair", rows="loss", ops=1).of("""
    binary_cross_entropy binary_cross_entropy_with_logits huber_loss kl_div l1_loss mse_loss poisson_nll_loss
    smooth_l1_loss soft_margin_loss
""")
OpRecord(cost="pair").of("cosine_embedding_loss hinge_embedding_loss margin_ranking_loss triplet_margin_loss")
OpRecord(cost="slow", unguarded=True).of("cross_entropy_loss")
OpRecord(ops=1, unguarded=True).of("nll_loss nll_loss2d nll_loss_nd")
OpRecord(once=_INNER, unguarded=True).of("nll_loss_forward")
OpRecord(once=_RARE, unguarded=True).of("multi_margin_loss")
OpRecord(cost="class pairs", once=_RARE, unguarded=True).of("multilabel_margin_loss")
OpRecord(cost="ctc", once=_ONE_TENSOR).of("ctc_loss")

# ---------------------------------------------------------------- products, distances, linear algebra

OpRecord(cost="product", rows="linear").of("linear")
OpRecord(cost="product", rows="matmul").of("addmv baddbmm matmul mv")
OpRecord(cost="product", rows="matmul", once=_INNER).of("addmm bmm mm")
OpRecord(cost="product", once=_RARE).of("addbmm")
OpRecord(cost="product", rows="of_all").of("dot vdot")
OpRecord(cost="product").of("addr ger outer")
OpRecord(cost="contraction", rows="einsum").of("einsum")
OpRecord(cost="contraction", rows="tensordot").of("tensordot")
OpRecord(cost="bilinear", rows="bilinear").of("bilinear")
OpRecord(cost="bilinear", once=_INNER).of("_trilinear")
OpRecord(cost="convolution", rows="convolution").of("""
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution
""")
OpRecord(cost="convolution", rows="convolution", once=_INNER).of("conv_depthwise3d")
OpRecord(cost="convolution", once=_RARE).of("conv_tbc")
OpRecord(cost="attention", rows="attention").of("""
    scaled_dot_product_attention _scaled_dot_product_efficient_attention _scaled_dot_product_flash_attention
    _scaled_dot_product_flash_attention_for_cpu
""")
OpRecord(cost="distance", rows="cdist").of("_cdist_forward cdist")
OpRecord(cost="distance", rows="cdist", once=_INNER).of("_euclidean_dist")
OpRecord(cost="distance", once=_INNER).of("_pdist_forward")
OpRecord(cost="distance", once=_RARE).of("pdist")
OpRecord(cost="distance", rows="of_all", once=_RARE).of("corrcoef cov")
OpRecord(cost="pair", rows="of_all").of("dist")
OpRecord(cost="pair", rows="over_dim").of("cosine_similarity linalg_vecdot pairwise_distance")
OpRecord(rows="over_dim").of("linalg_cross")
OpRecord(cost="bag").of("embedding_bag")
OpRecord(cost="bag", once=_INNER).of("_embedding_bag _embedding_bag_forward_only")
OpRecord(cost="matrix power", rows="matrices").of("linalg_matrix_exp linalg_matrix_power")
OpRecord(cost="cubic", rows="matrices").of("""
    cholesky cholesky_inverse cholesky_solve inverse linalg_cholesky linalg_cholesky_ex linalg_det
    linalg_householder_product linalg_inv linalg_inv_ex linalg_lu linalg_lu_factor linalg_qr linalg_slogdet
    linalg_solve linalg_solve_ex linalg_solve_triangular logdet
""")
OpRecord(cost="cubic").of("kron linalg_ldl_factor linalg_ldl_solve linalg_lu_solve lu_unpack")
OpRecord(cost="cubic", once=_INNER).of("_linalg_det _linalg_slogdet _linalg_solve_ex")
OpRecord(cost="spectral", rows="matrices").of("""
    linalg_eigh linalg_eigvalsh linalg_pinv linalg_svd linalg_svdvals
""")
OpRecord(cost="spectral", rows="reduction").of("linalg_matrix_norm linalg_norm")
OpRecord(cost="spectral", rows="reduction", once=_RARE).of("nuclear_norm")
OpRecord(cost="spectral").of("linalg_cond linalg_matrix_rank")
OpRecord(cost="spectral", once="a decomposition that refuses NaN in every strategy").of("""
    linalg_eig linalg_eigvals
""")
OpRecord(cost="spectral", once=_INNER).of("_linalg_eigh _linalg_svd")
OpRecord(cost="spectral", once=_RARE).of("linalg_lstsq")

# ---------------------------------------------------------------- sequences, and layers of all members

OpRecord(cost="recurrent", rows="recurrent", once=_PACKED).of(RECURRENT_LAYERS)
OpRecord(cost="cell", rows="cell").of("gru_cell lstm_cell rnn_relu_cell rnn_tanh_cell")
OpRecord(ops=9, once=_INNER).of("_thnn_fused_gru_cell _thnn_fused_lstm_cell")
OpRecord(cost="recurrent steps").of(RECURRENT_STEPS)
OpRecord(cost="convolution").of("widepack.convolution")
OpRecord(cost="member convolutions").of("widepack.member_convs")
OpRecord(cost="attention").of("widepack.masked_attention")
OpRecord(cost="grouped linear").of("""
    widepack.linear widepack.streamed_linear widepack.expert_linear widepack.grouped_experts
    widepack.expert_mm widepack.member_products widepack.int8_linear widepack.inner_product
""")
OpRecord(cost="factored").of("widepack.delta_linear widepack.factored_weight")
OpRecord(cost="layer chain").of("widepack.mlp_chain")
