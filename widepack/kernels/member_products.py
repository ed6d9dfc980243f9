"""Defines the product of each member's matrices, with a derivative: `widepack.member_products`.

    member_products(x, weight, bias) -> x weight^T + bias: [N, R, O]
    x: [N, R, I], or [1, R, I] for all members   weight: [N, O, I]   bias: [N, O] or none

On a CPU, in float32, products of `LEAST` multiplications or more of a member run through oneDNN, one call for
each member. oneDNN takes 0.5 to 0.9 times as long as torch's batched product there. Smaller and narrower
products are one batched product.

The derivatives are products of the same form, so that they have derivatives too. `weight` may be a transposed
view, which oneDNN reads without a copy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import onednn
from .checks.require import dense, for_members, of_shape
from .library import NodeList, differentiate, in_aten, own_op

PRODUCTS = "widepack.member_products.default"
LEAST, NARROW = 4 << 20, 64
"""The multiplications of a member, and the rows, inputs and outputs, from which oneDNN is faster."""


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Computes `member_products`, without a derivative and without checks."""
    members, outputs, inputs = weight.shape
    rows = x.expand(members, -1, -1)
    if not _is_large(x.shape[1], inputs, outputs) or not (onednn.usable(x) and onednn.usable(weight)):
        turned = weight.transpose(1, 2)
        y = torch.bmm(rows, turned) if bias is None else torch.baddbmm(bias.unsqueeze(1), rows, turned)
        return y.contiguous()
    biases = [None] * members if bias is None else bias.unbind(0)
    return torch.stack(
        [onednn.linear(a, _dense(b), c) for a, b, c in zip(rows.unbind(0), weight.unbind(0), biases)]
    )


def _is_large(rows: int, inputs: int, outputs: int) -> bool:
    return rows * inputs * outputs >= LEAST and min(rows, inputs, outputs) >= NARROW


def _dense(matrix: Tensor) -> Tensor:
    """Returns a matrix without gaps between rows or columns, for which oneDNN has no fast code."""
    rows, columns = matrix.shape
    of_row, of_column = matrix.stride()
    if (of_row, of_column) == (columns, 1) or (of_row, of_column) == (1, rows):
        return matrix
    return matrix.t().contiguous().t() if of_row == 1 else matrix.contiguous()


@own_op(
    "member_products(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    lambda x, weight, _: x.new_empty(weight.shape[0], x.shape[1], weight.shape[1]),
)
def _member_products(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    members, outputs, inputs = dense("weight", weight, 3).shape
    for_members("x", x, members, [None, inputs], weight)
    of_shape("bias", bias, [members, outputs], weight)
    return multiply(x, weight, bias)


@in_aten(PRODUCTS)
def _in_aten(new: NodeList, members: int, x: Any, weight: Any, bias: Any) -> None:
    turned = new.add("aten.transpose.int", weight, 1, 2, suffix="turned")
    new.product(new.add("aten.expand.default", x, [members, -1, -1], suffix="rows"), turned, bias)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    of_x, of_weight, of_bias = ctx.needs_input_grad
    members, outputs, inputs = weight.shape
    product, turned = torch.ops.widepack.member_products, grad.transpose(1, 2)  # [N, O, R]
    to_x = to_weight = None
    if of_x and x.shape[0] == members:
        to_x = product(grad, weight.transpose(1, 2), None)
    elif of_x:  # the sum over members is a part of the product
        rows = grad.transpose(0, 1).reshape(1, -1, members * outputs)
        to_x = product(rows, weight.reshape(1, members * outputs, inputs).transpose(1, 2), None)
    if of_weight:
        to_weight = product(turned, x.transpose(1, 2).expand(members, -1, -1), None)
    return to_x, to_weight, grad.sum(1) if of_bias else None


differentiate("member_products", _keep, _backward)
