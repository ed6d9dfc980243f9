"""Defines products of rows with the matrices of experts: `expert_linear` for N members, `expert_mm` for one.

    expert_linear    y[i, r] = weight[i, index[i, r]] @ x[i, r]
                     x: [N, R, I]   weight: [N, E, O, I]   index: [N, R], from -E to E - 1   y: [N, R, O]
    expert_mm        y[r] = x[r] @ weight[index[r]]
                     x: [R, I]   weight: [E, I, O]   index: [R], from -E to E - 1   y: [R, O]

Programs of one member have `expert_mm` where the network calls a grouped product. `expert_linear` is what it
becomes for all members. The ops sort the rows of all members by expert: expert e of member i has the number
i*E + e. Each expert that has rows is one product. If the matrices are small, and almost all experts of a
member have about as many rows, one batched product serves all of them. No matrix is copied. In ATen ops they
copy one matrix for each row, or, with `few`, multiply each row by the matrices of all experts. `expert_mm`
has a derivative.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .checks.require import dense, integers, of_shape, require
from .library import INT64, NodeList, differentiable_by, differentiate, in_aten, own_op

OP = "widepack.expert_linear.default"
OF_ONE_MEMBER = "widepack.expert_mm.default"


FEW = 32
"""With fewer experts, ATen ops that multiply each row by all matrices take less time than ATen ops that read
the matrix of each row (about 2 FLOP for each expert against 12 bytes)."""
PADDING = 4
"""The most times that padding may multiply the rows of a batched product."""
SMALL = 1 << 14
"""Products with matrices of fewer numbers take about as long to start as to run, so one batched product is
faster, although it pads the rows of all experts to one count."""


def check_experts(x: Tensor, weight: Tensor, index: Tensor, inputs: int) -> None:
    """Checks the operands of an op of experts: x: `[*, R, I]`, weight: `[*, E, ...]`, index: `[*, R]`."""
    rank = weight.dim() - 1
    require(weight.shape[rank - 2] > 0, "weight has no experts")
    before = list(weight.shape[: rank - 2])
    rows = dense("x", x, rank).shape[rank - 2]
    of_shape("x", x, [*before, rows, inputs], weight)
    of_shape("index", integers("index", index, rank - 1), [*before, rows])
    require(index.device == weight.device, f"index is on {index.device}; weight is on {weight.device}")


@own_op(
    "expert_linear(Tensor x, Tensor weight, Tensor index, bool few=False) -> Tensor",
    lambda x, weight, *_: x.new_empty((weight.shape[0], x.shape[1], weight.shape[2])),
)
def _expert_linear(x: Tensor, weight: Tensor, index: Tensor, few: bool = False) -> Tensor:
    inputs = dense("weight", weight, 4).shape[3]
    require(weight.is_floating_point(), f"weight is {weight.dtype}; a float is needed")
    check_experts(x, weight, index, inputs)
    return _of_members(x, weight, index)


def _of_members(x: Tensor, weight: Tensor, index: Tensor) -> Tensor:
    members, experts, outputs, inputs = weight.shape
    rows = index.shape[1]
    if not index.numel():
        return x.new_empty(members, rows, outputs)
    least, most = (int(v) for v in torch.aminmax(index))
    if least < -experts or most >= experts:
        wrong = least if least < -experts else most
        raise IndexError(f"index {wrong} is out of bounds for dimension 0 with size {experts}")
    first = torch.arange(0, members * experts, experts, device=index.device).unsqueeze(1)
    numbers, order = torch.sort((index.remainder(experts) + first).flatten(), stable=True)
    sorted_rows = x.reshape(-1, inputs).index_select(0, order)
    y = x.new_empty(members * rows, outputs)
    y.index_copy_(0, order, _products(sorted_rows, numbers, weight))
    return y.view(members, rows, outputs)


@own_op(
    "expert_mm(Tensor x, Tensor weight, Tensor index, bool few=False) -> Tensor",
    lambda x, weight, *_: x.new_empty((x.shape[0], weight.shape[2])),
)
def _expert_mm(x: Tensor, weight: Tensor, index: Tensor, few: bool = False) -> Tensor:
    inputs = dense("weight", weight, 3).shape[1]
    require(weight.is_floating_point(), f"weight is {weight.dtype}; a float is needed")
    check_experts(x, weight, index, inputs)
    return _of_one_member(x, weight, index)


def _of_one_member(x: Tensor, weight: Tensor, index: Tensor) -> Tensor:
    matrices = weight.transpose(1, 2).unsqueeze(0)
    return _of_members(x.unsqueeze(0), matrices, index.unsqueeze(0)).squeeze(0)


def _products(x: Tensor, numbers: Tensor, weight: Tensor) -> Tensor:
    """Multiplies rows `[S, I]` by the matrices of their experts. numbers: i*E + e of each row, in order.

    Each member's products are made by its own rows alone, so no other member changes a bit of them.
    """
    members, experts, outputs, inputs = weight.shape
    rows = x.shape[0] // members
    if outputs * inputs >= SMALL or PADDING * rows < experts:
        return torch.cat(_one_by_one(x, numbers, weight))
    counts = torch.bincount(numbers, minlength=members * experts).view(members, experts)
    parts: list[Tensor] = []
    for i, most in enumerate(counts.amax(1).tolist()):
        own = slice(i * rows, (i + 1) * rows)
        if experts * most <= PADDING * rows:
            parts.append(_padded(x[own], numbers[own] - i * experts, weight[i], counts[i], most))
        else:
            parts += _one_by_one(x[own], numbers[own], weight)
    return torch.cat(parts)


def _one_by_one(x: Tensor, numbers: Tensor, weight: Tensor) -> list[Tensor]:
    """Returns one product for each expert that has rows, in order."""
    experts = weight.shape[1]
    used, sizes = torch.unique_consecutive(numbers, return_counts=True)
    tables = weight.unbind(0)
    parts = torch.split_with_sizes(x, sizes.tolist())
    return [
        torch.nn.functional.linear(rows, tables[number // experts][number % experts])
        for rows, number in zip(parts, used.tolist())
    ]


def _padded(x: Tensor, numbers: Tensor, weight: Tensor, counts: Tensor, most: int) -> Tensor:
    """Returns the products of one member as a batched product, in which each expert has `most` rows."""
    places = torch.arange(x.shape[0], device=x.device) - (counts.cumsum(0) - counts).index_select(0, numbers)
    places += numbers * most
    padded = x.new_zeros(weight.shape[0] * most, x.shape[1]).index_copy_(0, places, x)
    y = torch.bmm(padded.view(weight.shape[0], most, -1), weight.transpose(1, 2))
    return y.flatten(0, 1).index_select(0, places)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])


def _plain(ctx: Any, x: Tensor, weight: Tensor, index: Tensor) -> tuple[Tensor]:
    """Returns the products of `expert_mm`, in ops of torch."""
    expert = index.remainder(weight.shape[0])
    order = torch.argsort(expert, stable=True)
    used, sizes = torch.unique_consecutive(expert[order], return_counts=True)
    parts = torch.split_with_sizes(x[order], sizes.tolist())
    products = [rows @ weight[e] for rows, e in zip(parts, used.tolist())]
    y = torch.cat([x[:0] @ weight[0], *products])
    return (y.index_select(0, torch.argsort(order)),)


@differentiable_by(_plain, 3)
def _backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    x, weight, index = ctx.saved_tensors
    of_x = _of_one_member(gradient, weight.transpose(1, 2), index)
    of_weight, expert = torch.zeros_like(weight), index.remainder(weight.shape[0])
    for number in expert.unique().tolist():
        rows = (expert == number).nonzero().squeeze(1)
        torch.mm(x.index_select(0, rows).t(), gradient.index_select(0, rows), out=of_weight[number])
    return of_x, of_weight, None, None


differentiate("expert_mm", _keep, _backward)


@in_aten(OP)
def _in_aten(new: NodeList, members: int, x: Any, weight: Any, index: Any, few: bool = False) -> None:
    numbers = new.member_numbers(members)
    if few:
        columns = new.add("aten.unsqueeze.default", x, 1, suffix="one")
        columns = new.add("aten.transpose.int", columns, 2, 3, suffix="columns")  # [N, 1, I, R]
        products = new.add("aten.matmul.default", weight, columns, suffix="products")  # [N, E, O, R]
        count = new.add("aten.sym_size.int", x, 1, suffix="count")
        rows = new.add("aten.arange.default", count, suffix="rows", **INT64)
        new.add("aten.index.Tensor", products, [numbers, index, None, rows], suffix="of_experts")
    else:
        matrices = new.add("aten.index.Tensor", weight, [numbers, index], suffix="matrices")  # [N, R, O, I]
        columns = new.add("aten.unsqueeze.default", x, -1, suffix="columns")
        product = new.add("aten.matmul.default", matrices, columns, suffix="product")
        new.add("aten.squeeze.dim", product, -1, suffix="rows")


@in_aten(OF_ONE_MEMBER)
def _of_one_in_aten(new: NodeList, _: int, x: Any, weight: Any, index: Any, few: bool = False) -> None:
    if few:
        products = new.add("aten.matmul.default", x, weight, suffix="products")  # [E, R, O]
        count = new.add("aten.sym_size.int", x, 0, suffix="count")
        rows = new.add("aten.arange.default", count, suffix="rows", **INT64)
        new.add("aten.index.Tensor", products, [index, rows], suffix="of_experts")
    else:
        matrices = new.add("aten.index.Tensor", weight, [index], suffix="matrices")  # [R, I, O]
        rows = new.add("aten.unsqueeze.default", x, 1, suffix="rows")
        product = new.add("aten.bmm.default", rows, matrices, suffix="product")
        new.add("aten.squeeze.dim", product, 1, suffix="of_rows")
