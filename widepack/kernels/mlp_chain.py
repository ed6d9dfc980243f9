"""Defines the op `mlp_chain`: linear layers with an activation after each, for all members.

    mlp_chain(x, weights, biases, activations) -> [N, R, O]
    y[i] = act_k(... act_1(x[i] W_1[i]^T + b_1[i]) ... W_k[i]^T + b_k[i])
    x: [N, R, I], or [1, R, I] for all members   weights: of each layer, [N, O, I]
    biases: of each layer, [N, O] or none   activations: of each layer, of `ACTIVATIONS`; "" is none

On a CUDA device, one Triton kernel runs a chain of small layers (`triton_kernels`). Everywhere else the op is
one batched product for each layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from widepack_artifacts.program import Node

from .checks.require import OperandError, dense, for_members, of_shape, require
from .library import NodeList, in_aten, own_op
from .triton_kernels import launches
from .triton_kernels.available import ACTIVATIONS as ACTIVATIONS

OP = "widepack.mlp_chain.default"

_IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda x: x,
    "relu": torch.relu_,
    "tanh": torch.tanh_,
    "sigmoid": torch.sigmoid_,
    "silu": torch.ops.aten.silu_.default,
    "gelu": torch.ops.aten.gelu_.default,
    "gelu_tanh": lambda x: torch.ops.aten.gelu_.default(x, approximate="tanh"),
}


_PLAIN = {f"aten.{name}.default": name for name in ACTIVATIONS if name not in ("", "gelu_tanh")}


def activation_of(node: Node) -> str:
    """Returns the activation of `ACTIVATIONS` that a node of a program computes; "" if it computes none."""
    name, options = _PLAIN.get(node.op, ""), [*node.args[1:], *node.kwargs.values()]
    if name == "gelu" and options in (["tanh"], ["none"]):
        return "gelu_tanh" if options == ["tanh"] else name
    return "" if options else name


def _check(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], activations: Sequence[str]
) -> None:
    require(len(weights) > 0, "there are no weights")
    for name, found in (("biases", biases), ("activations", activations)):
        if isinstance(found, str) or len(found) != len(weights):
            raise OperandError(
                f"there are {len(found)} {name}; {len(weights)} are needed, one for each layer"
            )
    first = weights[0]
    members, _, inputs = dense("weights[0]", first, 3).shape
    require(first.is_floating_point(), f"weights[0] is {first.dtype}; a float is needed")
    for_members("x", x, members, [None, inputs], first)
    for k, (weight, bias) in enumerate(zip(weights, biases)):
        outputs = dense(f"weights[{k}]", weight, 3).shape[1]
        of_shape(f"weights[{k}]", weight, [members, outputs, inputs], first)
        of_shape(f"biases[{k}]", bias, [members, outputs], first)
        inputs = outputs


@own_op(
    "mlp_chain(Tensor x, Tensor[] weights, Tensor?[] biases, str[] activations) -> Tensor",
    lambda x, weights, *_: x.new_empty((weights[0].shape[0], x.shape[1], weights[-1].shape[1])),
)
def _mlp_chain(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], activations: Sequence[str]
) -> Tensor:
    _check(x, weights, biases, activations)
    for name in activations:
        if name not in ACTIVATIONS:
            raise ValueError(
                f"widepack: the activation {name!r} of a chain of layers is unknown; known: "
                f"{', '.join(ACTIVATIONS[1:])}, and '' for none"
            )
    made = launches.mlp_chain(x, weights, biases, activations)
    if made is not None:
        return made
    y = x.expand(weights[0].shape[0], -1, -1)
    for weight, bias, name in zip(weights, biases, activations):
        turned = weight.transpose(1, 2)
        y = torch.bmm(y, turned) if bias is None else torch.baddbmm(bias.unsqueeze(1), y, turned)
        y = _IN_PLACE[name](y)
    return y


@in_aten(OP)
def _in_aten(new: NodeList, members: int, x: Any, weights: Any, biases: Any, activations: Any) -> None:
    y = new.add("aten.expand.default", x, [members, -1, -1], suffix="rows")
    for i, (weight, bias, name) in enumerate(zip(weights, biases, activations)):
        turned = new.add("aten.transpose.int", weight, 1, 2, suffix=f"turned{i}")
        y = new.product(y, turned, bias, f"layer{i}")
        if name == "gelu_tanh":
            y = new.add("aten.gelu.default", y, suffix=f"act{i}", approximate="tanh")
        elif name:
            y = new.add(f"aten.{name}.default", y, suffix=f"act{i}")
