"""Rules of row layouts: reductions, and ops along a dim."""

from __future__ import annotations

from .call import Call, Rule, named
from .layout import EVEN, Layout, RowAxis, RowNumbers
from .pointwise import aligned


def reduced(call: Call, layout: Layout, dims: list[int] | None, keep: bool) -> Layout:
    """Returns the layout after a reduction over dims; None for all dims.

    Raises: MixesRows if a dim has the rows; NoRule if their number matters.
    """
    if isinstance(layout, RowNumbers):
        call.unknown("reduces the numbers of the rows")
    if layout is EVEN:
        if dims is None or set(call.batch_dims("self")) & set(dims):
            call.unknown("reduces a dim whose size is the number of rows")
        return EVEN
    if not isinstance(layout, RowAxis):
        return layout
    if dims is None or layout.dim in dims:
        call.mixes("reduces over the rows")
    return layout if keep else layout.shifted(-sum(d < layout.dim for d in dims))


def _reduced_dims(call: Call) -> list[int] | None:
    return call.dims("dim") if call.given.get("dim") is not None else None


def reduction(call: Call) -> Layout:
    """A reduction over `dim`, or over all dims."""
    keep = bool(call.get("keepdim"))
    return call.several(reduced(call, call.layout("self"), _reduced_dims(call), keep))


def of_all(call: Call) -> Layout:
    """An op that reads all places of its arguments for each place of the result."""
    if any(isinstance(layout, RowAxis) for _, layout in call.tensors()):
        call.mixes("computes with all rows")
    return call.unknown("computes with a value of the batch") if call.reads_rows() else call.several(None)


def refuse_all(call: Call) -> None:
    """Refuses an op that reads all places of a value whose rows are not known. Raises: MixesRows."""
    base = call.node.op.split(".")[1]
    of_two = base in ("max", "min") and "other" in call.given
    whole = base in _REDUCTIONS.split() and _reduced_dims(call) is None and not of_two
    if whole or base in _OF_ALL.split():
        call.mixes("computes with all places of a value whose rows are not known")


def renorm(call: Call) -> Layout:
    """A norm of each place of a dim, over all other dims."""
    layout, dim = call.layout("self"), call.dim("dim")
    if isinstance(layout, RowAxis) and layout.dim != dim:
        call.mixes("normalizes over the rows")
    call.apart("self", dims=[dim])
    return layout


def extremum(call: Call) -> Layout:
    """`max` and `min`: of two tensors, over a dim, or over all dims."""
    if "other" in call.given:
        return aligned(call, call.result.dim())
    return reduction(call)


def along(call: Call) -> Layout:
    """An op along the dims `dim` or `dims` that keeps the others apart; all dims by default."""
    name = "dims" if "dims" in call.given else "dim"
    dims = call.dims(name)
    if dims is None and call.given.get("s") is not None:  # a Fourier transform of the last dims
        dims = list(range(call.rank("self")))[-len(call.given["s"]) :]
    return call.several(kept_along(call, call.layout("self"), dims))


def kept_along(call: Call, layout: Layout, dims: list[int] | None) -> Layout:
    """Returns the layout after an op along dims; None for all dims.

    Raises: MixesRows if one has the rows.
    """
    if isinstance(layout, RowAxis) and (dims is None or layout.dim in dims):
        call.mixes("computes along the rows")
    if isinstance(layout, RowNumbers):
        call.unknown("computes with the number of the row")
    if layout is EVEN and (dims is None or set(call.batch_dims("self")) & set(dims)):
        call.unknown("computes along a dim whose size is the number of rows")
    return layout


def glu(call: Call) -> Layout:
    """Halves of a dim."""
    return kept_along(call, call.layout("self"), [call.dim("dim")])


def two_over_dim(call: Call) -> Layout:
    """A reduction over `dim` of two tensors that are broadcast: cosine_similarity, vecdot."""
    names = [n for n in ("x1", "x2", "x", "y", "self", "other") if n in call.given]
    rank = max(call.rank(n) for n in names[:2])
    layout = aligned(call, rank)
    dim = int(call.get("dim")) % rank
    for name in names[:2]:
        if dim - (rank - call.rank(name)) in call.even_dims(name):
            call.unknown(f"reduces a dim of its {name} whose size is the number of rows")
    if layout is EVEN:
        call.unknown("reduces a value of the batch")
    if isinstance(layout, RowAxis):
        if layout.dim == dim:
            call.mixes("reduces over the rows")
        return layout.shifted(-(dim < layout.dim))
    return None


def pairwise_distance(call: Call) -> Layout:
    """A distance over the last dim."""
    rank = max(call.rank("x1"), call.rank("x2"))
    layout = aligned(call, rank)
    for name in ("x1", "x2"):
        call.apart(name, dims=range(call.rank(name) - 1))
    if isinstance(layout, RowAxis) and layout.dim == rank - 1:
        call.mixes("reduces over the rows")
    return layout


def cross(call: Call) -> Layout:
    """A product of vectors along a dim."""
    layout = aligned(call, call.result.dim())
    dim = int(call.get("dim")) % call.result.dim()
    if isinstance(layout, RowAxis) and layout.dim == dim:
        call.mixes("computes along the rows")
    return layout


def matrix_norm(call: Call) -> Layout:
    """A norm of the matrices in two dims."""
    dims = call.dims("dim") or [call.rank("self") - 2, call.rank("self") - 1]
    return reduced(call, call.layout("self"), dims, bool(call.get("keepdim")))


def loss(call: Call) -> Layout:
    """A loss, of each place or reduced."""
    if call.get("reduction") != 0:
        if not any(isinstance(layout, RowAxis) for _, layout in call.tensors()):
            return call.unknown("reduces a value of the batch") if call.reads_rows() else None
        call.mixes("reduces over the rows")
    return aligned(call, call.result.dim())


def differences(call: Call) -> Layout:
    """Differences along a dim, with values before and after it."""
    layout = kept_along(call, call.layout("self"), [call.dim("dim")])
    for name in ("prepend", "append"):
        if call.given.get(name) is not None and call.layout(name) not in (layout, EVEN):
            call.unknown("joins rows with other values")
    return layout


_REDUCTIONS = """
    all amax amin aminmax any argmax argmin count_nonzero frobenius_norm kthvalue linalg_norm
    linalg_vector_norm logsumexp max mean median min mode nanmean nanmedian nanquantile nansum norm prod
    quantile std std_mean sum var var_mean
"""
_OF_ALL = """
    _unique _unique2 argwhere bincount corrcoef cov dist dot histc histogram masked_scatter masked_select
    nonzero nonzero_static trace unique_consecutive unique_dim unique_dim_consecutive vdot
"""
RULES: dict[str, Rule] = {
    **named(_REDUCTIONS, reduction),
    **named("max min", extremum),
    **named(_OF_ALL, of_all),
    "renorm": renorm,
    **named(
        "softmax log_softmax _softmax _log_softmax _safe_softmax cumsum cumprod cummax cummin logcumsumexp"
        " _logcumsumexp sort argsort topk flip roll",
        along,
    ),
    **named(
        "fft_fft fft_fft2 fft_fftn fft_ifft fft_ifft2 fft_ifftn fft_rfft fft_rfft2 fft_rfftn fft_irfft"
        " fft_irfft2 fft_irfftn fft_hfft fft_ihfft fft_fftshift fft_ifftshift _fft_c2c _fft_c2r _fft_r2c",
        along,
    ),
    "glu": glu,
    "diff": differences,
    **named("cosine_similarity linalg_vecdot", two_over_dim),
    "pairwise_distance": pairwise_distance,
    "linalg_cross": cross,
    **named("linalg_matrix_norm nuclear_norm", matrix_norm),
    **named(
        "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits"
        " kl_div soft_margin_loss poisson_nll_loss",
        loss,
    ),
}
