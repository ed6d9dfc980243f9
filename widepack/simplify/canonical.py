"""Rewrites ops that have several names to the one name that has strategies.

A program that was decomposed before it was saved (`run_decompositions()`) contains `convolution` and
`native_layer_norm`. A functional program may copy where it could view.

| case | written | becomes |
|---|---|---|
| 1 | lazy conjugates and negatives, `*_copy` of views, `unsafe_*` | the plain op |
| 2 | `convolution` | `conv1d`, `conv2d`, `conv3d`, `conv_transpose*` |
| 3 | `reflection_pad*`, `replication_pad*`, `grid_sampler_*` | `pad`, `grid_sampler` |
| 4 | `native_layer_norm`, `native_group_norm`, attention kernels | `layer_norm`, `group_norm`, attention |

Requires: a functional member program whose nodes have types. Ensures: the same values under the same names.

Leaves alone: in case 4 ops of which the program reads more than the first result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from widepack_artifacts.program import Node, Program, Ref, refs

from ..ir import ops
from ..ir.edit import sweep
from ..ir.tensor_type import rank_of

Arguments = tuple[str, Sequence[Any], Mapping[str, Any]]

NAMES = {
    "aten._conj.default": "aten.conj_physical.default",
    "aten.conj.default": "aten.conj_physical.default",
    "aten._conj_physical.default": "aten.conj_physical.default",
    "aten._neg_view.default": "aten.neg.default",
    "aten._logcumsumexp.default": "aten.logcumsumexp.default",
    "aten._stack.default": "aten.stack.default",
    "aten._adaptive_avg_pool2d.default": "aten.adaptive_avg_pool2d.default",
    "aten._adaptive_avg_pool3d.default": "aten.adaptive_avg_pool3d.default",
    "aten.native_channel_shuffle.default": "aten.channel_shuffle.default",
    "aten.grid_sampler_2d.default": "aten.grid_sampler.default",
    "aten.grid_sampler_3d.default": "aten.grid_sampler.default",
    "aten.unsafe_split.Tensor": "aten.split.Tensor",
    "aten.unsafe_split_with_sizes.default": "aten.split_with_sizes.default",
    "aten.unsafe_chunk.default": "aten.chunk.default",
    "aten.inverse.default": "aten.linalg_inv.default",
    **{
        f"aten.{name}_copy.{overload}": f"aten.{name}.{overload}"
        for name, overload in (
            *(
                (n, "default")
                for n in [
                    "view",
                    "permute",
                    "expand",
                    "unsqueeze",
                    "view_as_complex",
                    "view_as_real",
                    "narrow",
                    "alias",
                    "t",
                ]
            ),
            *(
                ("view", "dtype"),
                ("transpose", "int"),
                ("squeeze", "dim"),
                ("squeeze", "dims"),
                ("select", "int"),
                ("slice", "Tensor"),
            ),
            *(("split", "Tensor"), ("split_with_sizes", "default"), ("unbind", "int")),
        )
    },
}


def plain(program: Program) -> Program:
    """Returns the program with every op under the name that has strategies."""
    types = {s.name: s.type for s in (*program.weights, *program.inputs)} | {
        n.name: n.out for n in program.nodes
    }
    readers: dict[str, list[Node]] = {}
    for node in program.nodes:
        for name in refs((node.args, node.kwargs)):
            readers.setdefault(name, []).append(node)
    outputs = {name for o in program.outputs for name in refs(o.value)}
    firsts: dict[str, Arguments] = {}  # case 4: op and arguments of the first result, by the name of the node
    nodes = []
    for node in program.nodes:
        if node.op in _FIRST:
            uses = readers.get(node.name, [])
            if node.name not in outputs and all(u.op == "operator.getitem" and u.args[1] == 0 for u in uses):
                firsts[node.name] = _FIRST[node.op](node)
        if node.op == "operator.getitem" and isinstance(node.args[0], Ref) and node.args[0].name in firsts:
            op, args, kwargs = firsts[node.args[0].name]
            nodes.append(replace(node, op=op, args=tuple(args), kwargs=dict(kwargs)))
        elif node.op in _OTHER and (other := _OTHER[node.op](node, types)) is not None:
            op, args, kwargs = other
            nodes.append(replace(node, op=op, args=tuple(args), kwargs=dict(kwargs)))
        else:
            nodes.append(replace(node, op=NAMES.get(node.op, node.op)))
    # No node reads the ops of case 4 any more, so the sweep removes them.
    return sweep(replace(program, nodes=tuple(nodes))) if firsts else replace(program, nodes=tuple(nodes))


def _convolution(node: Node, types: Mapping[str, str]) -> Arguments | None:
    bound = ops.bind(node.op, node.args, node.kwargs)
    rank = rank_of(types[bound["weight"].name])
    if rank not in (3, 4, 5) or rank_of(types[bound["input"].name]) != rank:
        return None
    x, weight, bias = bound["input"], bound["weight"], bound.get("bias")
    stride, padding, dilation, groups = bound["stride"], bound["padding"], bound["dilation"], bound["groups"]
    if not bound["transposed"]:
        return f"aten.conv{rank - 2}d.default", (x, weight, bias, stride, padding, dilation, groups), {}
    overload = "default" if rank == 3 else "input"
    return (
        f"aten.conv_transpose{rank - 2}d.{overload}",
        (x, weight, bias, stride, padding, bound["output_padding"], groups, dilation),
        {},
    )


def _padded(mode: str) -> Callable[[Node, Mapping[str, str]], Arguments]:
    def pad(node: Node, types: Mapping[str, str]) -> Arguments:
        bound = ops.bind(node.op, node.args, node.kwargs)
        return "aten.pad.default", (bound["self"], bound["padding"], mode), {}

    return pad


def _view(node: Node, types: Mapping[str, str]) -> Arguments:
    bound = ops.bind(node.op, node.args, node.kwargs)
    return "aten.view.default", (bound["self"], bound["size"]), {}


_OTHER: dict[str, Callable[[Node, Mapping[str, str]], Arguments | None]] = {
    "aten.convolution.default": _convolution,
    "aten._reshape_alias.default": _view,
    **{f"aten.reflection_pad{n}d.default": _padded("reflect") for n in (1, 2, 3)},
    **{f"aten.replication_pad{n}d.default": _padded("replicate") for n in (1, 2, 3)},
}


def _layer_norm(node: Node) -> Arguments:
    bound = ops.bind(node.op, node.args, node.kwargs)
    return (
        "aten.layer_norm.default",
        (bound["input"], bound["normalized_shape"], bound.get("weight"), bound.get("bias"), bound["eps"]),
        {},
    )


def _group_norm(node: Node) -> Arguments:
    bound = ops.bind(node.op, node.args, node.kwargs)
    return (
        "aten.group_norm.default",
        (bound["input"], bound["group"], bound.get("weight"), bound.get("bias"), bound["eps"]),
        {},
    )


def _attention(node: Node) -> Arguments:
    bound = ops.bind(node.op, node.args, node.kwargs)
    mask = bound.get("attn_mask", bound.get("attn_bias"))
    args = (
        bound["query"],
        bound["key"],
        bound["value"],
        mask,
        bound.get("dropout_p", 0.0),
        bound.get("is_causal", False),
    )
    return (
        "aten.scaled_dot_product_attention.default",
        args,
        {"scale": bound["scale"]} if bound.get("scale") is not None else {},
    )


_FIRST: dict[str, Callable[[Node], Arguments]] = {
    "aten.native_layer_norm.default": _layer_norm,
    "aten.native_group_norm.default": _group_norm,
    "aten._scaled_dot_product_flash_attention_for_cpu.default": _attention,
    "aten._scaled_dot_product_flash_attention.default": _attention,
    "aten._scaled_dot_product_efficient_attention.default": _attention,
}
REPLACED = {*NAMES, *_OTHER, *_FIRST}
"""Ops that programs of a build do not contain, except ops of case 4 that this pass leaves alone."""
