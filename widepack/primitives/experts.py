"""Products of rows with the matrices of experts that the network selects for each row.

    y[i, r] = W[i, e[i, r]] x[i, r]    W: [N, E, O, I] or [N, E, I, O]    e: [N, *s]    x: [N, *s, I]

A network writes such a product as two ops: it reads a matrix for each row, `W[e]`, and multiplies. The usual
forms are `torch.einsum("bkoi,bi->bko", W[e], x)` and `torch.bmm(W[e], x.unsqueeze(-1))`. The op that reads
the matrices (indexing.py) records W and e in `Stacked.gathered`. `experts` multiplies by expert instead
(kernels/experts.py). Then no op reads the matrices of all rows, and the program does not compute them.

A network that calls a grouped product, as torch's and transformers' `grouped_mm`, has the op `expert_mm`.

| op | strategy | when | how |
|---|---|---|---|
| einsum, bmm, matmul | `experts` | on a CPU, a row for each matrix | one product for each expert in use |
| expert_mm | `experts` | on a CPU | one product for each expert in use |
| expert_mm | `dense` | few experts | each row with the matrices of all experts of its member |
| expert_mm | `copied` | always | the matrix of each row is copied |
| expert_mm | `grouped_mm` | bfloat16, sizes of 8 | one product with up to 1,023 groups (grouped_experts.py) |

Matrices of fewer than `NUMBERS` numbers are copied for each row, or multiplied by all rows: that is faster.
"""

from __future__ import annotations

from typing import Any

import torch

from ..ir.values import GatheredMatrices, Shared, Stacked, Value, WideValue, expression
from ..kernels.experts import FEW, OF_ONE_MEMBER
from ..kernels.grouped_experts import MOST_GROUPS, MULTIPLE
from ..registry.registry import strategy
from ..registry.samples import B, Draw, Sample, call, samples
from ..registry.writer import Writer, rank
from .index_values import member_numbers

NUMBERS = 4096
"""The least count of numbers in an expert's matrix for which `experts` is used."""


def _gathered(w: Writer, x: WideValue, matrices: WideValue) -> GatheredMatrices | None:
    """Returns the parts of matrices that an index selects; None if `experts` does not apply to them."""
    if w.device != "cpu" or not isinstance(matrices, Stacked) or matrices.gathered is None:
        return None
    if not isinstance(x, (Shared, Stacked)) or x.value.dtype != matrices.value.dtype:
        return None
    outputs, inputs = matrices.value.sizes[-2:]
    if not matrices.value.dtype.is_floating_point or outputs is None or inputs is None:
        return None
    return matrices.gathered if outputs * inputs >= NUMBERS else None


def _product(w: Writer, parts: GatheredMatrices, rows: Value, turned: bool) -> Value:
    """Returns the products `[N, *s, O]` of rows `[N, *s, I]`. turned: whether a matrix is [I, O]."""
    index = w.stack(parts.index)
    sizes = w.sizes(Stacked(index))
    table = w.stack(parts.table)
    if turned:
        table = w.call("transpose.int", table, 2, 3)
    if len(sizes) != 1:
        index = w.call("reshape", index, [w.members, -1])
        rows = w.call("reshape", rows, [w.members, -1, rows.sizes[-1]])
    few = [True] if (experts := table.sizes[1]) is not None and experts < FEW else []
    y = w.call("widepack.expert_linear.default", rows, table, index, *few)  # [N, R, O]
    return y if len(sizes) == 1 else w.call("reshape", y, [w.members, *sizes, table.sizes[2]])


def _sides(w: Writer, a: WideValue, b: WideValue) -> tuple[GatheredMatrices, WideValue, bool] | None:
    """Returns the matrices, the rows, and whether the matrices are on the right; None for other products."""
    for x, matrices, right in ((b, a, False), (a, b, True)):
        parts = _gathered(w, x, matrices)
        if parts is None or rank(x) != rank(matrices) or rank(parts.index) == 0:
            continue
        lead = rank(parts.index)
        own, wanted = (_sizes(v)[:lead] for v in (x, matrices))
        if own == wanted and x.value.sizes[-2 if right else -1] == 1:  # type: ignore[union-attr]
            return parts, x, right
    return None


def _sizes(x: WideValue) -> list[Any]:
    """Returns the member's sizes as expressions."""
    shape = x.value.fake.shape  # type: ignore[union-attr]
    return [expression(s) for s in shape[1 if isinstance(x, Stacked) else 0 :]]


def _matmul_fits(w: Writer, a: WideValue, b: WideValue) -> bool:
    return _sides(w, a, b) is not None


@strategy("bmm matmul", "experts", family="linear", when=_matmul_fits, derivative=False)
def matmul(w: Writer, a: WideValue, b: WideValue) -> WideValue:
    """for matrices that an index selects: one product for each expert that has rows"""
    found = _sides(w, a, b)
    assert found is not None
    parts, x, right = found
    dim = -2 if right else -1
    y = _product(w, parts, w.call("squeeze.dim", w.stack(x), dim), turned=right)
    return Stacked(w.call("unsqueeze", y, dim))


def _letters(
    w: Writer, equation: str, operands: list[WideValue]
) -> tuple[GatheredMatrices, WideValue, str, str, str] | None:
    """Reads an einsum of two operands, one of which is the matrices that an index selects.

    Returns the matrices, the rows, and the letters of the matrices, of the rows and of the result. None if
    the einsum is not one product for each number of the index.
    """
    terms, arrow, out = equation.replace(" ", "").partition("->")
    words = terms.split(",")
    if not arrow or "." in terms or len(words) != 2 or len(operands) != 2:
        return None
    for at in (0, 1):
        matrices, term, other = operands[at], words[at], words[1 - at]
        parts = _gathered(w, operands[1 - at], matrices)
        if parts is None or rank(parts.index) == 0 or len(term) != rank(matrices):
            continue
        lead, p, q = term[:-2], term[-2], term[-1]
        unique = all(len(set(t)) == len(t) for t in (term, other, out))
        inner = q if q in other else p
        outer = p if inner == q else q
        one_row = inner in other and set(other) <= {*lead, inner} and set(out) == {*lead, outer}
        if unique and one_row:
            return parts, operands[1 - at], term, other, out
    return None


def _einsum_fits(w: Writer, equation: str, operands: list[WideValue], path: Any = None) -> bool:
    return _letters(w, equation, operands) is not None


@strategy("einsum", "experts", family="linear", when=_einsum_fits, derivative=False)
def einsum(w: Writer, equation: str, operands: list[WideValue], path: Any = None) -> WideValue:
    """for matrices that an index selects: one product for each expert that has rows"""
    found = _letters(w, equation, operands)
    assert found is not None
    parts, x, term, other, out = found
    lead, p, q = term[:-2], term[-2], term[-1]
    inner, outer = (q, p) if q in other else (p, q)
    order = [c for c in lead + inner if c in other]
    rows = w.call("permute", w.stack(x), [0, *(1 + other.index(c) for c in order)])
    for d, c in enumerate(lead):
        if c not in other:
            rows = w.call("unsqueeze", rows, 1 + d)
    sizes = w.sizes(Stacked(w.stack(parts.index)))
    rows = w.call("expand", rows, [w.members, *sizes, -1])
    y = _product(w, parts, rows, turned=inner == p)  # [N, *s, O]
    return Stacked(w.call("permute", y, [0, *(1 + (lead + outer).index(c) for c in out)]))


def _large(w: Writer, x: WideValue, weight: WideValue, index: WideValue, few: bool = False) -> bool:
    inputs, outputs = weight.value.sizes[-2:]  # type: ignore[union-attr]
    if w.device != "cpu" or inputs is None or outputs is None:
        return False
    return bool(inputs * outputs >= NUMBERS)


@strategy(OF_ONE_MEMBER, "experts", family="linear", when=_large, derivative=False)
def expert_mm(w: Writer, x: WideValue, weight: WideValue, index: WideValue, few: bool = False) -> WideValue:
    """one product for each expert that has rows"""
    matrices = w.call("transpose.int", w.stack(weight), 2, 3)
    option = [True] if few else []
    y = w.call("widepack.expert_linear.default", w.stack(x), matrices, w.stack(index), *option)
    return Stacked(y)


@strategy(OF_ONE_MEMBER, "dense", family="linear", when=lambda w, x, weight, index, few=False: few)
def expert_mm_dense(
    w: Writer, x: WideValue, weight: WideValue, index: WideValue, few: bool = False
) -> WideValue:
    """multiplies each row by the matrices of all experts of its member, and selects"""
    rows = w.call("unsqueeze", w.stack(x), 1)
    products = w.call("matmul", rows, w.stack(weight))  # [N, E, R, O]
    (size,) = w.sizes(index)
    places = w.call("arange", size, dtype=torch.int64, device=products.fake.device)
    numbers = member_numbers(w, [index], 1)[0]
    return Stacked(w.call("index.Tensor", products, [numbers, w.stack(index), places]))


@strategy(OF_ONE_MEMBER, "copied", family="linear")
def expert_mm_copied(
    w: Writer, x: WideValue, weight: WideValue, index: WideValue, few: bool = False
) -> WideValue:
    """copies the matrix of each row"""
    numbers = member_numbers(w, [index], 1)[0]
    matrices = w.call("index.Tensor", w.stack(weight), [numbers, w.stack(index)])  # [N, R, I, O]
    y = w.call("matmul", w.call("unsqueeze", w.stack(x), 2), matrices)
    return Stacked(w.call("squeeze.dim", y, 2))


def _grouped_fits(w: Writer, x: WideValue, weight: WideValue, index: WideValue, few: bool = False) -> bool:
    """Whether torch has one grouped product of these rows.

    It is in bfloat16, with sizes that are multiples of 8, and has a group for each expert of each member.
    """
    if not all(isinstance(v, (Shared, Stacked)) for v in (x, weight, index)):
        return False
    rows, matrices = x.value, weight.value  # type: ignore[union-attr]
    experts, *sizes = matrices.sizes[-3:]
    if experts is None or w.members * experts > MOST_GROUPS:
        return False
    half = rows.dtype == matrices.dtype == torch.bfloat16
    return half and all(size is not None and size and size % MULTIPLE == 0 for size in sizes)


@strategy(OF_ONE_MEMBER, "grouped_mm", family="linear", when=_grouped_fits, derivative=False)
def expert_mm_grouped(
    w: Writer, x: WideValue, weight: WideValue, index: WideValue, few: bool = False
) -> WideValue:
    """one grouped product of all members' experts; on a GPU without a wait of the host"""
    return Stacked(w.call("widepack.grouped_experts.default", w.stack(x), w.stack(weight), w.stack(index)))


@samples(OF_ONE_MEMBER)
def _expert_mm(draw: Draw) -> list[Sample]:
    return [
        call(draw.normal(B, 64), draw.normal(3, 64, 65) / 8, draw.ints(-3, 3, B), True),
        call(draw.normal(B, 64), draw.normal(3, 64, 65) / 8, draw.ints(0, 3, B)),
        call(draw.normal(B, 4), draw.normal(3, 4, 6), draw.ints(0, 3, B), True),
        call(draw.normal(B, 4), draw.normal(3, 6, 4).transpose(1, 2), draw.ints(0, 3, B)),
        call(draw.normal(B, 8).bfloat16(), draw.normal(3, 8, 16).bfloat16(), draw.ints(-3, 3, B), True),
        call(
            draw.normal(B, 16).bfloat16(),
            draw.normal(3, 8, 16).bfloat16().transpose(1, 2),
            draw.ints(0, 3, B),
        ),
    ]
