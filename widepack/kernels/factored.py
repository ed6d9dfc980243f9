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
thin products.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from widepack_artifacts.program import Tag

from . import onednn
from .checks.require import dense, for_members, of_shape, require
from .library import NodeList, in_aten, own_op

WEIGHT = "widepack.factored_weight.default"
LINEAR = "widepack.delta_linear.default"


@own_op(
    "factored_weight(Tensor base, Tensor left, Tensor right, Tensor? scale=None) -> Tensor",
    lambda base, *_: base.new_empty(base.shape),
)
def _factored_weight(base: Tensor, left: Tensor, right: Tensor, scale: Tensor | None = None) -> Tensor:
    require(dense("base", base).dim() > 0, "base has no dims")
    require(base.is_floating_point() and left.is_floating_point(), "base and left are not both floats")
    outputs, rank = dense("left", left, 2).shape
    require(base.shape[0] == outputs, f"base is {list(base.shape)}; left has {outputs} rows")
    inputs = math.prod(base.shape[1:])
    of_shape("right", right, [rank, inputs], left)
    if scale is not None:
        straight = dense("scale", scale, 2).shape[1] == 1
        of_shape("scale", scale, [outputs, 1] if straight else [1, inputs], left)
    require(base.device == left.device, f"base is on {base.device}; left is on {left.device}")
    dtype = torch.promote_types(torch.promote_types(base.dtype, left.dtype), torch.float32)
    product = torch.mm(left.to(dtype), right.to(dtype)).reshape(base.shape)
    total = base.to(dtype) + product
    if scale is not None:
        total = (total.reshape(outputs, inputs) * scale.to(dtype)).reshape(base.shape)
    return total.to(base.dtype)


@in_aten(WEIGHT)
def _weight_in_aten(new: NodeList, _: int, base: Any, left: Any, right: Any, scale: Any = None) -> None:
    dtype = Tag("dtype", "float64" if new.node.out.startswith("float64[") else "float32")
    wide = [
        new.add("aten._to_copy.default", value, suffix=name, dtype=dtype)
        for name, value in (("left", left), ("right", right), ("base", base))
    ]
    product = new.add("aten.mm.default", wide[0], wide[1], suffix="product")
    product = new.add("aten.reshape_as.default", product, wide[2], suffix="shaped")
    total = new.add("aten.add.Tensor", wide[2], product, suffix="sum")
    if scale is not None:
        scale = new.add("aten._to_copy.default", scale, suffix="scale", dtype=dtype)
        rows = new.add("aten.flatten.using_ints", total, 1, suffix="rows")
        scaled = new.add("aten.mul.Tensor", rows, scale, suffix="scaled")
        total = new.add("aten.reshape_as.default", scaled, wide[2], suffix="whole")
    new.add("aten.type_as.default", total, base, suffix="rounded")


@own_op(
    "delta_linear(Tensor x, Tensor base, Tensor left, Tensor right, Tensor? bias) -> Tensor",
    lambda x, base, left, *_: x.new_empty((left.shape[0], x.shape[1], left.shape[1])),
)
def _delta_linear(x: Tensor, base: Tensor, left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
    outputs, inputs = dense("base", base, 2).shape
    members, _, rank = dense("left", left, 3).shape
    for_members("x", x, members, [None, inputs], base)
    of_shape("left", left, [members, outputs, rank], base)
    of_shape("right", right, [members, rank, inputs], base)
    if bias is not None:
        for_members("bias", bias, members, [outputs], base)
    of_all, rows = x.shape[:2]
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


@in_aten(LINEAR)
def _linear_in_aten(new: NodeList, members: int, x: Any, base: Any, left: Any, right: Any, bias: Any) -> None:
    product = new.add("aten.linear.default", x, base, suffix="base")
    rows = new.add("aten.expand.default", x, [members, -1, -1], suffix="rows")
    turned = new.add("aten.transpose.int", right, 1, 2, suffix="right")
    thin = new.add("aten.bmm.default", rows, turned, suffix="thin")
    turned = new.add("aten.transpose.int", left, 1, 2, suffix="left")
    new.add("aten.add.Tensor", new.product(thin, turned, bias, "delta"), product, suffix="sum")
