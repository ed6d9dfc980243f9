"""widepack's own op for linear layers of few rows: every weight is read once, in the order in which it lies in memory.

| op | what it is |
|---|---|
| `widepack::streamed_linear(x, weight, bias)` | `x [N, R, I]`, or `[1, R, I]` for all members, `weight [N, I, O]`, `bias [N, O]` or none -> `[N, R, O]` |

With one row a member's product is a sum of the weight's rows, each times a number of x: what `embedding_bag` computes, whose code runs at the speed of memory where a
batched product of one row does not (bench/results/suite-cpu.json, MLP at batch 1). With more rows it is the batched product. `plain` writes the op as ATen's own.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from widepack_artifacts.program import Node, Ref

from .library import define

OP = "widepack.streamed_linear.default"

_bag = torch.ops.aten._embedding_bag_forward_only.default


@lru_cache(maxsize=64)
def _rows(members: int, inputs: int) -> tuple[Tensor, Tensor]:
    """Which rows of `[N*I, O]` a member's sum takes, and where each member's begin."""
    with torch.inference_mode(False):  # kept for whoever comes next
        return torch.arange(members * inputs), torch.arange(0, members * inputs, inputs)


def _streamed_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    members, inputs, outputs = weight.shape
    x = x.expand(members, -1, -1)
    if x.shape[1] != 1 or weight.device.type != "cpu" or weight.dtype != torch.float32 or not weight.numel() or not weight.is_contiguous():
        return torch.bmm(x, weight) if bias is None else torch.baddbmm(bias.unsqueeze(1), x, weight)
    numbers, starts = _rows(members, inputs)
    made: Tensor = _bag(weight.view(-1, outputs), numbers, starts, False, 0, False, x.reshape(-1))[0]
    return (made if bias is None else made.add_(bias)).unsqueeze(1)


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((weight.shape[0], x.shape[1], weight.shape[2]))


define("streamed_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor", _streamed_linear, _fake)


def plain(node: Node, members: int) -> list[Node]:
    """The op as ATen nodes, the last of them under its name."""
    x, weight, bias = node.args
    rows = Node(f"{node.name}_rows", "aten.expand.default", (x, [members, -1, -1]), {}, "", node.source, node.member)
    if bias is None:
        return [rows, Node(node.name, "aten.bmm.default", (Ref(rows.name), weight), {}, node.out, node.source, node.member)]
    added = Node(f"{node.name}_bias", "aten.unsqueeze.default", (bias, 1), {}, "", node.source, node.member)
    return [
        rows,
        added,
        Node(node.name, "aten.baddbmm.default", (Ref(added.name), Ref(rows.name), weight), {}, node.out, node.source, node.member),
    ]
