"""Norms, distances, and cross and dot products of vectors along dims.

linalg_vector_norm, norm     y[i] = (sum |x[i]|^p)^(1/p)          x: [N, *s]       y: [N, *s without dims]
linalg_matrix_norm           a norm of the matrices of two dims   x: [N, *s]       y: [N, *s without dims]
dist                         y[i] = norm(a[i] - b[i])             a, b: [N, *s]    y: [N]
linalg_cross, linalg_vecdot  products of vectors along one dim    a, b: [N, *s]
"""

from __future__ import annotations

from typing import Any

import torch

from ..ir.values import Stacked, WideValue
from ..registry.families import along, flat_member, value_of
from ..registry.registry import strategy
from ..registry.samples import B, call, reduced_dims, reduced_none, samples, whole
from ..registry.writer import Writer, rank

samples("linalg_vector_norm")(
    lambda draw: (
        [call(a[0], p, *a[1:]) for p in (2, 1, float("inf")) for a, _ in reduced_none(draw)[:-1]]
        + [call(draw.normal(B, 4)), call(draw.normal(), 2)]
    )
)
samples("norm.Scalar")(whole)
samples("norm.ScalarOpt_dtype")(
    lambda draw: [call(draw.normal(B, 4), p, dtype=torch.float64) for p in (2, 1, None)]
)


samples("norm.ScalarOpt_dim")(
    lambda draw: [call(a[0], p, *a[1:]) for p in (2, 1, None) for a, _ in reduced_dims(draw)]
)


samples("norm.ScalarOpt_dim_dtype")(
    lambda draw: [
        call(draw.normal(B, 4), p, d, k, dtype=torch.float64)
        for p, d, k in ((2, [1], False), (1, [0, 1], True))
    ]
)


samples("linalg_norm")(
    lambda draw: [
        call(draw.normal(B, 4, 6), o, d, k)
        for o, d, k in ((None, [1], False), (1, [-1], True), (2, [1, 2], False), (None, [0, 1], False))
    ]
)


samples("frobenius_norm.dim")(
    lambda draw: [call(draw.normal(B, 4, 6), [1, 2]), call(draw.normal(B, 4, 6), [-1], True)]
)


samples("nuclear_norm.dim")(
    lambda draw: [call(draw.normal(B, 4, 6), [1, 2]), call(draw.normal(B, 4), [0, 1], True)]
)


samples("linalg_matrix_norm")(
    lambda draw: [call(draw.normal(B, 4, 6), 1), call(draw.normal(B, 4, 6), float("inf"), [0, 1], True)]
)


samples("linalg_matrix_norm.str_ord")(
    lambda draw: [call(draw.normal(B, 4, 6)), call(draw.normal(B, 4, 6), "nuc", [0, -1], True)]
)


samples("dist")(
    lambda draw: [
        call(draw.normal(B, 4), draw.normal(B, 4)),
        call(draw.normal(4), draw.normal(4), 1),
        call(draw.normal(), draw.normal()),
    ]
)


samples("linalg_cross")(
    lambda draw: [
        call(draw.normal(B, 3), draw.normal(B, 3)),
        call(draw.normal(3, 4), draw.normal(3, 4), dim=0),
        call(draw.normal(B, 3), draw.normal(1, 3), dim=-1),
    ]
)


samples("linalg_vecdot")(lambda draw: [call(draw.normal(B, 4), draw.normal(B, 4), dim=d) for d in (0, 1, -1)])


def _whole_norm(
    w: Writer, x: Stacked, p: float = 2, dim: Any = None, keepdim: bool = False, **kwargs: Any
) -> bool:
    return dim in (None, [], ()) and not keepdim and rank(x) > 1


@strategy("linalg_vector_norm", "flatten", family="dim", when=_whole_norm)
def whole_norm(
    w: Writer, x: Stacked, p: float = 2, dim: Any = None, keepdim: bool = False, **kwargs: Any
) -> Any:
    """flattens the member's dims into one, then works along it

    torch sums several dims at once less exactly than one.
    """
    return Stacked(
        w.call("linalg_vector_norm", w.call("flatten.using_ints", x.value, 1, -1), p, [1], **kwargs)
    )


along("linalg_vector_norm norm.ScalarOpt_dim norm.ScalarOpt_dim_dtype", all_dims="dim")
along("linalg_norm", needs="dim")
along("frobenius_norm.dim nuclear_norm.dim linalg_matrix_norm linalg_matrix_norm.str_ord")
along("linalg_cross linalg_vecdot")


@strategy("norm.Scalar norm.ScalarOpt_dtype", "flatten", family="dim")
def whole_scalar_norm(w: Writer, x: Stacked, p: float | None = 2, **kwargs: Any) -> Any:
    """flattens the member's dims into one, then works along it"""
    return Stacked(w.call("linalg_vector_norm", flat_member(w, x), 2 if p is None else p, [1], **kwargs))


@strategy("dist", "flatten", family="dim", when=lambda w, x, other, p=2: rank(x) == rank(other))
def dist(w: Writer, x: WideValue, other: WideValue, p: float = 2) -> Any:
    """the norm of the difference"""
    return Stacked(
        w.call(
            "linalg_vector_norm",
            flat_member(w, Stacked(w.call("sub.Tensor", value_of(x), value_of(other)))),
            p,
            [1],
        )
    )
