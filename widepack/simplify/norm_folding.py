"""Folds batch norms into the weights of the layers before or after them. No kind rises.

1. An eval-mode batch norm is folded into the convolution, transposed convolution or linear layer before it,
   if it is the only reader: W' = W * s, b' = (b - m) * s + beta, with s = g / sqrt(v + eps), one number for
   each output channel.
2. An eval-mode batch norm is folded into the layers after it, if only convolutions without padding and linear
   layers read it: W' = W * s, b' = b + sum over inputs of W * t, with t = beta - m * s, one number for each
   input channel. Padding would not be exact: the border is 0 after the norm, not before it.

The new weights are computed in float64 and rounded once. Their nodes depend on weights alone, so the weight
prologue runs them once.

Requires: a functional member program with types, and the kinds of its slots.

Leaves alone: a Stacked norm next to a Shared weight, which would become N weights; Ragged weights; norms that
another node reads too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from widepack_artifacts.program import Kind, Node, Program, Ref, Tag

from ..ir import ops
from ..ir.edit import readers, renamed, uses, with_nodes
from ..ir.kinds import kinds
from ..ir.tensor_type import TensorType, parse_slot, rank_of

_CONVOLUTIONS = {f"aten.conv{d}d.{o}" for d in (1, 2, 3) for o in ("default", "padding")}
_TRANSPOSED = {"aten.conv_transpose1d.default", "aten.conv_transpose2d.input", "aten.conv_transpose3d.input"}
_LINEAR = "aten.linear.default"
_NORM = "aten._native_batch_norm_legit_no_training.default"
_RANK = {"shared": 0, "stacked": 1, "ragged": 2}


class WeightWriter:
    """Writes the nodes of new weights. stem: the start of their names; source: the user's source line."""

    def __init__(self, stem: str, source: str) -> None:
        self.stem, self.source = stem, source
        self.nodes: list[Node] = []

    def __call__(self, what: str, op: str, *args: Any, **kwargs: Any) -> Ref:
        """Adds a node and returns its value. what: the end of its name."""
        self.nodes.append(Node(f"{self.stem}_{what}", f"aten.{op}", args, kwargs, "", self.source))
        return Ref(self.nodes[-1].name)

    def double(self, what: str, value: Ref) -> Ref:
        """Casts a value to float64."""
        return self(what, "_to_copy.default", value, dtype=Tag("dtype", "float64"))

    def rounded(self, what: str, value: Ref, type_: TensorType) -> Ref:
        """Casts a value to the dtype of a type, and stores this type in its node."""
        rounded = self(what, "_to_copy.default", value, dtype=Tag("dtype", type_.dtype))
        self.nodes[-1] = replace(self.nodes[-1], out=str(type_))
        return rounded


def fold_batch_norms(program: Program, slots: Mapping[str, Kind]) -> Program:
    """Folds eval-mode batch norms into the layers before them, then into the layers after them."""
    return _fold_forward(_fold_back(program, slots), slots)


def _fold_back(program: Program, slots: Mapping[str, Kind]) -> Program:
    """Case 1: replaces layer -> batch_norm (eval) -> getitem 0 by the layer with other weights."""
    kind_of, count = kinds(program, slots), uses(program)
    made_by = {n.name: n for n in program.nodes}
    types = {s.name: s.type for s in program.weights}
    into: dict[str, tuple[Node, Node]] = {}  # layer -> (norm, its getitem)
    for norm, item in _norms(program, count):
        layer = made_by.get(norm.args[0].name) if isinstance(norm.args[0], Ref) else None
        if layer is None or count[layer.name] != 1 or not _has_channels(layer):
            continue
        bound = ops.bind(layer.op, layer.args, layer.kwargs)
        parameters = [p for p in (*norm.args[1:5], bound.get("bias")) if isinstance(p, Ref)]
        if may_fold(bound["weight"], parameters, kind_of, types):
            into[layer.name] = (norm, item)
    removed = {n.name for pair in into.values() for n in pair}
    kept: list[Node] = []
    to: dict[str, Any] = {}
    for node in program.nodes:
        if node.name in into:
            norm, item = into[node.name]
            kept += _take_in(renamed(node, to), norm, types)
            to[item.name] = Ref(node.name)
        elif node.name not in removed:
            kept.append(renamed(node, to))
    return with_nodes(program, kept, to)


def _fold_forward(program: Program, slots: Mapping[str, Kind]) -> Program:
    """Case 2: replaces batch_norm (eval) -> getitem 0 -> layers by the layers with other weights."""
    kind_of, count, by = kinds(program, slots), uses(program), readers(program)
    types = {s.name: s.type for s in program.weights}
    into: dict[str, Node] = {}  # layer -> norm
    to: dict[str, Any] = {}
    removed: set[str] = set()
    for norm, item in _norms(program, count):
        layers = by.get(item.name, [])
        parameters = [p for p in norm.args[1:5] if isinstance(p, Ref)]
        if count[item.name] == len(layers) > 0 and all(
            _takes_shift(n, item.name, parameters, kind_of, types) for n in layers
        ):
            into.update({n.name: norm for n in layers})
            to[item.name] = norm.args[0]
            removed |= {norm.name, item.name}
    kept: list[Node] = []
    for node in program.nodes:
        if node.name in into:
            kept += _take_from(node, into[node.name], types)
            kept[-1] = renamed(kept[-1], to)
        elif node.name not in removed:
            kept.append(renamed(node, to))
    return with_nodes(program, kept, to)


def _norms(program: Program, count: Mapping[str, int]) -> list[tuple[Node, Node]]:
    """Returns the batch norms of which only the first result is read, each with the node that reads it."""
    made_by = {n.name: n for n in program.nodes}
    norms = []
    for node in program.nodes:
        if node.op == "operator.getitem" and node.args[1] == 0 and isinstance(node.args[0], Ref):
            norm = made_by.get(node.args[0].name)
            if norm is not None and norm.op == _NORM and count[norm.name] == 1:
                norms.append((norm, node))
    return norms


def _has_channels(layer: Node) -> bool:
    """Whether dim 1 of the layer's result holds its output channels, as a batch norm needs."""
    bound = ops.bind(layer.op, layer.args, layer.kwargs)
    if layer.op == _LINEAR:
        return rank_of(layer.out) == 2
    return layer.op in _CONVOLUTIONS or (layer.op in _TRANSPOSED and isinstance(bound.get("groups", 1), int))


def _takes_shift(
    layer: Node, value: str, parameters: list[Any], kind_of: Mapping[str, Kind], types: Mapping[str, str]
) -> bool:
    """Whether the norm of a layer's input may be folded into its weights."""
    if layer.op != _LINEAR and layer.op not in _CONVOLUTIONS:
        return False
    bound = ops.bind(layer.op, layer.args, layer.kwargs)
    bias = bound.get("bias")
    if bound["input"] != Ref(value) or not may_fold(
        bound["weight"], [*parameters, *([] if bias is None else [bias])], kind_of, types
    ):
        return False
    if layer.op == _LINEAR:
        return rank_of(layer.out) == 2
    padding = bound.get("padding", 0)
    none = (
        padding == "valid"
        if isinstance(padding, str)
        else all(p == 0 for p in (padding if isinstance(padding, (list, tuple)) else [padding]))
    )
    return none and isinstance(bound.get("groups", 1), int)


def may_fold(
    weight: Any, parameters: list[Ref], kind_of: Mapping[str, Kind], types: Mapping[str, str]
) -> bool:
    """Whether these parameters may be folded into a weight.

    All must be weights of the program, none Ragged, and the kind of the weight must not rise.
    """
    named = [weight, *parameters]
    known = all(isinstance(p, Ref) and p.name in types and kind_of[p.name] != "ragged" for p in named)
    return (
        known and max((_RANK[kind_of[p.name]] for p in parameters), default=0) <= _RANK[kind_of[weight.name]]
    )


def _affine(make: WeightWriter, norm: Node, bias: Any) -> tuple[Ref, Ref]:
    """Returns scale and shift in float64, so that a batch norm of x + bias is x * scale + shift."""
    _, gamma, beta, mean, var, _, eps = norm.args
    scale = make("rsqrt", "rsqrt.default", make("var_eps", "add.Scalar", make.double("var", var), eps))
    if gamma is not None:
        scale = make("scale", "mul.Tensor", make.double("gamma", gamma), scale)
    shift = make.double("mean", mean)
    shift = (
        make("minus", "sub.Tensor", make.double("bias", bias), shift)
        if bias is not None
        else make("minus", "neg.default", shift)
    )
    shift = make("shifted", "mul.Tensor", shift, scale)
    return scale, make(
        "beta_sum", "add.Tensor", shift, make.double("beta", beta)
    ) if beta is not None else shift


def _take_in(layer: Node, norm: Node, types: Mapping[str, str]) -> list[Node]:
    """Case 1: returns the nodes of the new weights, then the layer."""
    bound = ops.bind(layer.op, layer.args, layer.kwargs)
    weight = parse_slot(types[bound["weight"].name])
    shape = weight.dims
    make = WeightWriter(f"{layer.name}_fold", norm.source)
    scale, shift = _affine(make, norm, bound.get("bias"))
    wide, groups = make.double("weight64", bound["weight"]), bound.get("groups", 1)
    outputs = shape[0]
    if layer.op in _TRANSPOSED:  # [I, O/g, *k]: dim 1 of the rows of a group holds the outputs of this group
        outputs = int(shape[1]) * groups  # type: ignore[arg-type]
        parted = make("parted", "unflatten.int", wide, 0, [groups, -1])  # [g, I/g, O/g, *k]
        column = make("column", "reshape.default", scale, [groups, 1, -1, *[1] * (len(shape) - 2)])
        wide = make("scaled", "flatten.using_ints", make("grouped", "mul.Tensor", parted, column), 0, 1)
    else:
        wide = make(
            "scaled",
            "mul.Tensor",
            wide,
            make("column", "reshape.default", scale, [-1, *[1] * (len(shape) - 1)]),
        )
    return _with_weights(
        layer,
        bound,
        make,
        make.rounded("weight", wide, weight),
        make.rounded("new_bias", shift, weight.with_sizes([outputs])),
    )


def _take_from(layer: Node, norm: Node, types: Mapping[str, str]) -> list[Node]:
    """Case 2: returns the nodes of the new weights, then the layer."""
    bound = ops.bind(layer.op, layer.args, layer.kwargs)
    weight, bias = parse_slot(types[bound["weight"].name]), bound.get("bias")
    shape = weight.dims
    make = WeightWriter(f"{layer.name}_fold", norm.source)
    scale, shift = _affine(make, norm, None)
    groups, ones = bound.get("groups", 1), [1] * (len(shape) - 2)
    parted = make(
        "parted", "unflatten.int", make.double("weight64", bound["weight"]), 0, [groups, -1]
    )  # [g, O/g, C/g, *k]
    moved = make(
        "product", "mul.Tensor", parted, make("shift_row", "reshape.default", shift, [groups, 1, -1, *ones])
    )
    moved = make(
        "moved",
        "flatten.using_ints",
        make("moved_parts", "sum.dim_IntList", moved, list(range(2, len(shape) + 1))),
        0,
        1,
    )
    if bias is not None:
        moved = make("moved_bias", "add.Tensor", make.double("bias64", bias), moved)
    scaled = make(
        "grouped", "mul.Tensor", parted, make("scale_row", "reshape.default", scale, [groups, 1, -1, *ones])
    )
    wide = make.rounded("weight", make("scaled", "flatten.using_ints", scaled, 0, 1), weight)
    return _with_weights(
        layer, bound, make, wide, make.rounded("new_bias", moved, weight.with_sizes([shape[0]]))
    )


def _with_weights(
    layer: Node, bound: dict[str, Any], make: WeightWriter, weight: Ref, bias: Ref
) -> list[Node]:
    bound = {**bound, "weight": weight, "bias": bias}
    order = [a for a, _, _ in ops.arguments(layer.op)]
    return [
        *make.nodes,
        replace(
            layer,
            args=tuple(bound[a] for a in order[:3]),
            kwargs={a: bound[a] for a in order[3:] if a in bound},
        ),
    ]
