"""Folds Stacked scales and shifts of layer norms into the linear layers after them. No kind rises.

1. A layer norm whose scale or shift differs between members is folded if only linear layers read it; nodes
   between may select or regroup rows.
2. The linear layers get new weights: W' = W * g, b' = b + W beta. They are computed in float64 and rounded
   once, by nodes that depend on weights alone, so the weight prologue runs them once.
3. The norm without scale and shift is one kernel for all members. Stacked scale and shift would be a second
   one.

Requires: a functional member program with types, and the kinds of its slots.

Leaves alone: Shared scales and shifts, which cost nothing; a Stacked norm before a Shared weight, which would
become N weights; norms over several dims; norms that another node reads too; linear layers with more than
`LARGE` weights.

A layer of `LARGE` weights takes so long that scale and shift do not count, and a second copy of its weights
would take memory and time at load.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from widepack_artifacts.program import Kind, Node, Program, Ref

from ..ir import ops
from ..ir.edit import readers, uses, with_nodes
from ..ir.kinds import kinds
from ..ir.tensor_type import parse_slot, rank_of
from .norm_folding import WeightWriter, may_fold

LARGE = 1 << 14  # weights of one member


def fold_layer_norms(program: Program, slots: Mapping[str, Kind]) -> Program:
    """Folds Stacked scales and shifts of layer norms into the linear layers that read them."""
    kind_of, by, count = kinds(program, slots), readers(program), uses(program)
    types = {s.name: s.type for s in program.weights}
    outs = {r for o in program.outputs if isinstance(o.value, Ref) for r in [o.value.name]}
    bare: dict[str, Node] = {}
    into: dict[str, Node] = {}  # linear layer -> the norm that is folded into it
    for norm in program.nodes:
        bound = ops.bind(norm.op, norm.args, norm.kwargs) if norm.op == "aten.layer_norm.default" else {}
        parameters = [p for p in (bound.get("weight"), bound.get("bias")) if isinstance(p, Ref)]
        if (
            not parameters
            or len(bound["normalized_shape"]) != 1
            or all(kind_of[p.name] == "shared" for p in parameters)
        ):
            continue
        layers = _layers(norm.name, by, outs, bound["normalized_shape"][0], rank_of(norm.out))
        fits = layers and all(
            may_fold(_weight(n), [*parameters, *_bias(n)], kind_of, types)
            and count[n.name]
            and n.name not in into
            and not _is_large(types[_weight(n).name])
            for n in layers
        )
        if fits:
            bare[norm.name] = replace(
                norm,
                args=(bound["input"], bound["normalized_shape"], None, None, *norm.args[4:]),
                kwargs={k: v for k, v in norm.kwargs.items() if k not in ("weight", "bias")},
            )
            into.update({n.name: norm for n in layers})
    kept: list[Node] = []
    for node in program.nodes:
        if node.name in bare:
            kept.append(bare[node.name])
        elif node.name in into:
            kept += _linear(node, into[node.name], types)
        else:
            kept.append(node)
    return with_nodes(program, kept, {})


def _layers(value: str, by: Mapping[str, list[Node]], outs: set[str], width: int, rank: int) -> list[Node]:
    """Returns the linear layers that read a value, if no other node reads it; else an empty list.

    Nodes between may select or regroup rows.
    """
    layers: list[Node] = []
    if value in outs:
        return []
    for node in by.get(value, []):
        if (node.op == "aten.linear.default" and node.args[0] == Ref(value)) or (
            node.op == "aten.addmm.default"
            and len(node.args) == 3
            and node.args[1] == Ref(value)
            and not node.kwargs
        ):
            layers.append(node)
        elif _keeps_rows(node, rank, width):
            behind = _layers(node.name, by, outs, width, rank_of(node.out))
            if not behind:
                return []
            layers += behind
        else:
            return []
    return layers


def _keeps_rows(node: Node, rank: int, width: int) -> bool:
    """Whether a node selects or regroups rows, and keeps each row along the last dim.

    rank: the rank of the value that the node reads.
    """
    if node.op == "aten.reshape.default":
        return node.out.endswith(f",{width}]")  # memory is row-major, so an equal last size keeps the rows
    if node.op not in ("aten.select.int", "aten.slice.Tensor") or rank < 2:
        return False
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    return isinstance(dim, int) and dim % rank != rank - 1


def _is_large(type_: str) -> bool:
    return math.prod(size for size in parse_slot(type_).sizes if isinstance(size, int)) > LARGE


def _weight(node: Node) -> Any:
    return node.args[1] if node.op == "aten.linear.default" else node.args[2]


def _bias(node: Node) -> list[Any]:
    bias = (
        (node.args[2] if len(node.args) > 2 else node.kwargs.get("bias"))
        if node.op == "aten.linear.default"
        else node.args[0]
    )
    return [] if bias is None else [bias]


def _linear(node: Node, norm: Node, types: Mapping[str, str]) -> list[Node]:
    bound = ops.bind(norm.op, norm.args, norm.kwargs)
    gamma, beta = bound.get("weight"), bound.get("bias")
    make = WeightWriter(f"{node.name}_fold", norm.source)
    weight, bias = _weight(node), _bias(node)
    type_ = parse_slot(types[weight.name])
    transposed = node.op == "aten.addmm.default"  # its weight is [I, O]
    wide = make.double("weight64", weight)
    shift: Ref | None = make.double("bias64", bias[0]) if bias else None
    if beta is not None:
        product = make(
            "product",
            "mul.Tensor",
            wide,
            make("beta_column", "unsqueeze.default", make.double("beta", beta), -1)
            if transposed
            else make.double("beta", beta),
        )
        moved = make("moved", "sum.dim_IntList", product, [0 if transposed else 1])
        shift = moved if shift is None else make("shift", "add.Tensor", shift, moved)
    if gamma is not None:
        scale = make.double("gamma", gamma)
        wide = make(
            "scaled",
            "mul.Tensor",
            wide,
            make("gamma_column", "unsqueeze.default", scale, -1) if transposed else scale,
        )
    new_weight = make.rounded("weight", wide, type_)
    new_bias = (
        None
        if shift is None
        else make.rounded("new_bias", shift, type_.with_sizes([type_.sizes[1 if transposed else 0]]))
    )
    args = (new_bias, node.args[1], new_weight) if transposed else (node.args[0], new_weight, new_bias)
    return [*make.nodes, replace(node, args=args, kwargs={})]
