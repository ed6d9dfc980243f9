"""Simplification of the member program, after kinds: the program stays a member program, and no node's kind rises.

requires: a functional member program and the kinds of its slots. ensures: equal answers but for rounding; no value has a higher kind than the one it replaces.

1. Copies and casts that change nothing go.
2. An eval-mode batch norm behind a convolution of which it is the only reader goes into the convolution's weight and bias, when these keep their kind:
   folding a member's own norm into a Shared convolution would make a frozen trunk N times dearer. The new weights are made in float64 and rounded once,
   by nodes of the program itself: they depend on weights alone, so the weight prologue runs them once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from widepack_artifacts.program import Kind, Node, Program, Ref, Tag, refs, substitute

from . import ops
from .kinds import kinds
from .specs import parse_type

_COPIES = {"aten.clone.default", "aten.contiguous.default", "aten.alias.default", "aten.detach.default", "aten.lift_fresh_copy.default", "aten.dropout.default"}
_VIEWS = {"aten.view.default", "aten._unsafe_view.default"}
_CONVOLUTIONS = {f"aten.conv{d}d.{o}" for d in (1, 2, 3) for o in ("default", "padding")}
_NORM = "aten._native_batch_norm_legit_no_training.default"
_RANK = {"shared": 0, "stacked": 1, "ragged": 2}


def simplify(program: Program, slots: Mapping[str, Kind]) -> Program:
    """The program without what changes nothing, batch norms folded where no kind rises."""
    return sweep(fold_batch_norms(drop_copies(program), slots))


def simplify_all(programs: Sequence[Program], slots: Mapping[str, Kind]) -> list[Program]:
    """Each shape signature's program simplified alike."""
    return [simplify(p, slots) for p in programs]


def drop_copies(program: Program) -> Program:
    """In a functional program a copy means nothing; neither does a cast to the dtype that a value has."""
    to: dict[str, Any] = {}
    types = {s.name: s.type for s in (*program.weights, *program.inputs)} | {n.name: n.out for n in program.nodes}
    kept: list[Node] = []
    for node in program.nodes:
        node = renamed(node, to)
        source = node.args[0] if node.args else None
        if node.op in _VIEWS:  # without the copy before it, memory may need one here
            node = replace(node, op="aten.reshape.default")
        same = isinstance(source, Ref) and types[source.name] == types[node.name]
        if node.op in _COPIES and isinstance(source, Ref):
            to[node.name] = source
        elif node.op == "aten._to_copy.default" and same:
            to[node.name] = source
        else:
            kept.append(node)
    return replace(program, nodes=tuple(kept), outputs=tuple(replace(o, value=substitute(o.value, lambda n: to.get(n, Ref(n)))) for o in program.outputs))


def renamed(node: Node, to: Mapping[str, Any]) -> Node:
    """The node reading other values."""
    if not any(r in to for r in refs((node.args, node.kwargs))):
        return node
    return replace(node, args=substitute(node.args, lambda n: to.get(n, Ref(n))), kwargs=substitute(node.kwargs, lambda n: to.get(n, Ref(n))))


def fold_batch_norms(program: Program, slots: Mapping[str, Kind]) -> Program:
    """conv -> batch_norm (eval) -> getitem 0 becomes conv with other weights."""
    found = kinds(program, slots)
    readers = Counter(r for n in program.nodes for r in refs((n.args, n.kwargs))) + Counter(r for o in program.outputs for r in refs(o.value))
    made_by = {n.name: n for n in program.nodes}
    types = {s.name: s.type for s in program.weights}
    into: dict[str, tuple[Node, Node]] = {}  # convolution -> (norm, its getitem)
    for node in program.nodes:
        if node.op != "operator.getitem" or node.args[1] != 0 or not isinstance(node.args[0], Ref):
            continue
        norm = made_by.get(node.args[0].name)
        if norm is None or norm.op != _NORM or readers[norm.name] != 1 or not isinstance(norm.args[0], Ref):
            continue
        conv = made_by.get(norm.args[0].name)
        if conv is None or conv.op not in _CONVOLUTIONS or readers[conv.name] != 1:
            continue
        given = ops.bind(conv.op, conv.args, conv.kwargs)
        weight, bias = given["weight"], given.get("bias")
        parameters = [p for p in norm.args[1:5] if isinstance(p, Ref)]
        raised = max(_RANK[found[p.name]] for p in (*parameters, *((bias,) if bias else ()))) > _RANK[found[weight.name]]
        known = all(p.name in types for p in (weight, *parameters))
        if not raised and known and "ragged" not in {found[p.name] for p in (weight, *parameters)}:
            into[conv.name] = (norm, node)
    gone = {n.name for pair in into.values() for n in pair}
    kept: list[Node] = []
    to: dict[str, Any] = {}
    for node in program.nodes:
        if node.name in into:
            norm, item = into[node.name]
            kept += _folded(node, norm, types)
            to[item.name] = Ref(node.name)
        elif node.name not in gone:
            kept.append(renamed(node, to))
    return replace(program, nodes=tuple(kept), outputs=tuple(replace(o, value=substitute(o.value, lambda n: to.get(n, Ref(n)))) for o in program.outputs))


def _folded(conv: Node, norm: Node, types: Mapping[str, str]) -> list[Node]:
    """W' = W * g / sqrt(v + eps), b' = (b - m) * g / sqrt(v + eps) + beta, and the convolution with them."""
    given = ops.bind(conv.op, conv.args, conv.kwargs)
    _, gamma, beta, mean, var, _, eps = norm.args
    dtype, shape = parse_type(types[given["weight"].name])
    nodes: list[Node] = []

    def add(what: str, op: str, *args: Any, **kwargs: Any) -> Ref:
        name = f"{conv.name}_fold_{what}"
        nodes.append(Node(name, f"aten.{op}", args, kwargs, "", norm.source))
        return Ref(name)

    def double(what: str, value: Ref) -> Ref:
        return add(what, "_to_copy.default", value, dtype=Tag("dtype", "float64"))

    scale = add("rsqrt", "rsqrt.default", add("var_eps", "add.Scalar", double("var", var), eps))
    if gamma is not None:
        scale = add("scale", "mul.Tensor", double("gamma", gamma), scale)
    bias = given.get("bias")
    shift = double("mean", mean)
    shift = add("minus", "sub.Tensor", double("bias", bias), shift) if bias is not None else add("minus", "neg.default", shift)
    shift = add("shifted", "mul.Tensor", shift, scale)
    if beta is not None:
        shift = add("beta_sum", "add.Tensor", shift, double("beta", beta))
    channels = [-1] + [1] * (len(shape) - 1)
    wide = add("scaled", "mul.Tensor", double("weight", given["weight"]), add("scale_view", "view.default", scale, channels))
    given["weight"] = add("new_weight", "_to_copy.default", wide, dtype=Tag("dtype", dtype))
    given["bias"] = add("new_bias", "_to_copy.default", shift, dtype=Tag("dtype", dtype))
    order = [a for a, _, _ in ops.arguments(conv.op)]
    nodes.append(replace(conv, args=tuple(given[a] for a in order[:3]), kwargs={a: given[a] for a in order[3:] if a in given}))
    return nodes


def sweep(program: Program) -> Program:
    """The program without nodes and weights that nothing reads."""
    live = {r for o in program.outputs for r in refs(o.value)}
    kept: list[Node] = []
    for node in reversed(program.nodes):
        if node.name in live or not (node.body or ops.tensors_only(node.op)):
            kept.append(node)
            live.update(refs((node.args, node.kwargs)))
    return replace(program, nodes=tuple(reversed(kept)), weights=tuple(s for s in program.weights if s.name in live))
