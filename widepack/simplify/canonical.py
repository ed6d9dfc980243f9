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
from ..ir.edit import readers, sweep, types_of
from ..ir.ops import full_name
from ..ir.tensor_type import rank_of

Arguments = tuple[str, Sequence[Any], Mapping[str, Any]]

_NAMES = """
    _conj conj_physical
    conj conj_physical
    _conj_physical conj_physical
    _neg_view neg
    _logcumsumexp logcumsumexp
    _stack stack
    _adaptive_avg_pool2d adaptive_avg_pool2d
    _adaptive_avg_pool3d adaptive_avg_pool3d
    native_channel_shuffle channel_shuffle
    grid_sampler_2d grid_sampler
    grid_sampler_3d grid_sampler
    unsafe_split.Tensor split.Tensor
    unsafe_split_with_sizes split_with_sizes
    unsafe_chunk chunk
    inverse linalg_inv
"""
_COPIED = (
    "view permute expand unsqueeze view_as_complex view_as_real narrow alias t view.dtype transpose.int "
    "squeeze.dim squeeze.dims select.int slice.Tensor split.Tensor split_with_sizes unbind.int"
)
"""Views that a functional program copies: `view_copy`, `transpose_copy.int`."""


def _copying(view: str) -> str:
    name, dot, overload = view.partition(".")
    return f"{name}_copy{dot}{overload}"


NAMES = {
    full_name(name): full_name(plain_name)
    for name, plain_name in (
        *(line.split() for line in _NAMES.strip().splitlines()),
        *((_copying(view), view) for view in _COPIED.split()),
    )
}


def plain(program: Program) -> Program:
    """Returns the program with every op under the name that has strategies."""
    types, read_by = types_of(program), readers(program)
    outputs = {name for o in program.outputs for name in refs(o.value)}
    firsts: dict[str, Arguments] = {}  # case 4: op and arguments of the first result, by the name of the node
    nodes = []
    for node in program.nodes:
        if node.op in _FIRST:
            uses = read_by.get(node.name, [])
            if node.name not in outputs and all(u.op == "operator.getitem" and u.args[1] == 0 for u in uses):
                firsts[node.name] = _FIRST[node.op](node)
        first = node.args[0] if node.op == "operator.getitem" else None
        other = firsts.get(first.name) if isinstance(first, Ref) else None
        if node.op in _OTHER:
            other = _OTHER[node.op](node, types)
        op, args, kwargs = other or (NAMES.get(node.op, node.op), node.args, node.kwargs)
        nodes.append(replace(node, op=op, args=tuple(args), kwargs=dict(kwargs)))
    plainer = replace(program, nodes=tuple(nodes))
    return sweep(plainer) if firsts else plainer  # no node reads the ops of case 4 any more


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
    args = (x, weight, bias, stride, padding, bound["output_padding"], groups, dilation)
    return f"aten.conv_transpose{rank - 2}d.{overload}", args, {}


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


def _norm(op: str, shape: str) -> Callable[[Node], Arguments]:
    """shape: the name of the argument that is the shape, or the number of groups."""

    def norm(node: Node) -> Arguments:
        bound = ops.bind(node.op, node.args, node.kwargs)
        return op, (bound["input"], bound[shape], bound.get("weight"), bound.get("bias"), bound["eps"]), {}

    return norm


def _attention(node: Node) -> Arguments:
    bound = ops.bind(node.op, node.args, node.kwargs)
    mask = bound.get("attn_mask", bound.get("attn_bias"))
    options = mask, bound.get("dropout_p", 0.0), bound.get("is_causal", False)
    args = (bound["query"], bound["key"], bound["value"], *options)
    kwargs = {"scale": bound["scale"]} if bound.get("scale") is not None else {}
    return "aten.scaled_dot_product_attention.default", args, kwargs


_FIRST: dict[str, Callable[[Node], Arguments]] = {
    "aten.native_layer_norm.default": _norm("aten.layer_norm.default", "normalized_shape"),
    "aten.native_group_norm.default": _norm("aten.group_norm.default", "group"),
    **{
        f"aten._scaled_dot_product_{kind}.default": _attention
        for kind in ("flash_attention_for_cpu", "flash_attention", "efficient_attention")
    },
}
REPLACED = {*NAMES, *_OTHER, *_FIRST}
"""Ops that programs of a build do not contain, except ops of case 4 that this pass leaves alone."""
