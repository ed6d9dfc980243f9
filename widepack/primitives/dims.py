"""Ops along dims that their schemas name: softmax, reductions, sorting, slicing, joining.

A rule for the rest: whole reductions `[...] -> []` flatten the member's dims first; `squeeze()` drops the dims that were 1 in the capture, never the member axis.
"""

from __future__ import annotations

from typing import Any

import torch

from ..registry.families import along, leading, shift, value_of
from ..registry.registry import full_name, register, strategy
from ..registry.samples import B, Draw, Sample, along_dim, call, reduced, reduced_dims, reduced_none, samples, whole
from ..ir.values import Shared, Stacked, Value, Wide
from ..registry.writer import Writer, is_tensor, put_shared, rank

along("""
    softmax.int log_softmax.int _softmax _log_softmax cumsum cumprod cummax cummin logcumsumexp flip topk sort sort.stable argsort argsort.stable
    kthvalue median.dim mode max.dim min.dim select.int slice.Tensor narrow split.Tensor split_with_sizes split.sizes chunk unbind.int unsqueeze squeeze.dim squeeze.dims
    transpose.int movedim.int movedim.intlist gather scatter.src scatter.value scatter_add scatter_reduce.two cat stack glu unflatten.int diagonal unfold
    slice_scatter diff linalg_cross prod.dim_int any.dim all.dim flatten.using_ints diag_embed swapdims rot90 unfold_copy
    nanmedian.dim _safe_softmax linalg_vecdot scatter.reduce scatter.value_reduce
""")
along("select_scatter diagonal_scatter", mixed=True)
along("roll", needs="dims")
along("argmax argmin repeat_interleave.self_int linalg_norm aminmax count_nonzero", needs="dim")
along("frobenius_norm.dim nuclear_norm.dim linalg_matrix_norm linalg_matrix_norm.str_ord")


def _is_nothing(x: Wide) -> bool:
    return is_tensor(x) and rank(x) == 1 and value_of(x).sizes[-1] == 0


def _with_nothing(w: Writer, tensors: list[Wide], dim: int = 0) -> bool:
    nothing = [_is_nothing(t) for t in tensors]
    same = len({value_of(t).dtype for t in tensors}) == 1
    return any(nothing) and not all(nothing) and same and len({rank(t) for t, n in zip(tensors, nothing) if not n} - {1}) == 1


@strategy("cat", "without_empty", family="dim", when=_with_nothing)
def cat_rest(w: Writer, tensors: list[Wide], dim: int = 0) -> Wide:
    """an empty tensor of one dim joins anything and adds nothing: a cache before its first keys"""
    rest = [w.stack(t) for t in tensors if not _is_nothing(t)]
    return Stacked(rest[0] if len(rest) == 1 else w.call("cat", rest, shift(dim)))


def _whole_norm(w: Writer, x: Stacked, p: float = 2, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> bool:
    return dim in (None, [], ()) and not keepdim and rank(x) > 1


@strategy("linalg_vector_norm", "flatten", family="dim", when=_whole_norm)
def whole_norm(w: Writer, x: Stacked, p: float = 2, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
    """the member's dims flattened into one, then along it: over several dims at once torch sums less exactly"""
    return Stacked(w.call("linalg_vector_norm", w.call("flatten.using_ints", x.value, 1, -1), p, [1], **kwargs))


along(
    "mean.dim sum.dim_IntList amax amin logsumexp var.dim var.correction std.dim std.correction var_mean.correction std_mean.correction linalg_vector_norm "
    "norm.ScalarOpt_dim norm.ScalarOpt_dim_dtype nansum nanmean count_nonzero.dim_IntList",
    all_dims="dim",
)
along("any.dims all.dims", all_dims="dim", empty=False)
leading("tril triu pixel_shuffle pixel_unshuffle")


def _flat(w: Writer, x: Stacked) -> Value:
    """`[N, numbers]`."""
    return x.value if x.rank == 1 else w.call("unsqueeze", x.value, 1) if x.rank == 0 else w.call("flatten.using_ints", x.value, 1, -1)


def _whole(op: str, named: str) -> None:
    def rule(w: Writer, x: Stacked, **kwargs: Any) -> Any:
        """the member's dims flattened into one, then along it"""
        y = w.call(named, _flat(w, x), -1, **kwargs)
        return w.stacked(y)[0] if isinstance(y.held, (tuple, list)) else Stacked(y)

    register(full_name(op), "flatten", rule, family="dim")


for _op, _named in (
    *(("prod", "prod.dim_int"), ("any", "any.dim"), ("all", "all.dim"), ("max", "max.dim"), ("min", "min.dim")),
    *(("median", "median.dim"), ("nanmedian", "nanmedian.dim")),
):
    _whole(_op, _named)


@strategy("count_nonzero", "flatten", family="dim", when=lambda w, x, dim=None: dim is None)
def whole_count(w: Writer, x: Stacked, dim: None = None) -> Any:
    """the member's dims flattened into one, then along it"""
    return Stacked(w.call("count_nonzero.dim_IntList", _flat(w, x), [1]))


@strategy("norm.Scalar norm.ScalarOpt_dtype", "flatten", family="dim")
def whole_scalar_norm(w: Writer, x: Stacked, p: float | None = 2, **kwargs: Any) -> Any:
    """the member's dims flattened into one, then along it"""
    return Stacked(w.call("linalg_vector_norm", _flat(w, x), 2 if p is None else p, [1], **kwargs))


@strategy("dist", "flatten", family="dim", when=lambda w, x, other, p=2: rank(x) == rank(other))
def dist(w: Writer, x: Wide, other: Wide, p: float = 2) -> Any:
    """the norm of the difference"""
    return Stacked(w.call("linalg_vector_norm", _flat(w, Stacked(w.call("sub.Tensor", value_of(x), value_of(other)))), p, [1]))


@strategy("aminmax", "flatten", family="dim", when=lambda w, x, *, dim=None, keepdim=False: dim is None and not keepdim)
def whole_aminmax(w: Writer, x: Stacked, *, dim: None = None, keepdim: bool = False) -> Any:
    """the member's dims flattened into one, then along it"""
    return w.stacked(w.call("aminmax", _flat(w, x), dim=1))


def _one_quantile(w: Writer, x: Wide, q: Any, dim: Any = None, *rest: Any, **kwargs: Any) -> bool:
    return isinstance(x, Stacked) and rank(x) > 0 and isinstance(dim, int) and (isinstance(q, float) or (isinstance(q, Shared) and rank(q) <= 1))


@strategy("quantile quantile.scalar nanquantile nanquantile.scalar", "shifted", family="dim", when=_one_quantile)
def quantiles(w: Writer, x: Stacked, q: Any, dim: int, *rest: Any, **kwargs: Any) -> Any:
    """along the member's dim; several quantiles stand in front of the members, and come behind them"""
    y = w.call(w.op, x.value, put_shared(q), dim % x.rank + 1, *rest, **kwargs)
    return Stacked(w.call("transpose.int", y, 0, 1) if isinstance(q, Shared) and rank(q) == 1 else y)


@strategy("one_hot", "leading", family="leading", when=lambda w, x, classes=-1: classes >= 0)
def one_hot(w: Writer, x: Stacked, classes: int = -1) -> Any:
    """one more trailing dim; without a number of classes each member would count its own"""
    return Stacked(w.call("one_hot", x.value, classes))


@strategy("mean sum", "flatten", family="dim")
def whole_sum(w: Writer, x: Stacked, **kwargs: Any) -> Any:
    """the member's dims flattened into one: over memory in order torch sums in cascades, over strides one number after the other, which rounds worse"""
    op = "mean.dim" if full_name(w.op) == "aten.mean.default" else "sum.dim_IntList"
    value = w.call("unsqueeze", x.value, 1) if x.rank == 0 else x.value if x.rank == 1 else w.call("flatten.using_ints", x.value, 1, -1)
    return Stacked(w.call(op, value, [1], **kwargs))


@strategy("isin.Tensor_Tensor", "any", family="dim")
def isin(w: Writer, x: Wide, among: Wide, *, assume_unique: bool = False, invert: bool = False) -> Any:
    """one look-up for all members; among numbers of their own, every pair compared"""
    if isinstance(among, Shared):
        return Stacked(w.call("isin.Tensor_Tensor", w.call("contiguous", value_of(x)), among.value, invert=invert))
    deep = rank(x)
    rows = _flat(w, among) if isinstance(among, Stacked) else among  # [N, numbers]
    for _ in range(deep):
        rows = w.call("unsqueeze", rows, 1)
    found = w.call("any.dim", w.call("eq.Tensor", w.call("unsqueeze", w.stack(x), -1), rows), -1)
    return Stacked(w.call("logical_not", found) if invert else found)


@strategy("isin.Scalar_Tensor", "any", family="dim")
def number_isin(w: Writer, number: Any, among: Stacked, *, assume_unique: bool = False, invert: bool = False) -> Any:
    """every number compared"""
    found = w.call("any.dim", w.call("eq.Scalar", _flat(w, among), number), 1)
    return Stacked(w.call("logical_not", found) if invert else found)


@strategy("argmax argmin", "flatten", family="dim", when=lambda w, x, dim=None, keepdim=False: dim is None and not keepdim)
def whole_argmax(w: Writer, x: Stacked, dim: None = None, keepdim: bool = False) -> Any:
    """the member's dims flattened into one, then along it"""
    value = w.call("flatten.using_ints", x.value, 1, -1) if x.rank else w.call("unsqueeze", x.value, 1)
    return Stacked(w.call(w.op, value, -1))


@strategy("swapaxes", "shifted", family="dim")
def swapaxes(w: Writer, x: Stacked, axis0: int, axis1: int) -> Any:
    """the schema's dims shifted by the member axis"""
    return Stacked(w.call("transpose.int", x.value, 1 + axis0 % x.rank, 1 + axis1 % x.rank))


@strategy("squeeze", "dims", family="dim")
def squeeze(w: Writer, x: Stacked) -> Any:
    """drops the dims that were 1 when the member was captured; the member axis never"""
    ones = [d for d, s in enumerate(x.value.sizes) if s == 1 and d > 0]
    return Stacked(w.call("squeeze.dims", x.value, ones)) if ones else x


@strategy("std var", "flatten", family="dim", when=lambda w, x, unbiased=True: rank(x) > 0)
def whole_var(w: Writer, x: Stacked, unbiased: bool = True) -> Any:
    """all dims but the member axis"""
    return Stacked(w.call("std.dim" if ".std." in w.op else "var.dim", x.value, list(range(1, 1 + x.rank)), unbiased))


samples("softmax.int log_softmax.int cumsum cumprod")(
    lambda draw: [*along_dim()(draw), call(draw.normal(), 0), call(draw.normal(B, 3), -1, dtype=torch.float64)]
)
samples("_softmax _log_softmax")(along_dim(False))
samples("cummax cummin logcumsumexp argsort sort unbind.int")(along_dim())
samples("unsqueeze")(lambda draw: [call(draw.normal(B, 3), d) for d in (0, 1, 2, -1, -3)] + [call(draw.normal(), 0)])
samples("glu")(lambda draw: [call(draw.normal(2, 4, 6), d) for d in (0, 1, -1)] + [call(draw.normal(B, 4))])
samples("flip")(lambda draw: [call(draw.normal(B, 3, 4), d) for d in ([0], [1, -1], [0, 1, 2])])
samples("topk")(lambda draw: [call(draw.normal(B, 4, 6), 2, *d) for d in ((), (0,), (1, False), (-1, True, True))] + [call(draw.normal(), 1)])
samples("sort.stable argsort.stable")(
    lambda draw: [call(draw.ints(0, 3, B, 4), stable=True, dim=d, descending=o) for d, o in ((0, False), (1, True), (-1, False))]
)
samples("kthvalue")(lambda draw: [call(draw.normal(B, 4, 6), 2, 0), call(draw.normal(B, 4, 6), 3, 1, True), call(draw.normal(4), 1)])
samples("median.dim mode max.dim min.dim nanmedian.dim")(reduced)
samples("_safe_softmax")(along_dim())
samples("linalg_vecdot")(lambda draw: [call(draw.normal(B, 4), draw.normal(B, 4), dim=d) for d in (0, 1, -1)])
samples("aminmax")(
    lambda draw: [*(call(draw.normal(B, 4, 6), dim=d, keepdim=k) for d, k in ((0, False), (-1, True))), call(draw.normal(B, 4)), call(draw.normal(4))]
)
samples("nansum nanmean")(lambda draw: [*reduced_none(draw), call(draw.normal(B, 3), [0], dtype=torch.float64)])
samples("count_nonzero.dim_IntList")(lambda draw: [call(draw.ints(0, 2, B, 4, 6), d) for d in ([0], [1, -1], [])])
samples("count_nonzero")(
    lambda draw: [
        call(draw.ints(0, 2, B, 4)),
        call(draw.ints(0, 2, B, 4), 0),
        call(draw.ints(0, 2, B, 4), -1),
        call(draw.bools(4)),
        call(draw.ints(0, 2)),
    ]
)
samples("median nanmedian norm.Scalar")(whole)
samples("norm.ScalarOpt_dtype")(lambda draw: [call(draw.normal(B, 4), p, dtype=torch.float64) for p in (2, 1, None)])
samples("dist")(
    lambda draw: [call(draw.normal(B, 4), draw.normal(B, 4)), call(draw.normal(4), draw.normal(4), 1), call(draw.normal(), draw.normal())]
)
samples("isin.Scalar_Tensor")(lambda draw: [call(2, draw.ints(0, 9, B, 3)), call(2, draw.ints(0, 9, 4), invert=True), call(1, draw.ints(0, 3))])
samples("isin.Tensor_Tensor")(
    lambda draw: [
        call(draw.ints(0, 9, B, 4), draw.ints(0, 9, 3)),
        call(draw.ints(0, 9, B), draw.ints(0, 9, 4), invert=True),
        call(draw.ints(0, 9), draw.ints(0, 9, 3)),
    ]
)
samples("quantile.scalar nanquantile.scalar")(
    lambda draw: [call(draw.normal(B, 4, 6), 0.3, d, k) for d, k in ((0, False), (-1, True), (1, False))] + [call(draw.normal(4), 0.5, 0)]
)
samples("quantile nanquantile")(
    lambda draw: (
        [call(draw.normal(B, 4, 6), torch.tensor([0.2, 0.7]), d, k) for d, k in ((0, False), (-1, True))]
        + [call(draw.normal(B, 4), torch.tensor(0.5), 1)]
    )
)
samples("prod.dim_int")(lambda draw: [*reduced(draw), call(draw.normal(B, 3), 1, dtype=torch.float64)])
samples("any.dim all.dim")(lambda draw: [*reduced(draw), call(draw.bools(B, 3), 0), call(draw.bools(B, 3), -1, True)])
samples("argmax argmin")(
    lambda draw: [
        *reduced(draw),
        call(draw.normal(B, 4)),
        call(draw.normal(B, 4), None, True),
        call(draw.normal()),
        call(draw.normal(B, 4), keepdim=False),
    ]
)
samples("select.int")(lambda draw: [call(draw.normal(B, 4, 6), d, i) for d, i in ((0, 1), (1, -1), (-1, 2))])
samples("slice.Tensor")(
    lambda draw: [call(draw.normal(B, 4, 6), *a) for a in ((), (0, 1), (1, 0, -1), (-1, 1, 9223372036854775807, 2), (0, None, 3))]
)
samples("narrow")(lambda draw: [call(draw.normal(B, 4, 6), *a) for a in ((0, 1, 2), (1, 2, 2), (-1, -3, 2))])
samples("split.Tensor chunk")(lambda draw: [call(draw.normal(B, 4, 6), 2, *d) for d in ((), (1,), (-1,))])
samples("split_with_sizes split.sizes")(lambda draw: [call(draw.normal(B, 4, 6), s, *d) for s, d in (([2, 3], ()), ([1, 3], (1,)), ([2, 4], (-1,)))])
samples("squeeze.dim")(lambda draw: [call(draw.normal(B, 1, 4), d) for d in (1, 0, -2)] + [call(draw.normal(1), 0), call(draw.normal(), 0)])
samples("squeeze.dims")(lambda draw: [call(draw.normal(B, 1, 4, 1), d) for d in ([1], [1, -1], [0, 3])])
samples("squeeze")(lambda draw: [call(draw.normal(*s)) for s in ((B, 1, 4, 1), (1, 1), (B, 3), ())])
samples("transpose.int movedim.int")(lambda draw: [call(draw.normal(B, 4, 6), a, b) for a, b in ((0, 1), (1, -1), (-3, 2))])
samples("movedim.intlist")(lambda draw: [call(draw.normal(B, 4, 6), a, b) for a, b in (([0, 1], [1, 2]), ([-1], [0]))])
samples("unflatten.int")(lambda draw: [call(draw.normal(B, 4, 6), d, s) for d, s in ((1, [2, 2]), (-1, [3, -1]), (0, [B, 1]))])
samples("flatten.using_ints")(lambda draw: [call(draw.normal(B, 4, 6), *d) for d in ((), (0, 1), (1,), (1, -1), (-2, 2))] + [call(draw.normal())])
samples("diagonal")(lambda draw: [call(draw.normal(B, 4, 6), *a) for a in ((), (1, 1, 2), (-1, -1, -2), (0, 0, 2))])
samples("unfold unfold_copy")(lambda draw: [call(draw.normal(B, 4, 6), *a) for a in ((0, 2, 1), (1, 2, 2), (-1, 3, 1))])
samples("diag_embed")(lambda draw: [call(draw.normal(B, 4), *a) for a in ((), (1,), (0, 0, 1), (-1, 1, -1))])
samples("diagonal_scatter")(lambda draw: [call(draw.normal(4, B), draw.normal(4)), call(draw.normal(B, 4, 6), draw.normal(B, 4), 1, 1, 2)])
samples("swapdims swapaxes")(lambda draw: [call(draw.normal(B, 4, 6), a, b) for a, b in ((0, 1), (1, -1))])
samples("rot90")(lambda draw: [call(draw.normal(B, 4, 6), *a) for a in ((), (2, [1, 2]), (3, [-1, 0]))])
samples("linalg_norm")(
    lambda draw: [call(draw.normal(B, 4, 6), o, d, k) for o, d, k in ((None, [1], False), (1, [-1], True), (2, [1, 2], False), (None, [0, 1], False))]
)
samples("frobenius_norm.dim")(lambda draw: [call(draw.normal(B, 4, 6), [1, 2]), call(draw.normal(B, 4, 6), [-1], True)])
samples("nuclear_norm.dim")(lambda draw: [call(draw.normal(B, 4, 6), [1, 2]), call(draw.normal(B, 4), [0, 1], True)])
samples("linalg_matrix_norm")(lambda draw: [call(draw.normal(B, 4, 6), 1), call(draw.normal(B, 4, 6), float("inf"), [0, 1], True)])
samples("linalg_matrix_norm.str_ord")(lambda draw: [call(draw.normal(B, 4, 6)), call(draw.normal(B, 4, 6), "nuc", [0, -1], True)])
samples("diff")(
    lambda draw: [
        call(draw.normal(B, 4)),
        call(draw.normal(B, 4), 2, 0),
        call(draw.normal(B, 4), 1, -1, draw.normal(B, 2), draw.normal(B, 1)),
        call(draw.normal(B, 4), 1, 0, draw.normal(1, 4)),
    ]
)
samples("linalg_cross")(
    lambda draw: [
        call(draw.normal(B, 3), draw.normal(B, 3)),
        call(draw.normal(3, 4), draw.normal(3, 4), dim=0),
        call(draw.normal(B, 3), draw.normal(1, 3), dim=-1),
    ]
)
samples("roll")(lambda draw: [call(draw.normal(B, 4), *a) for a in (([1], [0]), ([1, -1], [0, 1]), ([2], [-1]), ([1],), ([2], []))])
samples("repeat_interleave.self_int")(lambda draw: [call(draw.normal(B, 4), 2, 0), call(draw.normal(B, 4), 3, -1), call(draw.normal(B, 4), 2)])
samples("sum.dim_IntList mean.dim")(lambda draw: [*reduced_none(draw), call(draw.normal(B, 3), [0], dtype=torch.float64), call(draw.normal(), [0])])
samples("var.dim std.dim")(lambda draw: [*reduced_none(draw)[:-1], call(draw.normal(B, 4), [1], False), call(draw.normal(B, 4), None, False, True)])
samples("var.correction std.correction var_mean.correction std_mean.correction")(
    lambda draw: [
        *(call(*a[:2], correction=c, keepdim=k) for a, _ in reduced_none(draw)[:-1] for c, k in ((0, False), (1, True))),
        call(draw.normal(B, 4)),
        call(draw.normal(B, 4), [0], correction=None),
    ]
)
samples("logsumexp")(lambda draw: [s for s in reduced_dims(draw) if s[0][1]])  # torch itself refuses no dims
samples("amax amin")(lambda draw: [*reduced_dims(draw), call(draw.normal(B, 4)), call(draw.normal())])
samples("any.dims all.dims")(lambda draw: [*reduced_none(draw)[:-1], call(draw.bools(B, 4, 3), [0, -1]), call(draw.bools(B, 4))])
samples("linalg_vector_norm")(
    lambda draw: (
        [call(a[0], p, *a[1:]) for p in (2, 1, float("inf")) for a, _ in reduced_none(draw)[:-1]] + [call(draw.normal(B, 4)), call(draw.normal(), 2)]
    )
)
samples("norm.ScalarOpt_dim_dtype")(
    lambda draw: [call(draw.normal(B, 4), p, d, k, dtype=torch.float64) for p, d, k in ((2, [1], False), (1, [0, 1], True))]
)
samples("norm.ScalarOpt_dim")(lambda draw: [call(a[0], p, *a[1:]) for p in (2, 1, None) for a, _ in reduced_dims(draw)])
samples("mean sum prod any all max min")(whole)
samples("std var")(lambda draw: [call(draw.normal(B, 4, 3)), call(draw.normal(4), False), call(draw.normal(B, 4), unbiased=False)])
samples("tril triu")(lambda draw: [call(draw.normal(B, 4), *d) for d in ((), (1,), (-1,))] + [call(draw.normal(B, 3, 4))])
samples("pixel_shuffle")(lambda draw: [call(draw.normal(*s), 2) for s in ((B, 8, 2, 3), (4, 2, 3), (2, B, 4, 2, 3))])
samples("pixel_unshuffle")(lambda draw: [call(draw.normal(*s), 2) for s in ((B, 2, 4, 6), (2, 4, 2))])
samples("one_hot")(
    lambda draw: [call(draw.ints(0, 4, B, 3), 4), call(draw.ints(0, 4), 6)]
)  # without a number of classes the shape hangs on what the tensor holds


@samples("gather")
def _gathers(draw: Draw) -> list[Sample]:
    return [call(draw.normal(B, 4, 6), d, draw.ints(0, 4, 3, 2, 6)) for d in (0, 1, -1)] + [
        call(draw.normal(4), 0, draw.ints(0, 4, 2)),
        call(draw.normal(), 0, draw.ints(0, 1)),
    ]


def _rows(draw: Draw, *shape: int) -> torch.Tensor:
    """Indices along dim 0 that meet no place twice: which of two writes wins is not defined."""
    return torch.stack([torch.randperm(4, generator=draw.generator)[: shape[0]] for _ in range(shape[1])], 1)


@samples("scatter.src scatter_add")
def _scatters(draw: Draw) -> list[Sample]:
    return [
        call(draw.normal(4, 6), 0, _rows(draw, 3, 6), draw.normal(3, 6)),
        call(draw.normal(6, 4), -1, _rows(draw, 2, 6).t(), draw.normal(6, 2)),
        call(draw.normal(4, 6), 0, _rows(draw, 3, 2), draw.normal(4, 6)),
    ]


samples("scatter.reduce")(
    lambda draw: [call(draw.normal(4, 6), d, draw.ints(0, 4, 3, 2), draw.normal(3, 2), reduce=r) for d, r in ((0, "add"), (-1, "multiply"))]
)
samples("scatter.value_reduce")(
    lambda draw: [call(draw.normal(4, 6), d, draw.ints(0, 4, 3, 2), 0.5, reduce=r) for d, r in ((0, "add"), (-1, "multiply"))]
)
samples("scatter.value")(
    lambda draw: [call(draw.normal(4, 6), 0, draw.ints(0, 4, 3, 6), 0.5), call(draw.normal(B, 4), -1, draw.ints(0, 4, B, 2), 1.0)]
)
samples("scatter_reduce.two")(
    lambda draw: [
        call(draw.normal(B, 4), d, draw.ints(0, 4, 3, 2), draw.normal(3, 2), r, include_self=own)
        for d, r, own in ((0, "sum", True), (1, "amax", False), (-1, "mean", True), (0, "prod", True))
    ]
)
samples("slice_scatter")(
    lambda draw: [
        call(draw.normal(B, 4), draw.normal(2, 4), 0, 1, 3),
        call(draw.normal(B, 4), draw.normal(B, 2), 1, 0, 4, 2),
        call(draw.normal(B, 4), draw.normal(B, 1), -1, -1),
    ]
)
samples("select_scatter")(
    lambda draw: [
        call(draw.normal(B, 4), draw.normal(4), 0, 1),
        call(draw.normal(B, 4), draw.normal(B), -1, -2),
        call(draw.normal(4), draw.normal(), 0, 1),
    ]
)


@samples("cat")
def _cats(draw: Draw) -> list[Sample]:
    return [
        call([draw.normal(B, 3), draw.normal(B, 3)]),
        call([draw.normal(B, 3), draw.normal(B, 1), draw.normal(B, 2)], 1),
        call([draw.normal(2, 4), draw.normal(B, 4)], -2),
        call([draw.normal(0), draw.normal(B, 3)], 1),
        call([draw.normal(B, 3), draw.ints(0, 9, B, 2)], -1),
    ]


samples("stack")(
    lambda draw: [call([draw.normal(B, 3), draw.normal(B, 3)], *d) for d in ((), (1,), (-1,), (2,))] + [call([draw.normal(), draw.normal()])]
)
