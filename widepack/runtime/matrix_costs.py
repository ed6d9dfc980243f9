"""Computes the costs of matrix products, contractions, convolutions and attention.

The multiplications of `mm`, `addmm`, `bmm`, `baddbmm` and `convolution` are those of
`torch.utils.flop_counter`, which a test compares. The rules do not call it: it counts decomposed graphs, so
`linear`, `matmul`, `conv2d` and most other ops here have no formula in it, and it gives no time for a dtype
and no memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from ..ir.limits import integers, size, tensors
from ..kernels.experts import PADDING
from .cost_terms import NOTHING, Cost, count, first_tensor, rate

_WITH_ADDEND = frozenset(f"aten.{n}" for n in ("addmm", "addbmm", "baddbmm", "addmv", "addr"))
MEMBER = 5_000.0
"""Nanoseconds that the call of one member's kernel takes beside its numbers."""
_OUTER = frozenset(f"aten.{n}" for n in ("addr", "ger", "outer"))


def product(name: str, args: Mapping[str, Any], result: Any) -> Cost:
    """Matrix products: the size of the result times the inner size.

    Operands that broadcast are copied first.
    """
    out = first_tensor(result)
    operands = [
        t
        for key, t in args.items()
        if isinstance(t, torch.Tensor) and not (name in _WITH_ADDEND and key == "self") and key != "bias"
    ]
    if out is None or not operands:
        return NOTHING
    a, b = operands[0], operands[-1]
    inner = int(a.shape[-1]) if a.dim() else 1
    if name == "aten.addbmm":  # summed over the batch
        inner *= int(a.shape[0])
    if name in _OUTER:
        inner = 1
    columns, rows = (int(out.shape[-1]), int(out.shape[-2])) if out.dim() > 1 else (1, 1)
    copies = out.numel() // max(1, columns) * inner
    if b.dim() > 2:
        copies += out.numel() // max(1, rows) * inner
    work = out.numel() * max(1, inner) * rate(a) + count(dict(args)) + out.numel()
    if name == "aten.addbmm":
        work += 5_000.0 * int(a.shape[0])  # one matrix after the other
    return Cost(work, copies * a.element_size())


def contraction(name: str, args: Mapping[str, Any], result: Any) -> Cost:
    """`einsum` and `tensordot`.

    The product of the label sizes if they are known, else a bound from the operands' sizes.
    """
    parts = list(tensors(dict(args)))
    out = max(1, count(result))
    if name == "aten.einsum" and (labels := _label_sizes(args)) is not None:
        pairs = math.prod(labels.values())
        middle = pairs if len(parts) > 2 else 0
        return Cost(
            pairs * rate(first_tensor(parts)) + count(dict(args)) + out, (middle + count(dict(args))) * 8.0
        )
    whole = math.sqrt(float(out) * math.prod(max(1.0, float(t.numel())) for t in parts))
    room = 8.0 * (count(dict(args)) + (whole if len(parts) > 2 else 0))
    return Cost(whole * rate(first_tensor(parts)) + count(dict(args)) + out, room)


def _label_sizes(args: Mapping[str, Any]) -> dict[str, int] | None:
    """The size of every label of an einsum; each dim under an ellipsis has its own label.

    None for an equation that cannot be read.
    """
    equation, parts = args.get("equation"), list(tensors(args.get("tensors")))
    if not isinstance(equation, str):
        return None
    sides = equation.replace(" ", "").partition("->")[0].split(",")
    if len(sides) != len(parts):
        return None
    sizes: dict[str, int] = {}
    for side, x in zip(sides, parts):
        before, dots, after = side.partition("...")
        free = x.dim() - len(before) - len(after)
        if free < 0 or (free and not dots):
            return None
        for label, n in zip([*before, *(f"{k}" for k in range(-free, 0)), *after], x.shape):
            sizes[label] = max(sizes.get(label, 1), int(n))
    return sizes


def multiplications(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, transposed: bool) -> int:
    """The multiplications of a convolution: each number of the result (transposed: of the input) meets one
    filter.
    """
    places = x if transposed else out
    return places.numel() * max(1, weight.numel() // max(1, int(weight.shape[0])))


def convolution(name: str, args: Mapping[str, Any], result: Any) -> Cost:
    """Convolutions. Kernels other than oneDNN's write out the columns of the input first."""
    out, weight = first_tensor(result), args.get("weight")
    x = args.get("input", args.get("self", args.get("x")))
    if (
        out is None
        or not isinstance(x, torch.Tensor)
        or not isinstance(weight, torch.Tensor)
        or not weight.dim()
    ):
        return NOTHING
    transposed = "transpose" in name or bool(args.get("transposed"))
    pairs = multiplications(x, weight, out, transposed)
    outputs, batch = max(1, int(weight.shape[0])), max(1, int(x.shape[0]))
    at_once = str(x.dtype) != "torch.float32" or transposed  # the columns of the whole batch
    columns = pairs // outputs if at_once else pairs // (outputs * batch)
    slow = 4.0
    if args.get("groups", 1) != 1:  # few channels leave vectors empty
        slow += 50.0 / max(1, int(weight.shape[1]) if weight.dim() > 1 else 1)
    work = pairs * slow * rate(x) + x.numel() + out.numel() + weight.numel()
    if str(x.dtype) != "torch.float32":  # oneDNN runs float32 alone; other kernels loop over batch and groups
        groups = args.get("groups", 1)
        work += 10_000.0 * batch * (groups if isinstance(groups, int) else 1)
    read = 2 * x.numel() + 2 * weight.numel()  # in oneDNN's order, or dense
    return Cost(work, float((columns + read) * x.element_size()))


def member_convolutions(name: str, args: Mapping[str, Any], result: Any) -> Cost:
    """`widepack::member_convs`: the convolution of one member, N times, and a copy of each result."""
    x, weight, out = args.get("x"), args.get("weight"), first_tensor(result)
    if not isinstance(x, torch.Tensor) or not isinstance(weight, torch.Tensor) or out is None:
        return NOTHING
    if min(x.dim(), weight.dim(), out.dim()) < 4 or not weight.shape[0]:
        return NOTHING
    given = {"input": x[0], "weight": weight[0], "groups": args.get("groups", 1)}
    one = convolution(name, {**given, "transposed": args.get("output_padding") is not None}, out[0])
    work = int(weight.shape[0]) * (one.work + MEMBER) + 2 * out.numel()
    return Cost(work, one.room + 2.0 * size([out]))


def grouped_linear(name: str, args: Mapping[str, Any], result: Any) -> Cost:
    """`widepack::linear`, `streamed_linear`, `member_products`, `int8_linear`, `expert_linear`,
    `grouped_experts` and
    `expert_mm`: the size of the result times the inner size.
    """
    x, out = args.get("x"), first_tensor(result)
    if not isinstance(x, torch.Tensor) or out is None or x.dim() not in (2, 3):
        return NOTHING
    # The ops of experts sort the numbers of the experts, and may pad the rows.
    of_experts = "index" in args
    rows = PADDING if of_experts else 1
    work = rows * out.numel() * int(x.shape[-1]) * rate(x) + count(dict(args)) + out.numel()
    memory = size([x, out]) * (2 + (rows if of_experts else 0)) + size(args.get("weight"))
    return Cost(work, float(memory + (8 * 8 * count(args["index"]) if of_experts else 0)))


def factored(name: str, args: Mapping[str, Any], result: Any) -> Cost:
    """`widepack::delta_linear` and `widepack::factored_weight`: the product with the base, if there is one,
    and the products with both factors.
    """
    left, right, out = args.get("left"), args.get("right"), first_tensor(result)
    if not isinstance(left, torch.Tensor) or not isinstance(right, torch.Tensor) or out is None:
        return NOTHING
    x, rank = args.get("x"), int(left.shape[-1])
    pairs, thin = out.numel() * rank, 0
    if isinstance(x, torch.Tensor) and x.dim() == 3:
        inputs = int(x.shape[-1])
        thin = int(left.shape[0]) * int(x.shape[1]) * rank
        pairs += out.numel() * inputs + thin * inputs
    work = pairs * rate(left) + count(dict(args)) + out.numel() + thin
    return Cost(work, float(8 * (count(dict(args)) + 2 * out.numel() + thin)))


def layer_chain(name: str, args: Mapping[str, Any], result: Any) -> Cost:
    """`widepack::mlp_chain`: the rows of each layer times its weights, and two tensors of its results."""
    x, weights = args.get("x"), list(tensors(args.get("weights")))
    if not isinstance(x, torch.Tensor) or x.dim() != 3 or any(w.dim() != 3 for w in weights):
        return NOTHING
    rows = int(x.shape[1])
    made = [int(w.shape[0]) * int(w.shape[1]) * rows for w in weights]
    pairs = sum(w.numel() * rows for w in weights)
    work = pairs * rate(x) + count(dict(args)) + 20.0 * sum(made) + 10_000.0 * len(weights)
    copied = int(weights[0].shape[0]) * rows * int(x.shape[2]) if weights else 0
    return Cost(work, float((2 * sum(made) + copied) * x.element_size() + size(args.get("weights"))))


def attention(name: str, args: Mapping[str, Any], result: Any) -> Cost:
    """Attention: a score for each query and key, and the sum of the values by score."""
    q, k, v = (args.get(key) for key in ("query", "key", "value"))
    if not (isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)):
        return NOTHING
    if min(q.dim(), k.dim(), v.dim()) < 2:
        return NOTHING
    scores = q.numel() // max(1, int(q.shape[-1])) * int(k.shape[-2])
    work = scores * (int(q.shape[-1]) + int(v.shape[-1])) * rate(q) + 5 * scores + count(dict(args))
    return Cost(work, 3.0 * scores * q.element_size() + size([q, k, v]))


def matrix_power(name: str, args: Mapping[str, Any], result: Any) -> Cost:
    """Products of a matrix with itself: at most two for each bit of the power, or one for each bit of the
    largest exponent of the dtype, by which `linalg_matrix_exp` halves the matrix first.
    """
    x = args.get("self")
    if not isinstance(x, torch.Tensor) or x.dim() < 2:
        return NOTHING
    if name == "aten.linalg_matrix_exp":
        products = 20 + (1100 if x.dtype in (torch.float64, torch.complex128) else 150)
    else:
        products = 2 * max([1, *(abs(n).bit_length() for n in integers(args.get("n")))])
    rows = int(x.shape[-1])
    inverse = 0.5 * x.numel() * rows
    work = products * (x.numel() * rows * rate(x) + x.numel()) + inverse
    matrices = x.numel() // max(1, rows * rows)
    return Cost(work + products * (20_000.0 + 500.0 * matrices), 10.0 * size(x))


def bilinear(name: str, args: Mapping[str, Any], result: Any) -> Cost:
    """Products of three operands."""
    parts, out = list(tensors(dict(args))), first_tensor(result)
    if out is None or len(parts) < 3:
        return NOTHING
    inner = int(parts[0].shape[-1]) * int(parts[1].shape[-1]) if parts[0].dim() and parts[1].dim() else 1
    if name == "aten._trilinear":
        inner = max(max((int(n) for n in t.shape), default=1) for t in parts) ** 2
    rounds = parts[2].shape[0] if name == "aten.bilinear" and parts[2].dim() else 0
    if name == "aten._trilinear":
        rounds = max((int(n) for t in parts for n in t.shape), default=1)
    pairs = out.numel() * max(1, inner)
    return Cost(pairs * 1.0 + 20_000.0 * min(rounds, 2**14) + count(dict(args)), 8.0 * pairs)
