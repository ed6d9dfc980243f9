"""Products and decompositions of matrices beside those of linear.py: work on trailing dims, or are an einsum with one more letter."""

from __future__ import annotations

from typing import Any

import torch

from ..families import leading
from ..registry import strategy
from ..samples_of_ops import B, Draw, Sample, call, samples
from ..values import Shared, Stacked, Value, Wide
from ..writer import Writer, rank

_LETTERS = "abcdefghijklmopqrstuvwxyz"  # without n, the members
leading(
    "linalg_inv inverse linalg_det linalg_cholesky cholesky linalg_qr mT mH adjoint linalg_eigh linalg_eigvalsh linalg_svd linalg_svdvals linalg_slogdet logdet "
    "linalg_matrix_power linalg_inv_ex linalg_cholesky_ex",
    family="linalg",
)


@strategy("linalg_solve_triangular cholesky_solve", "leading", family="linalg", when=lambda w, a, b, *rest, **k: rank(a) == rank(b))
def solve_pair(w: Writer, a: Wide, b: Wide, *rest: Any, **kwargs: Any) -> Wide:
    """works on trailing dims of both: the member axis is one more leading dim"""
    return Stacked(w.call(w.op, w.stack(a), w.stack(b), *rest, **kwargs))


@strategy("linalg_matrix_exp", "leading", family="linalg")
def matrix_exp(w: Writer, x: Stacked) -> Wide:
    """works on trailing dims, of memory in order: torch looks at the matrices as one list"""
    return Stacked(w.call("linalg_matrix_exp", w.call("contiguous", x.value)))


def _einsum(w: Writer, equation: str, *operands: Wide) -> Wide:
    """An einsum with the letter n in front of every Stacked operand and of the output."""
    terms, _, out = equation.partition("->")
    if not any(isinstance(o, Stacked) for o in operands):
        return Stacked(w.stack(Shared(w.call("einsum", equation, [o.value for o in operands]))))  # type: ignore[union-attr]
    given = [f"n{t}" if isinstance(o, Stacked) else t for t, o in zip(terms.split(","), operands)]
    return Stacked(w.call("einsum", f"{','.join(given)}->n{out}", [o.value for o in operands]))  # type: ignore[union-attr]


@strategy("bilinear", "einsum", family="linear")
def bilinear(w: Writer, a: Wide, b: Wide, weight: Wide, bias: Wide | None = None) -> Wide:
    """y[o] = a W[o] b: one einsum, then the bias"""
    y = _einsum(w, "...i,oij,...j->...o", a, weight, b)
    if bias is None:
        return y
    shift = w.align(bias, rank(a)) if isinstance(bias, Stacked) else bias.value  # type: ignore[union-attr]
    return Stacked(w.call("add.Tensor", y.value, shift))  # type: ignore[union-attr]


@strategy("tensordot", "einsum", family="linear")
def tensordot(w: Writer, a: Wide, b: Wide, dims_a: list[int], dims_b: list[int]) -> Wide:
    """an einsum in which the dims that are summed share their letters"""
    left = list(_LETTERS[: rank(a)])
    right = list(_LETTERS[rank(a) : rank(a) + rank(b)].upper())
    for i, j in zip(dims_a, dims_b):
        right[j] = left[i]
    out = [c for c in left if c not in right] + [c for c in right if c not in left]
    return _einsum(w, f"{''.join(left)},{''.join(right)}->{''.join(out)}", a, b)


@strategy("outer ger", "broadcast", family="linear")
def outer(w: Writer, a: Wide, b: Wide) -> Wide:
    """a column times a row"""
    return Stacked(w.call("mul.Tensor", w.call("unsqueeze", a.value, -1), w.call("unsqueeze", b.value, -2)))  # type: ignore[union-attr]


@strategy("vdot", "sum", family="linear")
def vdot(w: Writer, a: Wide, b: Wide) -> Wide:
    """the first one conjugated, the products summed"""
    left: Value = a.value  # type: ignore[union-attr]
    left = w.call("conj_physical", left) if left.dtype.is_complex else left
    return _einsum(w, "i,i->", Stacked(left) if isinstance(a, Stacked) else Shared(left), b)


@strategy("kron", "broadcast", family="linear", when=lambda w, a, b: rank(a) == rank(b) > 0)
def kron(w: Writer, a: Wide, b: Wide) -> Wide:
    """every entry of one times all of the other, pairs of dims flattened"""
    left, right = w.stack(a), w.stack(b)
    for d in range(rank(a)):
        left, right = w.call("unsqueeze", left, 2 * d + 2), w.call("unsqueeze", right, 2 * d + 1)
    y = w.call("mul.Tensor", left, right)
    for d in range(rank(a)):
        y = w.call("flatten.using_ints", y, d + 1, d + 2)
    return Stacked(y)


@strategy("trace", "diagonal", family="linalg")
def trace(w: Writer, x: Stacked) -> Wide:
    """the diagonal's sum"""
    return Stacked(w.call("sum.dim_IntList", w.call("diagonal", x.value, 0, 1, 2), [1]))


@strategy("linalg_solve", "leading", family="linalg", when=lambda w, a, b, left=True: rank(b) == 1 or rank(a) == rank(b))
def solve(w: Writer, a: Wide, b: Wide, *, left: bool = True) -> Wide:
    """works on the last two dims; a vector becomes a column and back"""
    right = w.stack(b)
    if rank(b) > 1:
        return Stacked(w.call("linalg_solve", w.stack(a), right, left=left))
    for _ in range(rank(a) - 2):
        right = w.call("unsqueeze", right, 1)
    return Stacked(w.call("squeeze.dim", w.call("linalg_solve", w.stack(a), w.call("unsqueeze", right, -1), left=left), -1))


def _square(draw: Draw, *lead: int) -> torch.Tensor:
    return draw.normal(*lead, 4, 4) + 4 * torch.eye(4)


samples("linalg_inv inverse linalg_det")(lambda draw: [call(_square(draw)), call(_square(draw, B))])
samples("linalg_solve_triangular")(
    lambda draw: [
        call(_square(draw).triu() + 2 * torch.eye(4), draw.normal(4, 6), upper=True),
        call(_square(draw, B).tril() + 2 * torch.eye(4), draw.normal(B, 6, 4), upper=False, left=False),
    ]
)
samples("cholesky_solve")(
    lambda draw: [
        call(draw.normal(4, 6), _square(draw).tril() + 2 * torch.eye(4)),
        call(draw.normal(B, 4, 6), _square(draw, B).triu() + 2 * torch.eye(4), True),
    ]
)
samples("linalg_slogdet linalg_inv_ex")(lambda draw: [call(_square(draw)), call(_square(draw, B))])
samples("linalg_svdvals linalg_matrix_exp")(lambda draw: [call(_square(draw) / 4), call(_square(draw, B) / 4)])
samples("linalg_svd")(lambda draw: [call(_square(draw), *f) for f in ((), (False,))] + [call(_square(draw, B))])
samples("linalg_matrix_power")(lambda draw: [call(_square(draw, B) / 4, p) for p in (2, 3, 0)])
samples("linalg_eigh linalg_eigvalsh")(lambda draw: [call(x + x.mT) for x in (_square(draw), _square(draw, B))])
samples("logdet linalg_cholesky_ex")(lambda draw: [call(x @ x.mT) for x in (_square(draw), _square(draw, B))])
samples("linalg_cholesky cholesky")(lambda draw: [call(x @ x.mT) for x in (_square(draw), _square(draw, B))])
samples("linalg_qr")(lambda draw: [call(_square(draw)), call(_square(draw, B))])
samples("mT mH adjoint")(lambda draw: [call(draw.normal(B, 4)), call(draw.complex(B, 4, 6))])
samples("trace")(lambda draw: [call(draw.normal(B, 4)), call(draw.normal(4, 4))])
samples("outer ger")(lambda draw: [call(draw.normal(B), draw.normal(4))])
samples("vdot")(lambda draw: [call(draw.normal(6), draw.normal(6)), call(draw.complex(6), draw.complex(6))])
samples("kron")(lambda draw: [call(draw.normal(2, 4), draw.normal(6, 7)), call(draw.normal(4), draw.normal(2))])
samples("linalg_solve")(
    lambda draw: [
        call(_square(draw), draw.normal(4, 6)),
        call(_square(draw), draw.normal(6, 4), left=False),
        call(_square(draw, B), draw.normal(B, 4, 2)),
        call(_square(draw), draw.normal(4)),
        call(_square(draw, B), draw.normal(4)),
    ]
)


@samples("bilinear")
def _bilinears(draw: Draw) -> list[Sample]:
    return [call(draw.normal(*s, 4), draw.normal(*s, 2), draw.normal(6, 4, 2), *b) for s in ((), (B,), (B, 7)) for b in ((), (draw.normal(6),))]


samples("tensordot")(
    lambda draw: [
        call(draw.normal(B, 4, 6), draw.normal(6, 7), [2], [0]),
        call(draw.normal(B, 4, 6), draw.normal(6, 2, 4), [-1, 1], [0, -1]),
        call(draw.normal(4), draw.normal(6), [], []),
        call(draw.normal(4), draw.normal(4), [0], [0]),
    ]
)
