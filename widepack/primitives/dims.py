"""Ops along dims that their schemas name: softmax, reductions, sorting, slicing, joining.

A rule for the rest: whole reductions `[...] -> []` flatten the member's dims first; `squeeze()` drops the dims that were 1 in the capture, never the member axis.
"""

from __future__ import annotations

from typing import Any

from ..families import along, leading
from ..registry import full_name, register, strategy
from ..values import Stacked
from ..writer import Writer, rank

along("""
    softmax.int log_softmax.int _softmax _log_softmax cumsum cumprod cummax cummin logcumsumexp flip topk sort sort.stable argsort argsort.stable
    kthvalue median.dim mode max.dim min.dim select.int slice.Tensor narrow split.Tensor split_with_sizes split.sizes chunk unbind.int unsqueeze squeeze.dim squeeze.dims
    transpose.int movedim.int movedim.intlist gather scatter.src scatter.value scatter_add scatter_reduce.two cat stack glu unflatten.int diagonal unfold
    slice_scatter diff linalg_cross prod.dim_int any.dim all.dim flatten.using_ints
""")
along("select_scatter", mixed=True)
along("roll", needs="dims")
along("argmax argmin repeat_interleave.self_int", needs="dim")
along("mean.dim sum.dim_IntList amax amin logsumexp var.dim var.correction std.dim std.correction var_mean.correction any.dims all.dims linalg_vector_norm norm.ScalarOpt_dim", all_dims="dim")
leading("tril triu pixel_shuffle pixel_unshuffle one_hot")


def _whole(op: str, named: str) -> None:
    def rule(w: Writer, x: Stacked, **kwargs: Any) -> Any:
        """the member's dims flattened into one, then along it"""
        flat = x.value if x.rank == 1 else w.call("unsqueeze", x.value, 1) if x.rank == 0 else w.call("flatten.using_ints", x.value, 1, -1)
        y = w.call(named, flat, -1, **kwargs)
        return w.stacked(y)[0] if isinstance(y.held, (tuple, list)) else Stacked(y)

    register(full_name(op), "flatten", rule, family="dim")


for _op, _named in (("prod", "prod.dim_int"), ("any", "any.dim"), ("all", "all.dim"), ("max", "max.dim"), ("min", "min.dim")):
    _whole(_op, _named)


@strategy("mean sum", "all_dims", family="dim")
def whole_sum(w: Writer, x: Stacked, **kwargs: Any) -> Any:
    """all dims but the member axis"""
    op = "mean.dim" if full_name(w.op) == "aten.mean.default" else "sum.dim_IntList"
    value = x.value if x.rank else w.call("unsqueeze", x.value, 1)
    return Stacked(w.call(op, value, list(range(1, 1 + max(1, x.rank))), **kwargs))


@strategy("argmax argmin", "flatten", family="dim", when=lambda w, x, dim=None, keepdim=False: dim is None and not keepdim)
def whole_argmax(w: Writer, x: Stacked, dim: None = None, keepdim: bool = False) -> Any:
    """the member's dims flattened into one, then along it"""
    value = w.call("flatten.using_ints", x.value, 1, -1) if x.rank else w.call("unsqueeze", x.value, 1)
    return Stacked(w.call(w.op, value, -1))


@strategy("squeeze", "dims", family="dim")
def squeeze(w: Writer, x: Stacked) -> Any:
    """drops the dims that were 1 when the member was captured; the member axis never"""
    ones = [d for d, s in enumerate(x.value.sizes) if s == 1 and d > 0]
    return Stacked(w.call("squeeze.dims", x.value, ones)) if ones else x


@strategy("std var", "flatten", family="dim", when=lambda w, x, unbiased=True: rank(x) > 0)
def whole_var(w: Writer, x: Stacked, unbiased: bool = True) -> Any:
    """all dims but the member axis"""
    return Stacked(w.call("std.dim" if ".std." in w.op else "var.dim", x.value, list(range(1, 1 + x.rank)), unbiased))
