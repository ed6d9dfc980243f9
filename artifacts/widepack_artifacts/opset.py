"""Lists the ops that a program may use, by overload.

Every op of the list is functional by its schema: it writes to none of its arguments. It reads nothing but its
arguments and torch's random generator, and it opens no file. The list has no wildcards, because of ops such
as `aten.from_file`, which creates and maps any path.

widepack's own ops take weights in their own memory order, or run a layer over all steps of a sequence. Each
has an ATen decomposition (`widepack/kernels`). Only wide programs may use them.

In the list, `linear` means `aten.linear.default`, and `max:dim,other` means `aten.max.dim` and
`aten.max.other`.
"""

from __future__ import annotations

from collections.abc import Container

_ATEN = """
    __and__:Scalar,Tensor __or__:Scalar,Tensor __xor__:Tensor _adaptive_avg_pool2d _adaptive_avg_pool3d
    _cdist_forward _conj _conj_physical _dirichlet_grad _embedding_bag _embedding_bag_forward_only
    _euclidean_dist _fft_c2c _fft_c2r _fft_r2c _linalg_det _linalg_eigh _linalg_slogdet
    _local_scalar_dense _linalg_solve_ex _linalg_svd _log_softmax _logcumsumexp _masked_softmax
    _native_batch_norm_legit:no_stats _native_batch_norm_legit_functional
    _native_batch_norm_legit_no_training _neg_view _pdist_forward _prelu_kernel _reshape_alias
    _safe_softmax _sample_dirichlet _scaled_dot_product_efficient_attention
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu _softmax _stack
    _standard_gamma _thnn_fused_gru_cell _thnn_fused_lstm_cell _to_copy _trilinear _unique _unique2
    _unsafe_view _upsample_bicubic2d_aa:default,vec _upsample_bilinear2d_aa:default,vec
    _upsample_nearest_exact1d:default,vec _upsample_nearest_exact2d:default,vec
    _upsample_nearest_exact3d:default,vec _weight_norm _weight_norm_interface abs acos acosh
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d
    adaptive_max_pool3d add:Scalar,Tensor addbmm addcdiv addcmul addmm:default,dtype addmv addr adjoint
    affine_grid_generator alias alias_copy all:default,dim,dims alpha_dropout amax amin aminmax angle
    any:default,dim,dims arange:default,start,start_step arctan2 argmax argmin argsort:default,stable
    argwhere as_strided as_strided_scatter asin asinh atan atan2 atanh atleast_1d avg_pool1d avg_pool2d
    avg_pool3d baddbmm bartlett_window:default,periodic bernoulli:default,p bilinear binary_cross_entropy
    binary_cross_entropy_with_logits bincount binomial bitwise_and:Scalar,Scalar_Tensor,Tensor
    bitwise_left_shift:Tensor,Tensor_Scalar bitwise_not bitwise_or:Scalar,Scalar_Tensor,Tensor
    bitwise_right_shift:Tensor,Tensor_Scalar bitwise_xor:Scalar,Scalar_Tensor,Tensor
    blackman_window:default,periodic block_diag bmm:default,dtype broadcast_tensors
    bucketize:Scalar,Tensor cartesian_prod cat cauchy cdist ceil celu channel_shuffle cholesky
    cholesky_inverse cholesky_solve chunk clamp:Tensor,default clamp_max:Tensor,default
    clamp_min:Tensor,default clone col2im column_stack complex conj conj_physical constant_pad_nd
    contiguous conv1d:default,padding conv2d:default,padding conv3d:default,padding conv_depthwise3d
    conv_tbc conv_transpose1d conv_transpose2d:input conv_transpose3d:input convolution copy
    copysign:Scalar,Tensor corrcoef cos cosh cosine_embedding_loss cosine_similarity
    count_nonzero:default,dim_IntList cov cross_entropy_loss ctc_loss:IntList cummax cummin cumprod cumsum
    deg2rad dequantize:self detach diag diag_embed diagonal diagonal_scatter diff digamma dist
    div:Scalar,Scalar_mode,Tensor,Tensor_mode divide:Tensor dot dropout dstack einsum elu embedding
    embedding_bag:default,padding_idx empty:memory_format empty_like eq:Scalar,Tensor erf erfc erfinv exp
    exp2 expand expand_as expand_copy expm1 exponential eye feature_alpha_dropout feature_dropout fft_fft
    fft_fft2 fft_fftfreq fft_fftn fft_fftshift fft_hfft fft_hfft2 fft_hfftn fft_ifft fft_ifft2 fft_ifftn
    fft_ifftshift fft_ihfft fft_ihfft2 fft_ihfftn fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2
    fft_rfftfreq fft_rfftn fill:Scalar,Tensor flatten:using_ints flip floor floor_divide:Scalar,default
    fmax fmin fmod:Scalar,Tensor frac fractional_max_pool2d fractional_max_pool3d frexp:Tensor
    frobenius_norm:dim full full_like gather gcd
    ge:Scalar,Tensor gelu geometric ger glu gradient:scalarint grid_sampler grid_sampler_2d
    grid_sampler_3d group_norm gru:data,input gru_cell gt:Scalar,Tensor
    hamming_window:default,periodic,periodic_alpha,periodic_alpha_beta hann_window:default,periodic
    hardshrink hardsigmoid hardswish hardtanh heaviside hinge_embedding_loss histc histogram:bin_ct hstack
    huber_loss hypot i0 igamma igammac im2col imag index:Tensor index_add index_copy
    index_fill:int_Scalar,int_Tensor index_put index_reduce index_select instance_norm inverse isclose
    isfinite isin:Scalar_Tensor,Tensor_Scalar,Tensor_Tensor isinf isnan isneginf isposinf istft
    kaiser_window:beta,default,periodic kl_div kron kthvalue l1_loss layer_norm lcm le:Scalar,Tensor
    leaky_relu lerp:Scalar,Tensor lgamma lift lift_fresh lift_fresh_copy linalg_cholesky
    linalg_cholesky_ex linalg_cond linalg_cross linalg_det linalg_eig linalg_eigh linalg_eigvals
    linalg_eigvalsh linalg_householder_product linalg_inv linalg_inv_ex linalg_ldl_factor linalg_ldl_solve
    linalg_lstsq linalg_lu linalg_lu_factor linalg_lu_solve linalg_matrix_exp
    linalg_matrix_norm:default,str_ord linalg_matrix_power linalg_matrix_rank linalg_norm
    linalg_pinv:atol_rtol_float,atol_rtol_tensor,default linalg_qr linalg_slogdet linalg_solve
    linalg_solve_ex linalg_solve_triangular linalg_svd linalg_svdvals linalg_vecdot linalg_vector_norm
    linear linspace:Scalar_Tensor,Tensor_Scalar,Tensor_Tensor,default log log10 log1p log2 log_normal
    log_sigmoid log_softmax:int logaddexp logaddexp2 logcumsumexp logdet logical_and logical_not
    logical_or logical_xor logit logspace logsumexp lstm:data,input lstm_cell lt:Scalar,Tensor lu_unpack
    mH mT margin_ranking_loss masked_fill:Scalar,Tensor masked_scatter masked_select matmul
    max:default,dim,other max_pool1d max_pool1d_with_indices max_pool2d max_pool2d_with_indices max_pool3d
    max_pool3d_with_indices max_unpool2d max_unpool3d maximum mean:default,dim median:default,dim
    meshgrid:default,indexing min:default,dim,other minimum mish mm:default,dtype mode movedim:int,intlist
    mse_loss mul:Scalar,Tensor multi_margin_loss multilabel_margin_loss multinomial multiply:Tensor mv
    mvlgamma nan_to_num nanmean nanmedian:default,dim nanquantile:default,scalar nansum narrow narrow_copy
    native_channel_shuffle native_dropout native_group_norm native_layer_norm native_norm ne:Scalar,Tensor
    neg new_empty new_full new_ones new_zeros nextafter nll_loss nll_loss2d nll_loss_forward nll_loss_nd
    nonzero nonzero_static norm:Scalar,ScalarOpt_dim,ScalarOpt_dim_dtype,ScalarOpt_dtype norm_except_dim
    normal:Tensor_Tensor,Tensor_float,float_Tensor nuclear_norm:default,dim numpy_T one_hot ones ones_like
    outer pad pairwise_distance pdist permute permute_copy pixel_shuffle pixel_unshuffle poisson
    poisson_nll_loss polar polygamma positive pow:Scalar,Tensor_Scalar,Tensor_Tensor prelu
    prod:default,dim_int put quantile:default,scalar rad2deg rand rand_like randint:default,low
    randint_like:default,low_dtype randn randn_like randperm ravel real reciprocal reflection_pad1d
    reflection_pad2d reflection_pad3d relu relu6 remainder:Scalar,Scalar_Tensor,Tensor renorm repeat
    repeat_interleave:Tensor,self_Tensor,self_int replication_pad1d replication_pad2d replication_pad3d
    reshape reshape_as resolve_conj resolve_neg rms_norm rnn_relu:data,input rnn_relu_cell
    rnn_tanh:data,input rnn_tanh_cell roll rot90 round:decimals,default rrelu rrelu_with_noise_functional
    rsqrt rsub:Scalar,Tensor scalar_tensor scaled_dot_product_attention
    scatter:reduce,src,value,value_reduce scatter_add scatter_reduce:two searchsorted:Scalar,Tensor
    segment_reduce select:int select_copy:int select_scatter selu sgn sigmoid sign signbit silu sin sinc
    sinh slice:Tensor slice_copy:Tensor slice_scatter smooth_l1_loss soft_margin_loss
    softmax:int softplus softshrink sort:default,stable special_airy_ai special_bessel_j0
    special_bessel_j1 special_bessel_y0 special_bessel_y1 special_entr special_erf special_erfcx
    special_expm1 special_i0e special_i1 special_i1e special_log1p special_log_ndtr
    special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0
    special_modified_bessel_k1 special_ndtri special_scaled_modified_bessel_k0
    special_scaled_modified_bessel_k1 special_spherical_bessel_j0
    special_xlog1py:default,other_scalar,self_scalar special_zeta split:Tensor,sizes split_copy:Tensor
    split_with_sizes split_with_sizes_copy sqrt square squeeze:default,dim,dims
    squeeze_copy:default,dim,dims stack std:correction,default,dim std_mean:correction stft
    sub:Scalar,Tensor subtract:Tensor sum:default,dim_IntList swapaxes swapdims sym_numel sym_size:int
    sym_storage_offset sym_stride:int t t_copy take take_along_dim tan tanh tensordot threshold tile topk
    trace transpose:int transpose_copy:int tril tril_indices triplet_margin_loss triu triu_indices
    true_divide:Tensor trunc type_as unbind:int unbind_copy:int unflatten:int unfold unfold_copy uniform
    unique_consecutive unique_dim unique_dim_consecutive unsafe_chunk unsafe_split:Tensor
    unsafe_split_with_sizes unsqueeze unsqueeze_copy upsample_bicubic2d:default,vec
    upsample_bilinear2d:default,vec upsample_linear1d:default,vec upsample_nearest1d:default,vec
    upsample_nearest2d:default,vec upsample_nearest3d:default,vec upsample_trilinear3d:default,vec
    var:correction,default,dim var_mean:correction vdot view:default,dtype view_as view_as_complex
    view_as_complex_copy view_as_real view_as_real_copy view_copy:default,dtype vstack
    where:Scalar,ScalarOther,ScalarSelf,default,self xlogy:Scalar_Other,Scalar_Self,Tensor zeros
    zeros_like
"""

# Backward passes of activations, which members with derivatives in forward have.
_BACKWARD = """
    elu_backward gelu_backward hardswish_backward leaky_relu_backward mish_backward sigmoid_backward
    silu_backward softplus_backward tanh_backward threshold_backward
"""

_PYTHON = """
    math.ceil operator.add operator.eq operator.floordiv operator.ge operator.getitem operator.gt
    operator.le operator.lt operator.mod operator.mul operator.ne operator.neg operator.pow operator.sub
    operator.truediv torch.sym_float torch.sym_int torch.sym_ite torch.sym_max torch.sym_min torch.sym_not
"""

_OWN = """
    pack_convolution pack_convolutions convolution pack_linear linear streamed_linear delta_linear
    expert_linear expert_mm factored_weight masked_attention rnn_steps gru_steps lstm_steps pack_lstm
    packed_lstm rnn_training gru_training lstm_training member_products mlp_chain member_convs
    grouped_experts sequence_lengths pack_inner_product pack_inner_products inner_product
"""
OF_ONE_MEMBER = frozenset({"widepack.expert_mm.default", "widepack.sequence_lengths.default"})
"""widepack's own ops that programs of one member may use too."""


def _expand(text: str) -> frozenset[str]:
    """Returns the full names of the ops of a list."""
    rows = (word.partition(":") for word in text.split())
    return frozenset(
        f"aten.{op}.{overload}"
        for op, _, overloads in rows
        for overload in (overloads or "default").split(",")
    )


EXTRA: set[str] = set()
"""Ops of other libraries that the code of this process has allowed. No file can add to them."""


def allowed(op: str, extra: Container[str] | None = None) -> bool:
    """Returns whether a program may use an op.

    `extra` has the allowed ops of other libraries. Default: all that this process has allowed (`EXTRA`).
    """
    return op in OPS or op in (EXTRA if extra is None else extra)


OPS: frozenset[str] = (
    _expand(_ATEN + _BACKWARD)
    | frozenset(_PYTHON.split())
    | {f"widepack.{op}.default" for op in _OWN.split()}
    | {"loop"}
)
