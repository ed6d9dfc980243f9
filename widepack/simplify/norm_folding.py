"""Norms folded into the weights behind or before them; no kind rises.

1. An eval-mode batch norm behind a convolution, a transposed one or a linear layer, of which it is the only reader, goes into its weight and bias:
   W' = W * s, b' = (b - m) * s + beta, with s = g / sqrt(v + eps), one number an output channel.
2. An eval-mode batch norm that only convolutions without padding and linear layers read goes into theirs: W' = W * s, b' = b + sum over inputs of W * t, with
   t = beta - m * s, one number an input channel. With padding it would not be exact: the border is 0 after the norm, and not before it.
3. The scale and shift of a layer norm that differ by member go into the linear layers that are its only readers: W' = W * g, b' = b + W beta. The norm
   itself then is one kernel for all members, where members' own scale and shift would need a second one.

The new weights are made in float64 and rounded once, by nodes of the program itself: they depend on weights alone, so the weight prologue runs them once.
Folding a member's own norm into a Shared weight would make a frozen trunk N times dearer: never done.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from widepack_artifacts.program import Kind, Node, Program, Ref, Tag

from ..ir import ops
from ..ir.edit import rank_of, readers, renamed, uses, with_nodes
from ..ir.kinds import kinds
from ..spec.input_spec import parse_type

_CONVOLUTIONS = {f"aten.conv{d}d.{o}" for d in (1, 2, 3) for o in ("default", "padding")}
_TRANSPOSED = {"aten.conv_transpose1d.default", "aten.conv_transpose2d.input", "aten.conv_transpose3d.input"}
_LINEAR = "aten.linear.default"
_NORM = "aten._native_batch_norm_legit_no_training.default"
_RANK = {"shared": 0, "stacked": 1, "ragged": 2}


class Maker:
    """Makes the nodes of new weights. stem: what their names begin with; source: the user's line of the norm."""

    def __init__(self, stem: str, source: str) -> None:
        self.stem, self.source = stem, source
        self.nodes: list[Node] = []

    def __call__(self, what: str, op: str, *args: Any, **kwargs: Any) -> Ref:
        self.nodes.append(Node(f"{self.stem}_{what}", f"aten.{op}", args, kwargs, "", self.source))
        return Ref(self.nodes[-1].name)

    def double(self, what: str, value: Ref) -> Ref:
        return self(what, "_to_copy.default", value, dtype=Tag("dtype", "float64"))

    def rounded(self, what: str, value: Ref, type_: str) -> Ref:
        """The value in the dtype of a type, which is its type from here on."""
        made = self(what, "_to_copy.default", value, dtype=Tag("dtype", type_.partition("[")[0]))
        self.nodes[-1] = replace(self.nodes[-1], out=type_)
        return made


def fold_batch_norms(program: Program, slots: Mapping[str, Kind]) -> Program:
    """Batch norms (eval) into the layers before them, then into those behind them."""
    return _fold_forward(_fold_back(program, slots), slots)


def _fold_back(program: Program, slots: Mapping[str, Kind]) -> Program:
    """layer -> batch_norm (eval) -> getitem 0 becomes the layer with other weights."""
    found, count = kinds(program, slots), uses(program)
    made_by = {n.name: n for n in program.nodes}
    types = {s.name: s.type for s in program.weights}
    into: dict[str, tuple[Node, Node]] = {}  # layer -> (norm, its getitem)
    for norm, item in _norms(program, count):
        layer = made_by.get(norm.args[0].name) if isinstance(norm.args[0], Ref) else None
        if layer is None or count[layer.name] != 1 or not _has_channels(layer):
            continue
        given = ops.bind(layer.op, layer.args, layer.kwargs)
        parameters = [p for p in (*norm.args[1:5], given.get("bias")) if isinstance(p, Ref)]
        if may_fold(given["weight"], parameters, found, types):
            into[layer.name] = (norm, item)
    gone = {n.name for pair in into.values() for n in pair}
    kept: list[Node] = []
    to: dict[str, Any] = {}
    for node in program.nodes:
        if node.name in into:
            norm, item = into[node.name]
            kept += _take_in(renamed(node, to), norm, types)
            to[item.name] = Ref(node.name)
        elif node.name not in gone:
            kept.append(renamed(node, to))
    return with_nodes(program, kept, to)


def _fold_forward(program: Program, slots: Mapping[str, Kind]) -> Program:
    """batch_norm (eval) -> getitem 0 -> layers without padding becomes the layers with other weights."""
    found, count, by = kinds(program, slots), uses(program), readers(program)
    types = {s.name: s.type for s in program.weights}
    into: dict[str, Node] = {}  # layer -> norm
    to: dict[str, Any] = {}
    gone: set[str] = set()
    for norm, item in _norms(program, count):
        layers = by.get(item.name, [])
        parameters = [p for p in norm.args[1:5] if isinstance(p, Ref)]
        if count[item.name] == len(layers) > 0 and all(_takes_shift(n, item.name, parameters, found, types) for n in layers):
            into.update({n.name: norm for n in layers})
            to[item.name] = norm.args[0]
            gone |= {norm.name, item.name}
    kept: list[Node] = []
    for node in program.nodes:
        if node.name in into:
            kept += _take_from(node, into[node.name], types)
            kept[-1] = renamed(kept[-1], to)
        elif node.name not in gone:
            kept.append(renamed(node, to))
    return with_nodes(program, kept, to)


def _norms(program: Program, count: Mapping[str, int]) -> list[tuple[Node, Node]]:
    """Batch norms of which the answer alone is read, each with the node that takes it."""
    made_by = {n.name: n for n in program.nodes}
    found = []
    for node in program.nodes:
        if node.op == "operator.getitem" and node.args[1] == 0 and isinstance(node.args[0], Ref):
            norm = made_by.get(node.args[0].name)
            if norm is not None and norm.op == _NORM and count[norm.name] == 1:
                found.append((norm, node))
    return found


def _has_channels(layer: Node) -> bool:
    """Whether dim 1 of the layer's answer is its outputs, as a batch norm counts them."""
    given = ops.bind(layer.op, layer.args, layer.kwargs)
    if layer.op == _LINEAR:
        return rank_of(layer.out) == 2
    return layer.op in _CONVOLUTIONS or (layer.op in _TRANSPOSED and isinstance(given.get("groups", 1), int))


def _takes_shift(layer: Node, value: str, parameters: list[Any], found: Mapping[str, Kind], types: Mapping[str, str]) -> bool:
    """Whether a layer computes the same with a norm of its input in its weights."""
    if layer.op != _LINEAR and layer.op not in _CONVOLUTIONS:
        return False
    given = ops.bind(layer.op, layer.args, layer.kwargs)
    bias = given.get("bias")
    if given["input"] != Ref(value) or not may_fold(given["weight"], [*parameters, *([] if bias is None else [bias])], found, types):
        return False
    if layer.op == _LINEAR:
        return rank_of(layer.out) == 2
    padding = given.get("padding", 0)
    none = padding == "valid" if isinstance(padding, str) else all(p == 0 for p in (padding if isinstance(padding, (list, tuple)) else [padding]))
    return none and isinstance(given.get("groups", 1), int)


def may_fold(weight: Any, parameters: list[Ref], found: Mapping[str, Kind], types: Mapping[str, str]) -> bool:
    """Whether a weight may take these parameters in: all are weights of the program, none Ragged, and the weight's kind does not rise."""
    named = [weight, *parameters]
    known = all(isinstance(p, Ref) and p.name in types and found[p.name] != "ragged" for p in named)
    return known and max((_RANK[found[p.name]] for p in parameters), default=0) <= _RANK[found[weight.name]]


def _affine(make: Maker, norm: Node, bias: Any) -> tuple[Ref, Ref]:
    """A batch norm of x + bias as x * scale + shift, in float64."""
    _, gamma, beta, mean, var, _, eps = norm.args
    scale = make("rsqrt", "rsqrt.default", make("var_eps", "add.Scalar", make.double("var", var), eps))
    if gamma is not None:
        scale = make("scale", "mul.Tensor", make.double("gamma", gamma), scale)
    shift = make.double("mean", mean)
    shift = make("minus", "sub.Tensor", make.double("bias", bias), shift) if bias is not None else make("minus", "neg.default", shift)
    shift = make("shifted", "mul.Tensor", shift, scale)
    return scale, make("beta_sum", "add.Tensor", shift, make.double("beta", beta)) if beta is not None else shift


def _take_in(layer: Node, norm: Node, types: Mapping[str, str]) -> list[Node]:
    """The layer with the norm behind it in its weights, after the nodes that make them."""
    given = ops.bind(layer.op, layer.args, layer.kwargs)
    weight = types[given["weight"].name]
    dtype, shape = parse_type(weight)
    make = Maker(f"{layer.name}_fold", norm.source)
    scale, shift = _affine(make, norm, given.get("bias"))
    wide, groups = make.double("weight64", given["weight"]), given.get("groups", 1)
    outputs = shape[0]
    if layer.op in _TRANSPOSED:  # [I, O/g, *k]: the outputs of group j are dim 1 of its own inputs
        outputs = int(shape[1]) * groups  # type: ignore[arg-type]
        parted = make("parted", "unflatten.int", wide, 0, [groups, -1])  # [g, I/g, O/g, *k]
        column = make("column", "reshape.default", scale, [groups, 1, -1, *[1] * (len(shape) - 2)])
        wide = make("scaled", "flatten.using_ints", make("grouped", "mul.Tensor", parted, column), 0, 1)
    else:
        wide = make("scaled", "mul.Tensor", wide, make("column", "reshape.default", scale, [-1, *[1] * (len(shape) - 1)]))
    return _with_weights(layer, given, make, make.rounded("weight", wide, weight), make.rounded("new_bias", shift, f"{dtype}[{outputs}]"))


def _take_from(layer: Node, norm: Node, types: Mapping[str, str]) -> list[Node]:
    """The layer with the norm before it in its weights, after the nodes that make them."""
    given = ops.bind(layer.op, layer.args, layer.kwargs)
    weight, bias = types[given["weight"].name], given.get("bias")
    dtype, shape = parse_type(weight)
    make = Maker(f"{layer.name}_fold", norm.source)
    scale, shift = _affine(make, norm, None)
    groups, ones = given.get("groups", 1), [1] * (len(shape) - 2)
    parted = make("parted", "unflatten.int", make.double("weight64", given["weight"]), 0, [groups, -1])  # [g, O/g, C/g, *k]
    moved = make("product", "mul.Tensor", parted, make("shift_row", "reshape.default", shift, [groups, 1, -1, *ones]))
    moved = make("moved", "flatten.using_ints", make("moved_parts", "sum.dim_IntList", moved, list(range(2, len(shape) + 1))), 0, 1)
    if bias is not None:
        moved = make("moved_bias", "add.Tensor", make.double("bias64", bias), moved)
    scaled = make("grouped", "mul.Tensor", parted, make("scale_row", "reshape.default", scale, [groups, 1, -1, *ones]))
    wide = make.rounded("weight", make("scaled", "flatten.using_ints", scaled, 0, 1), weight)
    return _with_weights(layer, given, make, wide, make.rounded("new_bias", moved, f"{dtype}[{shape[0]}]"))


def _with_weights(layer: Node, given: dict[str, Any], make: Maker, weight: Ref, bias: Ref) -> list[Node]:
    given = {**given, "weight": weight, "bias": bias}
    order = [a for a, _, _ in ops.arguments(layer.op)]
    return [*make.nodes, replace(layer, args=tuple(given[a] for a in order[:3]), kwargs={a: given[a] for a in order[3:] if a in given})]


def fold_layer_norms(program: Program, slots: Mapping[str, Kind]) -> Program:
    """Scale and shift of a member's own layer norm go into the linear layers that alone read it."""
    found, by, count = kinds(program, slots), readers(program), uses(program)
    types = {s.name: s.type for s in program.weights}
    outs = {r for o in program.outputs if isinstance(o.value, Ref) for r in [o.value.name]}
    bare: dict[str, Node] = {}
    into: dict[str, Node] = {}  # linear layer -> the norm that it takes in
    for norm in program.nodes:
        given = ops.bind(norm.op, norm.args, norm.kwargs) if norm.op == "aten.layer_norm.default" else {}
        parameters = [p for p in (given.get("weight"), given.get("bias")) if isinstance(p, Ref)]
        if not parameters or len(given["normalized_shape"]) != 1 or all(found[p.name] == "shared" for p in parameters):
            continue
        layers = _layers(norm.name, by, outs, given["normalized_shape"][0], rank_of(norm.out))
        fits = layers and all(may_fold(_weight(n), [*parameters, *_bias(n)], found, types) and count[n.name] and n.name not in into for n in layers)
        if fits:
            bare[norm.name] = replace(
                norm,
                args=(given["input"], given["normalized_shape"], None, None, *norm.args[4:]),
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
    """The linear layers behind a value if nothing else reads it, rows picked or regrouped on the way; else nothing."""
    found: list[Node] = []
    if value in outs:
        return []
    for node in by.get(value, []):
        if (node.op == "aten.linear.default" and node.args[0] == Ref(value)) or (
            node.op == "aten.addmm.default" and len(node.args) == 3 and node.args[1] == Ref(value) and not node.kwargs
        ):
            found.append(node)
        elif _keeps_rows(node, rank, width):
            behind = _layers(node.name, by, outs, width, rank_of(node.out))
            if not behind:
                return []
            found += behind
        else:
            return []
    return found


def _keeps_rows(node: Node, rank: int, width: int) -> bool:
    """Whether the node picks or regroups rows and leaves each row, along the last dim, as it is. rank: of the value that it reads."""
    if node.op == "aten.reshape.default":
        return node.out.endswith(f",{width}]")  # row-major: an equal last size keeps the rows whole
    if node.op not in ("aten.select.int", "aten.slice.Tensor") or rank < 2:
        return False
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    return isinstance(dim, int) and dim % rank != rank - 1


def _weight(node: Node) -> Any:
    return node.args[1] if node.op == "aten.linear.default" else node.args[2]


def _bias(node: Node) -> list[Any]:
    bias = (node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")) if node.op == "aten.linear.default" else node.args[0]
    return [] if bias is None else [bias]


def _linear(node: Node, norm: Node, types: Mapping[str, str]) -> list[Node]:
    given = ops.bind(norm.op, norm.args, norm.kwargs)
    gamma, beta = given.get("weight"), given.get("bias")
    make = Maker(f"{node.name}_fold", norm.source)
    weight, bias = _weight(node), _bias(node)
    dtype, shape = parse_type(types[weight.name])
    turned = node.op == "aten.addmm.default"  # its weight is [I, O]
    wide = make.double("weight64", weight)
    shift: Ref | None = make.double("bias64", bias[0]) if bias else None
    if beta is not None:
        product = make(
            "product",
            "mul.Tensor",
            wide,
            make("beta_column", "unsqueeze.default", make.double("beta", beta), -1) if turned else make.double("beta", beta),
        )
        moved = make("moved", "sum.dim_IntList", product, [0 if turned else 1])
        shift = moved if shift is None else make("shift", "add.Tensor", shift, moved)
    if gamma is not None:
        scale = make.double("gamma", gamma)
        wide = make("scaled", "mul.Tensor", wide, make("gamma_column", "unsqueeze.default", scale, -1) if turned else scale)
    new_weight = make.rounded("weight", wide, types[weight.name])
    new_bias = None if shift is None else make.rounded("new_bias", shift, f"{dtype}[{shape[1 if turned else 0]}]")
    args = (new_bias, node.args[1], new_weight) if turned else (node.args[0], new_weight, new_bias)
    return [*make.nodes, replace(node, args=args, kwargs={})]
