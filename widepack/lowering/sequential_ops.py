"""Lists the ops that run once for each member on purpose, if they read values that differ between members.

Every op that programs may use has a strategy (`registry`), becomes an op that has one
(`simplify/canonical.py`), takes no tensor, or is listed here with its reason.
"""

from __future__ import annotations

from widepack_artifacts.opset import OPS

from ..ir import ops
from ..ir.ops import full_name
from ..registry.registry import REGISTRY
from ..simplify.canonical import REPLACED

_REASONS = {
    "recurrent over packed sequences: each step has other rows": """
        lstm.data gru.data rnn_tanh.data rnn_relu.data
    """,
    "draws random numbers: one draw for each member": """
        binomial rrelu_with_noise_functional _sample_dirichlet _standard_gamma _dirichlet_grad
    """,
    "the result is a number, or values decide its size: members differ from there on": """
        _local_scalar_dense nonzero argwhere where masked_select _unique _unique2 unique_consecutive
        unique_dim unique_dim_consecutive bincount repeat_interleave.Tensor repeat_interleave.self_Tensor
        linspace.Scalar_Tensor linspace.Tensor_Scalar linspace.Tensor_Tensor nonzero_static
    """,
    "a decomposition that refuses NaN in every strategy": "linalg_eig linalg_eigvals",
    "counts or ranges that torch accepts for one tensor only": """
        histogram.bin_ct segment_reduce ctc_loss.IntList searchsorted.Scalar bucketize.Scalar
    """,
    "depends on the memory layout": """
        as_strided as_strided_scatter sym_storage_offset sym_stride.int put take view_as
        squeeze_copy
    """,
    "an inner form of an op that has strategies, in decomposed programs": """
        _embedding_bag _embedding_bag_forward_only _fft_c2c _fft_c2r _fft_r2c _linalg_det _linalg_eigh
        _linalg_slogdet _linalg_solve_ex _linalg_svd _euclidean_dist _pdist_forward _thnn_fused_gru_cell
        _thnn_fused_lstm_cell _weight_norm_interface _masked_softmax _trilinear conv_depthwise3d
        nll_loss_forward native_norm norm_except_dim addmm.dtype bmm.dtype mm.dtype
    """,
    "rare in networks": """
        addbmm block_diag cartesian_prod conv_tbc corrcoef cov dequantize.self fft_hfft2 fft_hfftn fft_ihfft2
        fft_ihfftn gradient.scalarint index_fill.int_Tensor linalg_lstsq multi_margin_loss
        multilabel_margin_loss nuclear_norm pdist
    """,
}
ONCE_A_MEMBER: dict[str, tuple[str, ...]] = {
    why: tuple(sorted(map(full_name, names.split()))) for why, names in _REASONS.items()
}
"""For each reason the ops."""


def unlisted() -> set[str]:
    """Returns the ops that programs may use, would run once for each member, and are not listed here."""
    listed = {op for names in ONCE_A_MEMBER.values() for op in names}
    tensors = {
        op
        for op in OPS
        if op.startswith("aten.") and any("Tensor" in type_ for _, type_, _ in ops.arguments(op))
    }
    return tensors - listed - set(REGISTRY) - REPLACED
