"""Layers over weights that are a base of all members plus a product of thin factors.

    W[i] = (base + left[i] @ right[i]) * scale[i]
    base: [O, ...]    left: [N, O, r]    right: [N, r, I]    scale: [N, O, 1], [N, 1, I] or none

| op | strategy | how |
|---|---|---|
| `factored_weight` | `merged` | the weights `[N, O, ...]` of all members, computed at load |
| linear, addmm, mm, matmul | `split` | one product with the base, two thin products for each member |
| embedding | `split` | rows of the base, plus rows of left times right |
| conv1d, conv2d, conv3d | `split` | one convolution with the base, one with N*r outputs, one of size 1 |

`merged` also records the parts in `Stacked.factors`, and a layer that reads the weight may then split it. A
program in which no layer reads the merged weights does not compute them. `split` is the last strategy of each
op, so only a plan chooses it. It reads the base once for all members. It pays off where reading the weights
takes the time: for few rows (planning/split_plans.py).

A scale multiplies the outputs of a layer, or its inputs, so that `split` does not need the weight for it.

A member's product is rounded in other places than with its merged weight, within the same bound: rounding a
weight changes a product as much as rounding its input.
"""

from __future__ import annotations

from typing import Any

import torch

from ..ir.values import Shared, Stacked, Value, WeightFactors, WideValue
from ..registry.registry import strategy
from ..registry.samples import Draw, Sample, call, samples
from ..registry.writer import Writer, put_shared, rank
from .conv import CONV, batched, groups_of
from .embedding import flat_index, one_table
from .linear import add_bias, flatten_rows, is_whole_bias

_CONTIGUOUS = torch.contiguous_format


def _thin(
    w: Writer, base: WideValue, left: WideValue, right: WideValue, scale: WideValue | None = None
) -> bool:
    stacked = isinstance(left, Stacked) and isinstance(right, Stacked)
    return isinstance(base, Shared) and stacked and (scale is None or isinstance(scale, Stacked))


@strategy("widepack.factored_weight.default", "merged", family="linear", when=_thin)
def merged(w: Writer, base: Shared, left: Stacked, right: Stacked, scale: Stacked | None = None) -> WideValue:
    """the weights of all members; a layer may read their parts instead"""
    dtype = torch.promote_types(torch.promote_types(base.value.dtype, left.value.dtype), torch.float32)
    product = w.call("bmm", _cast(w, left.value, dtype), _cast(w, right.value, dtype))  # [N, O, I]
    whole = [w.members, *w.sizes(base)]
    if scale is None:
        weight = w.call("add.Tensor", w.call("reshape", product, whole), _cast(w, base.value, dtype))
    else:
        rows = w.call("flatten.using_ints", _cast(w, base.value, dtype), 1)
        weight = w.call("add.Tensor", product, rows)
        weight = w.call("reshape", w.call("mul.Tensor", weight, _cast(w, scale.value, dtype)), whole)
    return Stacked(_cast(w, weight, base.value.dtype), WeightFactors(base, left, right, scale))


def _cast(w: Writer, value: Value, dtype: torch.dtype) -> Value:
    return value if value.dtype == dtype else w.call("_to_copy", value, dtype=dtype)


def _factors(x: WideValue, weight: WideValue, dims: int) -> WeightFactors | None:
    """Returns the factors of a weight of this rank; None if it has none, or x has another dtype."""
    if not isinstance(weight, Stacked) or weight.factors is None or weight.rank != dims:
        return None
    if not isinstance(x, (Shared, Stacked)) or x.value.dtype != weight.value.dtype:
        return None
    return weight.factors if weight.value.dtype.is_floating_point else None


def _linear_fits(w: Writer, x: WideValue, weight: WideValue, bias: WideValue | None = None) -> bool:
    return _factors(x, weight, 2) is not None


@strategy("linear", "split", family="linear", when=_linear_fits, derivative=False)
def linear(w: Writer, x: WideValue, weight: Stacked, bias: WideValue | None = None) -> WideValue:
    """for a base with thin factors: one product with the base, two thin ones for each member"""
    assert weight.factors is not None
    return _product(w, x, weight.factors, weight, bias)


def _product(
    w: Writer, x: WideValue, factors: WeightFactors, weight: WideValue, bias: WideValue | None
) -> WideValue:
    """Returns `x @ ((base + left @ right) * scale)^T + bias`, where base is [O, I]."""
    scale = factors.scale
    on_rows = scale is not None and not _of_outputs(w, scale)
    if not is_whole_bias(bias, weight) or (bias is not None and scale is not None and not on_rows):
        return add_bias(w, _product(w, x, factors, weight, None).value, bias, rank(x))  # type: ignore[union-attr]
    base, left, right = factors.base.value, factors.left.value, factors.right.value
    value = x.value if isinstance(x, Stacked) else w.call("unsqueeze", put_shared(x), 0)
    rows, back = flatten_rows(w, value, rank(x))
    if on_rows:
        rows = w.call("mul.Tensor", rows, _cast(w, scale.value, rows.dtype))  # type: ignore[union-attr]
    b = None
    if isinstance(bias, Stacked):
        b = bias.value
    elif bias is not None:
        b = w.call("unsqueeze", bias.value, 0)  # type: ignore[union-attr]
    left, right = (_cast(w, f, rows.dtype) for f in (left, right))
    y = w.call("widepack.delta_linear.default", rows, base, left, right, b)
    if scale is not None and not on_rows:
        y = w.call("mul.Tensor", y, w.call("transpose.int", _cast(w, scale.value, rows.dtype), 1, 2))
    return Stacked(back(y))


def _of_outputs(w: Writer, scale: Stacked) -> bool:
    """Returns whether a scale multiplies the rows of a weight: `[N, O, 1]`."""
    return bool(w.sizes(scale)[-1] == 1)


def _matmul_fits(w: Writer, a: WideValue, b: WideValue) -> bool:
    return _factors(a, b, 2) is not None and rank(a) > 0


@strategy("matmul mm", "split", family="linear", when=_matmul_fits, derivative=False)
def matmul(w: Writer, a: WideValue, b: Stacked) -> WideValue:
    """for a base with thin factors: one product with the base, two thin ones for each member"""
    return _turned(w, a, b, None)


def _turned(w: Writer, a: WideValue, b: Stacked, bias: WideValue | None) -> WideValue:
    """Returns `a @ b + bias`, where b is [I, O], and so has left [N, I, r] and right [N, r, O]."""
    factors = b.factors
    assert factors is not None
    left = w.call("transpose.int", factors.right.value, 1, 2)  # [N, O, r]
    right = w.call("transpose.int", factors.left.value, 1, 2)
    right = w.call("clone", right, memory_format=_CONTIGUOUS)  # [N, r, I], for products with Shared rows
    turned = Stacked(w.call("transpose.int", b.value, 1, 2))
    scale = None
    if factors.scale is not None:
        scale = Stacked(w.call("transpose.int", factors.scale.value, 1, 2))
    base = Shared(w.call("t", factors.base.value))
    return _product(w, a, WeightFactors(base, Stacked(left), Stacked(right), scale), turned, bias)


def _addmm_fits(
    w: Writer, bias: WideValue, a: WideValue, b: WideValue, *, beta: float = 1, alpha: float = 1
) -> bool:
    same = isinstance(bias, (Shared, Stacked)) and bias.value.dtype == b.value.dtype  # type: ignore[union-attr]
    return same and beta == 1 and alpha == 1 and _factors(a, b, 2) is not None


@strategy("addmm", "split", family="linear", when=_addmm_fits, derivative=False)
def addmm(
    w: Writer, bias: WideValue, a: WideValue, b: Stacked, *, beta: float = 1, alpha: float = 1
) -> WideValue:
    """for a base with thin factors: one product with the base, two thin ones for each member"""
    return _turned(w, a, b, bias)


def _table_fits(w: Writer, weight: WideValue, ids: WideValue, *_: Any, **__: Any) -> bool:
    return isinstance(weight, Stacked) and weight.factors is not None and weight.rank == 2


# A padding row gets no gradient here from the left factor only: members that train use flat_index.
@strategy("embedding", "split", family="embedding", when=_table_fits, derivative=False)
def embedding(w: Writer, weight: Stacked, ids: WideValue, *_: Any, **__: Any) -> WideValue:
    """for a base with thin factors: rows of the base, plus rows of left times right"""
    factors = weight.factors
    assert factors is not None
    dtype = weight.value.dtype
    left, right = (_cast(w, f.value, dtype) for f in (factors.left, factors.right))
    rows = one_table(w, factors.base, ids).value
    thin, back = flatten_rows(w, flat_index(w, Stacked(left), ids).value, rank(ids) + 1)
    delta = back(w.call("bmm", thin, right))
    found = w.call("add.Tensor", delta, rows)
    if factors.scale is not None:
        scale = _cast(w, factors.scale.value, dtype)
        if _of_outputs(w, factors.scale):
            scale = flat_index(w, Stacked(scale), ids).value
        else:
            scale = w.call("reshape", scale, [w.members, *[1] * rank(ids), -1])
        found = w.call("mul.Tensor", found, scale)
    return Stacked(found)


def _conv_fits(
    w: Writer, x: WideValue, weight: WideValue, bias: WideValue | None = None, *args: Any, **kwargs: Any
) -> bool:
    groups = groups_of(w, args, kwargs, 3)[1]
    factors = _factors(x, weight, rank(weight))
    if factors is None or (factors.scale is not None and not _of_outputs(w, factors.scale)):
        return False
    return isinstance(groups, int) and groups == 1


@strategy(CONV, "split", family="conv", when=_conv_fits)
def conv(
    w: Writer, x: WideValue, weight: Stacked, bias: WideValue | None = None, *args: Any, **kwargs: Any
) -> WideValue:
    """for a base with thin factors: one convolution with the base, one with N*r outputs, one of size 1"""
    factors = weight.factors
    assert factors is not None
    rest = groups_of(w, args, kwargs, 3)[0]
    x, back = batched(w, x, weight)
    left, right = (_cast(w, f.value, weight.value.dtype) for f in (factors.left, factors.right))
    outputs, *filters = w.sizes(factors.base)  # O, [C, *k]
    right = w.call("reshape", right, [-1, *filters])  # [N*r, C, *k]
    left = w.call("flatten.using_ints", left, 0, 1)  # [N*O, r]
    for _ in filters[1:]:
        left = w.call("unsqueeze", left, -1)
    scale, b = factors.scale, None
    if bias is not None and scale is None:
        b = w.call("flatten.using_ints", w.stack(bias), 0, 1)
    if isinstance(x, Stacked):
        base = w.unfold(w.call(w.op, w.fold(x), factors.base.value, None, *rest), x).value
        thin = w.call(w.op, w.pack(x), right, None, *[*rest[:3], w.members])  # [B, N*r, *s]
    else:
        base = w.call(w.op, x.value, factors.base.value, None, *rest)  # type: ignore[union-attr]
        thin = w.call(w.op, x.value, right, None, *rest)  # type: ignore[union-attr]
    plain, ones = f"conv{len(filters) - 1}d", [1] * (len(filters) - 1)
    delta = w.unpack(w.call(plain, thin, left, b, ones, [0] * len(ones), ones, w.members)).value
    y = w.call("add.Tensor", delta, base)  # [N, B, O, *s]
    if scale is not None:
        channels: list[Any] = [w.members, 1, outputs, *ones]
        y = w.call("mul.Tensor", y, w.call("reshape", _cast(w, scale.value, y.dtype), channels))
        if bias is not None:
            y = w.call("add.Tensor", y, w.call("reshape", w.stack(bias), channels))
    return back(Stacked(y))  # type: ignore[no-any-return]


@samples("widepack.factored_weight.default")
def _weights(draw: Draw) -> list[Sample]:
    half = torch.bfloat16
    return [
        call(draw.normal(6, 4), draw.normal(6, 2), draw.normal(2, 4)),
        call(draw.normal(6, 4, 3, 2), draw.normal(6, 1), draw.normal(1, 24)),
        call(draw.normal(6, 4, dtype=half), draw.normal(6, 2), draw.normal(2, 4)),
        call(draw.normal(6, 4, dtype=half), draw.normal(6, 2, dtype=half), draw.normal(2, 4, dtype=half)),
        call(draw.normal(6, 4, dtype=torch.float64), draw.normal(6, 2), draw.normal(2, 4)),
        call(draw.normal(6, 4), draw.normal(6, 2), draw.normal(2, 4), draw.normal(6, 1)),
        call(draw.normal(6, 4, 3, 2), draw.normal(6, 1), draw.normal(1, 24), draw.normal(6, 1)),
        call(draw.normal(6, 4), draw.normal(6, 2), draw.normal(2, 4), draw.normal(1, 4)),
    ]
