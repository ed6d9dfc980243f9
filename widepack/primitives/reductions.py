"""Reductions: sums, means, extremes, variances and counts, over some dims or over all dims of each member.

over dims    y[i] = reduce(x[i], dims)    x: [N, *s]    y: [N, *s without dims]; with keepdim they have size 1
over all     y[i] = reduce(x[i])          x: [N, *s]    y: [N]

A reduction over all dims flattens the member's dims into one first, and then reduces that one. `None`, and
for most ops an empty list, means all dims of the member, never the member axis.
"""

from __future__ import annotations

from typing import Any

import torch

from ..ir.ops import full_name
from ..ir.values import Stacked
from ..registry.families import along, flat_member, whole_by_dim
from ..registry.registry import strategy
from ..registry.samples import B, call, reduced, reduced_dims, reduced_none, samples, whole
from ..registry.writer import Writer, rank

samples("sum.dim_IntList mean.dim")(
    lambda draw: [
        *reduced_none(draw),
        call(draw.normal(B, 3), [0], dtype=torch.float64),
        call(draw.normal(), [0]),
    ]
)


samples("nansum nanmean")(
    lambda draw: [*reduced_none(draw), call(draw.normal(B, 3), [0], dtype=torch.float64)]
)


samples("logsumexp")(lambda draw: [s for s in reduced_dims(draw) if s[0][1]])  # torch refuses an empty list


samples("amax amin")(lambda draw: [*reduced_dims(draw), call(draw.normal(B, 4)), call(draw.normal())])


samples("prod.dim_int")(lambda draw: [*reduced(draw), call(draw.normal(B, 3), 1, dtype=torch.float64)])


samples("any.dim all.dim")(
    lambda draw: [*reduced(draw), call(draw.bools(B, 3), 0), call(draw.bools(B, 3), -1, True)]
)


samples("any.dims all.dims")(
    lambda draw: [*reduced_none(draw)[:-1], call(draw.bools(B, 4, 3), [0, -1]), call(draw.bools(B, 4))]
)
samples("max.dim min.dim")(reduced)
samples("mean sum prod any all max min")(whole)


samples("argmax argmin")(
    lambda draw: [
        *reduced(draw),
        call(draw.normal(B, 4)),
        call(draw.normal(B, 4), None, True),
        call(draw.normal()),
        call(draw.normal(B, 4), keepdim=False),
    ]
)


samples("aminmax")(
    lambda draw: [
        *(call(draw.normal(B, 4, 6), dim=d, keepdim=k) for d, k in ((0, False), (-1, True))),
        call(draw.normal(B, 4)),
        call(draw.normal(4)),
    ]
)


samples("count_nonzero.dim_IntList")(
    lambda draw: [call(draw.ints(0, 2, B, 4, 6), d) for d in ([0], [1, -1], [])]
)


samples("count_nonzero")(
    lambda draw: [
        call(draw.ints(0, 2, B, 4)),
        call(draw.ints(0, 2, B, 4), 0),
        call(draw.ints(0, 2, B, 4), -1),
        call(draw.bools(4)),
        call(draw.ints(0, 2)),
    ]
)


samples("var.dim std.dim")(
    lambda draw: [
        *reduced_none(draw)[:-1],
        call(draw.normal(B, 4), [1], False),
        call(draw.normal(B, 4), None, False, True),
    ]
)


samples("var.correction std.correction var_mean.correction std_mean.correction")(
    lambda draw: [
        *(
            call(*a[:2], correction=c, keepdim=k)
            for a, _ in reduced_none(draw)[:-1]
            for c, k in ((0, False), (1, True))
        ),
        call(draw.normal(B, 4)),
        call(draw.normal(B, 4), [0], correction=None),
    ]
)


samples("std var")(
    lambda draw: [
        call(draw.normal(B, 4, 3)),
        call(draw.normal(4), False),
        call(draw.normal(B, 4), unbiased=False),
    ]
)
along("max.dim min.dim prod.dim_int any.dim all.dim")
along("argmax argmin aminmax count_nonzero", needs="dim")
along("mean.dim sum.dim_IntList amax amin logsumexp nansum nanmean count_nonzero.dim_IntList", all_dims="dim")
along("var.dim var.correction std.dim std.correction var_mean.correction std_mean.correction", all_dims="dim")
along("any.dims all.dims", all_dims="dim", empty=False)
for _op, _by_dim in (
    ("prod", "prod.dim_int"),
    ("any", "any.dim"),
    ("all", "all.dim"),
    ("max", "max.dim"),
    ("min", "min.dim"),
):
    whole_by_dim(_op, _by_dim)


@strategy("mean sum", "flatten", family="dim")
def whole_sum(w: Writer, x: Stacked, **kwargs: Any) -> Any:
    """flattens the member's dims into one, then works along it

    torch sums contiguous memory in cascades, but strided memory number by number, which rounds worse.
    """
    op = "mean.dim" if full_name(w.op) == "aten.mean.default" else "sum.dim_IntList"
    return Stacked(w.call(op, flat_member(w, x), [1], **kwargs))


@strategy("std var", "flatten", family="dim", when=lambda w, x, unbiased=True: rank(x) > 0)
def whole_var(w: Writer, x: Stacked, unbiased: bool = True) -> Any:
    """reduces all dims but the member axis"""
    return Stacked(
        w.call("std.dim" if ".std." in w.op else "var.dim", x.value, list(range(1, 1 + x.rank)), unbiased)
    )


@strategy("count_nonzero", "flatten", family="dim", when=lambda w, x, dim=None: dim is None)
def whole_count(w: Writer, x: Stacked, dim: None = None) -> Any:
    """flattens the member's dims into one, then works along it"""
    return Stacked(w.call("count_nonzero.dim_IntList", flat_member(w, x), [1]))


@strategy(
    "aminmax",
    "flatten",
    family="dim",
    when=lambda w, x, *, dim=None, keepdim=False: dim is None and not keepdim,
)
def whole_aminmax(w: Writer, x: Stacked, *, dim: None = None, keepdim: bool = False) -> Any:
    """flattens the member's dims into one, then works along it"""
    return w.stacked(w.call("aminmax", flat_member(w, x), dim=1))


@strategy(
    "argmax argmin",
    "flatten",
    family="dim",
    when=lambda w, x, dim=None, keepdim=False: dim is None and not keepdim,
)
def whole_argmax(w: Writer, x: Stacked, dim: None = None, keepdim: bool = False) -> Any:
    """flattens the member's dims into one, then works along it"""
    value = w.call("flatten.using_ints", x.value, 1, -1) if x.rank else w.call("unsqueeze", x.value, 1)
    return Stacked(w.call(w.op, value, -1))
