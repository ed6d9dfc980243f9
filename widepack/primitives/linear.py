"""Linear layers and products of matrices.

    y[i] = x[i] W[i]^T + b[i]        x: [N, *, I] or [*, I]    W: [N, O, I]    b: [N, O]    y: [N, *, O]

| strategy | when | how |
|---|---|---|
| `one_gemm` | x Shared | one product with `N*O` outputs |
| `fold` | W Shared | one product over all members' rows |
| `bmm` | both Stacked | one batched product |
| `turned` | W Stacked | products over weights transposed at load; x Shared: one product |
| `streamed` | on a CPU, float32, W Stacked | for up to three rows of a member: sums of rows of the weights |
| `packed` | on a CPU, W Stacked, not float64 | one oneDNN call over prepacked weights |
| `chain` | W Stacked, if a plan or the user names it | with the next layers: `mlp_chain` |
| `products` | on a CPU, float32, W Stacked | oneDNN over plain weights, also in the backward pass |

`packed` runs one product of `N*O` outputs where x is Shared. Otherwise it runs N groups, and its result has
the memory order `[R, N, O]`.

On a GPU, float32 products run in float32 unless torch.backends.cuda.matmul switches TF32 on.

The fastest strategy depends on the size of the weights of all members together: `packed` from 3 MB and 4 rows
on, `turned` below 1 MB, `bmm` for one row between. These limits were measured on one CPU.
"""

from __future__ import annotations

from typing import Any

import torch

from ..ir.values import Shared, Stacked, Value, WideValue, expression, hint
from ..kernels.onednn import PACKED_DTYPES, ROWS
from ..registry.registry import strategy
from ..registry.samples import B, Draw, Sample, call, samples
from ..registry.writer import Writer, put_shared, rank


def _x_shared(w: Writer, x: WideValue, weight: WideValue, bias: WideValue | None = None) -> bool:
    return isinstance(x, Shared) and isinstance(weight, Stacked) and rank(weight) == 2


def _w_shared(w: Writer, x: WideValue, weight: WideValue, bias: WideValue | None = None) -> bool:
    return isinstance(weight, Shared)


def _both(w: Writer, x: WideValue, weight: WideValue, bias: WideValue | None = None) -> bool:
    return isinstance(weight, Stacked) and rank(weight) == 2


def is_whole_bias(bias: WideValue | None, weight: WideValue) -> bool:
    """Whether the bias is None or has one number for each output.

    Any other bias broadcasts, and is added to the product.
    """
    if bias is None:
        return True
    if rank(bias) != 1 or rank(weight) != 2:
        return False
    outputs, numbers = (v.value.fake.shape[-rank(v)] for v in (weight, bias))  # type: ignore[union-attr]
    return bool(expression(outputs) == expression(numbers))


def add_bias(w: Writer, y: Value, bias: WideValue | None, rank_: int) -> WideValue:
    """Adds a bias that broadcasts to a product. rank_: the rank of the product in the member."""
    if bias is None:
        return Stacked(y)
    return Stacked(w.call("add.Tensor", y, w.align(bias, rank_) if isinstance(bias, Stacked) else bias.value))  # type: ignore[union-attr]


@strategy("linear", "one_gemm", family="linear", when=_x_shared)
def one_gemm(w: Writer, x: Shared, weight: Stacked, bias: WideValue | None = None) -> WideValue:
    """for a Shared input: one product with N*O outputs"""
    if not is_whole_bias(bias, weight):
        return add_bias(w, one_gemm(w, x, weight).value, bias, rank(x))
    flat = None if bias is None else w.call("flatten.using_ints", w.stack(bias), 0, 1)  # [N*O]
    y = w.call("linear", x.value, w.call("flatten.using_ints", weight.value, 0, 1), flat)  # [*, N*O]
    y = w.call("unflatten.int", y, -1, [w.members, -1])  # [*, N, O]
    return Stacked(w.call("movedim.int", y, -2, 0))


@strategy("linear", "fold", family="linear", when=_w_shared)
def fold(w: Writer, x: WideValue, weight: Shared, bias: WideValue | None = None) -> WideValue:
    """for a Shared weight: one product over all members' rows"""
    if not isinstance(bias, Stacked) and is_whole_bias(bias, weight):
        return Stacked(w.call("linear", x.value, weight.value, put_shared(bias)))  # type: ignore[union-attr]
    y = w.call("linear", x.value, weight.value)  # type: ignore[union-attr]
    return add_bias(w, y, bias, rank(x) - (rank(weight) == 1))


@strategy("linear", "bmm", family="linear", when=_both)
def bmm(w: Writer, x: WideValue, weight: Stacked, bias: WideValue | None = None) -> WideValue:
    """one batched product that adds the bias"""
    rows, back = flatten_rows(w, w.stack(x), rank(x))  # [N, R, I]
    turned = w.call("transpose.int", weight.value, 1, 2)  # [N, I, O]
    if bias is None or not is_whole_bias(bias, weight):
        return add_bias(w, back(w.call("bmm", rows, turned)), bias, rank(x))
    return Stacked(back(w.call("baddbmm", w.call("unsqueeze", w.stack(bias), 1), rows, turned)))  # [N, R, O]


@strategy("linear", "turned", family="linear", when=_both)
def turned(w: Writer, x: WideValue, weight: Stacked, bias: WideValue | None = None) -> WideValue:
    """one product over weights that were transposed at load: [N, I, O], or [I, N*O] for a Shared input"""
    if not is_whole_bias(bias, weight):
        return add_bias(w, turned(w, x, weight).value, bias, rank(x))
    if isinstance(x, Shared):
        flat = w.call("t", w.call("flatten.using_ints", weight.value, 0, 1))
        flat = w.call("clone", flat, memory_format=torch.contiguous_format)  # [I, N*O]
        b = None if bias is None else w.call("flatten.using_ints", w.stack(bias), 0, 1)
        if b is not None and rank(x) == 2:
            y = w.call("addmm", b, x.value, flat)
        else:
            y = w.call("matmul", x.value, flat)
            y = y if b is None else w.call("add.Tensor", y, b)
        return Stacked(w.call("movedim.int", w.call("unflatten.int", y, -1, [w.members, -1]), -2, 0))
    rows, back = flatten_rows(w, w.stack(x), rank(x))
    matrix = w.call(
        "clone", w.call("transpose.int", weight.value, 1, 2), memory_format=torch.contiguous_format
    )
    if bias is None:
        return Stacked(back(w.call("bmm", rows, matrix)))
    return Stacked(back(w.call("baddbmm", w.call("unsqueeze", w.stack(bias), 1), rows, matrix)))


def _packable(w: Writer, x: WideValue, weight: WideValue, bias: WideValue | None = None) -> bool:
    """Whether oneDNN can run it: CPU, float32 or 16 bits, and sizes that are static and not 0."""
    if (
        w.device != "cpu"
        or not isinstance(weight, Stacked)
        or rank(weight) != 2
        or not isinstance(x, (Shared, Stacked))
    ):
        return False
    same = weight.value.dtype == x.value.dtype
    return same and x.value.dtype in PACKED_DTYPES and all(s for s in weight.value.sizes)


def _in_float32(w: Writer, x: WideValue, weight: WideValue, bias: WideValue | None = None) -> bool:
    """Whether oneDNN can run it, and in float32."""
    return _packable(w, x, weight, bias) and weight.value.dtype == torch.float32  # type: ignore[union-attr]


@strategy("linear", "streamed", family="linear", when=_in_float32, derivative=False)
def streamed(w: Writer, x: WideValue, weight: Stacked, bias: WideValue | None = None) -> WideValue:
    """for one row per member: reads weights that were transposed at load once, in memory order"""
    if not is_whole_bias(bias, weight):
        return add_bias(w, streamed(w, x, weight).value, bias, rank(x))
    # [1, *, I] of a Shared input: one for all members
    value = x.value if isinstance(x, Stacked) else w.call("unsqueeze", put_shared(x), 0)
    rows, back = flatten_rows(w, value, rank(x))
    matrix = w.call("transpose.int", weight.value, 1, 2)  # [N, I, O]
    matrix = w.call("clone", matrix, memory_format=torch.contiguous_format)
    b = None if bias is None else w.stack(bias)
    return Stacked(back(w.call("widepack.streamed_linear.default", rows, matrix, b)))


@strategy("linear", "packed", family="linear", when=_packable, derivative=False)
def packed(w: Writer, x: WideValue, weight: Stacked, bias: WideValue | None = None) -> WideValue:
    """one oneDNN call over weights that were prepacked at load"""
    if not is_whole_bias(bias, weight):
        return add_bias(w, packed(w, x, weight).value, bias, rank(x))
    b = None if bias is None else w.stack(bias)  # [N, O]
    if isinstance(x, Stacked):
        rows, back = flatten_rows(w, x.value, rank(x))
        matrix = w.call("widepack.pack_linear.default", weight.value, ROWS)
        return Stacked(back(w.call("widepack.linear.default", rows, matrix, b)))
    rows, back = flatten_rows(w, w.call("unsqueeze", put_shared(x), 0), rank(x))  # [1, R, I]
    matrix = w.call(
        "widepack.pack_linear.default",
        w.call("unsqueeze", w.call("flatten.using_ints", weight.value, 0, 1), 0),
        ROWS,
    )
    flat = None if b is None else w.call("reshape", b, [1, -1])
    y = back(w.call("widepack.linear.default", rows, matrix, flat))  # [1, *, N*O]
    y = w.call("unflatten.int", w.call("squeeze.dim", y, 0), -1, [w.members, -1])  # [*, N, O]
    return Stacked(w.call("movedim.int", y, -2, 0))


@strategy("linear", "products", family="linear", when=_in_float32)
def products(w: Writer, x: WideValue, weight: Stacked, bias: WideValue | None = None) -> WideValue:
    """for many rows of members that train: a oneDNN call for each member over its plain weights"""
    if not is_whole_bias(bias, weight):
        return add_bias(w, products(w, x, weight).value, bias, rank(x))
    value = x.value if isinstance(x, Stacked) else w.call("unsqueeze", put_shared(x), 0)
    rows, back = flatten_rows(w, value, rank(x))  # [N or 1, R, I]
    b = None if bias is None else w.stack(bias)
    return Stacked(back(w.call("widepack.member_products.default", rows, weight.value, b)))


def _chainable(w: Writer, x: WideValue, weight: WideValue, bias: WideValue | None = None) -> bool:
    """Whether it may be a part of a chain: matrices of static sizes, one float dtype, a whole bias."""
    if not isinstance(weight, Stacked) or rank(weight) != 2 or not is_whole_bias(bias, weight):
        return False
    values = [v for v in (x, weight, bias) if v is not None]
    if not all(isinstance(v, (Shared, Stacked)) for v in values) or not all(weight.value.sizes):
        return False
    dtypes = {v.value.dtype for v in values}  # type: ignore[union-attr]
    return len(dtypes) == 1 and all(d.is_floating_point for d in dtypes)


@strategy("linear", "chain", family="linear", when=_chainable, derivative=False, on_request=True)
def chain(w: Writer, x: WideValue, weight: Stacked, bias: WideValue | None = None) -> WideValue:
    """for small layers on a GPU: one kernel with the activations and layers that follow"""
    value = x.value if isinstance(x, Stacked) else w.call("unsqueeze", put_shared(x), 0)
    rows, back = flatten_rows(w, value, rank(x))  # [N or 1, R, I]
    b = None if bias is None else w.stack(bias)
    return Stacked(back(w.call("widepack.mlp_chain.default", rows, [weight.value], [b], [""])))


def flatten_rows(w: Writer, x: Value, rank: int) -> tuple[Value, Any]:
    """Flattens `[N, *, I] -> [N, R, I]`, and returns a function that restores the dims.

    The rows keep their order in memory, so that a transposed value is not copied.
    """
    if rank == 2:
        return x, lambda y: y
    if rank == 1:
        return w.call("unsqueeze", x, 1), lambda y: w.call("squeeze.dim", y, 1)
    strides = [hint(s) for s in x.fake.stride()]
    order = sorted(range(1, rank), key=lambda d: -strides[d])
    if order != list(range(1, rank)):
        x = w.call("permute", x, [0, *order, rank])
    sizes = [s if s is not None else w.call("sym_size.int", x, d) for d, s in enumerate(x.sizes)][1:-1]

    def back(y: Value) -> Value:
        y = w.call("unflatten.int", y, 1, sizes)
        return (
            y
            if order == list(range(1, rank))
            else w.call("permute", y, [0, *(1 + order.index(d) for d in range(1, rank)), rank])
        )

    return w.call("flatten.using_ints", x, 1, -2), back


@strategy("matmul mm bmm mv dot", "matmul", family="linear")
def matmul(w: Writer, a: WideValue, b: WideValue) -> WideValue:
    """one broadcast product; vectors become matrices and back"""
    ra, rb = rank(a), rank(b)
    out = max(ra, rb, 2)
    left = _matrix(w, a, out, -2 if ra == 1 else None)
    right = _matrix(w, b, out, -1 if rb == 1 else None)
    y = w.call("matmul", left, right)
    if rb == 1:
        y = w.call("squeeze.dim", y, -1)
    if ra == 1:
        y = w.call("squeeze.dim", y, -2 if rb > 1 else -1)
    return Stacked(y)


def _matrix(w: Writer, x: WideValue, out: int, at: int | None) -> Value:
    """Raises an operand to the member rank `out`; a vector gets a dim of size 1 at `at` first."""
    value: Value = x.value  # type: ignore[union-attr]
    if at is not None:
        value = w.call("unsqueeze", value, at)
    return w.align(Stacked(value), out) if isinstance(x, Stacked) else value


@strategy("addmm baddbmm", "matmul", family="linear")
def addmm(
    w: Writer, bias: WideValue, a: WideValue, b: WideValue, *, beta: float = 1, alpha: float = 1
) -> WideValue:
    """one batched product that also adds, where the shapes allow"""
    if isinstance(a, Stacked) and isinstance(b, Stacked) and a.rank == b.rank == 2:
        c = w.align(bias, 2) if isinstance(bias, Stacked) else bias.value  # type: ignore[union-attr]
        return Stacked(w.call("baddbmm", c, a.value, b.value, beta=beta, alpha=alpha))
    y = w.call("matmul", a.value, b.value)  # type: ignore[union-attr]
    if isinstance(a, Shared) and isinstance(b, Shared):
        y = w.stack(Shared(y))
    if alpha != 1:
        y = w.call("mul.Scalar", y, alpha)
    if beta == 0:  # torch does not read the bias then, not even NaN
        return Stacked(y)
    c = w.align(bias, max(rank(a), rank(b))) if isinstance(bias, Stacked) else bias.value  # type: ignore[union-attr]
    return Stacked(w.call("add.Tensor", y, c if beta == 1 else w.call("mul.Scalar", c, beta)))


@strategy(
    "einsum",
    "letter",
    family="linear",
    when=lambda w, equation, operands, path=None: all(isinstance(o, (Shared, Stacked)) for o in operands),
)
def einsum(w: Writer, equation: str, operands: list[WideValue], path: Any = None) -> WideValue:
    """one more letter, for the member axis, on every Stacked operand and on the output"""
    text = equation.replace(" ", "")
    terms, _, out = text.partition("->")
    if "->" not in text:
        letters = [c for c in terms.replace("...", "") if c != ","]
        out = ("..." if "..." in terms else "") + "".join(
            sorted(c for c in set(letters) if letters.count(c) == 1)
        )
    member = next(c for c in "NMLKJIHGFEDCBAZYXWVUTSRQPOnmlkjihgfedcbazyxwvutsrqpo" if c not in text)
    lettered = [member + t if isinstance(o, Stacked) else t for t, o in zip(terms.split(","), operands)]
    values = [o.value for o in operands]  # type: ignore[union-attr]
    return Stacked(w.call("einsum", f"{','.join(lettered)}->{member}{out}", values, path=path))


@samples("linear")
def _linear(draw: Draw) -> list[Sample]:
    full = [
        call(draw.normal(*x, 4), draw.normal(3, 4), *b)
        for x in ((), (B,), (B, 2), (2, B, 6))
        for b in ((draw.normal(3),), (), (None,))
    ]
    spread = [
        call(draw.normal(*x, 4), draw.normal(3, 4), draw.normal(*b))
        for x in ((), (B,), (2, B, 6))
        for b in ((), (1,))
    ]
    spread += [call(draw.normal(B, 4), draw.normal(3, 4), draw.normal(*b)) for b in ((B, 3), (B, 1), (1, 3))]
    return [
        *full,
        *spread,
        call(draw.normal(B, 4), draw.normal(1, 4), draw.normal(1)),
        call(draw.normal(B, 4), draw.normal(4)),
    ]


@samples("matmul")
def _matmul(draw: Draw) -> list[Sample]:
    shapes = [
        ((4,), (4,)),
        ((B, 4), (4,)),
        ((4,), (4, 3)),
        ((B, 4), (4, 3)),
        ((B, 2, 4), (4, 3)),
        ((B, 2, 4), (B, 4, 3)),
        ((2, 4), (B, 4, 3)),
        ((4,), (B, 4, 3)),
        ((B, 2, 4), (4,)),
        ((B, 1, 2, 4), (6, 4, 3)),
        ((B, 1, 64), (B, 64, 65)),
        ((B, 2, 65, 64), (B, 2, 64, 1)),
    ]
    return [call(draw.normal(*a), draw.normal(*b)) for a, b in shapes]


samples("mm")(
    lambda draw: [
        call(draw.normal(B, 4), draw.normal(4, 3)),
        call(draw.ints(0, 9, B, 4), draw.ints(0, 9, 4, 3)),
    ]
)
samples("bmm")(
    lambda draw: [
        call(draw.normal(B, 2, 4), draw.normal(B, 4, 3)),
        call(draw.normal(B, 1, 64), draw.normal(B, 64, 65)),
        call(draw.normal(B, 65, 64), draw.normal(B, 64, 1)),
    ]
)
samples("mv")(lambda draw: [call(draw.normal(B, 4), draw.normal(4))])
samples("dot")(lambda draw: [call(draw.normal(B), draw.normal(B))])


@samples("addmm")
def _addmm(draw: Draw) -> list[Sample]:
    a, b = draw.normal(B, 4), draw.normal(4, 3)
    full = [
        call(draw.normal(*c), a, b, **k)
        for c in ((3,), (B, 3), (B, 1), ())
        for k in ({}, {"beta": 0.5, "alpha": 2.0})
    ]
    return [*full, call(draw.normal(3) * float("nan"), a, b, beta=0)]


@samples("baddbmm")
def _baddbmm(draw: Draw) -> list[Sample]:
    a, b = draw.normal(B, 2, 4), draw.normal(B, 4, 3)
    return [
        call(draw.normal(*c), a, b, **k)
        for c in ((B, 2, 3), (B, 1, 3), (3,), (1, 1, 1))
        for k in ({}, {"beta": 0.5, "alpha": 2.0}, {"beta": 0})
    ]


@samples("einsum")
def _einsum(draw: Draw) -> list[Sample]:
    equations = [
        ("bi,oi->bo", (B, 4), (3, 4)),
        ("bi, oi", (B, 4), (3, 4)),
        ("...i,oi->...o", (B, 2, 4), (3, 4)),
        ("...ij,jk", (B, 2, 4), (4, 3)),
        ("bhtd,bhsd->bhts", (B, 2, 3, 4), (B, 2, 6, 4)),
    ]
    more = [
        ("ii->i", (4, 4)),
        ("ii", (4, 4)),
        ("i->", (4,)),
        ("zyx", (B, 2, 3)),
        ("bij,jk,k->bi", (B, 2, 4), (4, 3), (3,)),
        ("i,j", (4,), (3,)),
        ("bNi,NM->bMi", (B, 2, 4), (2, 3)),
        ("bkoi,bi->bko", (B, 2, 65, 64), (B, 64)),
        ("ib,bkio->okb", (64, B), (B, 2, 64, 65)),
    ]
    return [call(e, [draw.normal(*s) for s in shapes]) for e, *shapes in (*equations, *more)]
