"""One op, one name: what other ways of writing an op come to.

A program that was taken apart before it was saved (`run_decompositions()`) says `convolution` and `native_layer_norm`; a functional one may copy where it
could view. They are written as the ops that have strategies, so that nothing has to be known twice.

requires: a functional member program whose nodes have their types. ensures: the same values under the same names.

| written | comes to |
|---|---|
| lazy conjugates and negatives, `*_copy` of views, `unsafe_*` | the plain op |
| `convolution` | `conv1d`, `conv2d`, `conv3d`, `conv_transpose*` |
| `native_layer_norm`, `native_group_norm`, attention kernels whose first result alone is read | `layer_norm`, `group_norm`, `scaled_dot_product_attention` |
| `reflection_pad*`, `replication_pad*`, `grid_sampler_*` | `pad`, `grid_sampler` |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from widepack_artifacts.program import Node, Program, Ref, refs

from ..ir import ops
from ..ir.edit import rank_of, sweep

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
            *((n, "default") for n in ["view", "permute", "expand", "unsqueeze", "view_as_complex", "view_as_real", "narrow", "alias", "t"]),
            *(("view", "dtype"), ("transpose", "int"), ("squeeze", "dim"), ("squeeze", "dims"), ("select", "int"), ("slice", "Tensor")),
            *(("split", "Tensor"), ("split_with_sizes", "default"), ("unbind", "int")),
        )
    },
}


def plain(program: Program) -> Program:
    """The program with every op under the name that has strategies."""
    types = {s.name: s.type for s in (*program.weights, *program.inputs)} | {n.name: n.out for n in program.nodes}
    read: dict[str, list[Node]] = {}
    for node in program.nodes:
        for name in refs((node.args, node.kwargs)):
            read.setdefault(name, []).append(node)
    given = {name for o in program.outputs for name in refs(o.value)}
    firsts: dict[str, Arguments] = {}  # of ops of several results whose first alone is read: what that one comes to
    nodes = []
    for node in program.nodes:
        if node.op in _FIRST:
            uses = read.get(node.name, [])
            if node.name not in given and all(u.op == "operator.getitem" and u.args[1] == 0 for u in uses):
                firsts[node.name] = _FIRST[node.op](node)
        if node.op == "operator.getitem" and isinstance(node.args[0], Ref) and node.args[0].name in firsts:
            op, args, kwargs = firsts[node.args[0].name]
            nodes.append(replace(node, op=op, args=tuple(args), kwargs=dict(kwargs)))
        elif node.op in _OTHER and (made := _OTHER[node.op](node, types)) is not None:
            op, args, kwargs = made
            nodes.append(replace(node, op=op, args=tuple(args), kwargs=dict(kwargs)))
        else:
            nodes.append(replace(node, op=NAMES.get(node.op, node.op)))
    # what gave several results is read by nothing now; all else stays as it was
    return sweep(replace(program, nodes=tuple(nodes))) if firsts else replace(program, nodes=tuple(nodes))


def _convolution(node: Node, types: Mapping[str, str]) -> Arguments | None:
    given = ops.bind(node.op, node.args, node.kwargs)
    rank = rank_of(types[given["weight"].name])
    if rank not in (3, 4, 5) or rank_of(types[given["input"].name]) != rank:
        return None
    x, weight, bias = given["input"], given["weight"], given.get("bias")
    stride, padding, dilation, groups = given["stride"], given["padding"], given["dilation"], given["groups"]
    if not given["transposed"]:
        return f"aten.conv{rank - 2}d.default", (x, weight, bias, stride, padding, dilation, groups), {}
    overload = "default" if rank == 3 else "input"
    return f"aten.conv_transpose{rank - 2}d.{overload}", (x, weight, bias, stride, padding, given["output_padding"], groups, dilation), {}


def _padded(mode: str) -> Callable[[Node, Mapping[str, str]], Arguments]:
    def made(node: Node, types: Mapping[str, str]) -> Arguments:
        given = ops.bind(node.op, node.args, node.kwargs)
        return "aten.pad.default", (given["self"], given["padding"], mode), {}

    return made


def _view(node: Node, types: Mapping[str, str]) -> Arguments:
    given = ops.bind(node.op, node.args, node.kwargs)
    return "aten.view.default", (given["self"], given["size"]), {}


_OTHER: dict[str, Callable[[Node, Mapping[str, str]], Arguments | None]] = {
    "aten.convolution.default": _convolution,
    "aten._reshape_alias.default": _view,
    **{f"aten.reflection_pad{n}d.default": _padded("reflect") for n in (1, 2, 3)},
    **{f"aten.replication_pad{n}d.default": _padded("replicate") for n in (1, 2, 3)},
}


def _layer_norm(node: Node) -> Arguments:
    given = ops.bind(node.op, node.args, node.kwargs)
    return "aten.layer_norm.default", (given["input"], given["normalized_shape"], given.get("weight"), given.get("bias"), given["eps"]), {}


def _group_norm(node: Node) -> Arguments:
    given = ops.bind(node.op, node.args, node.kwargs)
    return "aten.group_norm.default", (given["input"], given["group"], given.get("weight"), given.get("bias"), given["eps"]), {}


def _attention(node: Node) -> Arguments:
    given = ops.bind(node.op, node.args, node.kwargs)
    mask = given.get("attn_mask", given.get("attn_bias"))
    args = (given["query"], given["key"], given["value"], mask, given.get("dropout_p", 0.0), given.get("is_causal", False))
    return "aten.scaled_dot_product_attention.default", args, {"scale": given["scale"]} if given.get("scale") is not None else {}


_FIRST: dict[str, Callable[[Node], Arguments]] = {
    "aten.native_layer_norm.default": _layer_norm,
    "aten.native_group_norm.default": _group_norm,
    "aten._scaled_dot_product_flash_attention_for_cpu.default": _attention,
    "aten._scaled_dot_product_flash_attention.default": _attention,
    "aten._scaled_dot_product_efficient_attention.default": _attention,
}
REPLACED = {*NAMES, *_OTHER, *_FIRST}
"""Ops that programs of a build no longer hold, but for those of several results of which more than the first is read."""
