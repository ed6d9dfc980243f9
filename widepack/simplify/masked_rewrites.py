"""Rewrites the nodes that read masked values: cases 1 to 7 of `masked_selection.py`.

Each handler takes a `Read` and returns the new nodes and what the node becomes. Two tables map ops to
handlers: one for ops that need equal positions in all their masked values, one for ops that check their
arguments themselves. Ops of the family `pointwise` share one handler.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from widepack_artifacts.program import Node, Ref, Tag, refs, substitute

from ..ir import ops
from ..ir.edit import NodeWriter, renamed
from ..ir.ops import full_name, full_names
from ..ir.tensor_type import dtype_in, rank_of, sizes_of, tensor_type
from ..registry.registry import family_of


@dataclass(frozen=True)
class MaskedValue:
    """A value `[*a, K, *b]`, read at the K true positions of a mask `[*m]`, as a value at every position.

    mask: the name of the mask.
    dense: the value at every position, `[*a, *m, *b]`. Dims of m on which it does not depend may have size 1.
    before, within, behind: the number of dims of a, m and b.
    """

    mask: str
    dense: Ref
    before: int
    within: int
    behind: int

    @property
    def rank(self) -> int:
        """The rank of `[*a, K, *b]`."""
        return self.before + 1 + self.behind

    def fits(self, other: MaskedValue) -> bool:
        """Whether both values have the same positions and dims, so that one op may read both."""
        return self == replace(other, dense=self.dense)


@dataclass(frozen=True)
class PositionIndices:
    """The indices of the true positions of a mask, as `nonzero` and `where` return them.

    mask: the name of the mask. within: its rank.
    dim: the dim of the mask that the K indices belong to; None for the indices `[K, within]` of all dims.
    """

    mask: str
    within: int
    dim: int | None


Result = MaskedValue | PositionIndices | tuple[MaskedValue, ...] | Ref | None
Rewrite = tuple[list[Node], Result]
"""New nodes, and what the node becomes: a masked value, indices, or a value without the number K.

The result None means that the node cannot be rewritten.
"""
UNCHANGED: Rewrite = ([], None)


class Rewriter(NodeWriter):
    """Collects the new nodes of one rewrite. They are named after the node that they replace."""

    def __init__(self, node: Node) -> None:
        super().__init__(node.name, node.source)
        self.node = node

    def __call__(self, op: str, *args: Any, **kwargs: Any) -> Ref:  # type: ignore[override]
        """Adds a node and returns its value. Its type is computed later."""
        return super().__call__(f"at_{len(self.nodes)}", op, *args, **kwargs)

    def mask(self, value: MaskedValue) -> Ref:
        """Returns the mask as `[*m, 1, ...]`, which broadcasts over the dims behind the positions."""
        mask = Ref(value.mask)
        for _ in range(value.behind):
            mask = self("unsqueeze", mask, -1)
        return mask


class EqualValues:
    """Finds values that equal pure calls compute: such values are equal in a functional program."""

    def __init__(self) -> None:
        self._first: dict[str, str] = {}  # a value -> the first value with the same call
        self._by_call: dict[str, str] = {}

    def learn(self, node: Node) -> None:
        """Notes how a value is computed. Calls before and after an op that is not pure are not equal."""
        if node.body is not None or not ops.pure(node.op, node.args, node.kwargs):
            self._by_call.clear()
            return
        args, kwargs = (substitute(a, lambda n: Ref(self.first(n))) for a in (node.args, node.kwargs))
        arguments = ops.bind(node.op, args, kwargs) if node.op.startswith("aten.") else {"": args}
        call = repr((node.op, sorted(arguments.items())))  # the text tells 1, 1.0 and True apart
        self._first[node.name] = self._by_call.setdefault(call, node.name)

    def first(self, name: str) -> str:
        """Returns the first value that equals this one."""
        return self._first.get(name, name)


@dataclass
class Tracked:
    """What is known about the values of the program, by their names. types: their type texts."""

    types: dict[str, str]
    masked: dict[str, MaskedValue] = field(default_factory=dict)
    indices: dict[str, PositionIndices] = field(default_factory=dict)
    tuples: dict[str, tuple[MaskedValue, ...]] = field(default_factory=dict)
    equal: EqualValues = field(default_factory=EqualValues)

    def store(self, name: str, result: Result) -> None:
        """Notes what a value of the program is."""
        if isinstance(result, MaskedValue):
            self.masked[name] = result
        elif isinstance(result, PositionIndices):
            self.indices[name] = result
        elif isinstance(result, tuple):
            self.tuples[name] = result


@dataclass(frozen=True)
class Read:
    """A node that reads masked values or indices of positions."""

    node: Node
    tracked: Tracked

    @property
    def arguments(self) -> dict[str, Any]:
        """The node's arguments by the names of the op's schema."""
        return ops.bind(self.node.op, self.node.args, self.node.kwargs)

    @property
    def masked(self) -> list[MaskedValue]:
        """The masked values that the node reads, in the order of its arguments."""
        names = refs((self.node.args, self.node.kwargs))
        return [self.tracked.masked[r] for r in names if r in self.tracked.masked]

    def masked_at(self, argument: Any) -> MaskedValue | None:
        """Returns the masked value that an argument is, if it is one."""
        return self.tracked.masked.get(argument.name) if isinstance(argument, Ref) else None

    @property
    def only(self) -> MaskedValue | None:
        """The masked value of the first argument, if no other argument is masked."""
        values = list(self.arguments.values())
        first = self.masked_at(values[0])
        return first if first is not None and len(self.masked) == 1 else None

    def is_tracked(self, name: str) -> bool:
        """Whether a value is masked or holds indices of positions: its own size is data."""
        return name in self.tracked.masked or name in self.tracked.indices


Handler = Callable[[Read], Rewrite]


_ALONG_DIMS = full_names(
    "softmax.int log_softmax.int _softmax _log_softmax amax amin logsumexp unsqueeze select.int "
    "slice.Tensor argmax var.correction var.dim std.dim std.correction linalg_vector_norm cumsum flip"
)
_LAST_DIMS = full_names("linear layer_norm rms_norm")  # their other tensors are weights
_RESHAPES = full_names("reshape view squeeze.dim squeeze.dims")
_SUMS = full_names("sum mean sum.dim_IntList mean.dim")
_LOSSES = full_names(
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy_with_logits soft_margin_loss"
)
# Pointwise ops that may refuse a number, for example a division of integers by 0, or that have several
# results.
_NOT_EVERYWHERE = full_names(
    "div.Tensor_mode div.Scalar_mode floor_divide floor_divide.Scalar remainder.Tensor remainder.Scalar "
    "fmod.Tensor fmod.Scalar remainder.Scalar_Tensor pow.Tensor_Tensor pow.Scalar frexp.Tensor"
)


def rewrite_read(read: Read) -> Rewrite:
    """Rewrites a node that reads masked values."""
    node = read.node
    if node.op in _CHECKED_BY_HANDLER:
        return _CHECKED_BY_HANDLER[node.op](read)
    if not node.op.startswith("aten."):
        return UNCHANGED
    masked = read.masked
    if not all(masked[0].fits(m) for m in masked):
        return UNCHANGED
    if node.op in _EQUAL_POSITIONS:
        return _EQUAL_POSITIONS[node.op](read)
    return pointwise(read) if _is_pointwise(node) else UNCHANGED


def _is_pointwise(node: Node) -> bool:
    known = family_of(node.op) == "pointwise" and node.op not in _NOT_EVERYWHERE
    return known and ops.pure(node.op, node.args, node.kwargs)


def pointwise(read: Read) -> Rewrite:
    """Case 1: a pointwise op runs at every position. Other values broadcast over the positions."""
    node, one, types = read.node, read.masked[0], read.tracked.types
    write = Rewriter(node)
    dense: dict[str, Any] = {}
    for name in dict.fromkeys(refs((node.args, node.kwargs))):
        if name in read.tracked.masked:
            dense[name] = read.tracked.masked[name].dense
            continue
        rank = rank_of(types.get(name, ""))
        if rank <= one.behind:
            continue
        # Its dim at the place of K must have size 1. It becomes one dim for each dim of the mask.
        at = rank - 1 - one.behind
        if rank > one.rank or sizes_of(types[name])[at] != 1:
            return UNCHANGED
        value = Ref(name)
        for _ in range(one.within - 1):
            value = write("unsqueeze", value, at)
        dense[name] = value
    moved = renamed(node, dense)
    result = write(node.op, *moved.args, **moved.kwargs)
    return write.nodes, replace(one, dense=result)


def along_dims(read: Read) -> Rewrite:
    """Case 2: an op along dims behind the positions runs along the same dims of the dense value."""
    node, one = read.node, read.only
    if one is None:
        return UNCHANGED
    arguments, schema = read.arguments, ops.arguments(node.op)
    name = next((a for a in ops.dim_arguments(node.op) if a in ("dim", "dims")), "")
    dims: Any = arguments.get(name, next((d for a, _, d in schema if a == name), None))
    several = isinstance(dims, (list, tuple))
    listed = list(dims) if several else [dims]
    if not name or not listed or not all(isinstance(d, int) for d in listed):
        return UNCHANGED
    added = int(node.op == "aten.unsqueeze.default")
    positive = [d % (one.rank + added) for d in listed]
    if any(d <= one.before for d in positive):
        return UNCHANGED
    moved = [d + one.within - 1 for d in positive]
    changed = {**arguments, name: moved if several else moved[0]}
    by_name = {a: v for a, v in changed.items() if a in node.kwargs and a != name}
    positional = [a for a, _, _ in schema if a in changed and a not in by_name]
    if [a for a, _, _ in schema][: len(positional)] != positional:
        return UNCHANGED
    write = Rewriter(node)
    dense = write(node.op, one.dense, *(changed[a] for a in positional[1:]), **by_name)
    removed = 0
    if node.op == "aten.select.int":
        removed = 1
    elif any(a == "keepdim" for a, _, _ in schema) and not arguments.get("keepdim", False):
        removed = len(positive)
    return write.nodes, replace(one, dense=dense, behind=one.behind + added - removed)


def last_dims(read: Read) -> Rewrite:
    """Case 2: a linear layer or a norm of the last dims runs at every position."""
    node, one = read.node, read.only
    if one is None:
        return UNCHANGED
    last = 1 if node.op == "aten.linear.default" else len(read.arguments["normalized_shape"])
    if one.behind < last:
        return UNCHANGED
    write = Rewriter(node)
    dense = write(node.op, one.dense, *node.args[1:], **node.kwargs)
    return write.nodes, replace(one, dense=dense)


def reshaped(read: Read) -> Rewrite:
    """Case 3: `[1, K, *b]` in the shape `[K, *b]` loses the dims of size 1."""
    node, masked = read.node, read.masked
    if len(masked) != 1:
        return UNCHANGED
    one = masked[0]
    sizes, out = sizes_of(read.tracked.types[node.args[0].name]), sizes_of(node.out)
    if not one.before or sizes[: one.before] != (1,) * one.before or out != sizes[one.before :]:
        return UNCHANGED
    write = Rewriter(node)
    dense = write("squeeze.dims", one.dense, list(range(one.before)))
    return write.nodes, replace(one, dense=dense, before=0)


def total(read: Read) -> Rewrite:
    """Case 4: a sum or a mean over the positions counts 0 at the other positions."""
    node, one = read.node, read.only
    if one is None:
        return UNCHANGED
    arguments = read.arguments
    dims = arguments.get("dim")
    if dims in (None, [], ()):
        dims = list(range(one.rank))
    elif not all(isinstance(d, int) for d in dims):
        return UNCHANGED
    positive = sorted({d % one.rank for d in dims})
    if one.before not in positive:
        return along_dims(read)
    if not _is_float(node.out) or arguments.get("dtype") is not None:
        return UNCHANGED
    write = Rewriter(node)
    mean = node.op.startswith("aten.mean.")
    result = _masked_total(write, one, positive, mean, bool(arguments.get("keepdim", False)))
    return write.nodes, result


def _masked_total(write: Rewriter, one: MaskedValue, dims: list[int], mean: bool, keep: bool) -> Ref:
    """Sums or averages a masked value over dims of `[*a, K, *b]`, K among them."""
    value = one.dense
    others = [d for d in dims if d != one.before]
    if others:  # They come first, because their sizes do not depend on data.
        others = [d if d < one.before else d + one.within - 1 for d in others]
        value = write("mean.dim" if mean else "sum.dim_IntList", value, others, True)
    value = write("where.ScalarOther", write.mask(one), value, 0)
    dtype = dtype_in(write.node.out)
    # A mean divides after the sum, and the sum may be larger than a 16-bit float can be.
    upcast = {"dtype": Tag("dtype", "float32")} if mean and dtype in ("float16", "bfloat16") else {}
    everything = len(dims) == one.rank
    if everything:
        value = write("sum", value, **upcast)
    else:
        if one.within > 1:
            value = write("flatten.using_ints", value, one.before, one.before + one.within - 1)
        value = write("sum.dim_IntList", value, [one.before], True, **upcast)
    if mean:
        value = write("div.Tensor", value, write("sum", Ref(one.mask)))
        value = write("_to_copy", value, dtype=Tag("dtype", dtype)) if upcast else value
    if everything:
        return write("reshape", value, [1] * one.rank) if keep else value
    return value if keep else write("squeeze.dims", value, dims)


def loss(read: Read) -> Rewrite:
    """Case 5: a loss is computed at every position, and then reduced as in case 4."""
    node, one, arguments = read.node, read.masked[0], read.arguments
    plain = [v for v in arguments.values() if isinstance(v, Ref) and read.masked_at(v) is None]
    if plain or not _is_float(node.out):
        return UNCHANGED
    write = Rewriter(node)
    schema = ops.arguments(node.op)
    names = [a for a, _, _ in schema]
    values = {a: arguments.get(a, d) for a, _, d in schema} | {"reduction": 0}
    dense = {a: m.dense if (m := read.masked_at(v)) is not None else v for a, v in values.items()}
    if node.op == full_name("binary_cross_entropy_with_logits"):
        # It is the one loss that does not broadcast, and dense values may have dims of size 1.
        pair = write("broadcast_tensors", [dense[names[0]], dense[names[1]]])
        dense |= {a: write("operator.getitem", pair, k) for k, a in enumerate(names[:2])}
    value = replace(one, dense=write(node.op, *(dense[a] for a in names)))
    reduction = arguments.get("reduction", 1)
    if reduction == 0:
        return write.nodes, value
    result = _masked_total(write, value, list(range(value.rank)), mean=reduction == 1, keep=False)
    return write.nodes, result


def broadcast(read: Read) -> Rewrite:
    """Case 6: broadcast_tensors of masked values of one type returns them as they are."""
    values = read.node.args[0]
    masked = [m for v in values if (m := read.masked_at(v)) is not None]
    one_type = len({read.tracked.types[v.name] for v in values}) == 1
    return ([], tuple(masked)) if len(masked) == len(values) and one_type else UNCHANGED


def put(read: Read) -> Rewrite:
    """Case 7: masked values that are written back to the same positions are chosen by the mask."""
    arguments = read.arguments
    if read.node.op == "aten.masked_scatter.default":
        return _write_back(read, arguments["mask"], arguments["source"], before=0, whole=True, add=False)
    *leading, mask = arguments["indices"]
    if any(i is not None for i in leading):
        return UNCHANGED
    add = bool(arguments.get("accumulate", False))
    return _write_back(read, mask, arguments["values"], before=len(leading), whole=False, add=add)


def _write_back(read: Read, mask: Any, value: Any, *, before: int, whole: bool, add: bool) -> Rewrite:
    """Writes or adds a masked value at a mask. whole: no dims may follow those of the mask."""
    x, one, tracked = read.node.args[0], read.masked_at(value), read.tracked
    if one is None or not isinstance(x, Ref) or x.name in tracked.masked or not isinstance(mask, Ref):
        return UNCHANGED
    behind = rank_of(tracked.types.get(x.name, "")) - before - one.within
    places = tracked.equal.first(mask.name), before, behind
    if places != (one.mask, one.before, one.behind) or (whole and behind):
        return UNCHANGED
    write = Rewriter(read.node)
    dense = write("add.Tensor", x, one.dense) if add else one.dense
    return write.nodes, write("where.self", write.mask(one), dense, x)


def _is_float(type_: str) -> bool:
    return (parsed := tensor_type(type_)) is not None and parsed.is_floating


_CHECKED_BY_HANDLER: dict[str, Handler] = {
    "aten.broadcast_tensors.default": broadcast,
    "aten.index_put.default": put,
    "aten.masked_scatter.default": put,
}
_EQUAL_POSITIONS: dict[str, Handler] = {
    **dict.fromkeys(_ALONG_DIMS, along_dims),
    **dict.fromkeys(_LAST_DIMS, last_dims),
    **dict.fromkeys(_RESHAPES, reshaped),
    **dict.fromkeys(_SUMS, total),
    **dict.fromkeys(_LOSSES, loss),
}
