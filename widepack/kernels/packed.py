"""widepack's own ops: layers over weights that were brought into oneDNN's order beforehand. They run on a CPU in float32; each has an ATen decomposition.

| op | what it is |
|---|---|
| `widepack::pack_convolution(weight, stride, padding, dilation, groups, size)` | a convolution's weight `[O, C/g, *k]`, reordered. size: an example of its input's sizes: a hint for the order, never more |
| `widepack::pack_convolutions(weight, ...)` | the same of N members' weights `[N, O, C/g, *k]`, one by one: a list of N |
| `widepack::convolution(x, weight, bias, stride, padding, dilation, groups, act)` | `aten.convolution` of two or three spatial dims; the answer's memory is channels-last |
| `widepack::pack_linear(weight, rows)` | N layers' weights `[N, O, I]`, reordered. rows: an example of a member's rows: a hint |
| `widepack::linear(x, weight, bias, act)` | `x [N, R, I]`, `bias [N, O]` -> `[N, R, O]` over memory `[R, N, O]`: a 1x1 convolution of N groups over an image of R x 1, which is the one form in which oneDNN takes weights in its own order for all members in one call |

act: `relu`, `gelu`, `sigmoid`, `silu`, `tanh` or none, computed by torch in the answer's own memory. oneDNN's fused relu is not used: it makes 0 of NaN, which would
hide a broken member. The ops of recurrent layers stand in recurrent.py.

A packed weight is opaque: it has sizes and nothing else that can be read. It is made by the weight prologue and never saved. Where oneDNN is missing, and for other
devices and dtypes, packing copies the weight and the layer is the decomposition. `decompose` puts ATen ops in their place, for readers that know no others.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from widepack_artifacts.program import Node, Program, Ref, refs, substitute

from . import recurrent
from . import streamed
from .onednn import usable
from .library import define

ACTIVATIONS = {
    "": None,
    "gelu": torch.ops.aten.gelu_.default,
    "relu": torch.ops.aten.relu_.default,
    "sigmoid": torch.ops.aten.sigmoid_.default,
    "silu": torch.ops.aten.silu_.default,
    "tanh": torch.ops.aten.tanh_.default,
}
"""An activation's name, which is that of its ATen op, and what computes it in place."""


def _active(y: Tensor, act: str) -> Tensor:
    """y after the activation, in y's memory."""
    if act not in ACTIVATIONS:
        raise ValueError(f"widepack: the activation {act!r} is unknown; known: {', '.join(filter(None, ACTIVATIONS))}")
    rule = ACTIVATIONS[act]
    return y if rule is None else rule(y)


def _last(spatial: int) -> torch.memory_format:
    return torch.channels_last if spatial == 2 else torch.channels_last_3d


def _pack_convolution(weight: Tensor, stride: list[int], padding: list[int], dilation: list[int], groups: int, size: list[int]) -> Tensor:
    if not usable(weight):
        return weight.clone(memory_format=torch.contiguous_format)
    return torch.ops.mkldnn._reorder_convolution_weight(weight.contiguous(), padding, stride, dilation, groups, size)  # type: ignore[no-any-return]


def _pack_convolutions(weight: Tensor, stride: list[int], padding: list[int], dilation: list[int], groups: int, size: list[int]) -> list[Tensor]:
    return [_pack_convolution(w, stride, padding, dilation, groups, size) for w in weight.unbind(0)]


def _convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int], dilation: list[int], groups: int, act: str = ""
) -> Tensor:
    last = _last(len(stride))
    if x.shape[0] == 0 and weight.is_mkldnn:  # oneDNN takes no empty batch
        return torch.empty(_out(x, weight, stride, padding, dilation), dtype=x.dtype).contiguous(memory_format=last)
    if weight.is_mkldnn:
        y = torch.ops.mkldnn._convolution_pointwise(
            x.contiguous(memory_format=last), weight, None if bias is None else bias.contiguous(), padding, stride, dilation, groups, "none", [], ""
        )
    else:
        y = torch.convolution(x, weight, bias, stride, padding, dilation, False, [0] * len(stride), groups)
    return _active(y.contiguous(memory_format=last), act)


def _out(x: Tensor, weight: Tensor, stride: list[int], padding: list[int], dilation: list[int]) -> list[Any]:
    """The sizes of a convolution's answer."""
    window = zip(x.shape[2:], weight.shape[2:], stride, padding, dilation)
    return [x.shape[0], weight.shape[0], *((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in window)]


def _pack_linear(weight: Tensor, rows: int) -> Tensor:
    members, outputs, inputs = weight.shape
    flat = weight.reshape(members * outputs, inputs, 1, 1)
    if not usable(weight):
        return flat.clone(memory_format=torch.contiguous_format)
    size = [1, members * inputs, max(rows, 1), 1]
    return torch.ops.mkldnn._reorder_convolution_weight(flat.contiguous(), [0, 0], [1, 1], [1, 1], members, size)  # type: ignore[no-any-return]


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, act: str = "") -> Tensor:
    members, rows, inputs = x.shape
    if rows == 0 and weight.is_mkldnn:
        return x.new_empty(rows, members, weight.shape[0] // members).transpose(0, 1)
    if weight.is_mkldnn:
        image = x.transpose(0, 1).reshape(1, rows, 1, members * inputs).permute(0, 3, 1, 2)
        flat = None if bias is None else bias.reshape(-1).contiguous()  # oneDNN reads it as it lies: a number for all may have no stride
        y = torch.ops.mkldnn._convolution_pointwise(image, weight, flat, [0, 0], [1, 1], [1, 1], members, "none", [], "")
        y = y.permute(0, 2, 3, 1).reshape(rows, members, -1)
    else:
        turned = weight.reshape(members, -1, inputs).transpose(1, 2)
        y = torch.bmm(x, turned) if bias is None else torch.baddbmm(bias.unsqueeze(1), x, turned)
        y = y.transpose(0, 1).contiguous()
    return _active(y, act).transpose(0, 1)


def _fake_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int], dilation: list[int], groups: int, act: str = ""
) -> Tensor:
    n, c, *spatial = _out(x, weight, stride, padding, dilation)
    order = [0, *range(2, 2 + len(spatial)), 1]
    y = x.new_empty([n, *spatial, c])
    return y.permute([order.index(d) for d in range(len(order))])


def _fake_linear(x: Tensor, weight: Tensor, bias: Tensor | None, act: str = "") -> Tensor:
    return x.new_empty(x.shape[1], x.shape[0], weight.shape[0] // x.shape[0]).transpose(0, 1)


define(
    "pack_convolution(Tensor weight, int[] stride, int[] padding, int[] dilation, int groups, int[] size) -> Tensor",
    _pack_convolution,
    lambda weight, *_: torch.empty_like(weight),
)
define("pack_convolutions(Tensor weight, int[] stride, int[] padding, int[] dilation, int groups, int[] size) -> Tensor[]", _pack_convolutions, None)
define(
    "convolution(Tensor x, Tensor weight, Tensor? bias, int[] stride, int[] padding, int[] dilation, int groups, str act='') -> Tensor",
    _convolution,
    _fake_convolution,
)
define(
    "pack_linear(Tensor weight, int rows) -> Tensor",
    _pack_linear,
    lambda weight, rows: weight.new_empty(weight.shape[0] * weight.shape[1], weight.shape[2], 1, 1),
)
define("linear(Tensor x, Tensor weight, Tensor? bias, str act='') -> Tensor", _linear, _fake_linear)


def decompose(program: Program) -> Program:
    """The program with ATen ops in the place of widepack's own: equal answers but for rounding, other memory. Bodies of loops likewise."""
    to: dict[str, Any] = {}
    packs: dict[str, Node] = {}
    pairs: dict[str, tuple[Any, Any]] = {}  # of what gave two values, which `operator.getitem` took apart
    nodes: list[Node] = []
    for node in program.nodes:
        if any(r in to for r in refs((node.args, node.kwargs))):
            node = replace(node, args=substitute(node.args, lambda n: to.get(n, Ref(n))), kwargs=substitute(node.kwargs, lambda n: to.get(n, Ref(n))))
        if node.body is not None:
            nodes.append(replace(node, body=decompose(node.body)))
        elif node.op in ("widepack.pack_convolution.default", "widepack.pack_linear.default"):
            to[node.name] = node.args[0]
        elif node.op == "widepack.pack_convolutions.default":
            nodes.append(replace(node, op="aten.unbind.int", args=(node.args[0], 0)))
        elif node.op in ("widepack.convolution.default", "widepack.linear.default"):
            nodes += _plain(node)
        elif node.op == streamed.OP:
            nodes += streamed.plain(node, program.members)
        elif node.op == "widepack.pack_lstm.default":
            packs[node.name] = node
        elif node.op in recurrent.OPS:
            more, y, last = recurrent.members(node, program.members, packs)
            nodes += more
            if last is not None:
                pairs[node.name] = y, last
        elif node.op == "operator.getitem" and isinstance(node.args[0], Ref) and node.args[0].name in pairs:
            to[node.name] = pairs[node.args[0].name][node.args[1]]
        else:
            nodes.append(node)
    outputs = tuple(replace(o, value=substitute(o.value, lambda n: to.get(n, Ref(n)))) for o in program.outputs)
    return replace(program, nodes=tuple(nodes), outputs=outputs)


def _plain(node: Node) -> list[Node]:
    """A layer over packed weights as ATen nodes over plain ones."""
    made: list[Node] = []
    count = 7 if node.op == "widepack.convolution.default" else 3
    args, act = node.args[:count], node.args[count] if len(node.args) > count else ""

    def add(what: str, op: str, *args: Any) -> Ref:
        made.append(Node(f"{node.name}_{what}", op, args, {}, "", node.source, node.member))
        return Ref(made[-1].name)

    if count == 7:
        add("plain", f"aten.conv{len(args[3])}d.default", *args)
    else:
        x, weight, bias = args
        turned = add("turned", "aten.transpose.int", weight, 1, 2)
        if bias is None:
            add("plain", "aten.bmm.default", x, turned)
        else:
            add("plain", "aten.baddbmm.default", add("bias", "aten.unsqueeze.default", bias, 1), x, turned)
    if act:
        add("act", f"aten.{act}.default", Ref(made[-1].name))
    return [*made[:-1], replace(made[-1], name=node.name, out=node.out)]
