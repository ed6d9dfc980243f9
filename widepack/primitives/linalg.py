"""Matrix decompositions, solvers, and products other than those of linear.py.

decompositions, solvers    y[i] = op(A[i]), op(A[i], b[i])    A: [N, *, P, Q]    b: [N, *, P] or [N, *, P, R]
bilinear                   y[i, o] = a[i] W[i, o] b[i] + c[i, o]
                           a: [N, *, I]    b: [N, *, J]    W: [N, O, I, J]    c: [N, O]    y: [N, *, O]
tensordot, vdot            an einsum with one more letter, n, for the member axis
outer, kron, addmv, addr   products that broadcast behind the member axis

Most ops work on trailing dims: the member axis is one more leading dim.
"""

from __future__ import annotations

from typing import Any

import torch

from ..ir.ops import full_name
from ..ir.values import Shared, Stacked, Value, WideValue
from ..registry.families import leading
from ..registry.registry import register, strategy
from ..registry.samples import B, Draw, Sample, call, samples
from ..registry.writer import Writer, rank

_LETTERS = "abcdefghijklmopqrstuvwxyz"  # without n, which is the member axis
leading(
    """
    linalg_inv inverse linalg_det linalg_cholesky cholesky linalg_qr mT mH adjoint linalg_inv_ex
    linalg_cholesky_ex linalg_lu linalg_lu_factor linalg_ldl_factor
    linalg_eigh linalg_eigvalsh linalg_svd linalg_svdvals linalg_slogdet logdet
    linalg_pinv.atol_rtol_tensor
    cholesky_inverse linalg_matrix_power linalg_pinv linalg_pinv.atol_rtol_float linalg_matrix_rank
    linalg_cond
    """,
    family="linalg",
)


def _einsum(w: Writer, equation: str, *operands: WideValue) -> WideValue:
    """Runs an einsum with the letter n in front of every Stacked operand and of the output."""
    terms, _, out = equation.partition("->")
    if not any(isinstance(o, Stacked) for o in operands):
        return Stacked(w.stack(Shared(w.call("einsum", equation, [o.value for o in operands]))))  # type: ignore[union-attr]
    lettered = [f"n{t}" if isinstance(o, Stacked) else t for t, o in zip(terms.split(","), operands)]
    return Stacked(w.call("einsum", f"{','.join(lettered)}->n{out}", [o.value for o in operands]))  # type: ignore[union-attr]


@strategy("bilinear", "einsum", family="linear")
def bilinear(
    w: Writer, a: WideValue, b: WideValue, weight: WideValue, bias: WideValue | None = None
) -> WideValue:
    """y[o] = a W[o] b: one einsum, then the bias"""
    y = _einsum(w, "...i,oij,...j->...o", a, weight, b)
    if bias is None:
        return y
    shift = w.align(bias, rank(a)) if isinstance(bias, Stacked) else bias.value  # type: ignore[union-attr]
    return Stacked(w.call("add.Tensor", y.value, shift))  # type: ignore[union-attr]


def _own_matrix(
    w: Writer, a: WideValue, b: WideValue, weight: WideValue, bias: WideValue | None = None
) -> bool:
    return isinstance(weight, Stacked) and all(isinstance(v, (Shared, Stacked)) for v in (a, b))


@strategy("bilinear", "turned", family="linear", when=_own_matrix)
def bilinear_turned(
    w: Writer, a: WideValue, b: WideValue, weight: Stacked, bias: WideValue | None = None
) -> WideValue:
    """a batched product with weights reordered at load to [N, I, O*J], then a product with b"""
    outputs, _, right = weight.value.fake.shape[1:]
    matrix = w.call(
        "clone", w.call("permute", weight.value, [0, 2, 1, 3]), memory_format=torch.contiguous_format
    )
    rows, others = (_rows(w, v) for v in (a, b))  # [N, R, I], [N, R, J]
    y = w.call(
        "unflatten.int", w.call("bmm", rows, w.call("flatten.using_ints", matrix, 2, 3)), 2, [outputs, right]
    )
    y = w.call("squeeze.dim", w.call("matmul", y, w.call("unsqueeze", others, -1)), -1)  # [N, R, O]
    return _of_rows(w, y, a, bias)


def _own_wide_matrix(
    w: Writer, a: WideValue, b: WideValue, weight: WideValue, bias: WideValue | None = None
) -> bool:
    # the products a * b alone may overflow float16
    return (
        isinstance(weight, Stacked)
        and weight.value.fake.dtype != torch.float16
        and _own_matrix(w, a, b, weight, bias)
    )


@strategy("bilinear", "outer", family="linear", when=_own_wide_matrix)
def bilinear_outer(
    w: Writer, a: WideValue, b: WideValue, weight: Stacked, bias: WideValue | None = None
) -> WideValue:
    """a batched product of the outer products of a and b with weights reordered at load to [N, I*J, O]

    The outer products are [N, R, I*J]. No value of width O*J is computed.
    """
    matrix = w.call("transpose.int", w.call("flatten.using_ints", weight.value, 2, 3), 1, 2)
    matrix = w.call("clone", matrix, memory_format=torch.contiguous_format)
    rows, others = (_rows(w, v) for v in (a, b))
    pairs = w.call("mul.Tensor", w.call("unsqueeze", rows, -1), w.call("unsqueeze", others, -2))
    return _of_rows(w, w.call("bmm", w.call("flatten.using_ints", pairs, 2, 3), matrix), a, bias)


def _of_rows(w: Writer, y: Value, a: WideValue, bias: WideValue | None) -> WideValue:
    """Adds the bias to `[N, R, O]` and restores the leading dims of `a`."""
    if bias is not None:
        y = w.call("add.Tensor", y, w.call("unsqueeze", w.stack(bias), 1))
    if rank(a) == 1:
        return Stacked(w.call("squeeze.dim", y, 1))
    if rank(a) == 2:
        return Stacked(y)
    x = w.stack(a)
    return Stacked(
        w.call(
            "unflatten.int",
            y,
            1,
            [s if s is not None else w.call("sym_size.int", x, d) for d, s in enumerate(x.sizes)][1:-1],
        )
    )


def _rows(w: Writer, x: WideValue) -> Value:
    """Flattens the leading dims: `[N, *, I] -> [N, R, I]`."""
    value = w.stack(x)
    return w.call("unsqueeze", value, 1) if rank(x) == 1 else w.call("flatten.using_ints", value, 1, -2)


@strategy("tensordot", "einsum", family="linear")
def tensordot(w: Writer, a: WideValue, b: WideValue, dims_a: list[int], dims_b: list[int]) -> WideValue:
    """an einsum; the dims of a sum have one letter in both operands"""
    left = list(_LETTERS[: rank(a)])
    right = list(_LETTERS[rank(a) : rank(a) + rank(b)].upper())
    for i, j in zip(dims_a, dims_b):
        right[j] = left[i]
    out = [c for c in left if c not in right] + [c for c in right if c not in left]
    return _einsum(w, f"{''.join(left)},{''.join(right)}->{''.join(out)}", a, b)


@strategy("outer ger", "broadcast", family="linear")
def outer(w: Writer, a: WideValue, b: WideValue) -> WideValue:
    """a column times a row"""
    return Stacked(w.call("mul.Tensor", w.call("unsqueeze", a.value, -1), w.call("unsqueeze", b.value, -2)))  # type: ignore[union-attr]


@strategy("vdot", "sum", family="linear")
def vdot(w: Writer, a: WideValue, b: WideValue) -> WideValue:
    """conjugates the first vector, then sums the products"""
    left: Value = a.value  # type: ignore[union-attr]
    left = w.call("conj_physical", left) if left.dtype.is_complex else left
    return _einsum(w, "i,i->", Stacked(left) if isinstance(a, Stacked) else Shared(left), b)


@strategy("kron", "broadcast", family="linear", when=lambda w, a, b: rank(a) == rank(b) > 0)
def kron(w: Writer, a: WideValue, b: WideValue) -> WideValue:
    """each entry of a times all of b, then pairs of dims flattened"""
    left, right = w.stack(a), w.stack(b)
    for d in range(rank(a)):
        left, right = w.call("unsqueeze", left, 2 * d + 2), w.call("unsqueeze", right, 2 * d + 1)
    y = w.call("mul.Tensor", left, right)
    for d in range(rank(a)):
        y = w.call("flatten.using_ints", y, d + 1, d + 2)
    return Stacked(y)


@strategy("diag", "diagonal", family="linalg")
def diag(w: Writer, x: Stacked, offset: int = 0) -> WideValue:
    """a matrix with the vector as its diagonal, or the diagonal of a matrix"""
    return Stacked(
        w.call("diag_embed", x.value, offset) if x.rank == 1 else w.call("diagonal", x.value, offset, 1, 2)
    )


@strategy("addmv", "baddbmm", family="linear", when=lambda w, c, a, b, **_: rank(c) == 1)
def addmv(
    w: Writer, c: WideValue, a: WideValue, b: WideValue, *, beta: float = 1, alpha: float = 1
) -> WideValue:
    """the vectors as matrices of one column"""
    columns = [w.call("unsqueeze", w.stack(v), -1) for v in (c, b)]
    return Stacked(
        w.call(
            "squeeze.dim", w.call("baddbmm", columns[0], w.stack(a), columns[1], beta=beta, alpha=alpha), -1
        )
    )


@strategy("addr", "baddbmm", family="linear", when=lambda w, c, a, b, **_: rank(c) == 2)
def addr(
    w: Writer, c: WideValue, a: WideValue, b: WideValue, *, beta: float = 1, alpha: float = 1
) -> WideValue:
    """adds a column times a row"""
    column, row = w.call("unsqueeze", w.stack(a), -1), w.call("unsqueeze", w.stack(b), -2)
    return Stacked(w.call("baddbmm", w.stack(c), column, row, beta=beta, alpha=alpha))


@strategy("trace", "diagonal", family="linalg")
def trace(w: Writer, x: Stacked) -> WideValue:
    """the sum of the diagonal"""
    return Stacked(w.call("sum.dim_IntList", w.call("diagonal", x.value, 0, 1, 2), [1]))


@strategy(
    "linalg_solve",
    "leading",
    family="linalg",
    when=lambda w, a, b, left=True: rank(b) == 1 or rank(a) == rank(b),
)
def solve(w: Writer, a: WideValue, b: WideValue, *, left: bool = True) -> WideValue:
    """works on the last two dims; a vector becomes a column and back"""
    right = w.stack(b)
    if rank(b) > 1:
        return Stacked(w.call("linalg_solve", w.stack(a), right, left=left))
    for _ in range(rank(a) - 2):
        right = w.call("unsqueeze", right, 1)
    return Stacked(
        w.call(
            "squeeze.dim", w.call("linalg_solve", w.stack(a), w.call("unsqueeze", right, -1), left=left), -1
        )
    )


def _operands(op: str, *trailing: int) -> None:
    """Registers an op whose operands broadcast their leading dims.

    trailing: for each operand the number of dims that do not broadcast.
    """

    def rule(w: Writer, *args: Any, **kwargs: Any) -> Any:
        """works on trailing dims: the member axis is one more leading dim of every operand"""
        lead = max(rank(x) - t for x, t in zip(args, trailing))
        operands = [w.align(Stacked(w.stack(x)), lead + t) for x, t in zip(args, trailing)]
        return w.stacked(w.call(op, *operands, *args[len(trailing) :], **kwargs))

    register(full_name(op), "leading", rule, family="linalg")


_operands("cholesky_solve", 2, 2)
_operands("linalg_solve_triangular", 2, 2)
_operands("linalg_lu_solve", 2, 1, 2)
_operands("linalg_ldl_solve", 2, 1, 2)
_operands("linalg_householder_product", 2, 1)
_operands("lu_unpack", 2, 1)


@strategy("linalg_solve_ex", "leading", family="linalg", when=lambda w, a, b, **_: rank(a) == rank(b))
def solve_ex(w: Writer, a: WideValue, b: WideValue, **kwargs: Any) -> Any:
    """works on the last two dims"""
    return w.stacked(w.call(w.op, w.stack(a), w.stack(b), **kwargs))


@strategy("linalg_matrix_exp", "leading", family="linalg")
def matrix_exp(w: Writer, x: Stacked) -> WideValue:
    """works on the last two dims of contiguous memory, which torch requires for a batch"""
    return Stacked(w.call("linalg_matrix_exp", w.call("contiguous", x.value)))


def _square(draw: Draw, *lead: int) -> torch.Tensor:
    return draw.normal(*lead, 4, 4) + 4 * torch.eye(4)


samples("linalg_inv inverse linalg_det")(lambda draw: [call(_square(draw)), call(_square(draw, B))])
samples("linalg_matrix_exp")(lambda draw: [call(draw.normal(4, 4)), call(draw.normal(B, 4, 4))])
samples("linalg_cholesky cholesky")(lambda draw: [call(x @ x.mT) for x in (_square(draw), _square(draw, B))])
samples("linalg_inv_ex linalg_lu_factor linalg_slogdet linalg_cond")(
    lambda draw: [call(_square(draw)), call(_square(draw, B))]
)
samples("logdet cholesky_inverse linalg_cholesky_ex linalg_eigh linalg_eigvalsh")(
    lambda draw: [call(x @ x.mT) for x in (_square(draw), _square(draw, B))]
)
samples("linalg_ldl_factor")(lambda draw: [call(x + x.mT) for x in (_square(draw), _square(draw, B))])
samples("linalg_lu linalg_svd linalg_svdvals")(lambda draw: [call(_square(draw)), call(_square(draw, B))])
samples("linalg_matrix_power")(lambda draw: [call(_square(draw), 3), call(_square(draw, B), -1)])
samples("linalg_pinv linalg_matrix_rank")(
    lambda draw: [call(draw.normal(4, 6), 1e-4), call(draw.normal(B, 4, 2), 1e-4)]
)
samples("linalg_pinv.atol_rtol_tensor")(lambda draw: [call(draw.normal(4, 6)), call(draw.normal(B, 4, 2))])
samples("linalg_pinv.atol_rtol_float")(
    lambda draw: [call(draw.normal(4, 6)), call(draw.normal(B, 4, 2), atol=0.0, rtol=1e-4)]
)
samples("cholesky_solve")(
    lambda draw: [
        call(draw.normal(*b, 4, 2), _square(draw, *a).tril())
        for a, b in (((), ()), ((B,), (B,)), ((), (B,)), ((B,), ()))
    ]
)
samples("linalg_solve_triangular")(
    lambda draw: [
        call(_square(draw, *a), draw.normal(*b, 4, 2), upper=u)
        for a, b, u in (((), (), True), ((B,), (B,), False), ((), (B,), True))
    ]
)
samples("linalg_lu_solve")(
    lambda draw: [
        call(*torch.linalg.lu_factor(_square(draw, *a)), draw.normal(*b, 4, 2))
        for a, b in (((), ()), ((B,), (B,)), ((), (B,)))
    ]
)
samples("linalg_ldl_solve")(
    lambda draw: [
        call(*torch.linalg.ldl_factor(x + x.mT), draw.normal(*a, 4, 2))
        for a in ((), (B,))
        for x in [_square(draw, *a)]
    ]
)
samples("linalg_householder_product")(
    lambda draw: [call(*torch.geqrf(_square(draw, *a))) for a in ((), (B,))]
)
samples("lu_unpack")(lambda draw: [call(*torch.linalg.lu_factor(_square(draw, *a))) for a in ((), (B,))])
samples("linalg_solve_ex")(
    lambda draw: [
        call(_square(draw), draw.normal(4, 6)),
        call(_square(draw, B), draw.normal(B, 4, 2)),
        call(_square(draw), draw.normal(6, 4), left=False),
    ]
)
samples("linalg_qr")(lambda draw: [call(_square(draw)), call(_square(draw, B))])
samples("mT mH adjoint")(lambda draw: [call(draw.normal(B, 4)), call(draw.complex(B, 4, 6))])
samples("trace")(lambda draw: [call(draw.normal(B, 4)), call(draw.normal(4, 4))])
samples("diag")(
    lambda draw: [call(draw.normal(*s), *k) for s in ((4,), (4, 6), (B, 3)) for k in ((), (1,), (-1,))]
)
samples("addmv")(
    lambda draw: [
        call(draw.normal(4), draw.normal(4, 6), draw.normal(6)),
        call(draw.normal(B), draw.normal(B, 4), draw.normal(4), beta=0.5, alpha=2),
    ]
)
samples("addr")(
    lambda draw: [
        call(draw.normal(4, 6), draw.normal(4), draw.normal(6)),
        call(draw.normal(B, 4), draw.normal(B), draw.normal(4), beta=0.5, alpha=2),
    ]
)
samples("outer ger")(lambda draw: [call(draw.normal(B), draw.normal(4))])
samples("vdot")(lambda draw: [call(draw.normal(6), draw.normal(6)), call(draw.complex(6), draw.complex(6))])
samples("kron")(
    lambda draw: [call(draw.normal(2, 4), draw.normal(6, 7)), call(draw.normal(4), draw.normal(2))]
)
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
    return [
        call(draw.normal(*s, 4), draw.normal(*s, 2), draw.normal(6, 4, 2), *b)
        for s in ((), (B,), (B, 7))
        for b in ((), (draw.normal(6),))
    ]


samples("tensordot")(
    lambda draw: [
        call(draw.normal(B, 4, 6), draw.normal(6, 7), [2], [0]),
        call(draw.normal(B, 4, 6), draw.normal(6, 2, 4), [-1, 1], [0, -1]),
        call(draw.normal(4), draw.normal(6), [], []),
        call(draw.normal(4), draw.normal(4), [0], [0]),
    ]
)
