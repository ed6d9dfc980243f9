"""The ops that a program may ask for: one explicit list, by overload.

Every op here is functional by its schema (it writes to nothing that it was given), draws on nothing outside its arguments but torch's random generator, and
opens no file. There are no wildcards: `aten.from_file`, which creates and maps any path, shows why.

`linear` stands for `aten.linear.default`, `max:dim,other` for `aten.max.dim` and `aten.max.other`.
"""

from __future__ import annotations

_ATEN = """
    __and__:Scalar,Tensor __or__:Scalar,Tensor __xor__:Tensor _cdist_forward _log_softmax _native_batch_norm_legit:no_stats
    _native_batch_norm_legit_no_training _softmax _to_copy _unsafe_view _upsample_bicubic2d_aa:vec _upsample_bilinear2d_aa:vec
    _upsample_nearest_exact1d:vec _upsample_nearest_exact2d:vec _upsample_nearest_exact3d:vec _weight_norm _weight_norm_interface abs acos acosh
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d add:Scalar,Tensor
    addcdiv addcmul addmm adjoint affine_grid_generator alias alias_copy all:default,dim,dims alpha_dropout amax amin angle any:default,dim,dims
    arange:default,start,start_step arctan2 argmax argmin argsort:default,stable argwhere as_strided asin asinh atan atan2 atanh atleast_1d
    avg_pool1d avg_pool2d avg_pool3d baddbmm bernoulli:default,p bilinear binary_cross_entropy
    binary_cross_entropy_with_logits bincount bitwise_and:Scalar,Tensor
    bitwise_left_shift:Tensor bitwise_not bitwise_or:Scalar,Tensor bitwise_right_shift:Tensor bitwise_xor:Tensor block_diag bmm
    broadcast_tensors bucketize:Tensor cartesian_prod cat cdist ceil celu channel_shuffle cholesky chunk clamp:Tensor,default
    clamp_max:Tensor,default clamp_min:Tensor,default clone col2im column_stack complex conj conj_physical constant_pad_nd contiguous
    conv1d:default,padding conv2d:default,padding conv3d:default,padding conv_transpose1d conv_transpose2d:input conv_transpose3d:input
    convolution copy copysign:Tensor cos cosh cosine_embedding_loss cosine_similarity cross_entropy_loss cummax cummin cumprod cumsum deg2rad detach diag_embed diagonal diagonal_scatter
    diff digamma div:Scalar,Scalar_mode,Tensor,Tensor_mode divide:Tensor dot dropout dstack einsum elu embedding
    embedding_bag:default,padding_idx empty:memory_format empty_like eq:Scalar,Tensor erf erfc erfinv exp exp2 expand expand_as expm1 eye
    feature_dropout fft_fft fft_fft2 fft_fftfreq fft_fftn fft_fftshift fft_hfft fft_ifft fft_ifft2 fft_ifftn fft_ifftshift fft_ihfft fft_irfft
    fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftfreq fft_rfftn fill:Scalar,Tensor flatten:using_ints flip floor floor_divide:Scalar,default
    fmax fmin fmod:Scalar,Tensor frac frobenius_norm:dim full full_like gather ge:Scalar,Tensor gelu ger glu grid_sampler group_norm gru:input
    gru_cell gt:Scalar,Tensor hamming_window hann_window hardshrink hardsigmoid hardswish hardtanh heaviside hinge_embedding_loss histc hstack huber_loss hypot i0 im2col imag
    index:Tensor index_add index_copy index_fill:int_Scalar index_put index_select instance_norm inverse isfinite isinf isnan istft kl_div kron
    kthvalue l1_loss layer_norm le:Scalar,Tensor leaky_relu lerp:Scalar,Tensor lgamma lift lift_fresh lift_fresh_copy linalg_cholesky
    linalg_cross linalg_det linalg_inv linalg_matrix_norm:default,str_ord linalg_norm linalg_qr linalg_solve linalg_svd linalg_vector_norm linear linspace log log10 log1p log2
    log_sigmoid log_softmax:int logaddexp logaddexp2 logcumsumexp logical_and logical_not logical_or logical_xor logit logsumexp lstm:input
    lstm_cell lt:Scalar,Tensor mH mT masked_fill:Scalar,Tensor margin_ranking_loss masked_scatter masked_select matmul max:default,dim max_pool1d
    max_pool1d_with_indices max_pool2d max_pool2d_with_indices max_pool3d max_pool3d_with_indices max_unpool2d maximum mean:default,dim median:dim
    meshgrid:default,indexing min:default,dim minimum mish mm mode movedim:int,intlist mse_loss mul:Scalar,Tensor multinomial multiply:Tensor mv
    mvlgamma nan_to_num narrow native_channel_shuffle native_dropout native_group_norm native_layer_norm ne:Scalar,Tensor neg
    new_empty new_full new_ones new_zeros nll_loss nll_loss2d nll_loss_nd nonzero norm:ScalarOpt_dim normal:Tensor_Tensor nuclear_norm:default,dim numpy_T one_hot ones ones_like
    outer pad pairwise_distance pdist permute pixel_shuffle pixel_unshuffle poisson_nll_loss polar polygamma positive pow:Scalar,Tensor_Scalar,Tensor_Tensor
    prelu prod:default,dim_int rad2deg rand rand_like randint:low randn randn_like ravel real reciprocal relu relu6 remainder:Scalar,Tensor
    renorm repeat repeat_interleave:Tensor,self_int reshape reshape_as resolve_conj resolve_neg rms_norm rnn_relu:input rnn_relu_cell
    rnn_tanh:input rnn_tanh_cell roll rot90 round:decimals,default rrelu rsqrt rsub:Scalar,Tensor scalar_tensor scaled_dot_product_attention
    scatter:src,value scatter_add scatter_reduce:two searchsorted:Tensor select:int select_scatter selu sgn sigmoid sign signbit silu sin sinc
    sinh slice:Tensor slice_scatter smooth_l1_loss soft_margin_loss softmax:int softplus softshrink sort:default,stable special_erf
    special_expm1 special_i0e special_log1p split:Tensor,sizes split_with_sizes sqrt square squeeze:default,dim,dims squeeze_copy stack
    std:correction,default,dim stft sub:Scalar,Tensor subtract:Tensor sum:default,dim_IntList swapaxes swapdims sym_numel sym_size:int
    sym_storage_offset sym_stride:int t take_along_dim tan tanh tensordot threshold tile topk trace transpose:int tril tril_indices
    triplet_margin_loss triu triu_indices true_divide:Tensor trunc type_as unbind:int unflatten:int unfold unfold_copy unique_dim unsqueeze
    upsample_bicubic2d:vec upsample_bilinear2d:default,vec upsample_linear1d:vec upsample_nearest1d:default,vec upsample_nearest2d:default,vec
    upsample_nearest3d:vec upsample_trilinear3d:vec var:correction,default,dim var_mean:correction vdot view:default,dtype view_as
    view_as_complex view_as_real vstack where:Scalar,ScalarOther,ScalarSelf,default,self xlogy:Tensor zeros zeros_like
"""

_PYTHON = """
    math.ceil operator.add operator.eq operator.floordiv operator.ge operator.getitem operator.gt operator.le operator.lt operator.mod operator.mul operator.ne operator.neg operator.pow operator.sub operator.truediv torch.sym_float torch.sym_int torch.sym_ite torch.sym_max torch.sym_min torch.sym_not
"""


def _expand(text: str) -> frozenset[str]:
    rows = (word.partition(":") for word in text.split())
    return frozenset(f"aten.{op}.{overload}" for op, _, overloads in rows for overload in (overloads or "default").split(","))


OPS: frozenset[str] = _expand(_ATEN) | frozenset(_PYTHON.split()) | {"loop"}
