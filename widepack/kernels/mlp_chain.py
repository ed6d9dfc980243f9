"""Defines the op `mlp_chain`: linear layers with an activation after each, for all members.

    mlp_chain(x, weights, biases, activations) -> [N, R, O]
    y[i] = act_k(... act_1(x[i] W_1[i]^T + b_1[i]) ... W_k[i]^T + b_k[i])
    x: [N, R, I], or [1, R, I] for all members   weights: of each layer, [N, O, I]
    biases: of each layer, [N, O] or none   activations: of each layer, of `ACTIVATIONS`; "" is none

On a CUDA device, one Triton kernel runs a chain of small layers (`triton_kernels`). Everywhere else the op is
one batched product for each layer. `decompose.py` writes the op in ATen ops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from widepack_artifacts.program import Node

from .checks import own_ops as checks
from .library import define
from .node_list import NodeList
from .triton_kernels import launches
from .triton_kernels.activations import ACTIVATIONS as ACTIVATIONS

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


def activation_node(name: str) -> tuple[str, dict[str, Any]]:
    """Returns the ATen op of an activation of `ACTIVATIONS`, and its arguments by name."""
    if name == "gelu_tanh":
        return "aten.gelu.default", {"approximate": "tanh"}
    return f"aten.{name}.default", {}


_PLAIN = {f"aten.{name}.default": name for name in ACTIVATIONS if name not in ("", "gelu_tanh")}


def activation_of(node: Node) -> str:
    """Returns the activation of `ACTIVATIONS` that a node of a program computes; "" if it computes none."""
    name, options = _PLAIN.get(node.op, ""), [*node.args[1:], *node.kwargs.values()]
    if name == "gelu" and options in (["tanh"], ["none"]):
        return "gelu_tanh" if options == ["tanh"] else name
    return "" if options else name


def _mlp_chain(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], activations: Sequence[str]
) -> Tensor:
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


def _fake(x: Tensor, weights: Sequence[Tensor], biases: Any, activations: Any) -> Tensor:
    return x.new_empty((weights[0].shape[0], x.shape[1], weights[-1].shape[1]))


define(
    "mlp_chain(Tensor x, Tensor[] weights, Tensor?[] biases, str[] activations) -> Tensor",
    _mlp_chain,
    _fake,
    checks.mlp_chain,
)


def mlp_chain_in_aten(node: Node, members: int) -> list[Node]:
    """Returns an `mlp_chain` node as ATen nodes. members: N."""
    new = NodeList(node)
    y, weights, biases, activations = node.args
    y = new.add("aten.expand.default", y, [members, -1, -1], suffix="rows")
    for i, (weight, bias, name) in enumerate(zip(weights, biases, activations)):
        turned = new.add("aten.transpose.int", weight, 1, 2, suffix=f"turned{i}")
        if bias is None:
            y = new.add("aten.bmm.default", y, turned, suffix=f"layer{i}")
        else:
            added = new.add("aten.unsqueeze.default", bias, 1, suffix=f"bias{i}")
            y = new.add("aten.baddbmm.default", added, y, turned, suffix=f"layer{i}")
        if name:
            op, options = activation_node(name)
            y = new.add(op, y, suffix=f"act{i}", **options)
    return new.named_as_the_node()
