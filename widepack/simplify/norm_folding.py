"""Folds norms into the weights of the layers before or after them. No kind rises.

1. An eval-mode batch norm is folded into the convolution, transposed convolution or linear layer before it,
   if it is the only reader: W' = W * s, b' = (b - m) * s + beta, with s = g / sqrt(v + eps), one number for
   each output channel.
2. An eval-mode batch norm is folded into the layers after it, if only convolutions without padding and linear
   layers read it: W' = W * s, b' = b + sum over inputs of W * t, with t = beta - m * s, one number for each
   input channel. Padding would not be exact: the border is 0 after the norm, not before it.
3. A layer norm whose scale or shift differs between members is folded into the linear layers after it, if
   only these read it: W' = W * g, b' = b + W beta. Nodes between may select or regroup rows. The norm without
   scale and shift is one kernel for all members. Stacked scale and shift would be a second one.

The new weights are computed in float64 and rounded once. Their nodes depend on weights alone, so the weight
prologue runs them once.

Requires: a functional member program with types, and the kinds of its slots.

Leaves alone: a Stacked norm next to a Shared weight, which would become N weights; Ragged weights; norms that
another node reads too. Of layer norms also those with a Shared scale and shift, which cost nothing, those
over several dims, and those before linear layers with more than `LARGE` weights: such a layer takes so long
that scale and shift do not count, and a second copy of its weights would take memory and time at load.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from widepack_artifacts.program import Kind, Node, Program, Ref, Tag, refs

from ..ir import ops
from ..ir.edit import NodeWriter, readers, renamed, uses, with_nodes
from ..ir.kinds import kinds
from ..ir.tensor_type import TensorType, parse_slot, rank_of

LARGE = 1 << 14  # weights of one member
_CONVOLUTIONS = {f"aten.conv{d}d.{o}" for d in (1, 2, 3) for o in ("default", "padding")}
_TRANSPOSED = {"aten.conv_transpose1d.default", "aten.conv_transpose2d.input", "aten.conv_transpose3d.input"}
_LINEAR, _ADDMM = "aten.linear.default", "aten.addmm.default"
_NORM = "aten._native_batch_norm_legit_no_training.default"
_RANK = {"shared": 0, "stacked": 1, "ragged": 2}


class _WeightWriter(NodeWriter):
    """Writes the nodes of new weights."""

    def double(self, what: str, value: Ref) -> Ref:
        """Casts a value to float64."""
        return self(what, "_to_copy", value, dtype=Tag("dtype", "float64"))

    def rounded(self, what: str, value: Ref, type_: TensorType) -> Ref:
        """Casts a value to the dtype of a type, and notes this type at its node."""
        return self.typed(self(what, "_to_copy", value, dtype=Tag("dtype", type_.dtype)), type_)


class _Facts:
    """What is known of a program. types: of its weights."""

    def __init__(self, program: Program, slots: Mapping[str, Kind]) -> None:
        self.kinds, self.count, self.readers = kinds(program, slots), uses(program), readers(program)
        self.types = {s.name: s.type for s in program.weights}
        self.outputs = {r for o in program.outputs for r in refs(o.value)}

    def may_fold(self, layer: _BoundLayer, parameters: Sequence[Any]) -> bool:
        """Whether these parameters of a norm may be folded into the weight and the bias of a layer.

        All must be weights of the program, none Ragged, and the kind of the weight must not rise.
        """
        others = [p for p in (*parameters, layer.bias) if p is not None]
        if not all(isinstance(p, Ref) and p.name in self.types for p in (layer.weight, *others)):
            return False
        weight, *rest = (_RANK[self.kinds[p.name]] for p in (layer.weight, *others))
        return max(rest, default=0) <= weight < _RANK["ragged"]


class _BoundLayer(NamedTuple):
    """What a linear layer or a convolution reads, and its arguments by name."""

    input: Any
    weight: Any
    bias: Any
    bound: dict[str, Any]


def _layer(node: Node) -> _BoundLayer:
    bound = ops.bind(node.op, node.args, node.kwargs)
    names = ("mat1", "mat2", "self") if node.op == _ADDMM else ("input", "weight", "bias")
    given, weight, bias = map(bound.get, names)
    return _BoundLayer(given, weight, bias, bound)


def fold_batch_norms(program: Program, slots: Mapping[str, Kind]) -> Program:
    """Folds eval-mode batch norms into the layers before them, then into the layers after them."""
    return _fold_forward(_fold_back(program, slots), slots)


def _fold_back(program: Program, slots: Mapping[str, Kind]) -> Program:
    """Case 1: replaces layer -> batch_norm (eval) -> getitem 0 by the layer with other weights."""
    facts, made_by = _Facts(program, slots), {n.name: n for n in program.nodes}
    new: dict[str, list[Node]] = {}
    to: dict[str, Any] = {}
    for norm, item in _norms(program, facts):
        layer = made_by.get(norm.args[0].name) if isinstance(norm.args[0], Ref) else None
        if layer is None or facts.count[layer.name] != 1 or not _has_channels(layer):
            continue
        if facts.may_fold(_layer(layer), norm.args[1:5]):
            new |= {layer.name: _take_in(layer, norm, facts.types), norm.name: [], item.name: []}
            to[item.name] = Ref(layer.name)
    return _replaced(program, new, to)


def _fold_forward(program: Program, slots: Mapping[str, Kind]) -> Program:
    """Case 2: replaces batch_norm (eval) -> getitem 0 -> layers by the layers with other weights."""
    facts = _Facts(program, slots)
    new: dict[str, list[Node]] = {}
    to: dict[str, Any] = {}
    for norm, item in _norms(program, facts):
        layers = facts.readers.get(item.name, [])
        if facts.count[item.name] == len(layers) > 0 and all(
            _takes_shift(n, item.name) and facts.may_fold(_layer(n), norm.args[1:5]) for n in layers
        ):
            new |= {n.name: _take_from(n, norm, facts.types) for n in layers}
            new |= {norm.name: [], item.name: []}
            to[item.name] = norm.args[0]
    return _replaced(program, new, to)


def _replaced(program: Program, new: Mapping[str, Sequence[Node]], to: Mapping[str, Any]) -> Program:
    """The program with other nodes. new: the name of a node -> those in its place. to: as `with_nodes`."""
    kept = [renamed(n, to) for node in program.nodes for n in new.get(node.name, (node,))]
    return with_nodes(program, kept, to)


def _norms(program: Program, facts: _Facts) -> list[tuple[Node, Node]]:
    """Returns the batch norms of which only the first result is read, each with the node that reads it."""
    norms = {n.name: n for n in program.nodes if n.op == _NORM and facts.count[n.name] == 1}
    return [
        (norms[node.args[0].name], node)
        for node in program.nodes
        if node.op == "operator.getitem"
        and node.args[1] == 0
        and isinstance(node.args[0], Ref)
        and node.args[0].name in norms
    ]


def _has_channels(layer: Node) -> bool:
    """Whether dim 1 of the layer's result holds its output channels, as a batch norm needs."""
    if layer.op == _LINEAR:
        return rank_of(layer.out) == 2
    groups = _layer(layer).bound.get("groups", 1) if layer.op in _TRANSPOSED else None
    return layer.op in _CONVOLUTIONS or isinstance(groups, int)


def _takes_shift(layer: Node, value: str) -> bool:
    """Whether a layer reads a value as its input, each channel in the same way."""
    if layer.op != _LINEAR and layer.op not in _CONVOLUTIONS:
        return False
    x, *_, bound = _layer(layer)
    padding = bound.get("padding", 0)
    if x != Ref(value) or layer.op == _LINEAR:
        return x == Ref(value) and rank_of(layer.out) == 2
    none = padding == "valid" or not any(padding if isinstance(padding, (list, tuple)) else [padding])
    return none and isinstance(bound.get("groups", 1), int)


def _affine(make: _WeightWriter, norm: Node, bias: Any) -> tuple[Ref, Ref]:
    """Returns scale and shift in float64, so that a batch norm of x + bias is x * scale + shift."""
    _, gamma, beta, mean, var, _, eps = norm.args
    scale = make("rsqrt", "rsqrt", make("var_eps", "add.Scalar", make.double("var", var), eps))
    if gamma is not None:
        scale = make("scale", "mul.Tensor", make.double("gamma", gamma), scale)
    shift = make.double("mean", mean)
    if bias is None:
        shift = make("minus", "neg", shift)
    else:
        shift = make("minus", "sub.Tensor", make.double("bias", bias), shift)
    shift = make("shifted", "mul.Tensor", shift, scale)
    if beta is not None:
        shift = make("beta_sum", "add.Tensor", shift, make.double("beta", beta))
    return scale, shift


def _take_in(layer: Node, norm: Node, types: Mapping[str, str]) -> list[Node]:
    """Case 1: returns the nodes of the new weights, then the layer."""
    _, old, bias, bound = _layer(layer)
    type_ = parse_slot(types[old.name])
    outputs, *rest = type_.dims
    make = _WeightWriter(f"{layer.name}_fold", norm.source)
    scale, shift = _affine(make, norm, bias)
    wide, groups = make.double("weight64", old), bound.get("groups", 1)
    if layer.op in _TRANSPOSED:  # [I, O/g, *k]: dim 1 of the rows of a group holds the outputs of this group
        outputs = int(rest[0]) * groups  # type: ignore[arg-type]
        parted = make("parted", "unflatten.int", wide, 0, [groups, -1])  # [g, I/g, O/g, *k]
        column = make("column", "reshape", scale, [groups, 1, -1, *[1] * (len(rest) - 1)])
        wide = make("scaled", "flatten.using_ints", make("grouped", "mul.Tensor", parted, column), 0, 1)
    else:
        column = make("column", "reshape", scale, [-1, *[1] * len(rest)])
        wide = make("scaled", "mul.Tensor", wide, column)
    weight = make.rounded("weight", wide, type_)
    return _with_weights(layer, make, weight, make.rounded("new_bias", shift, type_.with_sizes([outputs])))


def _take_from(layer: Node, norm: Node, types: Mapping[str, str]) -> list[Node]:
    """Case 2: returns the nodes of the new weights, then the layer."""
    _, old, bias, bound = _layer(layer)
    type_ = parse_slot(types[old.name])
    rank = len(type_.dims)
    make = _WeightWriter(f"{layer.name}_fold", norm.source)
    scale, shift = _affine(make, norm, None)
    groups = bound.get("groups", 1)
    row = [groups, 1, -1, *[1] * (rank - 2)]
    parted = make(
        "parted", "unflatten.int", make.double("weight64", old), 0, [groups, -1]
    )  # [g, O/g, C/g, *k]
    moved = make("product", "mul.Tensor", parted, make("shift_row", "reshape", shift, row))
    moved = make("moved_parts", "sum.dim_IntList", moved, list(range(2, rank + 1)))
    moved = make("moved", "flatten.using_ints", moved, 0, 1)
    if bias is not None:
        moved = make("moved_bias", "add.Tensor", make.double("bias64", bias), moved)
    scaled = make("grouped", "mul.Tensor", parted, make("scale_row", "reshape", scale, row))
    weight = make.rounded("weight", make("scaled", "flatten.using_ints", scaled, 0, 1), type_)
    new_bias = make.rounded("new_bias", moved, type_.with_sizes([type_.dims[0]]))
    return _with_weights(layer, make, weight, new_bias)


def _with_weights(layer: Node, make: NodeWriter, weight: Ref, bias: Ref | None) -> list[Node]:
    """Returns the nodes of new weights, then the layer that reads them."""
    x, *_, bound = _layer(layer)
    if layer.op == _ADDMM:
        return [*make.nodes, replace(layer, args=(bias, x, weight), kwargs={})]
    rest = {a: v for a, v in bound.items() if a not in ("input", "weight", "bias")}
    return [*make.nodes, replace(layer, args=(x, weight, bias), kwargs=rest)]


def fold_layer_norms(program: Program, slots: Mapping[str, Kind]) -> Program:
    """Case 3: folds Stacked scales and shifts of layer norms into the linear layers that read them."""
    facts = _Facts(program, slots)
    new: dict[str, list[Node]] = {}
    for norm in program.nodes:
        bound = ops.bind(norm.op, norm.args, norm.kwargs) if norm.op == "aten.layer_norm.default" else {}
        parameters = [p for p in (bound.get("weight"), bound.get("bias")) if isinstance(p, Ref)]
        if all(facts.kinds[p.name] == "shared" for p in parameters) or len(bound["normalized_shape"]) != 1:
            continue
        layers = _linear_layers(norm.name, facts, bound["normalized_shape"][0], rank_of(norm.out))
        if layers and all(
            facts.may_fold(_layer(n), parameters)
            and facts.count[n.name]
            and n.name not in new
            and _numbers(facts.types[_layer(n).weight.name]) <= LARGE
            for n in layers
        ):
            kwargs = {k: v for k, v in norm.kwargs.items() if k not in ("weight", "bias")}
            args = (bound["input"], bound["normalized_shape"], None, None, *norm.args[4:])
            new |= {n.name: _take_layer_norm(n, norm, facts.types) for n in layers}
            new[norm.name] = [replace(norm, args=args, kwargs=kwargs)]
    return _replaced(program, new, {})


def _linear_layers(value: str, facts: _Facts, width: int, rank: int) -> list[Node]:
    """Returns the linear layers that read a value, if no other node reads it; else an empty list.

    Nodes between may select or regroup rows.
    """
    layers: list[Node] = []
    if value in facts.outputs:
        return []
    for node in facts.readers.get(value, []):
        plain = node.op == _LINEAR or (node.op == _ADDMM and len(node.args) == 3 and not node.kwargs)
        if plain and _layer(node).input == Ref(value):
            layers.append(node)
        elif _keeps_rows(node, rank, width) and (
            behind := _linear_layers(node.name, facts, width, rank_of(node.out))
        ):
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


def _numbers(type_: str) -> int:
    return math.prod(size for size in parse_slot(type_).sizes if isinstance(size, int))


def _take_layer_norm(node: Node, norm: Node, types: Mapping[str, str]) -> list[Node]:
    """Case 3: returns the nodes of the new weights, then the layer."""
    _, old, bias, _ = _layer(node)
    bound = ops.bind(norm.op, norm.args, norm.kwargs)
    gamma, beta = bound.get("weight"), bound.get("bias")
    make = _WeightWriter(f"{node.name}_fold", norm.source)
    type_ = parse_slot(types[old.name])
    transposed = node.op == _ADDMM  # its weight is [I, O]

    def row(what: str, value: Ref) -> Ref:
        """Returns one number for each input, as a row of the weight."""
        wide = make.double(what, value)
        return make(f"{what}_column", "unsqueeze", wide, -1) if transposed else wide

    wide = make.double("weight64", old)
    shift = None if bias is None else make.double("bias64", bias)
    if beta is not None:
        product = make("product", "mul.Tensor", wide, row("beta", beta))
        moved = make("moved", "sum.dim_IntList", product, [0 if transposed else 1])
        shift = moved if shift is None else make("shift", "add.Tensor", shift, moved)
    if gamma is not None:
        wide = make("scaled", "mul.Tensor", wide, row("gamma", gamma))
    weight = make.rounded("weight", wide, type_)
    if shift is not None:
        shift = make.rounded("new_bias", shift, type_.with_sizes([type_.sizes[1 if transposed else 0]]))
    return _with_weights(node, make, weight, shift)
