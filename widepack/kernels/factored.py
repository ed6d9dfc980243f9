"""Defines the ops over weights that are a base of all members plus a product of thin factors.

    factored_weight(base, left, right) -> base + (left @ right), in the shape of base
    base: [O, ...]   left: [O, r]   right: [r, I], where base has O * I numbers

    delta_linear(x, base, left, right, bias) -> [N, R, O]
    x: [N, R, I], or [1, R, I] for all members   base: [O, I]   left: [N, O, r]   right: [N, r, I]
    bias: [N, O], [1, O] or none

`factored_weight` is for one member. It computes in float32 at least, and rounds once, to the dtype of the
base. `delta_linear` never makes a member's weight: it computes `x @ base^T + (x @ right^T) @ left^T + bias`.
The product with the base reads the base once, for the rows of all members, and is added in the memory of the
thin products. `decompose.py` writes both ops in ATen ops.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import own_ops as checks
from .library import define

WEIGHT = "widepack.factored_weight.default"
LINEAR = "widepack.delta_linear.default"


def _factored_weight(base: Tensor, left: Tensor, right: Tensor) -> Tensor:
    dtype = torch.promote_types(torch.promote_types(base.dtype, left.dtype), torch.float32)
    product = torch.mm(left.to(dtype), right.to(dtype)).reshape(base.shape)
    return (base.to(dtype) + product).to(base.dtype)


def _fake_weight(base: Tensor, left: Tensor, right: Tensor) -> Tensor:
    return base.new_empty(base.shape)


def _delta_linear(x: Tensor, base: Tensor, left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
    members, outputs = left.shape[:2]
    if x.shape[0] != members:
        return _of_shared_rows(x[0], base, left, right, bias)
    rows, inputs = x.shape[1:]
    thin = torch.bmm(x, right.transpose(1, 2))  # [N, R, r]
    turned = left.transpose(1, 2)
    y = torch.bmm(thin, turned) if bias is None else torch.baddbmm(bias.unsqueeze(1), thin, turned)
    y = y.contiguous()
    y.view(members * rows, outputs).addmm_(x.reshape(members * rows, inputs), base.t())
    return y


def _of_shared_rows(x: Tensor, base: Tensor, left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
    """Computes `delta_linear` for rows `[R, I]` of all members: the base product runs once."""
    members, _, rank = left.shape
    thin = torch.mm(x, right.flatten(0, 1).t())  # [R, N*r]
    thin = thin.view(x.shape[0], members, rank).transpose(0, 1)
    product = torch.mm(x, base.t()).unsqueeze(0)
    if bias is not None:
        product = product + bias.unsqueeze(1)  # [N, R, O], or [1, R, O]
    return torch.baddbmm(product, thin, left.transpose(1, 2))


def _fake_linear(x: Tensor, base: Tensor, left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((left.shape[0], x.shape[1], left.shape[1]))


define(
    "factored_weight(Tensor base, Tensor left, Tensor right) -> Tensor",
    _factored_weight,
    _fake_weight,
    checks.factored_weight,
)
define(
    "delta_linear(Tensor x, Tensor base, Tensor left, Tensor right, Tensor? bias) -> Tensor",
    _delta_linear,
    _fake_linear,
    checks.delta_linear,
)
