"""Defines the ops over weights that are a base of all members plus a product of thin factors.

    factored_weight(base, left, right, scale) -> (base + left @ right) * scale, in the shape of base
    base: [O, ...]   left: [O, r]   right: [r, I], where base has O * I numbers
    scale: [O, 1], [1, I] or none

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

from . import onednn
from .checks import own_ops as checks
from .library import define

WEIGHT = "widepack.factored_weight.default"
LINEAR = "widepack.delta_linear.default"


def _factored_weight(base: Tensor, left: Tensor, right: Tensor, scale: Tensor | None = None) -> Tensor:
    dtype = torch.promote_types(torch.promote_types(base.dtype, left.dtype), torch.float32)
    product = torch.mm(left.to(dtype), right.to(dtype)).reshape(base.shape)
    total = base.to(dtype) + product
    if scale is not None:
        total = (total.reshape(left.shape[0], right.shape[1]) * scale.to(dtype)).reshape(base.shape)
    return total.to(base.dtype)


def _fake_weight(base: Tensor, left: Tensor, right: Tensor, scale: Tensor | None = None) -> Tensor:
    return base.new_empty(base.shape)


def _delta_linear(x: Tensor, base: Tensor, left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
    members, outputs = left.shape[:2]
    of_all, rows, inputs = x.shape
    thin, turned = _thin(x, right), left.transpose(1, 2)
    flat = x.reshape(of_all * rows, inputs)
    if of_all == members and not _on_onednn(flat, base):
        y = torch.bmm(thin, turned) if bias is None else torch.baddbmm(bias.unsqueeze(1), thin, turned)
        y = y.contiguous()
        y.view(members * rows, outputs).addmm_(flat, base.t())
        return y
    shared = None if bias is None or bias.shape[0] != 1 else bias[0]
    product = _base_product(flat, base, shared).view(of_all, rows, outputs)
    y = product.baddbmm_(thin, turned) if of_all == members else torch.baddbmm(product, thin, turned)
    return y if bias is None or shared is not None else y.add_(bias.unsqueeze(1))


def _thin(x: Tensor, right: Tensor) -> Tensor:
    """Returns `x @ right^T`, `[N, R, r]`. The rows of all members meet all factors in one product."""
    members, rank = right.shape[:2]
    if x.shape[0] == members:
        return torch.bmm(x, right.transpose(1, 2))
    thin = torch.mm(x[0], right.flatten(0, 1).t())  # [R, N*r]
    return thin.view(x.shape[1], members, rank).transpose(0, 1)


def _on_onednn(x: Tensor, base: Tensor) -> bool:
    """Returns whether oneDNN computes the product with the base.

    With a plain float32 weight it takes up to half the time of torch's product at 8 rows and more. With one
    row it has no advantage.
    """
    return x.shape[0] > 1 and x.dtype == torch.float32 and base.is_contiguous() and onednn.usable(base)


def _base_product(x: Tensor, base: Tensor, bias: Tensor | None) -> Tensor:
    """Returns `x @ base^T + bias` in new memory. x: [R, I]; base: [O, I]; bias: [O]."""
    if _on_onednn(x, base):
        return onednn.linear(x, base, bias)
    return torch.nn.functional.linear(x, base, bias)


def _fake_linear(x: Tensor, base: Tensor, left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((left.shape[0], x.shape[1], left.shape[1]))


define(
    "factored_weight(Tensor base, Tensor left, Tensor right, Tensor? scale=None) -> Tensor",
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
